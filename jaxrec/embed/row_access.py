"""Some rows of tables with their optimizer state, between a store's arrays and the host.

No table is copied. Sizes are on a ladder, so that few programs compile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array

from jaxrec.embed.row_slots import RowSlots
from jaxrec.embed.store import TableStore

_SMALLEST_SIZE = 64
_FINE_SIZE = 4096


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Rows of a table.

    Attributes:
        table: Name of the table.
        rows: Row indices, int ``[n]``.
    """

    table: str
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class GroupSlots:
    """Slots of rows of several tables in one group.

    Attributes:
        slots: int32 ``[n]``, or ``[devices, n]`` over a mesh, with -1 at padding. There may be
            more axes in front.
        parts: For each column slice of each table the number of its `TableRows`, its slots, and
            where they begin on the last axis of ``slots``.
        dim: Number of columns of the group's rows.
    """

    slots: np.ndarray
    parts: tuple[tuple[int, RowSlots, int], ...]
    dim: int

    def gather(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Return an array that has a row of some values for each slot; any of them at padding.

        Args:
            values: For each of the `TableRows` the values of its rows, ``[n, ...]``; where these
                are as wide as the table, each column slice gets its columns, with zeros behind
                them where the group is wider.
        """
        first = values[self.parts[0][0]]
        width = () if first.ndim == 1 else (self.dim,)
        gathered = np.empty((*self.slots.shape, *width), first.dtype)
        by_slot = self._slots_first(gathered)
        stop = 0
        for number, part, start in self.parts:
            of_part = values[number]
            if width:
                of_part = of_part[:, slice(*part.columns)]
            stop = start + part.slots.shape[-1]
            if not part.is_in_order:
                of_part = self._slots_first(of_part[part.index])
            if not width:
                by_slot[start:stop] = of_part
                continue
            by_slot[start:stop, ..., : of_part.shape[-1]] = of_part
            by_slot[start:stop, ..., of_part.shape[-1] :] = 0
        by_slot[stop:] = 0
        return gathered

    def _slots_first(self, array: np.ndarray) -> np.ndarray:
        """Return a view of an array shaped like ``slots`` with the slots on its first axis."""
        return array if self.slots.ndim == 1 else np.moveaxis(array, self.slots.ndim - 1, 0)

    def column_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first column of each slot's column slice and the column after its last.

        Both are int32 and shaped like ``slots``.
        """
        bounds = np.zeros_like(self.slots), np.zeros_like(self.slots)
        for _, part, start in self.parts:
            for columns, bound in zip(bounds, part.columns, strict=True):
                columns[..., start : start + part.slots.shape[-1]] = bound
        return bounds


def group_slots(store: TableStore, requests: Sequence[TableRows]) -> dict[str, GroupSlots]:
    """Return the slots of rows of several tables, by group; groups without any are left out."""
    parts: dict[str, list[tuple[int, RowSlots, int]]] = {}
    sizes: dict[str, int] = {}
    for number, request in enumerate(requests):
        if not len(request.rows):
            continue
        for part in store.row_slots(request.table, request.rows):
            start = sizes.get(part.group, 0)
            parts.setdefault(part.group, []).append((number, part, start))
            sizes[part.group] = start + part.slots.shape[-1]
    result = {}
    for group, of_group in parts.items():
        leading = of_group[0][1].slots.shape[:-1]
        slots = np.full((*leading, size_for(sizes[group])), -1, np.int32)
        for _, part, start in of_group:
            slots[..., start : start + part.slots.shape[-1]] = part.slots
        result[group] = GroupSlots(slots, tuple(of_group), store.groups[group].dim)
    return result


@dataclasses.dataclass(frozen=True)
class RowsOnDevices:
    """Rows that `read` gathered; `to_host` waits for them.

    Attributes:
        requests: The rows.
        dims: Number of columns of each request's table.
        groups: Their slots, by group.
        arrays: Rows and state of the slots, by group.
    """

    requests: tuple[TableRows, ...]
    dims: tuple[int, ...]
    groups: Mapping[str, GroupSlots]
    arrays: Mapping[str, tuple[Array, dict[str, Array]]]

    def to_host(self) -> list[dict[str, np.ndarray]]:
        """Return for each request its rows and state by name; the rows are under ``"rows"``.

        Some of the arrays may be views that cannot be written.
        """
        results: list[dict[str, np.ndarray]] = [{} for _ in self.requests]
        for group, slots in self.groups.items():
            rows, state = self.arrays[group]
            for name, array in {"rows": rows, **state}.items():
                host = np.asarray(array)
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


def read(
    store: TableStore, requests: Sequence[TableRows], *, with_state: bool = True
) -> RowsOnDevices:
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
        group: _read(store, store.put_rows(slots.slots), group, with_state)
        for group, slots in groups.items()
    }
    dims = {config.name: config.embedding_dim for config in store.layout.configs}
    return RowsOnDevices(
        tuple(requests), tuple(dims[request.table] for request in requests), groups, arrays
    )


def write(
    store: TableStore, requests: Sequence[TableRows], values: Sequence[Mapping[str, np.ndarray]]
) -> TableStore:
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
        on_devices = store.put_rows((slots.slots, arrays.pop("rows", None), arrays))
        store = _write(store, *on_devices, group)
    return store


@functools.partial(jax.jit, static_argnums=(2, 3))
def _read(
    store: TableStore, slots: Array, group: str, with_state: bool = True
) -> tuple[Array, dict[str, Array]]:
    rows, state = store.read_rows(group, slots)
    return store.on_every_process((rows, state if with_state else {}))


@functools.partial(jax.jit, static_argnums=4, donate_argnums=0)
def _write(
    store: TableStore, slots: Array, rows: Array | None, state: dict[str, Array], group: str
) -> TableStore:
    if rows is None:
        rows, _ = store.read_rows(group, slots)
    return store.write_rows(group, slots, rows, state)


def size_for(count: int) -> int:
    """Return the smallest size of a ladder that holds a count.

    The ladder doubles from 64 to 4,096: 64, 128, ... Then it takes four steps to double, since
    padding is copied, too: 4,096, 5,120, 6,144, 7,168, 8,192, 10,240, ...
    """
    size = _SMALLEST_SIZE
    while size < count and size < _FINE_SIZE:
        size *= 2
    if size >= count:
        return size
    step = 1 << (count - 1).bit_length() - 3
    return -(-count // step) * step
