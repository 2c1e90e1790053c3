"""Results of a run of `jaxrec train`: the file ``results.json``, a picture, and a report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.files.atomic import write_atomically
from jaxrec.train.checkpoint import PreservationPolicy
from jaxrec.train.config import TrainConfig
from jaxrec.train.loggers.base import FINAL
from jaxrec.train.models.kind import LOSS, Measure
from jaxrec.train.progress import HELD_OUT, read_history
from jaxrec.train.summary import draw_summary

RESULTS_FILE = "results.json"
HISTORY_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.png"


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts of a run that has ended.

    Attributes:
        rows: Number of training rows.
        held_out_rows: Number of held-out rows.
        hold_out: Which rows these are, as text.
        steps: Number of steps that were made.
        best_step: Step of the best checkpoint; None: checkpoints were not compared.
        seconds: Seconds from the first step of this process to the last, with evaluations.
        samples_per_second: Speed of the steps, without compiling and evaluations.
    """

    rows: int
    held_out_rows: int
    hold_out: str
    steps: int
    best_step: int | None
    seconds: float
    samples_per_second: float


def run_results(
    config: TrainConfig, measures: Sequence[Measure], values: Mapping[str, float], facts: RunFacts
) -> dict[str, Any]:
    """Return the content of ``results.json``: the held-out values first, then the run's facts."""
    measured = {measure.name: values[measure.name] for measure in measures}
    # null, where the true probabilities are unknown.
    best = {"best_auc": values.get("best_auc")} if "auc" in measured else {}
    return {
        **measured,
        **best,
        **values,
        **dataclasses.asdict(facts),
        "model": config.model.name,
        "data": None if config.data.path is None else str(config.data.path),
        "epochs": config.data.epochs,
        "batch_size": config.data.batch_size,
        "patience": config.patience,
        "seed": config.seed,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("jaxrec", "jax", "flax")},
        },
    }


def evaluated(
    steps: Iterable[int], measures: Sequence[Measure], output: pathlib.Path
) -> list[dict[str, float]]:
    """Return the held-out values after some steps of a run, from its history."""
    history = read_history(output / HISTORY_FILE)
    names = [measure.name for measure in measures]
    return [
        {"step": step, **{x: values[HELD_OUT + x] for x in names if HELD_OUT + x in values}}
        for step in steps
        if (values := history.get(step, {}))
    ]


def final_values(measures: Sequence[Measure], results: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a run's results for loggers, such as "final_auc"."""
    names = [measure.name for measure in measures] + ["best_step", "seconds", "samples_per_second"]
    values = {f"{FINAL}{name}": results.get(name) for name in names}
    return {name: float(value) for name, value in values.items() if value is not None}


def write_results(
    results: Mapping[str, Any],
    measures: Sequence[Measure],
    output: pathlib.Path,
) -> None:
    """Write the results' file of a run, and its picture if matplotlib is installed."""
    # A run with this file counts as finished: it is complete or absent.
    with write_atomically(output / RESULTS_FILE) as unfinished:
        unfinished.write_text(json.dumps(_strict(results), indent=2, allow_nan=False) + "\n")
    curves = [*measures, *([] if LOSS in measures else [LOSS])]
    with contextlib.suppress(ImportError):
        draw_summary(read_history(output / HISTORY_FILE), results, curves, output / SUMMARY_FILE)


def _strict(value: Any) -> Any:
    """Return a value for JSON, in which NaN and infinite numbers are null, as in the history."""
    if isinstance(value, Mapping):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_strict, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def has_stopped_early(output: pathlib.Path, config: TrainConfig) -> bool:
    """Return whether a run ended by the same patience, within the same number of epochs."""
    if not config.patience:
        return False
    try:
        before = json.loads((output / RESULTS_FILE).read_text())
    except (OSError, ValueError):
        return False
    return (before.get("patience"), before.get("epochs")) == (config.patience, config.data.epochs)


def report(
    console: Console, measures: Sequence[Measure], results: Mapping[str, Any], rows: int
) -> None:
    """Print the values of an evaluation on held-out rows."""
    # A run of one step has no rate: its time is that of compiling.
    rate = results.get("samples_per_second")
    trained = f"; trained at {rate:,.0f} samples/s" if rate else ""
    console.print(f"on {rows:,} held-out rows{trained}:")
    width = max(len("calibration"), *(len(measure.title) for measure in measures))
    for measure in measures:
        best = results.get(f"best_{measure.name}")
        reachable = "" if best is None else f"  (best reachable {best:.4f})"
        value = f"{results[measure.name]:.4f}{measure.unit}"
        console.print(f"  {measure.title:{width}}  {value}{reachable}")


def best_measure(best_by: str | None, measures: Sequence[Measure]) -> Measure:
    """Return the measure by which a checkpoint is the best; ``best_by`` None is the first."""
    named = {measure.name: measure for measure in measures if measure.best is not None}
    if best_by is None:
        return next(iter(named.values()))
    if best_by not in named:
        raise ConfigError(
            f"checkpoint.best-by {best_by} is not a value of this model; its values are "
            f"{', '.join(named)}"
        )
    return named[best_by]


def preservation_policy(config: TrainConfig, measures: Sequence[Measure]) -> PreservationPolicy:
    """Return the rule that keeps a run's checkpoints; with patience it keeps the best one."""
    measure = best_measure(config.checkpoint.best_by, measures)
    best = config.checkpoint.keep_best
    return PreservationPolicy(
        latest=config.checkpoint.keep_last,
        best=max(best, 1) if config.patience else best,
        metric=measure.name,
        mode=measure.best or "min",
    )
