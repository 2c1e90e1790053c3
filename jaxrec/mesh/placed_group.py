"""Positions of shards in the devices' arrays.

A lookup names a row of the group. `PlacedGroup` turns it into a slot, which tells the owner and the
row of the owner's array: ``slot = owner * local_rows + local_row``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.layout import Group
from jaxrec.embed.outputs import of_read_rows
from jaxrec.mesh.shards import Shard
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.key_segments import starts_of
from jaxrec.ragged.wide_ids import WideIds, widen


@dataclasses.dataclass(frozen=True)
class PlacedShard:
    """A shard and its position in its owner's array.

    Attributes:
        table: Name of the table.
        shard: The shard.
        first_row: The shard's first row, as a row of the group.
        local_row: The shard's first row, as a row of the owner's array.
    """

    table: str
    shard: Shard
    first_row: int
    local_row: int


@dataclasses.dataclass(frozen=True)
class PlacedGroup:
    """Tables of equal width, type and optimizer, cut into shards over the devices.

    A table that is cut by columns counts as several tables here, its *column slices*. The group's
    rows are those of its tables, one table after the other. A *slot* is a row of the group's global
    array ``[num_devices * local_rows, dim]``, which is sharded by rows. In a *large* group int32
    cannot number the rows or the slots. Each device then numbers its slots from 0, lookups use
    these numbers, and `Lookups.owners` names the device.

    Attributes:
        group: The column slices, as a group of `jaxrec.embed`. Slices that are updated together are
            stored as wide as the widest, with padding behind their columns.
        shards: All shards by first row.
        local_rows: Number of rows of each device's array.
        num_devices: Number of devices; 1 if every device has all rows.
        is_replicated: Whether every device has all rows.
        whole_dim: Number of columns of the uncut tables.
        is_large: Whether the group is large.
    """

    group: Group
    shards: tuple[PlacedShard, ...]
    local_rows: int
    num_devices: int
    is_replicated: bool
    whole_dim: int
    is_large: bool

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
        """The same group, with an optimizer without ``clip_value``."""
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
    def padding(self) -> int:
        """Row that lookups of padding name: the number of rows."""
        return self.local_rows if self.is_large else self.group.num_rows

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(dict.fromkeys(shard.table for shard in self.shards))

    def slots(self, rows: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """Return the slot of each row of the group; `num_slots` for rows outside of it."""
        if self.is_large:
            raise ValueError(
                f"table {self.tables[0]!r} has more slots over the mesh than int32 can number; "
                "locate() finds the owners of rows and the rows of their arrays"
            )
        # Rows and slots of a shard differ by a constant, so no table of all rows is needed.
        starts = tuple(shard.first_row for shard in self.shards)
        shifts = tuple(self._slot(shard) - shard.first_row for shard in self.shards)
        return kernels.shift_rows(rows, starts, shifts, self.group.num_rows, self.num_slots)

    def locate(self, lookups: Lookups) -> tuple[Int32[Array, " lookups"], Int32[Array, " lookups"]]:
        """Return the owner of each lookup's row, and the row in the owner's array.

        For a lookup without a row the owner is `num_devices` and the row arbitrary.
        """
        if lookups.owners is not None:
            has_row = (lookups.rows >= 0) & (lookups.rows < self.local_rows)
            return jnp.where(has_row, lookups.owners, self.num_devices), lookups.rows
        slots = self.slots(lookups.rows)
        has_row = slots < self.num_slots
        owners = jnp.where(has_row, slots // self.local_rows, self.num_devices)
        return owners, slots - owners * self.local_rows

    def device_slots(
        self, device: Int32[Array, "..."], local_rows: Int32[Array, "..."]
    ) -> Int32[Array, "..."]:
        """Return the slot of each row of a device's array."""
        return local_rows if self.is_large else device * self.local_rows + local_rows

    def whole_rows(self, slots: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """Return a number for the whole row of each slot; all column slices of a row share it.

        The slots of a device, in ascending order, have ascending numbers. A slot past the last one
        gets the number `group.num_rows`.
        """
        # A row is numbered by its place in the table's first slice.
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
        """Return the index in `tables` of each row's table; arbitrary for padding and bad rows."""
        if len(self.tables) == 1:
            return jnp.zeros_like(local_rows)
        tables = [self.tables.index(shard.table) for shard in self.shards]
        return self._of_shards(tables, local_rows, device)

    def is_column(
        self, local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Bool[Array, "n dim"] | None:
        """Return which columns of each row are not padding; None: no column is padding.

        A row ends with columns of padding if its slice is narrower than the group. The result is
        arbitrary for padding and bad rows.
        """
        widths = [stop - start for start, stop in (shard.shard.columns for shard in self.shards)]
        if min(widths) == self.group.dim:
            return None
        of_row = self._of_shards(widths, local_rows, device)
        return jnp.arange(self.group.dim, dtype=jnp.int32)[None] < of_row[:, None]

    def _of_shards(
        self, values: Sequence[int], local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Int32[Array, " n"]:
        """Return for each row the value of its shard; ``values`` has one for each shard."""
        order = sorted(range(len(self.shards)), key=lambda i: self._slot(self.shards[i]))
        starts = np.array([self._slot(self.shards[i]) for i in order], np.int32)
        slots = device * self.local_rows + local_rows
        index = jnp.searchsorted(starts, slots, side="right") - 1
        return jnp.asarray([values[i] for i in order], jnp.int32)[jnp.maximum(index, 0)]

    def _slot(self, placed: PlacedShard) -> int:
        """Return the slot of a shard's first row."""
        return placed.shard.device * self.local_rows + placed.local_row


def flatten_large(features: KeyedJaggedArray, layout: BagLayout, placed: PlacedGroup) -> Lookups:
    """Return the flat lookups of a large group; `jaxrec.embed.outputs.flatten` is for others."""
    ids = widen(features.values)
    shards = _shards_by_table(placed)
    owners, rows = [], []
    for start, capacity, first_row in zip(
        layout.id_starts, layout.capacities, layout.row_offsets, strict=True
    ):
        of_feature = _locate(ids[start : start + capacity], shards[first_row], first_row)
        owners.append(of_feature[0])
        rows.append(of_feature[1])
    # Rows are those of the owners' arrays by now.
    local = layout_of_rows(layout, placed.local_rows)
    lengths = jnp.asarray(features.lengths)
    lookups = kernels.flatten_bags(jnp.concatenate(rows), lengths, None, local, placed.local_rows)
    lookups = of_read_rows(lookups, features, layout, placed.group, placed.padding)
    return dataclasses.replace(lookups, owners=jnp.concatenate(owners))


def layout_of_rows(layout: BagLayout, num_rows: int) -> BagLayout:
    """Return the layout of a batch whose ids are rows of one array, feature after feature."""
    # The ids of this group's features alone are laid end to end, so they begin elsewhere than in
    # the batch. All features share the array, so rows have no offsets.
    return dataclasses.replace(
        layout,
        id_starts=starts_of(layout.capacities),
        row_offsets=(0,) * layout.num_features,
        row_counts=(num_rows,) * layout.num_features,
    )


def _shards_by_table(placed: PlacedGroup) -> dict[int, list[PlacedShard]]:
    """Return the shards of each column slice in the order of rows, by the slice's first row."""
    shards: dict[int, list[PlacedShard]] = {}
    for each in placed.shards:
        shards.setdefault(each.first_row - each.shard.rows[0], []).append(each)
    return shards


def _locate(
    ids: WideIds, shards: list[PlacedShard], first_row: int
) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """Return each id's owner and its row in the owner's array; `BAD_ROW` for a bad id.

    ``shards`` are those of a column slice, and ``first_row`` is the slice's first row.
    """
    owner = jnp.zeros(ids.shape, jnp.int32)
    row = jnp.full(ids.shape, kernels.BAD_ROW, jnp.int32)
    # From the last shard to the first: each takes the ids below its end.
    for each in reversed(shards):
        start = each.first_row - first_row
        is_below = ids.is_below(start + each.shard.num_rows)
        # The difference is right modulo 2**32, and int32 holds it where the id is in the shard.
        here = (ids.minus(start) + jnp.uint32(each.local_row)).astype(jnp.int32)
        owner = jnp.where(is_below, each.shard.device, owner)
        row = jnp.where(is_below, here, row)
    return owner, row
