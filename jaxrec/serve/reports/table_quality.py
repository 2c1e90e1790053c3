"""Size of a quantized table and the error of its rows."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrec.embed.store import TableStore
from jaxrec.serve.quantized.pruned_tables import row_maps_of


@dataclasses.dataclass(frozen=True)
class TableQuality:
    """Size of a table before and after quantization, and the error of its rows.

    Attributes:
        name: Name of the table.
        dtype: Format of the quantized rows.
        rows, columns: Shape of the table.
        pruned_rows: Number of rows that are pruned.
        bytes_before, bytes_after: Bytes of the rows, without optimizer state; afterwards with the
            map of a pruned table.
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
    """Compare a table with its quantized copy, in parts.

    Args:
        before: The store of the table.
        after: The store of the copy.
        name: Name of the table.

    Raises:
        KeyError: A store has no such table.
    """
    (config,) = (config for config in before.configs if config.name == name)
    squares, error_squares, largest = 0.0, 0.0, 0.0
    for (_, rows), (_, packed) in zip(before.parts(name), after.parts(name), strict=True):
        values = rows.astype(np.float32)
        errors = packed.astype(np.float32) - values
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
