"""Maps of ids to slots in plain Python, one id after the other, and streams of ids for them."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

M64 = 2**64 - 1

# Ids whose low or high words are equal, and the least and greatest ids.
POOL = [
    *range(6),
    *(5 + (i << 32) for i in range(1, 5)),
    -(2**63),
    -2,
    -(2**32),
    2**63 - 2,
    2**32 - 1,
    2**31,
    *range(10**12, 10**12 + 8),
]


def streams(batches, most):
    """Batches of up to ``most`` ids."""
    return st.lists(
        st.lists(st.sampled_from(POOL), max_size=most), min_size=batches, max_size=batches
    )


def _rotated(value, bits):
    return (value << bits | value >> (64 - bits)) & M64


def murmur(id):
    """MurmurHash3's mixing of the id and 0, by Python's integers."""
    first = _rotated((id & M64) * 0x87C37B91114253D5 & M64, 31) * 0x4CF5AD432745937F & M64
    first = (_rotated(first, 27) * 5 + 0x52DCE729) & M64
    second = (first * 5 + 0x38495AB5) & M64
    first, second = first ^ 16, second ^ 16
    first = (first + second) & M64
    second = (second + first) & M64
    halves = []
    for half in (first, second):
        half = (half ^ half >> 33) * 0xFF51AFD7ED558CCD & M64
        half = (half ^ half >> 33) * 0xC4CEB9FE1A85EC53 & M64
        halves.append(half ^ half >> 33)
    first = sum(halves) & M64
    return first ^ (halves[1] + first) & M64


@dataclasses.dataclass
class MultiProbe:
    """FBGEMM's kernel, one id after the other."""

    config: object
    num_slots: int

    def __post_init__(self):
        self.identities = [-1] * self.num_slots
        self.metadata = [-1] * self.num_slots

    def window(self, id):
        """The probed slots, and the slot of an id that gets none."""
        config = self.config
        size = self.num_slots // config.total_num_buckets
        if config.input_hash_size:
            bucket = id // -(-config.input_hash_size // config.total_num_buckets)
        else:
            bucket = id % config.total_num_buckets
        reserved = 0
        if config.opt_in_prob is not None:
            share = self.num_slots * config.percent_reserved_slots / 100
            reserved = int(share / config.total_num_buckets)
        usable, first, hashed = size - reserved, bucket * size, murmur(id)
        slots = [first + (hashed + i) % usable for i in range(config.max_probe)]
        shared = first + usable + hashed % reserved if reserved else first + hashed % size
        return slots, shared

    def remap(self, id):
        slots, shared = self.window(id)
        found = [slot for slot in slots if self.identities[slot] == id]
        return found[0] if found else -1 if self.config.disable_fallback else shared

    def add(self, id, expiry=None, hour=None, roll=0):
        """The slot of an id, and the slot that it took from another id or None."""
        slots, shared = self.window(id)
        is_present = False
        for slot in slots:
            if self.identities[slot] in (id, -1):
                is_present = self.identities[slot] == id
                break
        probability = self.config.opt_in_prob
        if not is_present and probability is not None and roll >= probability:
            self._touch(shared, expiry)
            return shared, None
        oldest = None
        for slot in slots:
            if self.identities[slot] in (id, -1):
                self.identities[slot] = id
                self._touch(slot, expiry)
                return slot, None
            if self.config.eviction is None or not self.metadata[slot] < min(hour, expiry):
                continue
            if not self.config.eviction.is_lru:
                if not is_present:
                    oldest = slot
                    break
            elif oldest is None or self.metadata[slot] < self.metadata[oldest]:
                oldest = slot
        if oldest is not None:
            self.identities[oldest] = id
            self._touch(oldest, expiry)
            return oldest, oldest
        return -1 if self.config.disable_fallback else shared, None

    def _touch(self, slot, expiry):
        if expiry is not None:
            self.metadata[slot] = max(self.metadata[slot], expiry)


@dataclasses.dataclass
class Sorted:
    """TorchRec's managed collisions with a dictionary."""

    num_slots: int
    interval: int
    history_size: int
    score: object
    admits: object = None

    def __post_init__(self):
        self.entries = {}  # id: [slot, count, last iteration]
        self.history = []
        self.iteration = 0

    def remap(self, id):
        return self.entries[id][0] if id in self.entries else self.num_slots - 1

    def add(self, ids):
        """Record a batch; the slots that got another id, in order."""
        self.iteration += 1
        ids = [(id, self.iteration) for id in ids if id != 2**63 - 1]
        self.history += ids[: self.history_size - len(self.history)]
        if self.iteration % self.interval:
            return []
        seen = {}
        for id, iteration in self.history:
            count = seen[id][0] + 1 if id in seen else 1
            seen[id] = count, iteration
        self.history = []
        if self.admits is not None:
            counts = [count for count, _ in seen.values()]
            seen = {id: each for id, each in seen.items() if self.admits(each[0], counts)}
        for id in seen.keys() & self.entries.keys():
            slot, count, _ = self.entries[id]
            self.entries[id] = [slot, count + seen[id][0], seen[id][1]]
        new = [id for id in sorted(seen) if id not in self.entries]
        new.sort(key=lambda id: -seen[id][0])
        used = {entry[0] for entry in self.entries.values()}
        # The order of the map: by id, empty slots last.
        order = sorted(self.entries) + [None] * (self.num_slots - 1 - len(used))
        empty = iter(self.empty_slots(used))
        places = [
            (None, next(empty), 0, 0) if id is None else (id, *self.entries[id]) for id in order
        ]
        residents = [
            (self.score(count, last, self.iteration), place, id, slot)
            for place, (id, slot, count, last) in enumerate(places)
        ]
        challengers = [
            (self.score(*seen[id], self.iteration), self.num_slots + place, id, None)
            for place, id in enumerate(new)
        ]
        ranked = sorted(residents + challengers, key=lambda each: (-each[0], each[1]))
        stays, falls = ranked[: self.num_slots - 1], ranked[self.num_slots - 1 :]
        entering = [each[2] for each in stays if each[1] >= self.num_slots]
        leaving = [each for each in falls if each[1] < self.num_slots]
        evicted = []
        for id, (_, _, old, slot) in zip(entering, leaving, strict=True):
            self.entries.pop(old, None)
            self.entries[id] = [slot, *seen[id]]
            evicted.append(slot)
        return evicted

    def empty_slots(self, used):
        """Empty slots in the map's order: they never move before they are used."""
        return [slot for slot in range(self.num_slots - 1) if slot not in used]
