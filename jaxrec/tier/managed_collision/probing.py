"""The slots that ids probe, a few at a time."""

from __future__ import annotations

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxrec.tier.managed_collision.id_order import equal

# "No slot", as a slot, and "never", as a preference.
NO_SLOT: Final = -1
NEVER: Final = np.int32(np.iinfo(np.int32).max)

# Slots of each id that are read at once: memory is ids * _STEP.
_STEP = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Windows:
    """The slots that each id probes, in order: a part of a bucket, around its end.

    Attributes:
        first: First slot of the id's bucket.
        start: The slot of the bucket that is probed first.
        bucket_size: Number of slots of a bucket.
        length: Number of slots that are probed, up to ``bucket_size``.
    """

    first: Int32[Array, " n"]
    start: Int32[Array, " n"]
    bucket_size: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    def take(self, index: Int32[Array, " n"]) -> Windows:
        """Return the windows of other ids."""
        return dataclasses.replace(
            self,
            first=self.first.at[index].get(mode="clip"),
            start=self.start.at[index].get(mode="clip"),
        )

    def slots(self, probes: Int32[Array, "n step"]) -> Int32[Array, "n step"]:
        """Return the slots of some probes, numbered from 0."""
        place = self.start[:, None] + probes
        # The sum is below twice the size, and below 2**32.
        place = place.astype(jnp.uint32)
        size = jnp.uint32(self.bucket_size)
        return self.first[:, None] + jnp.where(place >= size, place - size, place).astype(jnp.int32)

    @jax.jit
    def find(
        self,
        identities: UInt32[Array, "slots 2"],
        ids: UInt32[Array, "n 2"],
        until: Bool[Array, " slots"] | None = None,
    ) -> Int32[Array, " n"]:
        """Return the first slot of each window that has the id; `NO_SLOT` if none has.

        Args:
            identities: The ids of all slots.
            ids: The ids to find.
            until: Slots at which the search ends.
        """

        def go_on(state: tuple[Array, Array, Array]) -> Bool[Array, ""]:
            probe, _, is_done = state
            return (probe < self.length) & ~jnp.all(is_done)

        def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            probe, found, is_done = state
            probes = _probes(probe, ids.shape[0])
            slots = self.slots(jnp.minimum(probes, self.length - 1))
            is_same = equal(identities[slots], ids[:, None]) & (probes < self.length)
            ends = is_same if until is None else is_same | until[slots]
            place = jnp.argmax(ends, axis=1)[:, None]
            hit = jnp.take_along_axis(is_same, place, axis=1)[:, 0] & ~is_done
            slot = jnp.take_along_axis(slots, place, axis=1)[:, 0]
            return probe + _STEP, jnp.where(hit, slot, found), is_done | jnp.any(ends, axis=1)

        none = jnp.full(ids.shape[0], NO_SLOT, jnp.int32)
        state = jnp.int32(0), none, jnp.zeros(ids.shape[0], bool)
        return jax.lax.while_loop(go_on, step, state)[1]

    def next_choice(
        self,
        preferences: Int32[Array, " slots"],
        preference: Int32[Array, " n"],
        probe: Int32[Array, " n"],
        is_wanted: Bool[Array, " n"],
    ) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
        """Return the slot of each window that comes next in its order.

        The order is by preference, then by probe.

        Args:
            preferences: Preference of each slot, -1 or more; `NEVER` for one that is not taken.
            preference: Preference of the slot before.
            probe: Its probe.
            is_wanted: The ids that need a next slot. Results for others are arbitrary.

        Returns:
            Preference and probe of the next slot; the preference is `NEVER` if there is none.
        """

        def go_on(state: tuple[Array, Array, Array]) -> Bool[Array, ""]:
            start, best, _ = state
            # Nothing comes before a preference of -1 at the first probe.
            return (start < self.length) & jnp.any(is_wanted & (best > -1))

        def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            start, best, best_probe = state
            probes = _probes(start, probe.shape[0])
            slots = self.slots(jnp.minimum(probes, self.length - 1))
            found = preferences[slots]
            same = (found == preference[:, None]) & (probes > probe[:, None])
            is_later = (found > preference[:, None]) | same
            found = jnp.where(is_later & (probes < self.length), found, NEVER)
            place = jnp.argmin(found, axis=1)[:, None]
            least = jnp.take_along_axis(found, place, axis=1)[:, 0]
            is_better = least < best
            of_least = start + place[:, 0].astype(jnp.int32)
            best_probe = jnp.where(is_better, of_least, best_probe)
            return start + _STEP, jnp.where(is_better, least, best), best_probe

        state = jnp.int32(0), jnp.full_like(preference, NEVER), jnp.zeros_like(probe)
        return jax.lax.while_loop(go_on, step, state)[1:]


def _probes(start: Int32[Array, ""], count: int) -> Int32[Array, "n step"]:
    probes = start + jnp.arange(_STEP, dtype=jnp.int32)
    return jnp.broadcast_to(probes, (count, _STEP))
