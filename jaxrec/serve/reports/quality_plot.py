"""The picture of a quality report: sizes and errors of the tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jaxrec.plan.report import require_matplotlib
from jaxrec.serve.reports.table_quality import TableQuality

# Number of tables that are drawn, the largest ones.
_MAX_TABLES = 40


def draw(tables: Sequence[TableQuality], title: str, path: str | os.PathLike[str]) -> None:
    """Write the picture.

    Args:
        tables: The tables.
        title: Title of the picture.
        path: Its file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure_class = require_matplotlib()
    drawn = sorted(tables, key=lambda table: table.bytes_before)[-_MAX_TABLES:]
    places = range(len(drawn))
    figure = figure_class(figsize=(11, 1.6 + 0.24 * len(drawn)), layout="constrained")
    sizes, errors = figure.subplots(1, 2, sharey=True)
    _bars(sizes, "before", [table.bytes_before for table in drawn], "0.75", 0.8)
    _bars(sizes, "after", [table.bytes_after for table in drawn], "tab:blue", 0.4)
    sizes.set_xscale("log")
    sizes.set(xlabel="memory (bytes)")
    sizes.set_yticks(places, labels=[f"{table.name}  {table.dtype}" for table in drawn])
    largest = [100 * table.relative_largest_error for table in drawn]
    _bars(errors, "largest", largest, "0.75", 0.8)
    rms = [100 * table.relative_rms_error for table in drawn]
    _bars(errors, "root mean square", rms, "tab:orange", 0.4)
    errors.set(xlabel="error of elements (% of the table's root mean square)")
    for axes in (sizes, errors):
        axes.legend(fontsize="small", loc="lower right")
        axes.margins(y=0.02)
    left_out = len(tables) - len(drawn)
    figure.suptitle(title + (f"; {left_out} smaller tables are not shown" if left_out else ""))
    figure.savefig(path, dpi=120)


def _bars(axes: Any, label: str, values: Sequence[float], color: str, height: float) -> None:
    axes.barh(range(len(values)), values, height=height, color=color, label=label)
