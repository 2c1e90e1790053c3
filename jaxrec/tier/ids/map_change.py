"""Changes of a batch to an id map and to the records of its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrec.tier.ids import implementation
from jaxrec.tier.ids.id_map import IdMap


class SlotRecords(NamedTuple):
    """Records that change when a slot changes hands, all ``[slots]``, contiguous.

    Attributes:
        ids: int64 id of each slot.
        born: int64 number of the batch in which the id got the slot; -1: none has it.
        counts: uint32 number of uses.
        powers: uint8 frequency class.
    """

    ids: np.ndarray
    born: np.ndarray
    counts: np.ndarray
    powers: np.ndarray


class MapChange(NamedTuple):
    """Changes of a batch to one map and the records of its slots.

    Attributes:
        ids: The map.
        records: The records.
        victims: Slots whose ids are removed, int32 ``[e]``.
        new_ids: Ids that are added, int64 ``[m]``.
        new_slots: Their slots, int32 ``[m]``; those of victims are free already.
        slots: Slot of each id of the batch, int32 ``[n]``, contiguous; changed.
        misses: Positions in ``slots`` of the ids that had no slot, int32 ``[k]``.
        inverse: For each of ``misses`` the index of its id in ``absent_slots``, int32 ``[k]``.
        absent_slots: Slot of each absent id, -1 for none, int32.
    """

    ids: IdMap
    records: SlotRecords
    victims: np.ndarray
    new_ids: np.ndarray
    new_slots: np.ndarray
    slots: np.ndarray
    misses: np.ndarray
    inverse: np.ndarray
    absent_slots: np.ndarray


def commit(changes: Sequence[MapChange], batch: int, power: int) -> list[np.ndarray]:
    """Carry out the changes of a batch.

    Args:
        changes: The changes of each map. Arrays have the types that `MapChange` names.
        batch: Number of the batch: ``born`` of new ids.
        power: Frequency class of new ids; their count is 0.

    Returns:
        For each map the ids of its victims, int64 ``[e]``.

    Raises:
        ValueError: A map has no room for an id, has it already, or the id is -1.
    """
    if not changes:
        return []
    maps: list[Any] = [each.ids._map for each in changes]
    done, evicted = implementation.current().commit(maps, changes, batch, power)
    if done < len(changes):
        changes[done].ids.insert(changes[done].new_ids, changes[done].new_slots)  # raises its error
        raise AssertionError("a map lacks an id that its records have")
    return evicted
