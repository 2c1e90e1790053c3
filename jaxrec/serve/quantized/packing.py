"""Writes of rows into packed arrays, in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxrec.embed.formats import RowFormat, TableArray, check_rows
from jaxrec.embed.row_access import TableRows, read
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import write_part

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
    table: Float[TableArray, "rows dim"],
    row_format: RowFormat,
    name: str,
    parts: Iterable[tuple[int, np.ndarray]],
    first_row: int,
) -> Float[TableArray, "rows dim"]:
    """Pack the rows of a table into its group's array, in place: the array is donated.

    Args:
        table: The group's rows.
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
            table = write_part(table, part, jnp.int32(first_row + start + begin))
    return table


def rows_per_part(dim: int) -> int:
    """Return the number of rows of ``dim`` columns in a part, a power of two."""
    return 1 << max(0, (_PART_BYTES // (4 * dim)).bit_length() - 1)
