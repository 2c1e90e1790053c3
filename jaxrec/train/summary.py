"""The picture of a run: its curves, its calibration and the importance of its columns."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrec.plan.report import require_matplotlib
from jaxrec.train.models.kind import Measure
from jaxrec.train.progress import HELD_OUT

# Numbers of panels with curves, of columns of panels, and of columns whose importance is drawn.
_CURVES = 4
_COLUMNS = 3
_BARS = 12

# Largest number of characters of a name in the picture.
_CHARACTERS = 24

History = Mapping[int, Mapping[str, float]]


def draw_summary(
    history: History,
    results: Mapping[str, Any],
    measures: Sequence[Measure],
    path: pathlib.Path,
) -> None:
    """Draw a run.

    The panels are curves of the first values in the history, those of several labels together; the
    means of labels against predictions, with ``calibration_deciles``; and with ``importance`` the
    columns that matter most.

    Args:
        history: Values by step and name, as `jaxrec.train.progress.read_history` returns them.
        results: Content of ``results.json``.
        measures: Measures that the model reports, and the loss.
        path: The picture's file.
    """
    panels: list[Callable[[Any], None]] = []
    for title, names in _curves(history, measures).items():
        panels.append(
            functools.partial(
                _draw_curves, title=title, names=names, history=history, results=results
            )
        )
    if groups := results.get("calibration_deciles"):
        panels.append(functools.partial(_draw_calibration, groups=groups))
    if importance := results.get("importance"):
        panels.append(functools.partial(_draw_importance, importance=importance, measures=measures))
    # Four panels are a square.
    columns = 2 if len(panels) == 4 else min(_COLUMNS, max(len(panels), 1))
    rows = -(-len(panels) // columns) or 1
    size = (max(4.5 * columns, 8), 3.4 * rows + 0.8)
    figure = require_matplotlib()(figsize=size, layout="constrained")
    figure.suptitle(_title(results, measures))
    places = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, draw in zip(places, panels, strict=False):
        draw(axes)
    figure.savefig(path)


def _curves(history: History, measures: Sequence[Measure]) -> dict[str, dict[str, str]]:
    """Return the titles of the panels with curves, and in each the names of values by label.

    The value of a model with one label has the label "".
    """
    names = {name for values in history.values() for name in values}
    curves: dict[str, dict[str, str]] = {}
    for measure in measures:
        if {measure.name, f"{HELD_OUT}{measure.name}"} & names:
            label, _, _ = measure.name.rpartition("/")
            title = measure.title.removeprefix(label).strip()
            curves.setdefault(title, {})[label] = measure.name
    return dict([*curves.items()][:_CURVES])


def _draw_curves(
    axes: Any,
    title: str,
    names: Mapping[str, str],
    history: History,
    results: Mapping[str, Any],
) -> None:
    """Draw a value of each label in training and on held-out rows, and the final ones as lines."""
    for number, (label, name) in enumerate(names.items()):
        colors = f"C{2 * number}", f"C{2 * number + 1}"
        prefix = f"{_short(label)}, " if len(names) > 1 else ""
        points = {step: values[name] for step, values in history.items() if name in values}
        if points:
            # A curve of one point is invisible without a marker.
            marker = "o" if len(points) == 1 else None
            steps, values = [*points], [*points.values()]
            axes.plot(steps, values, colors[0], marker=marker, label=f"{prefix}training")
        evaluated = f"{HELD_OUT}{name}"
        seen = {step: values[evaluated] for step, values in history.items() if evaluated in values}
        if seen:
            axes.plot([*seen], [*seen.values()], colors[1], marker=".")
        if (value := results.get(name)) is not None:
            text = f"{prefix}held out: {value:.4f}"
            axes.axhline(value, color=colors[1], linestyle="--", label=text)
    if (best := results.get("best_step")) is not None:
        axes.axvline(best, color="0.4", linestyle=":", label=f"best step: {best:,}")
    axes.set(title=title, xlabel="step")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _draw_calibration(axes: Any, groups: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    ends: list[float] = []
    for label, means in groups.items():
        predicted, observed = ([each[x] for each in means] for x in ("predicted", "observed"))
        axes.plot(predicted, observed, "o-", label=_short(label))
        ends += [*predicted, *observed]
    if ends:
        line = [min(ends), max(ends)]
        axes.plot(line, line, color="0.6", linestyle="--", zorder=0)
    axes.set(title="calibration by decile", xlabel="mean prediction", ylabel="mean label")
    axes.legend(fontsize="small")


def _draw_importance(axes: Any, importance: Mapping[str, Any], measures: Sequence[Measure]) -> None:
    worse = {name: values[importance["value"]] for name, values in importance["columns"].items()}
    drawn = [*worse.items()][:_BARS]
    places = range(len(drawn), 0, -1)
    axes.barh(places, [value for _, value in drawn], tick_label=[_short(name) for name, _ in drawn])
    axes.axvline(0, color="0.6", linewidth=0.8)
    titles = {measure.name: (measure.title, measure.best) for measure in measures}
    title, best = titles[importance["value"]]
    rest = f", {len(drawn)} of {len(worse)}" if len(worse) > len(drawn) else ""
    change = "rise" if best == "min" else "fall"
    axes.set(title=f"importance of columns{rest}", xlabel=f"{change} of {title} if shuffled")


def _title(results: Mapping[str, Any], measures: Sequence[Measure]) -> str:
    """Return the picture's title: model, data, number of steps, and the first results."""
    data = results.get("data")
    name = "a generated log" if data is None else pathlib.PurePath(data).name
    rows, held_out = (results.get(x) or 0 for x in ("rows", "held_out_rows"))
    step, best = results.get("steps") or 0, results.get("best_step")
    shown = [
        f"{x.title} {results[x.name]:.4f}" for x in measures if results.get(x.name) is not None
    ]
    speed = results.get("samples_per_second")
    facts = [f"{step:,} steps" + (f", best step {best:,}" if best is not None else "")]
    facts += [f"{speed:,.0f} samples/s"] if speed else []
    return (
        f"{results.get('model')} on {_short(name)}: {rows:,} rows, {held_out:,} held out\n"
        f"{'; '.join([', '.join(shown[:2]), *facts])}"
    )


def _short(text: str) -> str:
    # A dollar sign would begin a formula.
    kept = text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…"
    return kept.replace("$", r"\$")
