"""Runs of ``jaxrec train --follow``, which train on rows as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.data import ClickBatch, DataError, Shard, StreamBatches, TableEncoder
from jaxrec.data.column_types import check_columns
from jaxrec.data.structs import flat_schema
from jaxrec.files.atomic import write_atomically
from jaxrec.mesh.agree import on_process_zero
from jaxrec.train.checkpoint import CheckpointManager, PreservationPolicy
from jaxrec.train.checkpoint.files import lock_directory
from jaxrec.train.config import TrainConfig
from jaxrec.train.interrupt import Interrupt
from jaxrec.train.models import KINDS, model_kind
from jaxrec.train.models.kind import LOSS, ModelKind
from jaxrec.train.models.rows import RowModel
from jaxrec.train.progress import Progress
from jaxrec.train.run_callbacks import RunCheckpoints, RunningMetrics, shown_values
from jaxrec.train.run_record import open_record
from jaxrec.train.run_size import with_sizes
from jaxrec.train.run_trainer import make_trainer, train_on
from jaxrec.train.stream_options import followed_columns, open_source, topic_address
from jaxrec.train.trainer import Trainer

SAMPLE_FILE = "sample.parquet"

# Learning rates decay over the steps of a run. This one never ends: over as many steps they stay as
# they are.
_ENDLESS = (1 << 31) - 1

_RECORD_EVERY = 100

StartRun = Callable[[pathlib.Path, TrainConfig, TableEncoder | None, Trainer], None]
"""Function that writes the options and the encoder to a run's directory before training."""


def follow(
    config: TrainConfig,
    console: Console,
    interrupt: Interrupt,
    output: pathlib.Path,
    start: StartRun,
) -> int:
    """Train on the rows of a topic or a folder until they end or a signal comes.

    Returns the exit code. Each batch is measured before it is trained on, which takes the place of
    held-out rows.
    """
    _check(config, output)
    with lock_directory(output), warnings.catch_warnings():
        # Python's own format, with a path and a line of code, would cut the progress bar.
        warnings.showwarning = lambda message, *_, **__: console.print(f"warning: {message}")
        sample = _sample(config, output, console)
        learned = dataclasses.replace(config.data, path=sample)
        encoder = KINDS[config.model.name].learn(dataclasses.replace(config, data=learned), console)
        # A stream has no last row: the sizes are those of the longest runs.
        count = config.devices * jax.process_count()
        kind = model_kind(config, encoder)
        config = with_sizes(config, _ENDLESS, count, kind.epochs)
        kind = model_kind(config, encoder)
        kind.check(config, encoder.schema)
        # A process without more rows must not end the run of those that have some.
        trainer, devices = make_trainer(kind, encoder, _ENDLESS, console, uneven="empty")
        start(output, config, encoder, trainer)
        batches = _batches(config, encoder, pq.read_schema(sample), interrupt)
        plan = None if devices.plan is None else devices.plan.to_json()
        return _train(kind, trainer, batches, output, plan, console, interrupt)


def _check(config: TrainConfig, output: pathlib.Path) -> None:
    """Raise a ConfigError if an option has no meaning for rows without an end, or for a folder."""
    kind = KINDS[config.model.name]
    if not issubclass(kind, RowModel) or kind.datasets is not RowModel.datasets:
        names = [
            name
            for name, each in KINDS.items()
            if issubclass(each, RowModel) and each.datasets is RowModel.datasets
        ]
        raise ConfigError(
            f"--follow trains on one row after another, and --model {config.model.name} needs "
            f"others with it; take one of {', '.join(names)}"
        )
    if config.eval_only:
        raise ConfigError(
            "a run that follows a stream has no held-out rows, so --eval-only has nothing to "
            "measure; `jaxrec export` its model, and measure what `jaxrec predict` writes"
        )
    given = {
        "--epochs": config.data.epochs > 1,
        "--hold-out-data": config.data.eval_path is not None,
        **{f"--{name.replace('_', '-')}": True for name in config.data.hold_out_options},
        "--patience": config.patience > 0,
        "--evaluate-every": config.evaluate_every > 0,
        "--checkpoint.keep-best": config.checkpoint.keep_best > 0,
        "--memory": config.data.memory is not None,
        "--profile": config.profile,
    }
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{option} is for a run over all rows; leave it out with --follow, which measures "
                "each batch before it is trained on"
            )
    if config.data.types:
        raise ConfigError(
            "--data.types is for a run over all rows; leave it out with --follow, where columns "
            "have the types of the first --stream.sample-rows rows"
        )
    path = config.data.path
    if path is None:
        raise ConfigError("--follow needs --data kafka://HOST:PORT/TOPIC, or a folder")
    if topic_address(path) is not None:
        return
    for option, is_given in {
        "--stream.start": config.stream.start != "earliest",
        "--stream.group": config.stream.group is not None,
        "--data.bad-rows": config.data.bad_rows != "fail",
    }.items():
        if is_given:
            raise ConfigError(f"{option} is for messages of a topic; leave it out with a folder")
    # The run's own files, such as its history, would come as rows.
    if output.resolve().is_relative_to(path.resolve()):
        raise ConfigError(
            f"--output {output} lies in the folder that is followed, {path}; give another"
        )


def _sample(config: TrainConfig, output: pathlib.Path, console: Console) -> pathlib.Path:
    """Return the Parquet file of the first rows; read them unless the run goes on."""
    path = output / SAMPLE_FILE

    def read() -> None:
        # A run that failed before its first checkpoint may have left those of other data.
        if config.resume is not None and path.exists():
            return
        console.print(f"reading up to {config.stream.sample_rows:,} rows to learn the columns")
        assert config.data.path is not None
        first = dataclasses.replace(config.stream, start="earliest", group=None)
        batches = StreamBatches(
            source=open_source(config.data.path, first, config.data.bad_rows),
            batch_size=config.stream.sample_rows,
            until="caught_up",
            num_batches=1,
        )
        rows: list[pa.Table] = [*batches]
        if not rows:
            raise DataError(
                f"{config.data.path} has no rows yet; begin once there are some, from which the "
                "columns are learned"
            )
        with write_atomically(path) as unfinished:
            pq.write_table(rows[0], unfinished)

    # One process reads, so that all learn from the same rows.
    on_process_zero(read, (ConfigError, ConnectionError, DataError, ImportError, OSError))
    return path


def _batches(
    config: TrainConfig, encoder: TableEncoder, columns: pa.Schema, interrupt: Interrupt
) -> StreamBatches:
    assert config.data.path is not None
    columns = followed_columns(columns, encoder.schema)
    shard = Shard(jax.process_index(), jax.process_count())
    each = config.data.batch_size // shard.count

    def encode(rows: pa.Table) -> ClickBatch:
        # The encoder itself takes rows without labels, to predict them.
        check_columns(
            encoder.schema, flat_schema(rows.schema, encoder.schema.inputs), str(config.data.path)
        )
        return encoder.batch(rows, each)

    return StreamBatches(
        source=open_source(config.data.path, config.stream, config.data.bad_rows, columns),
        batch_size=each,
        transform=encode,
        shard=shard,
        max_wait=config.stream.max_wait,
        until=config.stream.until,
        stop=lambda: bool(interrupt),
    )


def _train(
    kind: ModelKind,
    trainer: Trainer,
    batches: StreamBatches,
    output: pathlib.Path,
    plan: str | None,
    console: Console,
    interrupt: Interrupt,
) -> int:
    """Train, save and report; return the exit code."""
    config, first = kind.config, trainer.step
    console.print(
        f"following {config.data.path}; {config.data.batch_size:,} rows a step"
        + (f", {first:,} steps made before" if first else "")
        + ("" if config.stream.until == "caught_up" else "; Ctrl-C saves the model and ends")
    )
    last: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        policy = PreservationPolicy(latest=config.checkpoint.keep_last)
        manager = stack.enter_context(CheckpointManager(output, policy))
        progress = stack.enter_context(Progress(console, None, first))
        record = open_record(config, output, first, console)
        stack.enter_context(contextlib.closing(record))

        def write(step: int, compute: Callable[[], dict[str, float]]) -> None:
            def values() -> dict[str, float]:
                last.update(compute())
                return last

            record.write(step, values)

        trainer.callbacks = (
            RunningMetrics(kind, progress, write, config.record_every or _RECORD_EVERY),
            RunCheckpoints(
                manager,
                config.checkpoint.every,
                metrics=dict,
                plan=plan,
                progress=progress,
                record=record,
            ),
            interrupt,
        )
        train_on(trainer, batches)
        if not interrupt:
            record.finish(trainer.step, {})
    return _report(kind, trainer.step - first, last, output, console, interrupt)


def _report(
    kind: ModelKind,
    steps: int,
    values: dict[str, Any],
    output: pathlib.Path,
    console: Console,
    interrupt: Interrupt,
) -> int:
    reason = "no more rows" if interrupt.signal is None else f"stopped by {interrupt.signal.name}"
    shown = shown_values((*kind.measures, LOSS), values, 2)
    console.print(
        f"{reason}: {steps:,} steps made" + (f"; {shown} over the last steps" if shown else "")
    )
    console.print(f"model saved in {output}, go on with: jaxrec train --resume {output}")
    return interrupt.exit_code
