"""Slots: positions of rows in a store's arrays, and the devices that have them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

# Sizes of padded requests: see `size_for`.
_SMALLEST_SIZE = 64
_FINE_SIZE = 4096

# Bytes. XLA's CPU client copies arrays that begin elsewhere.
_ALIGNMENT = 64


class SlotDevices:
    """The devices that have a store's slots; this class stands for one device.

    Slots, and arrays with an entry for each slot, are ``[n, ...]`` here. Over a mesh
    (`jaxrec.mesh.shard_access.MeshSlots`) they are ``[devices, n, ...]``.
    """

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the tables; None: they lie on one device."""
        return None

    @property
    def has_replicas(self) -> bool:
        """Whether an axis of the mesh has replicas of the tables, which differ between syncs."""
        return False

    def put(self, tree: Any) -> Any:
        """Put host arrays with an entry for each slot on the devices of the slots.

        The caller must not change the arrays afterwards.
        """
        # A CPU device then reads the arrays of `GroupSlots.gather` where they are; `jnp.asarray`
        # would copy them.
        return jax.device_put(tree)

    def put_beside(self, tree: Any) -> Any:
        """Put arrays that are used with the tables on all of the tables' devices."""
        return tree

    # The methods below are traced.

    def spread(self, tree: Any) -> Any:
        """Put constants with an entry for each slot on the devices of the slots."""
        return jax.tree.map(jnp.asarray, tree)

    def gather(self, tree: Any) -> Any:
        """Return arrays with an entry for each slot, whole in each process."""
        return tree

    def map(self, function: Callable[[Any, Any], Any], per_slot: Any, shared: Any) -> Any:
        """Return ``function(per_slot, shared)``, where each device computes its own slots.

        The function maps arrays ``[n, ...]``, and arrays that all devices have, to ``[n, ...]``.
        """
        return function(per_slot, shared)


ONE_DEVICE = SlotDevices()


@dataclasses.dataclass(frozen=True)
class RowSlots:
    """Slots of some rows of a table, or of a column slice of it; all in one group."""

    group: str
    columns: tuple[int, int]  # first column of the slice, and the one after its last
    slots: np.ndarray  # int32 [n], or over a mesh [devices, n] with -1 at padding
    index: np.ndarray  # like slots: which of the given rows each slot has; -1 at padding
    is_in_order: bool = False  # whether index is 0, 1, 2, ...: rows need no reordering


@dataclasses.dataclass(frozen=True)
class TableRows:
    """Rows of one table: a request, among several that are read or written together."""

    table: str
    rows: np.ndarray  # row indices, int [n]
    # Process whose row store has each row, int [n]; None: all processes take part alike.
    owners: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class GroupSlots:
    """Slots of rows of several tables in one group: one gather or scatter for all of them."""

    slots: np.ndarray  # int32 [n], or over a mesh [devices, n], with -1 at padding
    # For each column slice of each table: the number of its request, its slots, and the position in
    # the last axis of `slots` at which they begin.
    parts: tuple[tuple[int, RowSlots, int], ...]
    dim: int  # columns of the group's rows

    def gather(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Arrange the values of all requests, ``[n, ...]`` each, by slot: ``[*slots, ...]``.

        The slot of a column slice gets its columns of the row, then zeros up to `dim` columns.
        """
        # Values at padding are arbitrary: scatters skip its slots. The array is allocated once and
        # filled in place, since a tier calls this between all steps.
        first = values[self.parts[0][0]]
        width = () if first.ndim == 1 else (self.dim,)
        gathered = _aligned_empty((*self.slots.shape, *width), first.dtype)
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
        """Return a view of an array shaped like ``slots``, with the slots on its first axis."""
        return array if self.slots.ndim == 1 else np.moveaxis(array, self.slots.ndim - 1, 0)

    def column_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first column of each slot's slice, and the column after its last.

        Both are int32 of the shape of ``slots``.
        """
        bounds = np.zeros_like(self.slots), np.zeros_like(self.slots)
        for _, part, start in self.parts:
            for columns, bound in zip(bounds, part.columns, strict=True):
                columns[..., start : start + part.slots.shape[-1]] = bound
        return bounds


def group_slots(store: Any, requests: Sequence[TableRows]) -> dict[str, GroupSlots]:
    """Return the slots of all requests' rows, by the name of their group."""
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


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new array whose memory a CPU device can use as it is."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def size_for(count: int) -> int:
    """Return the padded size of a request of ``count`` slots, from a ladder of sizes."""
    # 64, 128, ..., 4096, 5120, 6144, 7168, 8192, 10240, ... Each size is a program to compile, so
    # small ones double. Large ones take four steps to double, since padding is copied too.
    size = _SMALLEST_SIZE
    while size < count and size < _FINE_SIZE:
        size *= 2
    if size >= count:
        return size
    step = 1 << (count - 1).bit_length() - 3
    return -(-count // step) * step
