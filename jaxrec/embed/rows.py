"""Reads and writes of rows with their optimizer state, between a store and the host.

`Rows` (`TableStore.rows_of`) takes the ids of one table as users know them. `read` and `write` take
row indices of several tables, with one compiled program for each group: a tier calls them between
two steps. They never copy a table.
"""

# Three kinds of numbers name a row, and this file translates:
#
#     id         what users know: an integer, or a string in an open vocabulary
#     row index  position in the table, 0 .. num_embeddings - 1   (`TableStore.find_ids`)
#     slot       position in a device's array of the group        (`TableStore.row_slots`)
#
# A request of n rows becomes a gather of `slots.size_for(n)` slots, padded with -1. There are few
# padded sizes, so that a program compiled for one request serves most others.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array

from jaxrec.embed.config import find_config
from jaxrec.embed.slots import GroupSlots, RowSlots, TableRows, group_slots
from jaxrec.optim import RowOptimizer

# Bytes that are read or written at once: 32 MiB is all that devices need beside the tables.
_BYTES = 1 << 25

# Bytes of float32 rows in one part that `TableStore.parts` yields.
_PART_BYTES = 1 << 24


class OutsideRows(Protocol):
    """Rows that a store keeps outside of its arrays, in a file for example.

    Attributes:
        positions: Positions of the rows' ids among the requested ids, int ``[m]``.
    """

    positions: np.ndarray

    def read(self) -> dict[str, np.ndarray]:
        """Return the rows under ``"rows"``, and their optimizer state by name, ``[m, ...]``."""

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Set rows and state, by the names of `read`; arrays without a value stay as they are."""


@dataclasses.dataclass(frozen=True)
class FoundIds:
    """Result of `TableStore.find_ids`.

    Attributes:
        rows: Row index of each id, int ``[n]``; -1 for a row outside of the table's arrays.
        outside: The rows outside; None: there are none.
    """

    rows: np.ndarray
    outside: OutsideRows | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of some ids of a table, from `TableStore.rows_of`.

    With several processes, all of them make the same calls: reads and writes are collectives.
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
        """Return the rows under ``"rows"``, ``[n, embedding_dim]``, and their state by name."""
        shapes = self._shapes()
        found = self.store.find_ids(self.table, self.ids)
        if not with_state:
            shapes = {"rows": shapes["rows"]}
        result = {
            key: np.zeros((found.rows.size, *shape.shape[1:]), shape.dtype)
            for key, shape in shapes.items()
        }
        # Part by part, so that a read of a whole table needs `_BYTES` on the device and not another
        # table.
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
        """Set rows (``"rows"``) or state (by name) in place, and return the new store.

        Arrays that ``values`` lacks stay as they are.
        """
        store, name, shapes = self.store, self.table, self._shapes()
        found = store.find_ids(name, self.ids, is_written=True)
        # All checks come before the first write: an error must not leave half of the rows set.
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
        """Return the shapes and types of the table's rows (``"rows"``) and state (by name)."""
        logical = self.store.checkpoint_shapes(self.table)
        return {"rows": logical.rows, **logical.state}


def check_values(store: Any, name: str, rows: np.ndarray) -> None:
    """Raise a ValueError if a table's format cannot hold ``rows``, ``[n, embedding_dim]``."""
    find_config(store.configs, name).check_rows(f"table {name!r}, given ", rows)


@dataclasses.dataclass(frozen=True)
class RowsOnDevices:
    """Rows and state that `read` gathers, by group; `to_host` waits for them."""

    requests: tuple[TableRows, ...]
    dims: tuple[int, ...]  # columns of each request's table
    groups: Mapping[str, GroupSlots]
    arrays: Mapping[str, tuple[Array, dict[str, Array]]]
    # Brings an array of a group to the host, shaped like its slots. A store over several processes
    # brings its own.
    on_host: Callable[[Array, GroupSlots], np.ndarray] = lambda array, slots: np.asarray(array)

    def to_host(self) -> list[dict[str, np.ndarray]]:
        """Return the rows (``"rows"``) and state of each request; some are read-only views."""
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
        """Store one array's values of one part in the result of request ``number``."""
        is_wide = values.ndim > part.slots.ndim
        # On one device the gathered rows are the answer already: no copy.
        if part.is_in_order and (not is_wide or values.shape[1] == self.dims[number]):
            result[name] = values
            return
        count = len(self.requests[number].rows)
        if name not in result:
            width = (self.dims[number],) if is_wide else ()
            result[name] = np.zeros((count, *width), values.dtype)
        # Over a mesh a row may come in column slices, and padding has the index -1.
        target = result[name][:, slice(*part.columns)] if is_wide else result[name]
        is_row = part.index >= 0
        rows = values[is_row]
        target[part.index[is_row]] = rows[:, : target.shape[1]] if is_wide else rows


def read(
    store: Any,
    requests: Sequence[TableRows],
    *,
    with_state: bool = True,
    is_leaving: bool = False,
) -> RowsOnDevices:
    """Start to gather rows with their state; ``store`` is a `TableStore.placed`.

    The devices may still compute when it returns. Rows that leave for good, ``is_leaving``, are on
    their way into pinned memory of the host, beside the programs that follow.
    """
    groups = group_slots(store, requests)
    arrays = {
        group: _read(store, store.devices.put(slots.slots), group, with_state)
        for group, slots in groups.items()
    }
    if is_leaving:
        arrays = jax.tree.map(_into_pinned_memory, arrays)
    return RowsOnDevices(tuple(requests), table_dims(store, requests), groups, arrays)


def table_dims(store: Any, requests: Sequence[TableRows]) -> tuple[int, ...]:
    """Return the number of columns of each request's table."""
    dims = {config.name: config.embedding_dim for config in store.layout.configs}
    return tuple(dims[request.table] for request in requests)


def write(
    store: Any, requests: Sequence[TableRows], values: Sequence[Mapping[str, np.ndarray]]
) -> Any:
    """Set rows (``"rows"``) and state (by name) in place: ``store`` is donated.

    Each request has a mapping of its arrays in ``values``. Arrays that a request lacks stay as they
    are. A row must not occur twice.
    """
    # One scatter writes the rows of all tables of a group. It sets the same arrays of all of them,
    # so requests with other arrays get a scatter of their own.
    by_names: dict[frozenset[str], list[int]] = {}
    for number, arrays in enumerate(values):
        by_names.setdefault(frozenset(arrays), []).append(number)
    for names, numbers in by_names.items():
        alike = [values[number] for number in numbers]
        for group, slots in group_slots(store, [requests[number] for number in numbers]).items():
            new = {name: slots.gather([arrays[name] for arrays in alike]) for name in names}
            on_devices = store.devices.put((slots.slots, new.pop("rows", None), new))
            store = _write(store, *on_devices, group)
    return store


@functools.partial(jax.jit, static_argnums=(2, 3))
def _read(
    store: Any, slots: Array, group: str, with_state: bool = True
) -> tuple[Array, dict[str, Array]]:
    rows, state = store.read_rows(group, slots)
    return store.devices.gather((rows, state if with_state else {}))


def _into_pinned_memory(array: Array) -> Array:
    """Start to copy an array into pinned memory of the host, where a device has its own memory."""
    if not _has_own_memory(array.addressable_shards[0].device):
        return array
    # Without `jax.jit`: a copy in a program ends before the next program begins, and nothing else
    # runs in this one. A copy of its own runs beside the training step.
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


@functools.cache
def _has_own_memory(device: jax.Device) -> bool:
    """Whether a device computes in other memory than the host, and copies to pinned host memory."""
    # CPU devices have all kinds of memory by name: a copy between them would be for nothing.
    kinds = [memory.kind for memory in device.addressable_memories()]
    return device.platform != "cpu" and "pinned_host" in kinds


@functools.partial(jax.jit, static_argnums=4, donate_argnums=0)
def _write(
    store: Any, slots: Array, rows: Array | None, state: dict[str, Array], group: str
) -> Any:
    if rows is None:
        # `write_rows` always sets rows. For state alone, we set the rows that are there.
        rows, _ = store.read_rows(group, slots)
    return store.write_rows(group, slots, rows, state)


def rows_per_part(dim: int) -> int:
    """Return the number of rows of a part of `TableStore.parts`.

    It is a power of two whose rows take at most 16 MiB in float32.
    """
    return 1 << max(0, (_PART_BYTES // (4 * dim)).bit_length() - 1)


def as_ids(table: str, ids: Any) -> np.ndarray:
    """Return ids as an array; raise a ValueError if it is not ``[n]``."""
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(
            f"table {table!r}: ids have one axis, got an array of shape {list(array.shape)}"
        )
    # NumPy turns [1, 2**63] into floats, which would round the ids.
    if array.dtype.kind == "f" and all(type(value) is int for value in ids):
        return np.array(ids, object)
    return array


def row_indices(table: str, ids: Any, num_embeddings: int) -> np.ndarray:
    """Check that ids are row indices of a table, and return them as int64 ``[n]``."""
    array = as_ids(table, ids)
    # An empty list is an array of float64, which is no error here.
    if not array.size:
        return np.zeros(0, np.int64)
    # Python integers of more than 64 bits make an array of objects. They are out of range, and that
    # message helps more than one about the type.
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
    """Raise a ValueError if an id occurs twice: which of its rows would stay is undefined."""
    in_order = np.sort(ids)
    is_repeat = in_order[1:] == in_order[:-1]
    if is_repeat.any():
        raise ValueError(
            f"table {table!r}: id {in_order[int(np.argmax(is_repeat))]} is given more than once; "
            "each row is set once"
        )


def _parts(positions: np.ndarray, shapes: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """Cut positions into parts whose rows, of arrays of these shapes, take up to `_BYTES`."""
    width = sum(
        int(np.prod(shape.shape[1:], dtype=np.int64)) * np.dtype(shape.dtype).itemsize
        for shape in shapes.values()
    )
    size = max(1, _BYTES // max(1, width))
    return (positions[start : start + size] for start in range(0, positions.size, size))


def _as_array(name: str, key: str, value: Any, wanted: tuple[int, ...], like: Any) -> np.ndarray:
    """Return a value as an array of the shape ``wanted`` and the type of ``like``, or raise."""
    what = f"rows of table {name!r}" if key == "rows" else f"state {key!r} of table {name!r}"
    array = np.asarray(value)
    if array.shape != wanted:
        raise ValueError(f"{what} for {wanted[0]} ids have shape {wanted}, got {array.shape}")
    return array.astype(like.dtype)
