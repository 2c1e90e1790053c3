"""Assignment of slots to ids, as if ids took slots one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxrec.tier.managed_collision.probing import NEVER, NO_SLOT, Windows

_State = tuple[Array, Array, Array, Array, Array, Array]


def match_slots(
    windows: Windows,
    preferences: Int32[Array, " slots"],
    own: Int32[Array, " n"],
    first: Int32[Array, " n"],
    first_admitted: Int32[Array, " n"],
) -> Int32[Array, " n"]:
    """Return the slot that each distinct id gets, if each takes the best free slot at its turn.

    All ids propose to their best slots at once, each slot keeps the id with the earliest turn, and
    the others propose to their next slots (deferred acceptance; Gale and Shapley, "College
    Admissions and the Stability of Marriage", 1962). Since the earliest turn of all keeps its first
    choice, and so on by induction, the result is that of the turns one after the other. The number
    of rounds is that of the longest chain of displaced ids, not the number of ids.

    Args:
        windows: The slots that each id probes.
        preferences: Rank of each slot for a new id, -1 or more: an id takes the lowest rank in its
            window, and the first of equal ranks. `NEVER`: the slot keeps its id.
        own: The slot that the id has, `NO_SLOT` for none. The id keeps it at its first turn, unless
            another id took it before; a slot of rank `NEVER` is not taken.
        first: Turn of the first occurrence of each id; ``n`` or more past the last id.
        first_admitted: Turn at which the id may take another slot; ``n`` for never.

    Returns:
        The slots; the number of slots for an id that gets none.
    """
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

    before_all = jnp.full(count, -2, jnp.int32)
    earliest = jnp.full(num_slots, count, jnp.int32)
    has_own = own != NO_SLOT
    state = settle(jnp.where(has_own, own, num_slots), first, before_all, before_all, earliest)
    is_waiting = ~has_own & (first < count)
    state = (state[0] | is_waiting, *state[1:])
    return jax.lax.while_loop(go_on, step, state)[1]
