"""The slots that ids probe from their hash on, and their assignment to the ids of a batch."""

from __future__ import annotations

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxrec.ragged.wide_ids import WideIds, equal_words

# The slot of an id without one, and the preference of a slot that must not be taken.
NO_SLOT: Final = -1
NEVER: Final = np.int32(np.iinfo(np.int32).max)

# Slots of each id that are read at once. Most ids are found within a few slots: more would be read
# in vain, and fewer would make more iterations. Memory is [ids, _STEP].
_STEP = 16


# Loop state of `match_slots`, each array [n] but for the last, which is [slots].
_State = tuple[Array, Array, Array, Array, Array, Array]


def murmur_hash3(ids: UInt32[Array, "*shape 2"]) -> UInt32[Array, "*shape 2"]:
    """Hash ids as FBGEMM's ``murmur_hash3(id, 0, 0)`` does.

    MurmurHash3's mixing of the 16 bytes of the id and of 0, with its two halves joined by an
    exclusive or (``murmur_hash3_2x64`` in FBGEMM's ``faster_hash_ops/common_utils.cuh``).

    Args:
        ids: ``[..., 2]`` uint32, as `jaxrec.ragged.split_int64` makes them.

    Returns:
        The 64-bit hashes in the same form.

    Example:
        >>> import numpy as np
        >>> from jaxrec.ragged import join_int64, split_int64
        >>> int(join_int64(murmur_hash3(jnp.asarray(split_int64(np.array([3])))))[0])
        1573190477316769101
    """
    first = WideIds.of_words(ids) * 0x87C37B91114253D5
    first = first.rotate_left(31) * 0x4CF5AD432745937F
    first = first.rotate_left(27) * 5 + 0x52DCE729
    # The second half is 0 up to here.
    second = first * 5 + 0x38495AB5
    first, second = first ^ 16, second ^ 16  # the length
    first = first + second
    second = second + first
    first, second = _mix(first), _mix(second)
    first = first + second
    return (first ^ (second + first)).words


def _mix(half: WideIds) -> WideIds:
    half = (half ^ half.shift_right(33)) * 0xFF51AFD7ED558CCD
    half = (half ^ half.shift_right(33)) * 0xC4CEB9FE1A85EC53
    return half ^ half.shift_right(33)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of slots: each id probes ``length`` slots of its bucket, from ``start`` on.

    A window that reaches the end of the bucket goes on at the bucket's first slot.
    """

    first: Int32[Array, " n"]  # first slot of the id's bucket
    start: Int32[Array, " n"]  # counted from `first`
    bucket_size: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    def take(self, index: Int32[Array, " n"]) -> Windows:
        """Return the windows of the ids at the given indices."""
        return dataclasses.replace(
            self,
            first=self.first.at[index].get(mode="clip"),
            start=self.start.at[index].get(mode="clip"),
        )

    def slots(self, probes: Int32[Array, "n step"]) -> Int32[Array, "n step"]:
        """Return the slot of each probe; an id's probes are numbered from 0."""
        place = self.start[:, None] + probes
        # The sum is below twice the bucket's size: it may pass 2**31, but not 2**32.
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
        """Return the slot in each id's window where ``identities`` has the id, or `NO_SLOT`.

        The search in a window ends at the first slot that is set in ``until``.
        """

        def go_on(state: tuple[Array, Array, Array]) -> Bool[Array, ""]:
            probe, _, is_done = state
            return (probe < self.length) & ~jnp.all(is_done)

        def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            probe, found, is_done = state
            probes = _probes(probe, ids.shape[0])
            slots = self.slots(jnp.minimum(probes, self.length - 1))
            is_same = equal_words(identities[slots], ids[:, None]) & (probes < self.length)
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
        """Return the preference and the probe of the next slot in each window.

        The slots of a window are ordered by preference, then by probe. ``preference`` and ``probe``
        identify the current slot. The returned preference is `NEVER` if no slot is left. Results
        are arbitrary where ``is_wanted`` is False.
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


def match_slots(
    windows: Windows,
    preferences: Int32[Array, " slots"],
    own: Int32[Array, " n"],
    first: Int32[Array, " n"],
    first_admitted: Int32[Array, " n"],
) -> Int32[Array, " n"]:
    """Return the slot of each distinct id when each takes the best free slot at its turn.

    The lowest of the ``preferences``, -1 or more, is best; slots with `NEVER` keep their ids. An id
    keeps its ``own`` slot at its ``first`` turn, unless another id took it before. It may take
    another slot from turn ``first_admitted`` on, ``n`` for never. An id without a slot gets the
    number of slots.
    """
    # Turns one after the other would be a loop over all ids. Instead all ids propose to their best
    # slots at once, each slot keeps the id with the earliest turn, and the others propose to their
    # next slots (deferred acceptance; Gale and Shapley, "College Admissions and the Stability of
    # Marriage", 1962). The earliest turn of all keeps its first choice, then the second earliest
    # the best that is left, and so on: the result is that of the turns. The number of rounds is
    # the length of the longest chain of displaced ids.
    num_slots, count = preferences.shape[0], own.shape[0]

    def go_on(state: _State) -> Bool[Array, ""]:
        return jnp.any(state[0])

    def step(state: _State) -> _State:
        moves, slot, turn, preference, probe, earliest = state
        is_able = moves & (first_admitted < count)
        preference_next, probe_next = windows.next_choice(preferences, preference, probe, is_able)
        proposes = is_able & (preference_next < NEVER)
        next_slot = windows.slots(probe_next[:, None])[:, 0]
        slot = jnp.where(moves, jnp.where(proposes, next_slot, num_slots), slot)
        turn = jnp.where(moves, first_admitted, turn)
        preference = jnp.where(proposes, preference_next, preference)
        probe = jnp.where(proposes, probe_next, probe)
        return settle(slot, turn, preference, probe, earliest)

    def settle(
        slot: Array, turn: Array, preference: Array, probe: Array, earliest: Array
    ) -> _State:
        earliest = earliest.at[slot].min(turn, mode="drop")
        loses = (slot < num_slots) & (earliest.at[slot].get(mode="clip") != turn)
        return loses, slot, turn, preference, probe, earliest

    # Less than any preference and any probe: the first proposal then goes to the best slot.
    before_all = jnp.full(count, -2, jnp.int32)
    earliest = jnp.full(num_slots, count, jnp.int32)
    has_own = own != NO_SLOT
    # Round 0: ids with a slot propose to it, with the turn of their first occurrence.
    state = settle(jnp.where(has_own, own, num_slots), first, before_all, before_all, earliest)
    is_waiting = ~has_own & (first < count)
    state = (state[0] | is_waiting, *state[1:])
    return jax.lax.while_loop(go_on, step, state)[1]
