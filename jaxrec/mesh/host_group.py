"""A group of tables as the devices of one host see it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrec.mesh.channel import Channel
from jaxrec.mesh.placed_group import PlacedGroup


@dataclasses.dataclass(frozen=True)
class HostGroup(PlacedGroup):
    """A group on one host: slots count from the host's first, and rows elsewhere have none.

    Attributes:
        whole: The group on all devices.
        host: The host; known to the devices alone, inside `jax.shard_map`.
    """

    whole: PlacedGroup
    host: Int32[Array, ""]

    @classmethod
    def of(cls, placed: PlacedGroup, channel: Channel) -> HostGroup:
        """Return a group on this device's host.

        Args:
            placed: The group on all devices.
            channel: Channel between all devices.
        """
        fields = {field.name: getattr(placed, field.name) for field in dataclasses.fields(placed)}
        fields["num_devices"] = channel.within.size
        return cls(**fields, whole=placed, host=channel.across.index)

    def slots(self, rows: Int32[Array, " n"]) -> Int32[Array, " n"]:
        slots = self.whole.slots(rows) - self.host * self.num_slots
        return jnp.where((slots >= 0) & (slots < self.num_slots), slots, self.num_slots)

    def tables_of(
        self, local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Int32[Array, " n"]:
        return self.whole.tables_of(local_rows, self.host * self.num_devices + device)
