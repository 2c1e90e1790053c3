"""Slots of rows: where the arrays of a store have them, and the devices that they are on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

_SMALLEST_SIZE = 64
_FINE_SIZE = 4096


class SlotDevices:
    """The devices that a store's slots are on; here one device.

    Slots, and arrays with an entry for each of them, are ``[n, ...]`` on one device. Over a mesh
    (`jaxrec.mesh.shard_access.MeshSlots`) they are ``[devices, n, ...]``.
    """

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that tables lie over; None: they lie on one device."""
        return None

    @property
    def has_replicas(self) -> bool:
        """Whether some axis of the mesh has replicas of the tables, which differ for a while."""
        return False

    def put(self, tree: Any) -> Any:
        """Return host arrays with an entry for each slot, on the devices of the slots."""
        return jax.tree.map(jnp.asarray, tree)

    def put_beside(self, tree: Any) -> Any:
        """Return arrays that are used with the tables, put on all of the tables' devices."""
        return tree

    # The methods below are traced.

    def spread(self, tree: Any) -> Any:
        """Return constants with an entry for each slot, on the devices of the slots."""
        return jax.tree.map(jnp.asarray, tree)

    def gather(self, tree: Any) -> Any:
        """Return arrays with an entry for each slot, whole on each process."""
        return tree

    def map(self, function: Callable[[Any, Any], Any], per_slot: Any, shared: Any) -> Any:
        """Return ``function(per_slot, shared)``, computed on each slot's device.

        Args:
            function: Maps arrays of ``[n, ...]`` and shared arrays to arrays of ``[n, ...]``.
            per_slot: Arrays with an entry for each slot.
            shared: Arrays that all devices have.
        """
        return function(per_slot, shared)


ONE_DEVICE = SlotDevices()


@dataclasses.dataclass(frozen=True)
class RowSlots:
    """Slots of some rows of a table in one group, for `TableStore.read_rows` and `write_rows`.

    A table that is cut by columns has one of these for each column slice.

    Attributes:
        group: Name of the group.
        columns: First column of the slice and the column after its last.
        slots: int32 slots, ``[n]``; over a mesh ``[devices, n]`` with -1 at padding.
        index: For each slot the position of its row among the given rows, shaped like ``slots``;
            -1 at padding.
        is_in_order: Whether ``index`` is 0, 1, ..., the position of each row.
    """

    group: str
    columns: tuple[int, int]
    slots: np.ndarray
    index: np.ndarray
    is_in_order: bool = False


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Rows of a table, one request of several that are read or written together.

    Attributes:
        table: Name of the table.
        rows: Row indices, int ``[n]``.
        owners: Index of the process whose row store has each row, int ``[n]``; None: every process
            takes part alike.
    """

    table: str
    rows: np.ndarray
    owners: np.ndarray | None = None


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


def group_slots(store: Any, requests: Sequence[TableRows]) -> dict[str, GroupSlots]:
    """Return the slots of rows of several tables, by group; groups without any are left out.

    Args:
        store: The `TableStore` that has the arrays.
        requests: The rows.
    """
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
