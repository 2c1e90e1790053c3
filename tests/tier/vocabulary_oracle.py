"""A vocabulary in plain Python: a dict of ids, and each policy written out."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable

from jaxrec.tier import Dynamic

BITS = 2**64 - 1


def mix(number: int, seed: int) -> int:
    """SplitMix64, with Python's integers."""
    bits = (number + (seed + 1) * 0x9E3779B97F4A7C15) & BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & BITS
    return bits ^ (bits >> 31)


@dataclasses.dataclass
class Resident:
    """Use of the row of an id."""

    id: int
    row: int
    born: int
    last_use: int = 0
    count: int = 0
    power: int = 5
    seconds: int = 0


@dataclasses.dataclass(frozen=True)
class Policy:
    """Order of eviction, smallest first, and the time to live."""

    key: Callable[[Resident, int], object]
    is_expired: Callable[[Resident, int, float], bool] = lambda resident, batch, now: False
    interval: int = 100


def row_of(resident: Resident) -> int:
    return resident.row


def lru_key(resident: Resident, batch: int) -> object:
    return resident.last_use


POLICIES = {
    "lru": Policy(lru_key),
    "lfu": Policy(lambda r, batch: (min(r.count, 2**24 - 1), r.last_use)),
    "lfu_lru": Policy(lambda r, batch: (r.power, r.last_use)),
    "distance_lfu": Policy(lambda r, batch: r.count / (batch - r.last_use + 1)),
    "distance_lfu_squared": Policy(lambda r, batch: r.count / (batch - r.last_use + 1) ** 2),
    "ttl_batches": Policy(lru_key, lambda r, batch, now: batch - r.last_use > 9, interval=2),
    "ttl_hours": Policy(lru_key, lambda r, batch, now: now - r.seconds > 2 * 3600),
    "by_score": Policy(lambda r, batch: r.count - 0.5 * (batch - r.born)),
}


class Sketch:
    """A count-min sketch with conservative update, a counter at a time."""

    def __init__(self, counters: int) -> None:
        self.counters = counters
        self.lines = [collections.Counter() for _ in range(4)]
        self.new_ids = 0

    def places(self, number: int) -> list[int]:
        return [mix(number, seed) % self.counters for seed in range(4)]

    def lowest(self, number: int) -> int:
        places = self.places(number)
        return min(line[place] for line, place in zip(self.lines, places, strict=True))

    def counted(self, counts: dict[int, int]) -> dict[int, int]:
        return {i: min(255, self.lowest(i) + count) for i, count in counts.items()}

    def record(self, counted: dict[int, int]) -> None:
        self.new_ids += sum(self.lowest(i) == 0 for i in counted)
        for i, count in counted.items():
            for line, place in zip(self.lines, self.places(i), strict=True):
                line[place] = max(line[place], count)
        if self.new_ids >= self.counters:
            self.new_ids = 0
            for line in self.lines:
                for place in line:
                    line[place] //= 2


class FullError(Exception):
    """What `VocabularyFullError` says."""


class Oracle:
    """The assignment of rows to ids.

    Args:
        num_rows: Rows of the table.
        settings: Its settings.
        policy: The same policy as that of the settings.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, num_rows: int, settings: Dynamic, policy: Policy, clock: Callable[[], float]
    ) -> None:
        self.num_rows, self.settings, self.policy, self.clock = num_rows, settings, policy, clock
        self.first_row = {"zeros": 1, "default": 1}.get(
            settings.unknown.kind, settings.unknown.rows
        )
        self.room = num_rows - self.first_row
        self.residents: dict[int, Resident] = {}
        self.free = collections.deque(self.rows_in_order())
        self.sketch = Sketch(settings.counters or num_rows) if settings.admit_after > 1 else None
        self.counts = collections.Counter()

    def rows_in_order(self) -> list[int]:
        """All rows in steps of about 0.618 of their number."""
        stride = max(1, round(self.room * 0.618))
        while math.gcd(stride, self.room) > 1:
            stride += 1
        return [self.first_row + i * stride % self.room for i in range(self.room)]

    def unknown_row(self, number: int) -> int:
        return mix(number, 101) % self.first_row if self.settings.unknown.kind == "shared" else 0

    def plan(
        self, ids: list[int], batch: int, held: int, coming: list[list[int]]
    ) -> tuple[dict, list[int], list[Resident]]:
        """The sightings of ids without a row, those that get one, and who loses theirs."""
        missing = collections.Counter(i for i in ids if i not in self.residents)
        counted = dict(missing) if self.sketch is None else self.sketch.counted(missing)
        share = self.settings.admit_probability
        admitted = [
            i
            for i, count in counted.items()
            if count >= self.settings.admit_after
            and (share == 1 or mix(i, 2**20 + batch) / 2**64 < share)
        ]
        now = self.clock()
        idle = [r for i, r in self.residents.items() if i not in ids and r.last_use < batch - held]
        victims = []
        if batch % self.policy.interval == 0:
            victims = [r for r in idle if self.policy.is_expired(r, batch, now)]
            victims.sort(key=lambda r: r.row)
            idle = [r for r in idle if r not in victims]
        lacking = len(admitted) - len(self.free) - len(victims)
        if lacking > len(idle):
            fitting = len(self.free) + len(victims) + len(idle)
            raise FullError(len(admitted), fitting, self.room, admitted[fitting])
        if lacking > 0:
            idle.sort(key=lambda r: (self.policy.key(r, batch), r.row))
            in_sight = set().union(*coming)
            unused = [r for r in idle if r.id not in in_sight]
            chosen = unused[: max(lacking, int(self.settings.evict_fraction * self.room))]
            victims += chosen + self.farthest(idle, coming)[: max(0, lacking - len(chosen))]
        return counted, admitted, victims

    def farthest(self, idle: list[Resident], coming: list[list[int]]) -> list[Resident]:
        """The rows that coming batches use, the farthest next use first."""
        used = []
        for ids in coming:
            used = sorted((r for r in idle if r.id in ids and r not in used), key=row_of) + used
        return used

    def assign(
        self, ids: list[int], batch: int, held: int, coming: list[list[int]] = ()
    ) -> dict[str, list]:
        """The rows of a batch and all that changes."""
        counted, admitted, victims = self.plan(ids, batch, held, coming)
        hits = sum(i in self.residents for i in ids)
        if self.sketch is not None:
            self.sketch.record(counted)
        for victim in victims:
            del self.residents[victim.id]
            self.free.append(victim.row)
        for i in admitted:
            self.residents[i] = Resident(i, self.free.popleft(), born=batch)
        self.touch(ids, batch)
        rows = [self.residents[i].row if i in self.residents else self.unknown_row(i) for i in ids]
        self.counts.update(
            lookups=len(ids),
            hits=hits,
            new=len(counted),
            admitted=len(admitted),
            evicted=len(victims),
            refused=sum(i not in self.residents for i in ids),
        )
        return {
            "rows": rows,
            "new_ids": admitted,
            "new_rows": [self.residents[i].row for i in admitted],
            "evicted_ids": [victim.id for victim in victims],
            "evicted_rows": [victim.row for victim in victims],
        }

    def touch(self, ids: list[int], batch: int) -> None:
        for i, count in collections.Counter(ids).items():
            if (resident := self.residents.get(i)) is None:
                continue
            resident.count += count
            draw = mix(i, 2**21 + batch) % 2**resident.power
            if draw == 0 and resident.born != batch:
                resident.power = min(31, resident.power + 1)
            resident.last_use = batch
            resident.seconds = int(self.clock())

    def resized(self, num_rows: int, batch: int) -> Oracle:
        """A vocabulary of another number of rows, with the ids that would be evicted last."""
        other = Oracle(num_rows, self.settings, self.policy, self.clock)
        kept = sorted(
            self.residents.values(), key=lambda r: (self.policy.key(r, batch), r.row), reverse=True
        )[: other.room]
        taken = {r.row for r in kept if r.row < num_rows}
        other.free = collections.deque(row for row in other.rows_in_order() if row not in taken)
        for resident in sorted(kept, key=lambda r: r.row):
            row = resident.row if resident.row < num_rows else other.free.popleft()
            other.residents[resident.id] = dataclasses.replace(resident, row=row)
        return other
