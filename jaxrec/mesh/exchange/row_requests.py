"""Row requests: the slots that a device's lookups need of each owner, without repeats."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.mesh.placed_group import PlacedGroup

# Index of a lookup without a row: padding, or a bad id.
ABSENT = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowRequests:
    """Slots that a device's lookups need, without repeats, owner by owner.

    Attributes:
        slots: The slots, ascending for each owner, with padding at the end.
        index: Position in ``slots`` of each lookup's slot, or `ABSENT`.
        owners: Owner of each lookup's slot.
        begins: Position of the first slot of each owner.
        ends: The position after the last slot of each owner.
    """

    slots: Int32[Array, " n"]
    index: Int32[Array, " n"]
    owners: Int32[Array, " n"]
    begins: Int32[Array, " devices"]
    ends: Int32[Array, " devices"]

    @classmethod
    def of(cls, placed: PlacedGroup, lookups: Lookups) -> RowRequests:
        """Sort the slots of a group's lookups and drop repeats."""
        if lookups.owners is not None:
            return cls._by_owner(placed, lookups)
        slots = placed.slots(lookups.rows)
        runs = kernels.build_runs(slots, placed.num_slots)
        # Slots number the owners' rows one owner after the other, so one sort groups them by owner,
        # and each owner begins where the slots reach its first one.
        first_slots = jnp.arange(placed.num_devices + 1, dtype=jnp.int32) * placed.local_rows
        bounds = _lower_bounds(runs.unique, first_slots)
        index = jnp.where(slots < placed.num_slots, runs.inverse, ABSENT)
        owners = jnp.minimum(slots // placed.local_rows, placed.num_devices - 1)
        return cls(runs.unique, index, owners, bounds[:-1], bounds[1:])

    @classmethod
    def _by_owner(cls, placed: PlacedGroup, lookups: Lookups) -> RowRequests:
        """Sort the lookups of a large group, whose slots are rows of their owner's array."""
        owners, rows = placed.locate(lookups)
        # A sort by (owner, row), which one int32 key cannot hold: by row, then stably by owner.
        order = kernels.build_runs(rows, placed.local_rows).order
        order = order[kernels.bucket(owners[order], placed.num_devices).order]
        sorted_owners, sorted_rows = owners[order], rows[order]
        is_same = (sorted_rows[1:] == sorted_rows[:-1]) & (sorted_owners[1:] == sorted_owners[:-1])
        is_first = jnp.ones(rows.shape, bool).at[1:].set(~is_same)
        runs = jnp.cumsum(is_first, dtype=jnp.int32) - 1
        slots = jnp.full(rows.shape, placed.local_rows, jnp.int32).at[runs].set(sorted_rows)
        of_runs = jnp.full(rows.shape, placed.num_devices, jnp.int32).at[runs].set(sorted_owners)
        every_owner = jnp.arange(placed.num_devices + 1, dtype=jnp.int32)
        bounds = _lower_bounds(of_runs, every_owner)
        inverse = jnp.zeros(rows.shape, jnp.int32).at[order].set(runs, unique_indices=True)
        index = jnp.where(owners < placed.num_devices, inverse, ABSENT)
        owners = jnp.minimum(owners, placed.num_devices - 1)
        return cls(slots, index, owners, bounds[:-1], bounds[1:])

    def positions(
        self, begins: Int32[Array, " devices"], capacity: int
    ) -> Int32[Array, "devices capacity"]:
        """Return the positions of a round's requests in ``slots``; ``slots.size`` is padding.

        The round requests up to ``capacity`` slots of each owner, from position ``begins`` on.
        """
        positions = begins[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
        return jnp.where(positions < self.ends[:, None], positions, self.slots.size)

    def local_rows(
        self, placed: PlacedGroup, positions: Int32[Array, "devices capacity"]
    ) -> Int32[Array, "devices capacity"]:
        """Return the row of each position's slot in its owner's array.

        Padding is `PlacedGroup.local_rows`.
        """
        devices = jnp.arange(placed.num_devices, dtype=jnp.int32)[:, None]
        first_slots = placed.device_slots(devices, jnp.zeros_like(devices))
        slots = self.slots.at[positions].get(mode="clip")
        is_used = positions < self.slots.size
        return jnp.where(is_used, slots - first_slots, placed.local_rows)

    def index_in_round(self, begins: Int32[Array, " devices"], capacity: int) -> Int32[Array, " n"]:
        """Return each lookup's index in a round's array, ``[devices * capacity]``.

        It is `ABSENT` if the round does not have the lookup's row.
        """
        return self._places(self.index, self.owners, begins, capacity)

    def slots_in_round(self, begins: Int32[Array, " devices"], capacity: int) -> Int32[Array, " n"]:
        """Return the index of each of `slots` in a round's array, as `index_in_round`."""
        positions = jnp.arange(self.slots.size, dtype=jnp.int32)
        # Marks at the owners' ends, added up: not [n, devices] comparisons in each round.
        marks = jnp.zeros_like(self.slots).at[self.ends[:-1]].add(1, mode="drop")
        owners = jnp.cumsum(marks, dtype=jnp.int32)
        return self._places(positions, owners, begins, capacity)

    def _places(
        self,
        positions: Int32[Array, " n"],
        owners: Int32[Array, " n"],
        begins: Int32[Array, " devices"],
        capacity: int,
    ) -> Int32[Array, " n"]:
        """Return the index of positions of `slots`, with their owners, in a round's array."""
        begin = begins[owners]
        end = jnp.minimum(begins + capacity, self.ends)[owners]
        is_inside = (positions >= begin) & (positions < end)
        return jnp.where(is_inside, owners * capacity + positions - begin, ABSENT)


def _lower_bounds(
    ascending: Int32[Array, " n"], values: Int32[Array, " values"]
) -> Int32[Array, " values"]:
    """Return the number of elements of the sorted array that are smaller than each value."""
    # Like jnp.searchsorted, in two comparisons: with the last number of each block of sqrt(n), and
    # then with the numbers of one block. On GPUs the loop of jnp.searchsorted launches three
    # kernels a turn. Unrolled, it was a third of a step's instructions, compiled for each group.
    if not ascending.size:
        return jnp.zeros(values.shape, jnp.int32)
    block = math.isqrt(ascending.size)
    is_smaller = ascending[None, block - 1 :: block] < values[:, None]
    start = block * jnp.sum(is_smaller, axis=1, dtype=jnp.int32)
    positions = start[:, None] + jnp.arange(block, dtype=jnp.int32)[None]
    last = jnp.iinfo(jnp.int32).max
    is_smaller = ascending.at[positions].get(mode="fill", fill_value=last) < values[:, None]
    return start + jnp.sum(is_smaller, axis=1, dtype=jnp.int32)
