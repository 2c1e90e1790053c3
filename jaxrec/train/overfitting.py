"""Overfitting: values on training rows still improve while those on held-out rows do not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxrec.train.models.kind import LOSS, Measure
from jaxrec.train.progress import HELD_OUT

# Relative rise of the held-out value above its smallest one that is more than noise.
_RISE = 0.003

# Relative difference between the last values on held-out and on training rows that is reported.
_GAP = 0.05


def describe_overfitting(
    history: Mapping[int, Mapping[str, float]],
    measures: Iterable[Measure],
    results: Mapping[str, float],
    *,
    step: int,
    epochs: int,
) -> str | None:
    """Return a sentence on where held-out values stop following training; None: they follow.

    The values compared are those of the first measure that is best when it is smallest, such as
    normalized entropy. In the first epoch the model has not seen a row before it is evaluated on
    it, so that a run of one epoch cannot overfit in this sense.

    Args:
        history: Values by step and name, as `read_history` returns them.
        measures: Measures that the model reports.
        results: Values of the model on held-out rows.
        step: Step of the model.
        epochs: Number of epochs of the run.
    """
    for measure in (*measures, LOSS):
        training = _curve(history, measure.name)
        held_out = _curve(history, HELD_OUT + measure.name)
        if measure.best != "min" or not training or measure.name not in results or epochs == 1:
            continue
        title = measure.title
        if held_out:
            best, last = min(held_out, key=lambda step: held_out[step]), max(held_out)
            before, after = _value_at(training, best), _value_at(training, last)
            if held_out[last] > held_out[best] * (1 + _RISE) and after < before:
                return (
                    f"overfitting after step {best:,}: by step {last:,} the {title} of held-out "
                    f"rows rose from {held_out[best]:.4f} to {held_out[last]:.4f}, and that of "
                    f"training rows fell from {before:.4f} to {after:.4f}"
                )
        value, own = results[measure.name], _value_at(training, step)
        if value > own * (1 + _GAP):
            return (
                f"{title} is {own:.4f} on the training rows of the last steps and {value:.4f} on "
                "held-out rows: the model overfits, or held-out rows differ from training rows; "
                "try fewer --epochs, or --patience 3"
            )
        return None
    return None


def _curve(history: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    """Return the finite values of one name by step."""
    curve = {step: values[name] for step, values in history.items() if name in values}
    return {step: value for step, value in curve.items() if math.isfinite(value)}


def _value_at(curve: Mapping[int, float], step: int) -> float:
    """Return the last value up to a step, or the first one after it."""
    return curve[max((x for x in curve if x <= step), default=min(curve))]
