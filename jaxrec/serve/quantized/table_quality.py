"""Sizes of quantized tables and the errors of their rows: figures, and the picture of a report."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrec.embed.store import TableStore
from jaxrec.plan.report import require_matplotlib
from jaxrec.serve.quantized.pruned_tables import row_maps_of

# Number of tables that are drawn, the largest ones.
_MAX_TABLES = 40


@dataclasses.dataclass(frozen=True)
class TableQuality:
    """Size of a table before and after quantization, and the error of its rows.

    Attributes:
        name: Name of the table.
        dtype: Format of the quantized rows.
        rows, columns: Shape of the table.
        pruned_rows: Number of rows that are pruned.
        bytes_before, bytes_after: Bytes of the rows, without optimizer state; after quantization
            with the map of a pruned table.
        rms: Root mean square of the table's elements before.
        rms_error: Root mean square of the elements' errors. A pruned row has zeros.
        largest_error: Largest absolute error of an element.
    """

    name: str
    dtype: str
    rows: int
    columns: int
    pruned_rows: int
    bytes_before: int
    bytes_after: int
    rms: float
    rms_error: float
    largest_error: float

    @property
    def relative_rms_error(self) -> float:
        """``rms_error / rms``; 0 for a table of zeros."""
        return self.rms_error / self.rms if self.rms else 0.0

    @property
    def relative_largest_error(self) -> float:
        """``largest_error / rms``; 0 for a table of zeros."""
        return self.largest_error / self.rms if self.rms else 0.0


def table_quality(before: TableStore, after: TableStore, name: str) -> TableQuality:
    """Compare a table of the store ``before`` with its quantized copy in ``after``."""
    (config,) = (config for config in before.configs if config.name == name)
    squares, error_squares, largest = 0.0, 0.0, 0.0
    for (_, rows), (_, packed) in zip(before.parts(name), after.parts(name), strict=True):
        values = rows.astype(np.float32)
        errors = packed.astype(np.float32) - values
        # Summed in float64: float32 would stop growing within a large table.
        squares += float(np.sum(np.square(values), dtype=np.float64))
        error_squares += float(np.sum(np.square(errors), dtype=np.float64))
        largest = max(largest, float(np.max(np.abs(errors))))
    row_map = row_maps_of(after).get(name)
    count = config.num_embeddings * config.embedding_dim
    return TableQuality(
        name=name,
        dtype=after.formats()[name].name,
        rows=config.num_embeddings,
        columns=config.embedding_dim,
        pruned_rows=0 if row_map is None else row_map.num_ids - row_map.num_rows,
        bytes_before=count * jnp.dtype(config.dtype).itemsize,
        bytes_after=after.num_bytes(name),
        rms=(squares / count) ** 0.5,
        rms_error=(error_squares / count) ** 0.5,
        largest_error=largest,
    )


def draw(tables: Sequence[TableQuality], title: str, path: str | os.PathLike[str]) -> None:
    """Write the picture of a report: sizes and errors of the tables."""
    figure_class = require_matplotlib()
    # The largest last, which a horizontal bar chart draws at the top.
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
