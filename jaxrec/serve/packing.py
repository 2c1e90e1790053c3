"""Writes of rows into packed arrays, in parts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped

from jaxrec.embed.formats import RowFormat
from jaxrec.embed.row_access import TableRows, read
from jaxrec.embed.store import TableStore
from jaxrec.serve.rows import check_rows

# Number of bytes of float32 rows that are packed at a time.
_PART_BYTES = 1 << 24


def table_parts(store: TableStore, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the rows of a table on the host, in parts: the first row's index, and the rows.

    With several processes all of them iterate, and each gets all rows.

    Args:
        store: A store of rows in their own order.
        name: Name of the table.
    """
    (config,) = (config for config in store.configs if config.name == name)
    size = rows_per_part(config.embedding_dim)
    for start in range(0, config.num_embeddings, size):
        rows = np.arange(start, min(start + size, config.num_embeddings))
        (values,) = read(store, [TableRows(name, rows)], with_state=False).to_host()
        yield start, values["rows"]


def write_parts(
    packed: Shaped[Array, "rows width"],
    row_format: RowFormat,
    name: str,
    parts: Iterable[tuple[int, np.ndarray]],
    first_row: int,
) -> Shaped[Array, "rows width"]:
    """Pack the rows of a table into its group's array, in place: the array is donated.

    Args:
        packed: The group's packed rows.
        row_format: Their format.
        name: Name of the table, for errors.
        parts: Parts of the table as `table_parts` yields them.
        first_row: Row of the group's array where the table begins.

    Raises:
        ValueError: The format cannot hold an element of the table.
    """
    for start, rows in parts:
        step = rows_per_part(rows.shape[1])
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            check_rows(row_format, f"table {name!r}, ", part, start + begin)
            packed = write_part(packed, part, jnp.int32(first_row + start + begin), row_format)
    return packed


def rows_per_part(dim: int) -> int:
    """Return the number of rows of ``dim`` columns in a part, a power of two."""
    return 1 << max(0, (_PART_BYTES // (4 * dim)).bit_length() - 1)


@functools.partial(jax.jit, static_argnames="row_format", donate_argnums=0)
def write_part(
    packed: Shaped[Array, "rows width"],
    rows: Float[Array, "n dim"],
    start: Int32[Array, ""],
    row_format: RowFormat,
) -> Shaped[Array, "rows width"]:
    """Pack some rows into an array from row ``start`` on, in place."""
    return jax.lax.dynamic_update_slice_in_dim(packed, row_format.pack(rows), start, 0)
