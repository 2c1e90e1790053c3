"""Shards of tables in the arrays of a mesh's devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxrec.embed import kernels
from jaxrec.embed.layout import Group
from jaxrec.mesh.shards import Shard


@dataclasses.dataclass(frozen=True)
class PlacedShard:
    """A shard and its place.

    Attributes:
        table: Name of the table.
        shard: The part of the table, and its owner.
        first_row: Row of the group, as lookups number them, that the shard starts with.
        local_row: Row of the owner's array that the shard starts at.
    """

    table: str
    shard: Shard
    first_row: int
    local_row: int


@dataclasses.dataclass(frozen=True)
class PlacedGroup:
    """Tables of equal width, type and optimizer, cut into shards over the devices.

    A table that is cut by columns counts as several tables here, its *column slices*. The rows of
    the tables, one after the other, are the group's rows; lookups number them so. A *slot* is a
    row of the group's global array ``[num_devices * local_rows, dim]``, whose first axis lies over
    the devices.

    Attributes:
        group: The column slices, as `jaxrec.embed` sees a group of tables.
        shards: All shards by first row.
        local_rows: Number of rows of each device's array.
        num_devices: Number of devices; 1 if every device has all rows.
        is_replicated: Whether every device has all rows.
        whole_dim: Number of columns of the tables; the group's own width where they are not cut.

    Slices that are updated together are as wide as the widest, with padding behind their columns.
    """

    group: Group
    shards: tuple[PlacedShard, ...]
    local_rows: int
    num_devices: int
    is_replicated: bool
    whole_dim: int

    @property
    def name(self) -> str:
        """Name of the group."""
        return self.group.name

    @property
    def is_trained(self) -> bool:
        """Whether the rows are trained."""
        return self.group.optimizer.is_trained

    @property
    def without_bound(self) -> PlacedGroup:
        """The group with an optimizer that does not bound the elements of gradients."""
        optimizer = dataclasses.replace(self.group.optimizer, clip_value=None)
        return dataclasses.replace(self, group=dataclasses.replace(self.group, optimizer=optimizer))

    @property
    def is_sliced(self) -> bool:
        """Whether the columns of a row lie on several devices."""
        return self.whole_dim != self.group.dim

    @property
    def joins_slices(self) -> bool:
        """Whether the column slices of a row must be updated together."""
        return self.is_sliced and self.group.optimizer.needs_whole_rows

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.num_devices * self.local_rows

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(dict.fromkeys(shard.table for shard in self.shards))

    def slots(self, rows: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """Return the slot of each row; `num_slots` for a row outside of the group."""
        starts = tuple(shard.first_row for shard in self.shards)
        shifts = tuple(self._slot(shard) - shard.first_row for shard in self.shards)
        return kernels.shift_rows(rows, starts, shifts, self.group.num_rows, self.num_slots)

    def whole_rows(self, slots: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """Return a number for each slot's whole row, the same for all its column slices.

        On a device the numbers ascend with the slots. `group.num_rows` past the last slot.
        """
        first_slice: dict[str, int] = {}
        for placed in self.shards:
            first_slice.setdefault(placed.table, placed.first_row - placed.shard.rows[0])
        shards = sorted(self.shards, key=self._slot)
        starts = tuple(self._slot(placed) for placed in shards)
        shifts = tuple(
            first_slice[placed.table] + placed.shard.rows[0] - self._slot(placed)
            for placed in shards
        )
        # The first stretch begins at slot 0, even where the first device has no shard.
        starts, shifts = (0, *starts), (0, *shifts)
        return kernels.shift_rows(slots, starts, shifts, self.num_slots, self.group.num_rows)

    def tables_of(
        self, local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Int32[Array, " n"]:
        """Return the index in `tables` of the table of each row of a device's array.

        Arbitrary for a row that belongs to no table.
        """
        tables = [self.tables.index(shard.table) for shard in self.shards]
        return self._of_shards(tables, local_rows, device)

    def is_column(
        self, local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Bool[Array, "n dim"] | None:
        """Return which columns of rows of a device's array belong to their slices; None: all.

        The rows of a slice that is narrower than the group end with columns of padding. Arbitrary
        for a row that belongs to no table.
        """
        widths = [stop - start for start, stop in (shard.shard.columns for shard in self.shards)]
        if min(widths) == self.group.dim:
            return None
        of_row = self._of_shards(widths, local_rows, device)
        return jnp.arange(self.group.dim, dtype=jnp.int32)[None] < of_row[:, None]

    def _of_shards(
        self, values: Sequence[int], local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Int32[Array, " n"]:
        """Return for each row of a device's array the value of its shard."""
        order = sorted(range(len(self.shards)), key=lambda i: self._slot(self.shards[i]))
        starts = np.array([self._slot(self.shards[i]) for i in order], np.int32)
        slots = device * self.local_rows + local_rows
        index = jnp.searchsorted(starts, slots, side="right") - 1
        return jnp.asarray([values[i] for i in order], jnp.int32)[jnp.maximum(index, 0)]

    def _slot(self, placed: PlacedShard) -> int:
        """Return the first slot of a shard."""
        return placed.shard.device * self.local_rows + placed.local_row
