"""The command ``jaxrec train``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence

import jax
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.data import DataError, SchemaError, Shard, TableEncoder
from jaxrec.mesh.agree import gather_texts
from jaxrec.mesh.processes import join_processes
from jaxrec.metrics import calibration, log_loss, normalized_entropy
from jaxrec.metrics.writers import JSONLinesWriter
from jaxrec.plan import PlanError
from jaxrec.train import checkpoint
from jaxrec.train.checkpoint import CheckpointError, Saver
from jaxrec.train.config import TrainConfig
from jaxrec.train.devices import plan_devices, simulate_cpus
from jaxrec.train.features import FEATURES_DIRECTORY, is_parquet, run_encoder
from jaxrec.train.interrupt import Interrupt, interruptible
from jaxrec.train.keep import Keep
from jaxrec.train.lock import lock_directory
from jaxrec.train.loop import Evaluation, Evaluator, NotFiniteError, train
from jaxrec.train.memory import keep_freed_memory
from jaxrec.train.model import CONFIG_FILE, make_model, table_configs
from jaxrec.train.options import is_written, load_config, parse_options, write_options
from jaxrec.train.progress import Progress
from jaxrec.train.rows import ParquetRows, Rows, bad_lines, split_rows
from jaxrec.train.summary import HELD_OUT, SUMMARY_FILE, draw_summary, read_history
from jaxrec.train.trace import StepTrace

RESULTS_FILE = "results.json"
HISTORY_FILE = "metrics.jsonl"
PROFILE_DIRECTORY = "profile"

# Steps between lines of the history, and the fewest lines that a run of enough steps has.
RECORD_EVERY = 100
RECORDS = 20

USAGE_ERRORS = (ConfigError, SchemaError)


class JobError(RuntimeError):
    """The processes of a job do not find each other."""


FAILURES = (CheckpointError, DataError, JobError, NotFiniteError, PlanError)


def run(options: Sequence[str]) -> int:
    """Runs ``jaxrec train``; returns the exit code."""
    keep_freed_memory()
    config = train_config(options)
    simulate_cpus(config.devices)
    try:
        join_processes(**dataclasses.asdict(config.job))
    except RuntimeError as error:
        raise JobError(f"the processes of the job do not find each other: {error}") from None
    # One speaks for all.
    quiet = jax.process_index() != 0
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=quiet)

    def announce(signal: str) -> None:
        console.print(f"{signal}: stopping after this step")

    with interruptible(announce) as interrupt:
        return _train(config, console, interrupt)


def train_config(options: Sequence[str]) -> TrainConfig:
    """The configuration of the command line, over that of a file or of a run to go on with.

    A first option that is none is the file: ``jaxrec train CONFIG`` is ``--config CONFIG``.
    """
    if options and not options[0].startswith("-"):
        options = ["--config", *options]
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--config", type=pathlib.Path)
    files.add_argument("--resume", type=pathlib.Path)
    try:
        named, _ = files.parse_known_args(options)
    except argparse.ArgumentError:
        raise ConfigError("--config and --resume are followed by a path") from None
    if named.resume is not None:
        if named.config is not None:
            raise ConfigError("--resume goes on with a run's own options; leave --config out")
        if not (named.resume / CONFIG_FILE).exists():
            raise CheckpointError(f"{named.resume}: there is no saved run here")
        default = load_config(named.resume / CONFIG_FILE)
        config = parse_options(options, dataclasses.replace(default, output=named.resume))
        _check_resumed(config, default)
        return config
    default = TrainConfig() if named.config is None else load_config(named.config)
    return parse_options(options, default)


def _check_resumed(config: TrainConfig, run: TrainConfig) -> None:
    """Check that a run is to go on with its own rows; raises ConfigError."""
    if config.seed != run.seed:
        drawn = "log" if config.data.path is None else "order of the rows"
        raise ConfigError(
            f"--seed {config.seed} makes another {drawn} than that of the run, whose seed is "
            f"{run.seed}; leave --seed out"
        )
    rows = config.data.generated_rows
    if config.eval_only and config.data.path is None and rows != run.data.generated_rows:
        raise ConfigError(
            f"--data.generated-rows {rows} holds out other rows than the run, which has "
            f"{run.data.generated_rows} before them; leave it out"
        )


def _train(config: TrainConfig, console: Console, interrupt: Interrupt) -> int:
    output = _output(config)
    encoder = None
    if is_parquet(config.data.path):
        encoder = run_encoder(config.data, config.resume, console)
    shard = Shard(jax.process_index(), jax.process_count())
    rows, held_out = split_rows(config, shard, encoder)
    with contextlib.nullcontext() if config.eval_only else lock_directory(output):
        return _train_on(encoder, rows, held_out, output, config, console, interrupt)


def _train_on(
    encoder: TableEncoder | None,
    rows: Rows | ParquetRows,
    held_out: Rows | ParquetRows,
    output: pathlib.Path,
    config: TrainConfig,
    console: Console,
    interrupt: Interrupt,
) -> int:
    batch_size = config.data.batch_size
    num_steps = rows.num_batches(batch_size) * config.data.epochs
    if (count := config.devices * jax.process_count()) > 1:
        console.print(f"planning where the tables go on {count} devices")
    tables = table_configs(config, encoder)
    devices = dataclasses.replace(plan_devices(config.devices, tables, batch_size), encoder=encoder)
    plan = None if devices.plan is None else devices.plan.to_json()
    model, optimizer = make_model(config, num_steps, devices, encoder)
    # A run that was killed before its first checkpoint starts anew.
    if config.resume is not None and (checkpoint.steps(config.resume) or config.eval_only):
        checkpoint.restore(config.resume, model, optimizer, step=config.step)
    done = int(optimizer.step.get_value())
    evaluate = Evaluator(model, held_out, batch_size=batch_size, place=devices.put_batch)
    if config.eval_only:
        evaluation = evaluate(interrupt.is_due)
        if evaluation is not None:
            _report(console, _results(evaluation), len(held_out))
        return interrupt.exit_code
    is_first = jax.process_index() == 0
    # Now, not after hours of training, is the time to find out that it cannot be written to.
    checkpoint.require_space(output, model, optimizer)
    if is_first:
        if config.resume is None and is_written(output / CONFIG_FILE):
            # This file was left by a run that failed before its first checkpoint.
            (output / HISTORY_FILE).unlink(missing_ok=True)
        if encoder is not None and (config.resume is None or output != config.resume):
            encoder.save(output / FEATURES_DIRECTORY)
        write_options(config, output / CONFIG_FILE)

    console.print(
        f"{config.data.path or 'generated log'}: {len(rows):,} rows to train on, "
        f"{len(held_out):,} held out; {num_steps:,} steps of {batch_size:,}"
        + (f", {done:,} of them made before" if done else "")
    )
    for path, count in bad_lines(rows, held_out).items():
        console.print(f"{path}: {count:,} bad lines left out")
    kept = config.checkpoint
    keep = Keep(
        last=kept.keep_last,
        best=kept.keep_best,
        metric=kept.best_by,
        mode="max" if kept.best_by == "auc" else "min",
    )
    # The evaluation of the newest step that was evaluated.
    evaluated: dict[int, Evaluation] = {}
    with contextlib.ExitStack() as stack:
        saver = stack.enter_context(Saver(output, keep))
        record = _ignore
        if is_first:
            writer = JSONLinesWriter(output / HISTORY_FILE)
            record = stack.enter_context(contextlib.closing(writer)).write
        progress = stack.enter_context(Progress(console, num_steps, done))
        traced = output / PROFILE_DIRECTORY if config.profile and is_first else None
        trace = stack.enter_context(StepTrace(traced, progress.paused))

        def evaluate_now() -> Evaluation | None:
            step = int(optimizer.step.get_value())
            if step not in evaluated:
                found = evaluate(interrupt.is_due)
                if found is None:
                    return None
                evaluated.clear()
                evaluated[step] = found
                if not (kept.keep_best or config.evaluate_every):
                    return found  # the report of the whole run says it
                values = _known(_results(found))
                record(step, {f"{HELD_OUT}{name}": value for name, value in values.items()})
                progress.show_held_out(step, values["auc"], values["normalized_entropy"])
            return evaluated[step]

        def save() -> None:
            found = evaluate_now() if kept.keep_best and not interrupt else None
            metrics = {} if found is None else _known(_results(found))
            saver.save(model, optimizer, plan=plan, metrics=metrics)

        train(
            model,
            optimizer,
            rows,
            batch_size=batch_size,
            epochs=config.data.epochs,
            progress=progress,
            stop=interrupt.is_due,
            record=record,
            record_every=config.record_every or min(RECORD_EVERY, -(-num_steps // RECORDS)),
            save=save,
            save_every=kept.every,
            evaluate=evaluate_now,
            evaluate_every=config.evaluate_every or None,
            trace=trace,
            place=devices.put_batch,
        )
        saver.wait()
        # A checkpoint that is there is not written again: while it is, there would be none.
        if int(optimizer.step.get_value()) not in checkpoint.steps(output):
            save()
        evaluation = None if interrupt else evaluate_now()
    if evaluation is None:
        return _stopped(console, interrupt, output, int(optimizer.step.get_value()), num_steps)
    results = _results(evaluation) | {"samples_per_second": progress.samples_per_second}
    if (best := checkpoint.best_step(output, keep)) is not None:
        results["best_step"] = best
    if is_first:
        _write_results(console, results, output)
    _report(console, results, len(held_out))
    console.print(f"model saved in {output}")
    return 0


def _ignore(step: int, values: Mapping[str, float]) -> None:
    """What processes do that write nothing."""


def _output(config: TrainConfig) -> pathlib.Path:
    """Where the run goes, the same on all processes."""
    output = config.output or pathlib.Path(
        "runs", datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    )
    problem = None if config.resume is not None else _why_taken(output)
    if jax.process_count() > 1:
        # None writes before all have looked.
        text, problem = json.loads(gather_texts(json.dumps([str(output), problem]))[0])
        output = pathlib.Path(text)
    if problem is not None:
        raise ConfigError(problem)
    return output


def _why_taken(output: pathlib.Path) -> str | None:
    """Why a new run cannot go to a directory; one that failed before its first checkpoint may."""
    if not (output / CONFIG_FILE).exists():
        return None
    if checkpoint.steps(output):
        return (
            f"{output} holds a saved run; go on with it by --resume {output}, "
            "or give another --output"
        )
    if is_written(output / CONFIG_FILE):
        return None
    return f"{output} holds a {CONFIG_FILE} that no run has written; give another --output"


def _write_results(
    console: Console, results: dict[str, float | None], output: pathlib.Path
) -> None:
    (output / RESULTS_FILE).write_text(json.dumps(results, indent=2) + "\n")
    try:
        draw_summary(read_history(output / HISTORY_FILE), results, output / SUMMARY_FILE)
    except ImportError as error:
        console.print(str(error))


def _stopped(
    console: Console, interrupt: Interrupt, output: pathlib.Path, step: int, num_steps: int
) -> int:
    name = "" if interrupt.signal is None else interrupt.signal.name
    console.print(
        f"stopped by {name} after step {step:,} of {num_steps:,}; model saved in "
        f"{output}, go on with: jaxrec train --resume {output}"
    )
    return interrupt.exit_code


def _results(evaluation: Evaluation) -> dict[str, float | None]:
    return {
        "auc": evaluation.auc,
        "best_auc": evaluation.best_auc,
        "normalized_entropy": normalized_entropy(evaluation.sums),
        "log_loss": log_loss(evaluation.sums),
        "calibration": calibration(evaluation.sums),
    }


def _known(results: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in results.items() if value is not None}


def _report(console: Console, results: dict[str, float | None], rows: int) -> None:
    best = results["best_auc"]
    reachable = "" if best is None else f"  (best reachable {best:.4f})"
    # A run of one step has nothing but compilation to measure.
    rate = results.get("samples_per_second")
    trained = f"; trained at {rate:,.0f} samples/s" if rate else ""
    console.print(f"on {rows:,} held-out rows{trained}:")
    console.print(f"  AUC          {results['auc']:.4f}{reachable}")
    console.print(f"  NE           {results['normalized_entropy']:.4f}")
    console.print(f"  log loss     {results['log_loss']:.4f} nats")
    console.print(f"  calibration  {results['calibration']:.4f}")
    if "best_step" in results:
        console.print(f"best of the checkpoints that stay: step {results['best_step']:,}")
