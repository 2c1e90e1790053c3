"""The plot of a run: loss, normalized entropy, AUC and throughput over the steps."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping

SUMMARY_FILE = "summary.png"

# Prefix of the names of held-out values in the history.
HELD_OUT = "held_out_"

# Curves of the plot: name in the history, title, and name in the results.
CURVES = (
    ("log_loss", "log loss (nats)", "log_loss"),
    ("normalized_entropy", "normalized entropy", "normalized_entropy"),
    ("auc", "AUC", "auc"),
    ("samples_per_second", "samples/s", None),
)


def read_history(path: pathlib.Path) -> dict[int, dict[str, float]]:
    """Read the values that `jaxrec.metrics.JSONLinesWriter` wrote, by step and name.

    The last value counts: a resumed run writes the steps after its checkpoint again. An incomplete
    line of a killed run is left out.
    """
    history: dict[int, dict[str, float]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        step = record.pop("step")
        values = {n: math.nan if x is None else x for n, x in record.items()}
        # An evaluation has a line of its own.
        history[step] = history.get(step, {}) | values
    return dict(sorted(history.items()))


def draw_summary(
    history: Mapping[int, Mapping[str, float]],
    results: Mapping[str, float | None],
    path: pathlib.Path,
) -> None:
    """Draw the curves of a run.

    Args:
        history: Values by step and name, as `read_history` returns them.
        results: Values on held-out rows at the end, drawn as lines.
        path: The picture's file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "a picture of the run needs matplotlib: pip install 'jaxrec[plot]'"
        ) from None
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (name, title, result) in zip(figure.subplots(2, 2).flat, CURVES, strict=True):
        steps = [step for step, values in history.items() if name in values]
        # A curve of one point is invisible without a marker.
        marker = "o" if len(steps) == 1 else None
        axes.plot(steps, [history[step][name] for step in steps], marker=marker, label="training")
        evaluated = f"{HELD_OUT}{name}"
        seen = [step for step, values in history.items() if evaluated in values]
        if seen:
            axes.plot(seen, [history[step][evaluated] for step in seen], "C1.-")
        held_out = None if result is None else results.get(result)
        if held_out is not None:
            axes.axhline(held_out, color="C1", linestyle="--", label=f"held out: {held_out:.4f}")
        axes.set(title=title, xlabel="step")
        if steps or held_out is not None:
            axes.legend()
    figure.savefig(path)
