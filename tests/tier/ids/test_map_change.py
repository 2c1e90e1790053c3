"""Changes of batches to maps and records, in C++ and in NumPy, compared with plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.tier.ids import implementation, library, reference
from jaxrec.tier.ids.id_map import IdMap, look_up
from jaxrec.tier.ids.map_change import MapChange, SlotRecords, commit
from tests.fuzz import max_examples

IMPLEMENTATIONS = [reference]
if library.missing() is None:
    IMPLEMENTATIONS.append(library)
_NONE = np.zeros(0, np.int32)


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda module: module.__name__.rpartition(".")[2])
def each_implementation(request, monkeypatch):
    monkeypatch.setattr(implementation, "current", lambda: request.param)


class Table:
    """A map with its records, and the same as a dict from slots to ids and births."""

    def __init__(self, room: int) -> None:
        self.map = IdMap(room)
        self.records = SlotRecords(
            np.zeros(room, np.int64),
            np.full(room, -1),
            np.full(room, 9, np.uint32),
            np.zeros(room, np.uint8),
        )
        self.expected: dict[int, tuple[int, int]] = {}

    def change(self, rng: np.random.Generator, batch: int) -> tuple[MapChange, list, list]:
        """Draw a change; return it, the evicted ids and the slots that the batch should have."""
        room = self.records.born.size
        ids = rng.integers(-room, 2 * room, rng.integers(0, room + 2))
        ids[ids == -1] = 7
        (lookup,) = look_up([self.map], [ids])
        hits = set(lookup.slots[lookup.slots >= 0].tolist())
        spare = [slot for slot in self.expected if slot not in hits]
        victims = rng.permutation(np.array(spare, np.int32))[: rng.integers(0, len(spare) + 1)]
        free = [slot for slot in range(room) if slot not in self.expected or slot in victims]
        admitted = rng.random(lookup.absent.size) < 0.7
        admitted &= np.cumsum(admitted) <= len(free)
        new_ids = lookup.absent[admitted]
        new_slots = rng.permutation(np.array(free, np.int32))[: new_ids.size]
        absent_slots = np.full(admitted.size, -1, np.int32)
        absent_slots[admitted] = new_slots
        evicted = [self.expected.pop(slot)[0] for slot in victims.tolist()]
        for slot, new_id in zip(new_slots.tolist(), new_ids.tolist(), strict=True):
            self.expected[slot] = new_id, batch
        slot_of = {of_slot: slot for slot, (of_slot, _) in self.expected.items()}
        change = MapChange(
            self.map,
            self.records,
            victims,
            new_ids,
            new_slots,
            lookup.slots,
            lookup.misses,
            lookup.inverse,
            absent_slots,
        )
        return change, evicted, [slot_of.get(each, -1) for each in ids.tolist()]

    def require_expected(self) -> None:
        slots = np.array(sorted(self.expected), np.int64)
        ids = np.array([self.expected[slot][0] for slot in slots.tolist()], np.int64)
        births = [self.expected[slot][1] for slot in slots.tolist()]
        np.testing.assert_array_equal(self.records.ids[slots], ids)
        assert self.records.born[slots].tolist() == births
        assert np.flatnonzero(self.records.born >= 0).tolist() == slots.tolist()
        assert not self.records.counts[slots].any()
        assert (self.records.powers[slots] == 5).all()
        assert len(self.map) == ids.size
        np.testing.assert_array_equal(self.map.find(ids), slots)


@pytest.mark.parametrize("seed", range(max_examples(20)))
def test_random_batches_of_several_tables(seed, each_implementation):
    rng = np.random.default_rng(seed)
    tables = [Table(int(room)) for room in rng.integers(1, 300, 4)]
    for batch in range(12):
        changes, evicted, slots = zip(*(t.change(rng, batch) for t in tables), strict=True)
        of_maps = commit(changes, batch, power=5)
        assert [each.tolist() for each in of_maps] == list(evicted)
        assert [each.slots.tolist() for each in changes] == list(slots)
        for table in tables:
            table.require_expected()


def test_no_tables(each_implementation):
    assert commit([], 1, 0) == []


@pytest.mark.parametrize(
    ("new_ids", "message"),
    [([-1], "id -1 at position 0"), ([5], "in the map already"), ([8, 9], "no room for 2 ids")],
)
def test_a_refused_id(new_ids, message, each_implementation):
    """The error is that of the map; the table after it is as before."""
    table, after = Table(2), Table(2)
    ids, slots = np.array(new_ids), np.arange(len(new_ids), dtype=np.int32)
    first = MapChange(
        table.map, table.records, _NONE, np.array([5]), slots[:1], _NONE, _NONE, _NONE, _NONE
    )
    commit([first], 1, 0)
    changes = [
        MapChange(each.map, each.records, _NONE, ids, slots, _NONE, _NONE, _NONE, _NONE)
        for each in (table, after)
    ]
    with pytest.raises(ValueError, match=message):
        commit(changes, 2, 0)
    assert len(after.map) == 0
    assert (after.records.born == -1).all()
    assert table.map.find(np.array([5])).tolist() == [0]


def test_records_that_disagree_with_the_map(each_implementation):
    table, zero = Table(2), np.zeros(1, np.int32)
    change = MapChange(
        table.map, table.records, zero, np.zeros(0, np.int64), _NONE, _NONE, _NONE, _NONE, _NONE
    )
    with pytest.raises(AssertionError, match="a map lacks an id that its records have"):
        commit([change], 1, 0)
