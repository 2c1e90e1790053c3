"""Rows of tables with their optimizer state, between a store and the host.

`TableStore.rows_of` gives the rows of some ids, as users know them. `read` and `write` take rows of
several tables by their indices, with one program a group of tables: a tier moves rows so between
two steps. No table is copied, and sizes are on a ladder, so that few programs compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array

from jaxrec.embed.slots import GroupSlots, RowSlots, TableRows, group_slots
from jaxrec.optim import RowOptimizer

# Number of bytes that are read or written at once, so that devices need no more beside the tables.
_BYTES = 1 << 25

# Number of bytes of float32 rows in a part of a table.
_PART_BYTES = 1 << 24


class OutsideRows(Protocol):
    """Rows of ids that a store keeps outside of its arrays, such as in a file.

    Attributes:
        positions: Positions of these ids among those that were asked for, int ``[m]``.
    """

    positions: np.ndarray

    def read(self) -> dict[str, np.ndarray]:
        """Return the rows, under ``"rows"``, and their optimizer state by name, ``[m, ...]``."""

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Set what `read` returns, or some of it; the rest stays as it is."""


@dataclasses.dataclass(frozen=True)
class FoundIds:
    """Places of the rows of some ids.

    Attributes:
        rows: Row index of each id in the table's arrays, int ``[n]``; -1 where the row is outside
            of them.
        outside: The rows outside of the arrays; None: there are none.
    """

    rows: np.ndarray
    outside: OutsideRows | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of some ids of a table; see `TableStore.rows_of`.

    With several processes all of them call a method with the same arguments.

    Attributes:
        store: The `TableStore`.
        table: Name of the table.
        ids: The ids as users know them, any array-like ``[n]``.
    """

    store: Any
    table: str
    ids: Any

    @property
    def optimizer(self) -> RowOptimizer:
        """The row optimizer of the table."""
        (part, *_) = self.store.row_slots(self.table, np.zeros(1, np.int64))
        return self.store.groups[part.group].optimizer

    def read(self, *, with_state: bool = True) -> dict[str, np.ndarray]:
        """Return the rows, and their optimizer state; with several processes each gets all.

        Args:
            with_state: Whether the optimizer state is read too.

        Returns:
            The rows under ``"rows"``, ``[n, embedding_dim]``, and the state by name, ``[n, ...]``.

        Raises:
            KeyError: No table has that name.
            TypeError, ValueError: The table has no such ids.
        """
        shapes = self._shapes()
        found = self.store.find_ids(self.table, self.ids)
        if not with_state:
            shapes = {"rows": shapes["rows"]}
        result = {
            key: np.zeros((found.rows.size, *shape.shape[1:]), shape.dtype)
            for key, shape in shapes.items()
        }
        for part in _parts(np.flatnonzero(found.rows >= 0), shapes):
            request = TableRows(self.table, found.rows[part])
            (values,) = read(self.store.placed, [request], with_state=with_state).to_host()
            for key, array in values.items():
                result[key][part] = array
        if found.outside is not None:
            outside = found.outside.read()
            for key, array in result.items():
                array[found.outside.positions] = outside[key]
        return result

    def write(self, values: Mapping[str, Any]) -> Any:
        """Set the rows, or their optimizer state, in place, and return the store.

        Args:
            values: Rows under ``"rows"`` and state by name, ``[n, ...]``; what is missing stays.

        Raises:
            KeyError: No table has that name.
            TypeError, ValueError: The table has no such ids, an id is repeated, values have another
                shape, or the table cannot hold them.
        """
        store, name, shapes = self.store, self.table, self._shapes()
        found = store.find_ids(name, self.ids, is_written=True)
        arrays = {}
        for key, value in values.items():
            wanted = found.rows.size, *shapes[key].shape[1:]
            arrays[key] = _as_array(name, key, value, wanted, shapes[key])
        if "rows" in arrays:
            check_values(store, name, arrays["rows"])
        if found.outside is not None:
            positions = found.outside.positions
            found.outside.write({key: array[positions] for key, array in arrays.items()})
        placed = store.placed
        for part in _parts(np.flatnonzero(found.rows >= 0), shapes):
            of_part = {key: array[part] for key, array in arrays.items()}
            placed = write(placed, [TableRows(name, found.rows[part])], [of_part])
        return store.with_placed(placed)

    def _shapes(self) -> dict[str, Any]:
        """Return shapes and types of the table's rows and state, ``[rows, ...]``."""
        logical = self.store.checkpoint_shapes(self.table)
        return {"rows": logical.rows, **logical.state}


def check_values(store: Any, name: str, rows: np.ndarray) -> None:
    """Raise a ValueError where a table cannot hold elements of rows that are to be set.

    Args:
        store: The `TableStore`.
        name: Name of the table.
        rows: The rows, ``[n, embedding_dim]``.
    """
    (config,) = (config for config in store.configs if config.name == name)
    config.check_rows(f"table {name!r}, given ", rows)


@dataclasses.dataclass(frozen=True)
class RowsOnDevices:
    """Rows that `read` gathered; `to_host` waits for them.

    Attributes:
        requests: The rows.
        dims: Number of columns of each request's table.
        groups: Their slots, by group.
        arrays: Rows and state of the slots, by group.
        on_host: Returns an array of a group on the host, shaped like its slots.
    """

    requests: tuple[TableRows, ...]
    dims: tuple[int, ...]
    groups: Mapping[str, GroupSlots]
    arrays: Mapping[str, tuple[Array, dict[str, Array]]]
    on_host: Callable[[Array, GroupSlots], np.ndarray] = lambda array, slots: np.asarray(array)

    def to_host(self) -> list[dict[str, np.ndarray]]:
        """Return for each request its rows and state by name; the rows are under ``"rows"``.

        Some of the arrays may be views that cannot be written.
        """
        results: list[dict[str, np.ndarray]] = [{} for _ in self.requests]
        for group, slots in self.groups.items():
            rows, state = self.arrays[group]
            for name, array in {"rows": rows, **state}.items():
                host = self.on_host(array, slots)
                for number, part, start in slots.parts:
                    of_part = slice(start, start + part.slots.shape[-1])
                    values = host[(slice(None),) * (slots.slots.ndim - 1) + (of_part,)]
                    self._put(results[number], number, name, part, values)
        return results

    def _put(
        self,
        result: dict[str, np.ndarray],
        number: int,
        name: str,
        part: RowSlots,
        values: np.ndarray,
    ) -> None:
        is_wide = values.ndim > part.slots.ndim
        if part.is_in_order and (not is_wide or values.shape[1] == self.dims[number]):
            result[name] = values
            return
        count = len(self.requests[number].rows)
        if name not in result:
            width = (self.dims[number],) if is_wide else ()
            result[name] = np.zeros((count, *width), values.dtype)
        target = result[name][:, slice(*part.columns)] if is_wide else result[name]
        is_row = part.index >= 0
        rows = values[is_row]
        target[part.index[is_row]] = rows[:, : target.shape[1]] if is_wide else rows


def read(store: Any, requests: Sequence[TableRows], *, with_state: bool = True) -> RowsOnDevices:
    """Gather rows of tables with their optimizer state; the devices may still compute them.

    Args:
        store: The store that has the arrays (`TableStore.placed`).
        requests: The rows.
        with_state: Whether the state is gathered too.

    Raises:
        KeyError: The store has no such table.
    """
    groups = group_slots(store, requests)
    arrays = {
        group: _read(store, store.devices.put(slots.slots), group, with_state)
        for group, slots in groups.items()
    }
    return RowsOnDevices(tuple(requests), table_dims(store, requests), groups, arrays)


def table_dims(store: Any, requests: Sequence[TableRows]) -> tuple[int, ...]:
    """Return the number of columns of each request's table."""
    dims = {config.name: config.embedding_dim for config in store.layout.configs}
    return tuple(dims[request.table] for request in requests)


def write(
    store: Any, requests: Sequence[TableRows], values: Sequence[Mapping[str, np.ndarray]]
) -> Any:
    """Set rows of tables and their optimizer state, in place: the store is donated.

    Args:
        store: The store that has the arrays (`TableStore.placed`).
        requests: The rows; a row must not occur twice.
        values: For each request its rows, under ``"rows"``, and state by name. What is missing
            stays as it is.

    Raises:
        KeyError: The store has no such table.
    """
    for group, slots in group_slots(store, requests).items():
        numbers = {number for number, _, _ in slots.parts}
        names = set.intersection(*[set(values[number]) for number in numbers])
        arrays = {
            name: slots.gather(
                [value[name] if i in numbers else np.zeros(0) for i, value in enumerate(values)]
            )
            for name in names
        }
        on_devices = store.devices.put((slots.slots, arrays.pop("rows", None), arrays))
        store = _write(store, *on_devices, group)
    return store


@functools.partial(jax.jit, static_argnums=(2, 3))
def _read(
    store: Any, slots: Array, group: str, with_state: bool = True
) -> tuple[Array, dict[str, Array]]:
    rows, state = store.read_rows(group, slots)
    return store.devices.gather((rows, state if with_state else {}))


@functools.partial(jax.jit, static_argnums=4, donate_argnums=0)
def _write(
    store: Any, slots: Array, rows: Array | None, state: dict[str, Array], group: str
) -> Any:
    if rows is None:
        rows, _ = store.read_rows(group, slots)
    return store.write_rows(group, slots, rows, state)


def rows_per_part(dim: int) -> int:
    """Return the number of rows of ``dim`` columns in a part, a power of two."""
    return 1 << max(0, (_PART_BYTES // (4 * dim)).bit_length() - 1)


def as_ids(table: str, ids: Any) -> np.ndarray:
    """Return ids as an array of one axis, of whatever type they have.

    Args:
        table: Name of the table, for errors.
        ids: Any array-like.

    Raises:
        ValueError: There are several axes.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(
            f"table {table!r}: ids have one axis, got an array of shape {list(array.shape)}"
        )
    # NumPy makes floats of a list with integers below and above 2**63.
    if array.dtype.kind == "f" and all(type(value) is int for value in ids):
        return np.array(ids, object)
    return array


def row_indices(table: str, ids: Any, num_embeddings: int) -> np.ndarray:
    """Return the ids of a plain table, which are its row indices, as int64 ``[n]``.

    Args:
        table: Name of the table, for errors.
        ids: Integers, ``[n]``.
        num_embeddings: Number of rows of the table.

    Raises:
        TypeError: The ids are not integers.
        ValueError: An id is outside the table, or ``ids`` has several axes.
    """
    array = as_ids(table, ids)
    if not array.size:
        return np.zeros(0, np.int64)
    # Python integers beyond 64 bits make an array of objects.
    is_integer = array.dtype.kind in "iu" or (
        array.dtype.kind == "O" and all(type(value) is int for value in array.tolist())
    )
    if not is_integer:
        raise TypeError(f"table {table!r}: ids are integers, got an array of {array.dtype}")
    is_outside = (array < 0) | (array >= num_embeddings)
    if is_outside.any():
        position = int(np.argmax(is_outside))
        raise ValueError(
            f"table {table!r} has the rows 0 to {num_embeddings - 1:,}, got id {array[position]} "
            f"at position {position}"
        )
    return array.astype(np.int64)


def check_distinct(table: str, ids: np.ndarray) -> None:
    """Raise a ValueError where an id occurs twice: only one of its rows could be kept."""
    in_order = np.sort(ids)
    is_repeat = in_order[1:] == in_order[:-1]
    if is_repeat.any():
        raise ValueError(
            f"table {table!r}: id {in_order[int(np.argmax(is_repeat))]} is given more than once; "
            "each row is set once"
        )


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
