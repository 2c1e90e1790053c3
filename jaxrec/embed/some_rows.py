"""Rows of a table by id, with their optimizer state, between a store and the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrec.embed.row_access import TableRows, read, write
from jaxrec.embed.store import TableStore

# Number of bytes that are read or written at once, so that devices need no more beside the tables.
_BYTES = 1 << 25


def read_ids(
    store: TableStore, name: str, ids: Any, *, with_state: bool = True
) -> dict[str, np.ndarray]:
    """Return the rows of some ids, and their optimizer state; no table is copied.

    With several processes all of them call it with the same ids, and each gets all rows.

    Args:
        store: The store.
        name: Name of the table.
        ids: Ids, ``[n]``, with repeats; see `TableStore.find_ids`.
        with_state: Whether the optimizer state is read too.

    Returns:
        The rows under ``"rows"``, ``[n, embedding_dim]``, and the state by name, ``[n, ...]``.

    Raises:
        KeyError: No table has that name.
        TypeError, ValueError: The table has no such ids.
    """
    shapes = _shapes(store, name)
    found = store.find_ids(name, ids)
    if not with_state:
        shapes = {"rows": shapes["rows"]}
    result = {
        key: np.zeros((found.rows.size, *shape.shape[1:]), shape.dtype)
        for key, shape in shapes.items()
    }
    for part in _parts(np.flatnonzero(found.rows >= 0), shapes):
        request = TableRows(name, found.rows[part])
        (values,) = read(store.placed, [request], with_state=with_state).to_host()
        for key, array in values.items():
            result[key][part] = array
    if found.outside is not None:
        outside = found.outside.read()
        for key, array in result.items():
            array[found.outside.positions] = outside[key]
    return result


def write_ids(store: TableStore, name: str, ids: Any, values: Mapping[str, Any]) -> TableStore:
    """Set the rows of some ids, or their optimizer state, in place: the store is donated.

    With several processes all of them call it with the same arguments.

    Args:
        store: The store.
        name: Name of the table.
        ids: Distinct ids, ``[n]``.
        values: Rows under ``"rows"`` and state by name, ``[n, ...]``; what is missing stays.

    Raises:
        KeyError: No table has that name.
        TypeError, ValueError: The table has no such ids, an id is repeated, values have another
            shape, or the table cannot hold them.
    """
    shapes = _shapes(store, name)
    found = store.find_ids(name, ids, is_written=True)
    arrays = {
        key: _as_array(name, key, value, (found.rows.size, *shapes[key].shape[1:]), shapes[key])
        for key, value in values.items()
    }
    if "rows" in arrays:
        store.check_values(name, arrays["rows"])
    if found.outside is not None:
        positions = found.outside.positions
        found.outside.write({key: array[positions] for key, array in arrays.items()})
    placed = store.placed
    for part in _parts(np.flatnonzero(found.rows >= 0), shapes):
        of_part = {key: array[part] for key, array in arrays.items()}
        placed = write(placed, [TableRows(name, found.rows[part])], [of_part])
    return store.with_placed(placed)


def _shapes(store: TableStore, name: str) -> dict[str, Any]:
    """Return shapes and types of a table's rows and state, ``[rows, ...]``."""
    logical = store.checkpoint_shapes(name)
    return {"rows": logical.rows, **logical.state}


def _parts(positions: np.ndarray, shapes: Mapping[str, Any]) -> Iterator[np.ndarray]:
    width = sum(
        int(np.prod(shape.shape[1:], dtype=np.int64)) * np.dtype(shape.dtype).itemsize
        for shape in shapes.values()
    )
    size = max(1, _BYTES // max(1, width))
    return (positions[start : start + size] for start in range(0, positions.size, size))


def _as_array(name: str, key: str, value: Any, wanted: tuple[int, ...], like: Any) -> np.ndarray:
    what = f"rows of table {name!r}" if key == "rows" else f"state {key!r} of table {name!r}"
    array = np.asarray(value)
    if array.shape != wanted:
        raise ValueError(f"{what} for {wanted[0]} ids have shape {wanted}, got {array.shape}")
    return array.astype(like.dtype)
