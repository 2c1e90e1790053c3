"""The command ``jaxrec train``, which trains, evaluates and saves a model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import pathlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.data import ClickBatch, DataError, SchemaError, Shard, TableEncoder
from jaxrec.data.addresses import Address, data_path
from jaxrec.mesh.agree import on_process_zero
from jaxrec.mesh.processes import join_processes, losses_first
from jaxrec.plan import PlanError
from jaxrec.plan.report import require_matplotlib
from jaxrec.train import checkpoint
from jaxrec.train.callbacks import StepTrace
from jaxrec.train.checkpoint import CheckpointError, CheckpointManager, PreservationPolicy
from jaxrec.train.checkpoint.files import lock_directory
from jaxrec.train.config import (
    CONFIG_FILE,
    FEATURES_DIRECTORY,
    TrainConfig,
    is_written,
    load_config,
    parse_options,
    write_options,
)
from jaxrec.train.datasets import Dataset, bad_lines, run_batches
from jaxrec.train.devices import Devices, simulate_cpus
from jaxrec.train.features import is_parquet
from jaxrec.train.following import follow
from jaxrec.train.interrupt import Interrupt, interruptible
from jaxrec.train.model import saved_config
from jaxrec.train.models import KINDS, default_config, model_kind
from jaxrec.train.models.kind import EvaluationStopped, HeldOutBatches, ModelKind
from jaxrec.train.open_vocabularies import describe, describe_stores
from jaxrec.train.overfitting import describe_overfitting
from jaxrec.train.progress import HELD_OUT, Progress, read_history, standard_output
from jaxrec.train.results import (
    HISTORY_FILE,
    RESULTS_FILE,
    SUMMARY_FILE,
    RunFacts,
    evaluated,
    final_values,
    has_stopped_early,
    preservation_policy,
    report,
    run_results,
    write_results,
)
from jaxrec.train.resumed import check_resumed
from jaxrec.train.run_callbacks import (
    HeldOutEvaluation,
    RunCheckpoints,
    RunningMetrics,
    RunStopping,
    shown_values,
)
from jaxrec.train.run_record import LoggerError, RunRecord, open_record, require_loggers
from jaxrec.train.run_size import SIZES, with_sizes
from jaxrec.train.run_trainer import make_trainer, train_on
from jaxrec.train.sweep import Learn, combinations, read_axes, run_sweep
from jaxrec.train.trainer import NotFiniteError, Trainer

PROFILE_DIRECTORY = "profile"

# Number of evaluations of a run of one epoch that may stop early.
EVALUATIONS = 10

# Default number of steps between two lines of the history; fewer in a run of under 2,000 steps,
# whose curves need 20 points, too.
RECORD_EVERY = 100
MIN_RECORDS = 20

USAGE_ERRORS = (ConfigError, SchemaError)


class JobError(RuntimeError):
    """The processes of a job cannot connect."""


FAILURES = (CheckpointError, DataError, JobError, LoggerError, NotFiniteError, PlanError)


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec train``; return the exit code."""
    config = train_config(options)
    # Before the first use of a device, which fixes the number of simulated CPUs; processes are
    # joined before that, too.
    simulate_cpus(config.devices)
    try:
        job = config.job
        join_processes(
            job.coordinator, job.num_processes, job.process_id, lost_after=job.lost_after
        )
    except RuntimeError as error:
        raise JobError(f"the processes of the job do not find each other: {error}") from None
    # All processes would print the same.
    quiet = jax.process_index() != 0
    output: Any = standard_output()
    console = Console(file=output, highlight=False, markup=False, soft_wrap=True, quiet=quiet)

    def announce(signal: str) -> None:
        console.print(f"{signal}: stopping after this step")

    with interruptible(announce) as interrupt, losses_first():
        require_loggers([] if config.eval_only else config.loggers)
        if config.sweep:
            output = _output(config)
            runs = combinations(read_axes(config.sweep), options, output, train_config)
            return run_sweep(
                runs, output, console, interrupt, _train, sentences=(*USAGE_ERRORS, *FAILURES)
            )
        if config.stream.follow:
            return follow(config, console, interrupt, _output(config), _start_output)
        return _train(config, console, interrupt)


def train_config(options: Sequence[str]) -> TrainConfig:
    """Parse the options, with defaults from a file or from a resumed run.

    ``jaxrec train CONFIG`` is short for ``jaxrec train --config CONFIG``.
    """
    if options and not options[0].startswith("-"):
        options = ["--config", *options]
    # The file's values are the defaults of the other options: find it first, then parse the rest.
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--config", type=pathlib.Path)
    files.add_argument("--resume", type=pathlib.Path)
    files.add_argument("--model", "--model.name")
    try:
        named, _ = files.parse_known_args(options)
    except argparse.ArgumentError as error:
        wanted = "a path" if error.argument_name in ("--config", "--resume") else "a name"
        raise ConfigError(f"{error.argument_name} is followed by {wanted}") from None
    if named.resume is not None:
        if named.config is not None:
            raise ConfigError("--resume goes on with a run's own options; leave --config out")
        default = saved_config(named.resume)
        config = parse_options(options, dataclasses.replace(default, output=named.resume))
        check_resumed(config, default)
        return config
    name = named.model
    if name is None and named.config is not None:
        name = load_config(named.config).model.name
    default = default_config(name or TrainConfig().model.name)
    if named.config is not None:
        default = load_config(named.config, default)
    return parse_options(options, default)


def _learn(config: TrainConfig, console: Console) -> TableEncoder:
    return KINDS[config.model.name].learn(config, console)


def _train(
    config: TrainConfig, console: Console, interrupt: Interrupt, learn: Learn = _learn
) -> int:
    output = _output(config)
    encoder = learn(config, console) if is_parquet(config.data.path) else None
    kind = model_kind(config, encoder)
    kind.check(config, kind.encoder.schema)
    for name in SIZES:
        if not getattr(config.data, name) and (own := kind.defaults.get(f"data.{name}")):
            raise ConfigError(
                f"data.{name.replace('_', '-')} of model.name {kind.name} does not follow from the "
                f"rows; give a number above 0, or leave it out for {own}"
            )
    shard = Shard(jax.process_index(), jax.process_count())
    rows, held_out = kind.datasets(shard)
    config = with_sizes(config, len(rows), config.devices * shard.count, kind.epochs)
    kind = model_kind(config, encoder)
    if not config.eval_only:
        kind.check_held_out(held_out)
    # Two runs must not write to one directory. Evaluating only reads it, also beside a run.
    with contextlib.nullcontext() if config.eval_only else lock_directory(output):
        steps, uneven = _num_steps(config, rows), config.job.uneven
        trainer, devices = make_trainer(kind, encoder, steps, console, uneven)
        run = _Run(kind, console, interrupt, output, rows, held_out, devices, trainer)
        return run.evaluate() if config.eval_only else run.train()


def _num_steps(config: TrainConfig, rows: Dataset) -> int:
    return rows.num_batches(config.data.batch_size) * config.data.epochs


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """A run of ``jaxrec train``, with its model, directory, rows, devices and trainer."""

    kind: ModelKind
    console: Console
    interrupt: Interrupt
    output: pathlib.Path
    rows: Dataset
    held_out: Dataset
    devices: Devices
    trainer: Trainer

    @property
    def config(self) -> TrainConfig:
        """Options of the run."""
        return self.kind.config

    @functools.cached_property
    def _others(self) -> Mapping[int, Dataset]:
        """Further rows to evaluate on, by the step after which they are evaluated."""
        return self.kind.evaluations(self.rows, self.held_out)

    def evaluate(self) -> int:
        """Evaluate the model; return the exit code."""
        if (values := self._evaluation()()) is not None:
            report(self.console, self.kind.measures, values, len(self.held_out))
        return self.interrupt.exit_code

    def train(self) -> int:
        """Train, evaluate and save the model; return the exit code."""
        config, console, trainer = self.config, self.console, self.trainer
        num_steps, batch_size = _num_steps(config, self.rows), config.data.batch_size
        results_file = self.output / RESULTS_FILE
        is_done = trainer.step >= num_steps or has_stopped_early(self.output, config)
        if is_done and results_file.exists():
            console.print(
                f"{self.output} is finished: {trainer.step:,} steps of {num_steps:,} are made. To "
                f"train on, give more epochs than {config.data.epochs}: --epochs"
                + (f", and more patience than {config.patience}" if config.patience else "")
                + "; to evaluate the model again: --eval-only"
            )
            return 0
        _start_output(self.output, config, self.devices.encoder, trainer)
        console.print(
            f"{config.data.path or 'generated log'}: {len(self.rows):,} rows to train on, "
            f"{len(self.held_out):,} held out; {num_steps:,} steps of {batch_size:,}"
            + (f", {trainer.step:,} of them made before" if trainer.step else "")
        )
        for path, count in bad_lines(self.rows, self.held_out).items():
            console.print(f"{path}: {count:,} bad lines left out")
        # Before the run: a finished run is not drawn later.
        try:
            require_matplotlib()
        except ImportError as error:
            console.print(f"no {SUMMARY_FILE}: {error}")
        policy = preservation_policy(config, self.kind.measures)
        begun = time.perf_counter()
        with contextlib.closing(open_record(config, self.output, trainer.step, console)) as record:
            with contextlib.ExitStack() as stack:
                progress = stack.enter_context(Progress(console, num_steps, trainer.step))
                evaluation, stopping = self._add_callbacks(progress, policy, record, stack)
                batches = run_batches(self.rows, batch_size, config.data.epochs, first=trainer.step)
                self._steps(batches)
                values = None if self.interrupt else evaluation.values_at(trainer.step)
            if values is None:
                return _stopped(console, self.interrupt, self.output, trainer.step, num_steps)
            record.wait()
            facts = RunFacts(
                rows=len(self.rows),
                held_out_rows=len(self.held_out),
                hold_out=self.kind.hold_out,
                steps=trainer.step if stopping is None else stopping.last_step,
                # Process 0 reads, as it alone knows which checkpoints it has deleted.
                best_step=on_process_zero(lambda: checkpoint.best_step(self.output, policy)),
                seconds=round(time.perf_counter() - begun, 3),
                samples_per_second=progress.samples_per_second,
            )
            results = self._results(values, facts)
            self._write(results)
            # The results are there whatever comes of their explanation.
            if explanation := self._explanation():
                results |= explanation
                self._write(results)
            files = [self.output / name for name in (RESULTS_FILE, SUMMARY_FILE)]
            record.finish(facts.steps, final_values(self.kind.measures, results), files)
        measures = self.kind.measures
        if stopping is not None:
            console.print(stopping.describe(num_steps))
        report(console, measures, results, len(self.held_out))
        history = read_history(self.output / HISTORY_FILE)
        if text := describe_overfitting(
            history, measures, results, step=trainer.step, epochs=config.data.epochs
        ):
            console.print(text)
        if stopping is None and facts.best_step is not None:
            console.print(f"best of the checkpoints that stay: step {facts.best_step:,}")
        if ids := describe(trainer.model):
            console.print(f"  ids          {ids}")
        if rows := describe_stores(trainer.model):
            console.print(f"  rows         {rows}")
        console.print(f"model saved in {self.output}")
        return 0

    def _results(self, values: Mapping[str, float], facts: RunFacts) -> dict[str, Any]:
        """Return the content of ``results.json``."""
        measures = self.kind.measures
        results = run_results(self.config, measures, values, facts)
        if others := self._others:
            results["windows"] = evaluated(others, measures, self.output)
            for each in results["windows"]:
                self.console.print(
                    f"after step {each['step']:,}, on the next window: "
                    + shown_values(measures, each, 2)
                )
        return results

    def _explanation(self) -> dict[str, Any]:
        """Return the entries of ``results.json`` on columns and calibration; {} without any."""
        if not self.config.explain_rows:
            return {}
        held_out = self._held_out_batches
        held_out.dataset = self.held_out  # after a window, it is another
        # An interrupt now ends these evaluations alone: the model is saved.
        with contextlib.suppress(EvaluationStopped):
            return self.kind.explain(held_out, self.config.explain_rows)
        return {}

    def _write(self, results: Mapping[str, Any]) -> None:
        if jax.process_index() == 0:
            write_results(results, self.kind.measures, self.output)

    def _steps(self, batches: Iterator[ClickBatch]) -> None:
        """Train on batches; print warnings of the vocabularies on the console."""
        with warnings.catch_warnings():
            # Python's own format, with a path and a line of code, would cut the progress bar.
            if self.config.vocabulary.is_dynamic:
                warnings.showwarning = self._show_warning
            train_on(self.trainer, batches)

    def _show_warning(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self.console.print(
            f"warning: {message}: --data.table-rows, --vocabulary.admit-after, --vocabulary.store"
        )

    @functools.cached_property
    def _held_out_batches(self) -> HeldOutBatches:
        return HeldOutBatches(
            self.trainer.model,
            self.held_out,
            self.config.data.batch_size,
            place=self.devices.put_batch,
            stop=self.interrupt.is_due,
        )

    def _evaluation(self, **options: Any) -> HeldOutEvaluation:
        return HeldOutEvaluation(self.kind, self._held_out_batches, **options)

    def _add_callbacks(
        self,
        progress: Progress,
        policy: PreservationPolicy,
        record: RunRecord,
        stack: contextlib.ExitStack,
    ) -> tuple[HeldOutEvaluation, RunStopping | None]:
        """Add the trainer's callbacks; ``stack`` closes them. Return those that evaluate."""
        config, trainer, plan = self.config, self.trainer, self.devices.plan
        manager = stack.enter_context(CheckpointManager(self.output, policy))

        # Called for evaluations during training.
        def report_values(step: int, values: dict[str, float]) -> None:
            record.write(step, {f"{HELD_OUT}{name}": value for name, value in values.items()})
            progress.show_held_out(step, shown_values(self.kind.measures, values, 2))

        is_reported = config.evaluate_every or policy.best or self._others
        evaluation = self._evaluation(
            every=config.evaluate_every or None,
            # If the only evaluation is at the end, its values are printed with the results.
            report=report_values if is_reported else None,
            others=self._others,
            paused=progress.paused,
        )

        num_steps = _num_steps(config, self.rows)

        def checkpoint_metrics() -> dict[str, float]:
            if not policy.best:
                return {}
            # Early stopping compares the steps that it evaluates, of which the last step is one.
            is_needed = config.checkpoint.keep_best or trainer.step == num_steps
            # After an interrupt the checkpoint must be saved soon, without an evaluation before.
            is_needed = is_needed and not self.interrupt
            values_at = evaluation.values_at if is_needed else evaluation.known_values
            return values_at(trainer.step) or {}

        default_every = min(RECORD_EVERY, -(-num_steps // MIN_RECORDS))
        saving = RunCheckpoints(
            manager,
            config.checkpoint.every,
            metrics=checkpoint_metrics,
            plan=None if plan is None else plan.to_json(),
            progress=progress,
            record=record,
        )
        stopping = None
        if config.patience:
            per_epoch = num_steps // config.data.epochs
            stopping = RunStopping(
                policy.metric or "",
                config.patience,
                every=config.evaluate_every
                or (per_epoch if config.data.epochs > 1 else -(-num_steps // EVALUATIONS)),
                mode=policy.mode,
                manager=manager,
                evaluation=evaluation,
                saving=saving,
                interrupt=self.interrupt,
            )
        is_traced = config.profile and jax.process_index() == 0
        trace_directory = self.output / PROFILE_DIRECTORY if is_traced else None
        # The trainer calls them in this order: a step's history and evaluation come before its
        # checkpoint.
        trainer.callbacks = (
            RunningMetrics(self.kind, progress, record.write, config.record_every or default_every),
            stack.enter_context(StepTrace(trace_directory, progress.paused)),
            evaluation,
            *([] if stopping is None else [stopping]),
            saving,
            self.interrupt,
        )
        return evaluation, stopping


def _start_output(
    output: pathlib.Path, config: TrainConfig, encoder: TableEncoder | None, trainer: Trainer
) -> None:
    """Write a run's options and encoder; raise an OSError if the disk cannot hold checkpoints."""
    # A full disk should stop the run now, not at its first checkpoint.
    checkpoint.require_space(output, trainer.model, trainer.optimizer)
    if jax.process_index() != 0:
        return
    if config.resume is None and is_written(output / CONFIG_FILE):
        # The directory of a run that failed before its first checkpoint: its history does not
        # belong to this run.
        (output / HISTORY_FILE).unlink(missing_ok=True)
    if encoder is not None and (config.resume is None or output != config.resume):
        encoder.save(output / FEATURES_DIRECTORY)
    write_options(config, output / CONFIG_FILE)


def _output(config: TrainConfig) -> pathlib.Path:
    """Return the directory of the run, the same in all processes."""
    output = config.output or pathlib.Path(
        "runs", datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    )
    problem = None if config.resume is not None else _why_taken(output)
    # Process 0 decides: clocks differ, and a process that looks late might see files of this run.
    text, problem = on_process_zero(lambda: (str(output), problem))
    output = pathlib.Path(text)
    if problem is not None:
        raise ConfigError(problem)
    return output


def _why_taken(output: pathlib.Path) -> str | None:
    """Return why a new run cannot use a directory; None if it can."""
    if isinstance(data_path(output), Address):
        return f"the output is a directory of this machine, got {data_path(output)}"
    # It can use one without files of a run, and that of a run that failed before its first
    # checkpoint.
    if not (output / CONFIG_FILE).exists():
        return None
    if checkpoint.all_steps(output):
        return (
            f"{output} holds a saved run; go on with it by --resume {output}, "
            "or give another --output"
        )
    if is_written(output / CONFIG_FILE):
        return None
    return f"{output} holds a {CONFIG_FILE} that no run has written; give another --output"


def _stopped(
    console: Console, interrupt: Interrupt, output: pathlib.Path, step: int, num_steps: int
) -> int:
    name = "" if interrupt.signal is None else interrupt.signal.name
    console.print(
        f"stopped by {name} after step {step:,} of {num_steps:,}; model saved in "
        f"{output}, go on with: jaxrec train --resume {output}"
    )
    return interrupt.exit_code
