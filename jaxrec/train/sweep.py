"""Sweeps: a run of ``jaxrec train`` for each combination of some options' values."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Console

from jaxrec.arguments import ConfigError, option_names, similar_names
from jaxrec.data import DataError, SchemaError, TableEncoder
from jaxrec.mesh.agree import on_process_zero
from jaxrec.train.checkpoint import all_steps
from jaxrec.train.checkpoint.files import lock_directory
from jaxrec.train.config import CONFIG_FILE, TrainConfig, load_config, run_options
from jaxrec.train.features import saved_encoder
from jaxrec.train.interrupt import Interrupt
from jaxrec.train.models import KINDS, model_kind
from jaxrec.train.models.kind import Measure
from jaxrec.train.results import RESULTS_FILE, best_measure
from jaxrec.train.run_size import SIZES
from jaxrec.train.sweep_report import RunRow, report_sweep

# Options that do not vary within a sweep: files of a run, what it shares with others, and the
# processes and devices, which are fixed before the first run.
_FIXED = ("config", "output", "resume", "eval-only", "step", "profile", "sweep", "devices", "log")
_FIXED_GROUP = "job."

# Characters that a folder's name has besides letters and digits.
_OTHER = re.compile(r"[^\w.,=+-]+")

Learn: TypeAlias = Callable[[TrainConfig, Console], TableEncoder]


@dataclasses.dataclass(frozen=True)
class Axis:
    """An option and the values that it takes in a sweep.

    Attributes:
        name: Name of the option as the user wrote it, such as "lr".
        option: The whole name, such as "optimizer.learning-rate".
        values: The values, as text.
    """

    name: str
    option: str
    values: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Combination:
    """One run of a sweep.

    Attributes:
        values: Value of each axis by the axis's name, as text.
        config: Options of the run.
    """

    values: Mapping[str, str]
    config: TrainConfig

    @property
    def output(self) -> pathlib.Path:
        """Directory of the run."""
        assert self.config.output is not None
        return self.config.output

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


def read_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Parse the arguments of ``--sweep``.

    Raises:
        ConfigError: An argument is not NAME=VALUE,..., names no option or one that cannot vary, or
            repeats an option or a value.

    Example:
        >>> read_axes(["lr=0.01,0.02"])
        (Axis(name='lr', option='optimizer.learning-rate', values=('0.01', '0.02')),)
    """
    axes: list[Axis] = []
    for text in texts:
        name, equals, joined = text.partition("=")
        values = tuple(value.strip() for value in joined.split(","))
        if not (name and equals and all(values)):
            raise ConfigError(f"--sweep takes NAME=VALUE,VALUE, such as lr=0.01,0.02, got {text!r}")
        option = _option(name.lstrip("-"))
        if repeated := [value for value in values if values.count(value) > 1]:
            raise ConfigError(f"--sweep {text}: {repeated[0]} is given twice")
        if twice := [axis.name for axis in axes if axis.option == option]:
            raise ConfigError(f"--sweep has {option} twice, as {twice[0]} and as {name}")
        axes.append(Axis(name.lstrip("-"), option, values))
    return tuple(axes)


def _option(name: str) -> str:
    """Return an option's full name, given that name, an alias, or the part after the last dot."""
    wanted = name.replace("_", "-")
    options = {each.name: each.aliases for each in option_names(TrainConfig)}
    found = [x for x, aliases in options.items() if wanted == x or wanted in aliases]
    found = found or [x for x in options if wanted == x.rpartition(".")[2]]
    if not found:
        names = [*options, *(alias for aliases in options.values() for alias in aliases)]
        similar = similar_names(wanted, names)
        raise ConfigError(
            f"--sweep {name}: there is no option --{wanted}"
            + (f", did you mean {' or '.join(similar)}?" if similar else "")
            + "; `jaxrec train --help` lists all options"
        )
    if len(found) > 1:
        raise ConfigError(f"--sweep {name} may be {' or '.join(found)}; give the whole name")
    if found[0] in _FIXED or found[0].startswith(_FIXED_GROUP):
        raise ConfigError(f"--sweep {name}: --{found[0]} is the same in all runs of a sweep")
    return found[0]


def combinations(
    axes: Sequence[Axis],
    options: Sequence[str],
    output: pathlib.Path,
    parse: Callable[[Sequence[str]], TrainConfig],
) -> tuple[Combination, ...]:
    """Return the runs of a sweep, the last axis varying fastest; ``parse`` parses a run's options.

    Raises:
        ConfigError: A value does not fit its option, or two folders would have one name.
    """
    runs = []
    for chosen in itertools.product(*(axis.values for axis in axes)):
        values = dict(zip((axis.name for axis in axes), chosen, strict=True))
        # A value of several words is that of an option with several values.
        given = [
            [f"--{axis.option}", *value.split()] for axis, value in zip(axes, chosen, strict=True)
        ]
        folder = _OTHER.sub("-", ",".join(f"{name}={value}" for name, value in values.items()))
        try:
            # The last value of an option counts, so that a sweep's values replace others.
            config = parse([*options, *(word for words in given for word in words)])
        except ConfigError as error:
            raise ConfigError(f"--sweep, {folder}: {error}") from None
        config = dataclasses.replace(config, sweep=(), output=output / folder)
        runs.append(Combination(values, config))
    folders = [run.output.name for run in runs]
    if repeated := [name for name in folders if folders.count(name) > 1]:
        raise ConfigError(f"--sweep: two runs would have the folder {repeated[0]}")
    return tuple(runs)


class SharedEncoders:
    """Learns the columns of data once for all runs that read the same columns."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, TableEncoder]] = []

    def __call__(self, config: TrainConfig, console: Console) -> TableEncoder:
        """Return what the kind of model of a run would learn."""
        kind = KINDS[config.model.name]
        if config.resume is not None:
            return kind.learn(config, console)
        key = (kind.learn.__func__, kind.needs_label, _read_options(config))  # type: ignore[attr-defined]
        for known, encoder in self._known:
            if known == key:
                kind.check(config, encoder.schema)
                return encoder
        self._known.append((key, kind.learn(config, console)))
        return self._known[-1][1]


def _read_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a run on which its learned columns depend."""
    options = run_options(config)
    data = {name: value for name, value in options["data"].items() if name not in SIZES}
    chooses = config.data.hold_out_by is not None or "random" in (config.data.hold_out or "")
    seed = config.seed if chooses or config.data.path is None else None
    return {"data": data, "seed": seed, **{x: options[x] for x in ("vocabulary", "ranker")}}


def run_sweep(
    runs: Sequence[Combination],
    output: pathlib.Path,
    console: Console,
    interrupt: Interrupt,
    train: Callable[[TrainConfig, Console, Interrupt, Learn], int],
    sentences: tuple[type[Exception], ...] = (ConfigError, DataError),
) -> int:
    """Make the runs of a sweep that are not finished yet; return the exit code.

    The results are written after each run. A run that fails is recorded with its error, and the
    others go on; the next sweep with the same directory tries it again, and goes on with a run that
    was stopped.

    Args:
        runs: The runs.
        output: Directory of the sweep.
        console, interrupt: Console and interrupt that all runs share.
        train: Function that makes a run with options.
        sentences: Classes of errors that are reported by their message alone; other errors are
            reported with their class, too.

    Raises:
        ConfigError: The directory has a run of other options.
    """
    with lock_directory(output):
        errors_of_states = (ConfigError, DataError, OSError, SchemaError)
        states = on_process_zero(lambda: [_state(run) for run in runs], errors_of_states)
        learn = SharedEncoders()
        errors: dict[str, str] = {}
        for number, (run, state) in enumerate(zip(runs, states, strict=True), 1):
            if state == "finished":
                continue
            console.print(f"\nrun {number} of {len(runs)}: {run}")
            config = run.config
            if state == "stopped":
                config = _resumed(config, run.output)
            try:
                train(config, console, interrupt, learn)
            except Exception as error:
                name = ""
                if not isinstance(error, sentences):
                    name = f"{type(error).__name__}: "
                    console.print(traceback.format_exc())
                errors[run.output.name] = name + " ".join(f"{error}".split())
                console.print(f"the run failed: {errors[run.output.name]}")
            _report(runs, errors, output, console, is_last=False)
            if interrupt:
                console.print(
                    f"the sweep is stopped; go on with it by the same command and --output {output}"
                )
                return interrupt.exit_code
        _report(runs, errors, output, console, is_last=True)
    return 1 if errors else 0


def _state(run: Combination) -> str:
    """Return "new", "stopped" or "finished"; a ConfigError if a folder has another run."""
    file = run.output / CONFIG_FILE
    if not file.exists():
        return "new"
    options, others = run_options(run.config), run_options(load_config(file))
    for each in (options, others):
        # That of the folder is a copy.
        each["data"]["schema"] = "a file" if each["data"]["schema"] else None
        # Loggers do not change what a run computes.
        del each["log"]
    for name in SIZES:
        # A run writes the size that its rows gave.
        if not options["data"][name]:
            options["data"][name] = others["data"][name]
    if different := _different(options, others):
        name, value, other = different[0]
        raise ConfigError(
            f"{run.output} has a run of another sweep, with {name} {other} in place of {value}; "
            "give another --output"
        )
    is_finished = (run.output / RESULTS_FILE).exists()
    if not (is_finished or all_steps(run.output)):
        return "new"
    if run.config.data.schema is not None:
        _check_schema(run)
    return "finished" if is_finished else "stopped"


def _check_schema(run: Combination) -> None:
    """Raise a ConfigError if a folder's run had other columns than its schema file has now."""
    config = dataclasses.replace(run.config, resume=run.output)
    try:
        KINDS[config.model.name].learn(config, Console(quiet=True))
    except ConfigError:
        raise ConfigError(
            f"{run.output} has a run of another schema than {config.data.schema} has now; give "
            "another --output"
        ) from None


def _resumed(config: TrainConfig, output: pathlib.Path) -> TrainConfig:
    """Return the options that go on with a run, with its sizes where they follow from the rows."""
    data, before = config.data, load_config(output / CONFIG_FILE).data
    sizes = {name: getattr(data, name) or getattr(before, name) for name in SIZES}
    return dataclasses.replace(config, data=dataclasses.replace(data, **sizes), resume=output)


def _different(
    options: Mapping[str, Any], others: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """Return the name of each option that differs, and its two values."""
    found = []
    for name, value in options.items():
        other = others.get(name)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            found += _different(value, other, f"{prefix}{name}.")
        elif value != other:
            found.append((f"{prefix}{name}".replace("_", "-"), value, other))
    return found


def _report(
    runs: Sequence[Combination],
    errors: Mapping[str, str],
    output: pathlib.Path,
    console: Console,
    *,
    is_last: bool,
) -> None:
    def report() -> None:
        rows: list[RunRow] = []
        measures: tuple[Measure, ...] = ()
        for run in runs:
            results: dict[str, Any] = {}
            if (file := run.output / RESULTS_FILE).exists():
                results = json.loads(file.read_text())
                measures = measures or _measures(run)
            rows.append(RunRow(run.output.name, run.values, results, errors.get(run.output.name)))
        report_sweep(rows, measures, output, console, is_last=is_last)

    on_process_zero(report)


def _measures(run: Combination) -> tuple[Measure, ...]:
    """Return the measures of a finished run, first the one by which runs are compared."""
    measures = model_kind(run.config, saved_encoder(run.output)).measures
    best = best_measure(run.config.checkpoint.best_by, measures)
    return (best, *(x for x in measures if x != best))
