"""The results of a sweep: a table, as a file and on the console, and a picture."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from jaxrec.files.atomic import write_atomically
from jaxrec.plan.report import require_matplotlib
from jaxrec.train.models.kind import Measure

TABLE_FILE = "sweep.csv"
JSON_FILE = "sweep.json"
PICTURE_FILE = "sweep.png"

# Facts of a run that the table has besides its options and its values.
_FACTS = ("steps", "best_step", "seconds", "rows", "held_out_rows")

# Number of values on the console.
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class RunRow:
    """A run of a sweep, as a row of its table.

    Attributes:
        folder: Name of its folder.
        values: Value of each option that varies, as text.
        results: Content of its ``results.json``; empty if it has none.
        error: Why it failed; None: it did not, or was not made yet.
    """

    folder: str
    values: Mapping[str, str]
    results: Mapping[str, Any]
    error: str | None = None

    @property
    def state(self) -> str:
        """Text "finished", "failed" or "to do"."""
        return "finished" if self.results else "to do" if self.error is None else "failed"


def sorted_rows(rows: Sequence[RunRow], measure: Measure) -> list[RunRow]:
    """Sort runs by a value, the best first; runs without the value come last, in their order."""
    sign = -1 if measure.best == "max" else 1

    def key(row: RunRow) -> tuple[bool, float]:
        value = row.results.get(measure.name)
        return value is None, 0.0 if value is None else sign * value

    return sorted(rows, key=key)


def report_sweep(
    rows: Sequence[RunRow],
    measures: Sequence[Measure],
    output: pathlib.Path,
    console: Console,
    *,
    is_last: bool,
) -> None:
    """Write the table of a sweep's runs; if they are all made, print it and draw the picture.

    ``measures`` are the values of the runs, first the one by which they are sorted; none if no run
    has finished.
    """
    if measures:
        rows = sorted_rows(rows, measures[0])
    names = [measure.name for measure in measures]
    lines = [_line(row, names) for row in rows]
    with write_atomically(output / TABLE_FILE) as unfinished, unfinished.open("w", newline="") as f:
        writer = csv.DictWriter(f, [*lines[0]])
        writer.writeheader()
        writer.writerows(lines)
    content = {
        "sorted_by": names[0] if names else None,
        "runs": [
            {
                "folder": row.folder,
                "state": row.state,
                "error": row.error,
                "options": dict(row.values),
                "results": dict(row.results) or None,
            }
            for row in rows
        ],
    }
    with write_atomically(output / JSON_FILE) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n")
    if not is_last:
        return
    console.print(f"\n{_printed(rows, measures)}")
    if len({_held_out(row.results) for row in rows if row.results}) > 1:
        console.print(
            "the runs have different held-out rows, so that their values do not say which is the "
            "best; give all the same, such as by --hold-out-data"
        )
    if measures:
        try:
            draw_sweep(rows, measures[0], output / PICTURE_FILE)
        except ImportError as error:
            console.print(f"no {PICTURE_FILE}: {error}")
    console.print(f"the runs are in {output}, and this table in {output / TABLE_FILE}")


def _held_out(results: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for runs with the same held-out rows."""
    # A generated log follows from its seed.
    seed = results.get("seed") if results.get("data") is None else None
    return (seed, *(results.get(name) for name in ("data", "hold_out", "held_out_rows")))


def _line(row: RunRow, names: Sequence[str]) -> dict[str, Any]:
    """Return a row of the file, with the whole name of each column."""
    facts = {name: row.results.get(name) for name in (*names, *_FACTS)}
    ends = {"state": row.state, "error": row.error, "folder": row.folder}
    return {**row.values, **facts, **ends}


def _printed(rows: Sequence[RunRow], measures: Sequence[Measure]) -> str:
    """Return the table for the console, and a line for each run that failed."""
    shown = measures[:_SHOWN]
    table = [[*rows[0].values, *(measure.title for measure in shown), "steps", "seconds"]]
    for row in rows:
        values = [row.results.get(measure.name) for measure in shown]
        facts = [row.results.get(name) for name in ("steps", "seconds")]
        table.append(
            [
                *row.values.values(),
                *("-" if value is None else f"{value:.4f}" for value in values),
                *("-" if fact is None else f"{fact:,.0f}" for fact in facts),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
        for line in table
    ]
    lines += [f"{row.folder} failed: {row.error}" for row in rows if row.state == "failed"]
    return "\n".join(lines)


def draw_sweep(rows: Sequence[RunRow], measure: Measure, path: pathlib.Path) -> None:
    """Draw a value against each option that varies; ``rows`` are sorted, the best first.

    A point is a run. Lines join the runs that differ only in the option of their axes.
    """
    done = [row for row in rows if row.results.get(measure.name) is not None]
    options = [*rows[0].values]
    columns = min(len(options), 3)
    lines = -(-len(options) // columns)
    figure = require_matplotlib()(figsize=(1 + 4 * columns, 3.5 * lines), layout="constrained")
    places_of_axes = figure.subplots(lines, columns, squeeze=False).flat
    for axes, option in zip(places_of_axes, options, strict=False):
        texts = list(dict.fromkeys(row.values[option] for row in rows))
        places = _places(texts)
        others: dict[tuple[str, ...], list[RunRow]] = {}
        for row in done:
            rest = tuple(f"{name}={x}" for name, x in row.values.items() if name != option)
            others.setdefault(rest, []).append(row)
        for rest, group in sorted(others.items()):
            group = sorted(group, key=lambda row: places[row.values[option]])
            x = [places[row.values[option]] for row in group]
            y = [row.results[measure.name] for row in group]
            axes.plot(x, y, ".-", label=" ".join(rest) or None)
        if done:
            best = done[0]
            axes.plot(
                places[best.values[option]],
                best.results[measure.name],
                "k*",
                markersize=12,
                label=f"best: {best.results[measure.name]:.4f}",
            )
        axes.set_xticks([*places.values()], [*places])
        axes.set(xlabel=option, ylabel=measure.title)
        if len(others) <= 8:
            axes.legend(fontsize="small")
    for axes in figure.axes[len(options) :]:
        axes.remove()
    figure.savefig(path)


def _places(texts: Sequence[str]) -> dict[str, float]:
    """Return the place of each value on an axis: its number, its logarithm, or its order."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return {text: float(place) for place, text in enumerate(texts)}
    # Rates and sizes are swept by factors.
    if min(numbers) > 0 and max(numbers) / min(numbers) >= 4:
        numbers = [math.log10(number) for number in numbers]
    return dict(sorted(zip(texts, numbers, strict=True), key=lambda pair: pair[1]))
