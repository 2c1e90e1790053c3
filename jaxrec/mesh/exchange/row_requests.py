"""The rows that a device's lookups need of each owner."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrec.embed import kernels
from jaxrec.mesh.placed_group import PlacedGroup

# Index of a lookup that has no row: padding, or a bad id.
ABSENT = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowRequests:
    """The slots that a device's lookups need, without repeats, owner by owner.

    Attributes:
        slots: The slots, ascending; padded with the number of slots.
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
    def of(cls, placed: PlacedGroup, rows: Int32[Array, " n"]) -> RowRequests:
        """Return the requests of lookups of some rows of a group."""
        slots = placed.slots(rows)
        runs = kernels.build_runs(slots, placed.num_slots)
        first_slots = jnp.arange(placed.num_devices + 1, dtype=jnp.int32) * placed.local_rows
        # A loop would take three launches a turn on GPUs.
        bounds = jnp.searchsorted(runs.unique, first_slots, method="scan_unrolled")
        bounds = bounds.astype(jnp.int32)
        index = jnp.where(slots < placed.num_slots, runs.inverse, ABSENT)
        owners = jnp.minimum(slots // placed.local_rows, placed.num_devices - 1)
        return cls(runs.unique, index, owners, bounds[:-1], bounds[1:])

    def positions(
        self, begins: Int32[Array, " devices"], capacity: int
    ) -> Int32[Array, "devices capacity"]:
        """Return the positions in ``slots`` of a round; unused ones lie past the end.

        A round has space for ``capacity`` rows of each owner, from position ``begins`` on.
        """
        positions = begins[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
        return jnp.where(positions < self.ends[:, None], positions, self.slots.size)

    def local_rows(
        self, placed: PlacedGroup, positions: Int32[Array, "devices capacity"]
    ) -> Int32[Array, "devices capacity"]:
        """Return the rows of the owners' arrays at the positions; `local_rows` where unused."""
        first_slots = jnp.arange(placed.num_devices, dtype=jnp.int32)[:, None] * placed.local_rows
        slots = self.slots.at[positions].get(mode="clip")
        is_used = positions < self.slots.size
        return jnp.where(is_used, slots - first_slots, placed.local_rows)

    def index_in_round(self, begins: Int32[Array, " devices"], capacity: int) -> Int32[Array, " n"]:
        """Return the index of each lookup's row among the ``[devices * capacity]`` of a round.

        `ABSENT` where the row is not in the round.
        """
        begin = begins[self.owners]
        end = jnp.minimum(begins + capacity, self.ends)[self.owners]
        is_inside = (self.index >= begin) & (self.index < end)
        return jnp.where(is_inside, self.owners * capacity + self.index - begin, ABSENT)
