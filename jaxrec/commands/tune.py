"""The command ``jaxrec tune``, which times the kernels on a model's shapes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console
from rich.status import Status
from rich.table import Table

from jaxrec.arguments import ConfigError, parse
from jaxrec.embed.kernels import trial
from jaxrec.embed.kernels.answers import Answers, TunedCall, kept_for, tunable_device
from jaxrec.embed.kernels.registry import Implementation
from jaxrec.plan.model_file import read_model_file
from jaxrec.tune.calls import Batch, Call, calls_of
from jaxrec.tune.search import (
    Stopwatch,
    Timing,
    choose,
    default_for,
    implementations_for,
    timings_of,
)

USAGE_ERRORS = (ConfigError,)
FAILURES = (RuntimeError, ValueError)


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """Times the kernels' implementations on a model's shapes, and keeps the fastest for each call.

    Later processes on this machine use the choices. Each implementation is compared with the
    reference before it is timed. After Ctrl-C, the choices made so far are kept.

    Example: jaxrec tune model.yaml --batch-size 8192
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL.yaml")] = ""
    """YAML file of the tables, as for jaxrec plan; see the documentation of
    jaxrec.plan.model_file."""
    batch_size: int | None = None
    """Samples of all devices in a step; by default the model file's batch_size."""
    devices: int = 1
    """Devices that share the batch and the rows; with more than one, the calls that exchange rows
    are timed too."""
    ids_per_feature: float | None = None
    """Mean number of ids of each feature in a sample, instead of the model file's
    pooling_factors."""
    skew: Literal["powerlaw", "uniform"] = "powerlaw"
    """Distribution of the ids: a few rows have most of the lookups, or all have equally many."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the embeddings and of their gradients: the collection's dtype."""
    memory: float = 1.0
    """GB of the rows and state of tables of one kind; larger tables are cut. The command takes
    about four times this memory."""
    seconds: float = 0.5
    """Seconds to time each implementation with each of its options, without compiling."""
    keep: bool = True
    """Whether to keep the choices for later processes."""
    output: pathlib.Path | None = None
    """JSON file to write all times and choices to."""
    forget: bool = False
    """Only remove the choices that are kept for this machine and these versions."""

    def check(self) -> None:
        """Raise ConfigError if the options do not go together."""
        if self.forget and self.model:
            raise ConfigError("--forget removes choices and takes no model")
        if not self.forget and not self.model:
            raise ConfigError("give the YAML file of a model, or --forget")
        for name in ("batch_size", "devices", "ids_per_feature", "memory", "seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}")


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec tune``; return the exit code."""
    parsed = parse("tune", options, TuneOptions())
    parsed.check()
    platform = "cuda" if trial.cards() else jax.default_backend()
    if platform not in ("cpu", "cuda"):
        raise RuntimeError(f"there is one implementation for {platform}, and nothing to choose")
    tuning = Answers.read(tunable_device(platform))
    if parsed.forget:
        tuning.path.unlink(missing_ok=True)  # also a damaged file, which has no calls
        kept_for.cache_clear()
        print(f"{len(tuning.calls)} choices removed from {tuning.path}")
        return 0
    calls = _calls(parsed)
    # Written once before the timing: minutes later is too late to learn that it cannot be written.
    if parsed.keep and not tuning.write():
        raise RuntimeError(
            f"{tuning.path} cannot be written; name another directory by JAXREC_CACHE_DIR, or give "
            "--no-keep"
        )
    return _tune(parsed, calls, platform, tuning)


def _calls(options: TuneOptions) -> list[Call]:
    model = read_model_file(options.model)
    batch_size = options.batch_size or model.batch_size
    if batch_size is None:
        raise ConfigError(f"{options.model} has no batch_size; give --batch-size")
    # The shapes of one device: its share of the rows and of the batch.
    tables = [
        dataclasses.replace(table, num_embeddings=max(1, table.num_embeddings // options.devices))
        for table in model.tables
    ]
    batch = Batch(
        size=-(-batch_size // options.devices),
        ids=options.ids_per_feature,
        skew=options.skew,
        dtype=options.dtype,
        max_bytes=options.memory * 1e9,
        is_sharded=options.devices > 1,
    )
    return calls_of(tables, model.constraints, batch)


def _tune(options: TuneOptions, calls: Sequence[Call], platform: str, tuning: Answers) -> int:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if tuning.problem is not None:
        errors.print(tuning.problem)
    if named := os.environ.get("JAXREC_KERNELS"):
        errors.print(f"JAXREC_KERNELS={named} comes before the choices: unset it to follow them.")
    choices: list[TunedCall] = []
    results = []
    try:
        for number, call in enumerate(calls, 1):
            heading = f"{number}/{len(calls)} {call.primitive}"
            errors.print(f"{number}/{len(calls)} {_title(call)}")
            with errors.status(heading) as status:
                timings, choice = _tune_call(call, platform, options.seconds, heading, status)
            console.print(_table(call, timings, choice))
            results.append((call, timings, choice))
            if choice is None:
                continue
            choices.append(choice)
            tuning = tuning.with_call(choice)
            # After each call, so that a run that is killed loses only the one under way.
            if options.keep:
                tuning.write()
    finally:
        # Also after Ctrl-C. The cache has choices from before this run.
        kept_for.cache_clear()
        if options.output is not None:
            options.output.write_text(json.dumps(_json(tuning, results), indent=2) + "\n")
        where = f"kept in {tuning.path}" if options.keep else "not kept"
        console.print(f"{len(choices)} of {len(calls)} choices are made, {where}")
    return 0


def _tune_call(
    call: Call, platform: str, seconds: float, heading: str, status: Status
) -> tuple[list[Timing], TunedCall | None]:
    stopwatch = Stopwatch(call, seconds)

    def time(implementation: Implementation, options: Mapping[str, int]) -> Timing:
        status.update(f"{heading}: {implementation.name} {_text(options)}")
        return stopwatch.time(implementation, options)

    implementations = implementations_for(call, platform)
    timings = timings_of(call, implementations, time)
    default = default_for(call, platform)
    return timings, choose(call, default, timings, implementations, time)


def _title(call: Call) -> str:
    form, (lookups, bags) = call.form, call.size
    rows = (
        f"{form.dtype} rows of {form.dim}" if "table" in call.arguments else f"rows of {form.dim}"
    )
    optimizer = "" if form.optimizer is None else f", {type(form.optimizer).__name__}"
    tables = ", ".join(call.tables[:3]) + (", ..." if len(call.tables) > 3 else "")
    size = f"{lookups:,} lookups" + (f" in {bags:,} bags" if bags != lookups else "")
    return f"{call.primitive} of {rows}{optimizer}: {size} ({tables})"


def _table(call: Call, timings: Sequence[Timing], choice: TunedCall | None) -> Table:
    table = Table(title=_title(call), title_justify="left", title_style="bold")
    table.add_column("implementation")
    table.add_column("options")
    table.add_column("ms", justify="right")
    table.add_column("")
    for timing in timings:
        milliseconds = "" if timing.milliseconds is None else f"{timing.milliseconds:.3f}"
        notes = []
        if choice is not None:
            own = (timing.implementation, timing.options)
            notes += ["chosen"] * (own == (choice.implementation, choice.options))
            notes += ["default"] * (own == (choice.default, {}))
        note = timing.failure or ", ".join(notes)
        style = "bold" if "chosen" in notes else None
        table.add_row(timing.implementation, _text(timing.options), milliseconds, note, style=style)
    return table


def _text(options: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _json(
    tuning: Answers, results: Sequence[tuple[Call, Sequence[Timing], TunedCall | None]]
) -> dict[str, object]:
    return {
        "environment": dict(tuning.environment),
        "calls": [
            {
                "primitive": call.primitive,
                "form": str(call.form),
                "lookups": call.size[0],
                "bags": call.size[1],
                "tables": list(call.tables),
                "timings": [dataclasses.asdict(timing) for timing in timings],
                "choice": None if choice is None else dataclasses.asdict(choice),
            }
            for call, timings, choice in results
        ],
    }
