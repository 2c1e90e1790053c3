"""Slots of a map that got another id."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvictedSlots:
    """Slots that got another id in an update; their rows need a reset.

    Attributes:
        slots: The slots; the number of all slots from ``count`` on.
        ids: The id that each slot got, as two words; zeros from ``count`` on.
        count: Number of evicted slots.
    """

    slots: Int32[Array, " evicted"]
    ids: UInt32[Array, "evicted 2"]
    count: Int32[Array, ""]

    @classmethod
    def none(cls, capacity: int, num_slots: int) -> EvictedSlots:
        """Return a list of no slots."""
        ids = jnp.zeros((capacity, 2), jnp.uint32)
        return cls(jnp.full(capacity, num_slots, jnp.int32), ids, jnp.int32(0))
