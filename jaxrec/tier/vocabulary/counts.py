"""Counts of a vocabulary: sightings of ids without a row, uses of rows, and statistics."""

from __future__ import annotations

import collections
import warnings

import numpy as np

from jaxrec.tier.ids.batch_ops import distinct, mix, record_uses
from jaxrec.tier.vocabulary.eviction import MAX_POWER, Eviction, Records

_HASHES = 4
MAX_SIGHTINGS = 255


class Sightings:
    """Bounded counters of ids in four lines of one-byte counters: a count-min sketch.

    Source: Cormode and Muthukrishnan, "An improved data stream summary: the count-min sketch and
    its applications" (2005), with conservative update.
    """

    # An id's count is the smallest of its four counters, so that it is too large only where other
    # ids share all four. Conservative update raises a counter no further than that count.
    # New ids would fill up the sketch in the long run. So all counters are halved once the number
    # of new ids reaches the length of a line: ids that were seen once are forgotten.

    def __init__(self, counters: int) -> None:
        self.lines = np.zeros((_HASHES, counters), np.uint8)
        self.new_ids = 0

    def count(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return how often distinct ids, int64 ``[n]``, were seen, at most 255; change nothing.

        ``counts`` are their occurrences in the present batch, ``[n]``, which are included.
        """
        lines = np.arange(_HASHES)[:, None]
        before = self.lines[lines, self._places(ids)].min(axis=0).astype(np.int64)
        return np.minimum(before + counts, MAX_SIGHTINGS)

    def record(self, ids: np.ndarray, counted: np.ndarray) -> None:
        """Write the sightings ``counted``, ``[n]``, that `count` returned for ids ``[n]``."""
        places = self._places(ids)
        lines = np.arange(_HASHES)[:, None]
        self.new_ids += int((self.lines[lines, places].min(axis=0) == 0).sum())
        for line, place in zip(self.lines, places, strict=True):
            np.maximum.at(line, place, counted.astype(np.uint8))
        if self.new_ids >= self.lines.shape[1]:
            self.lines >>= 1
            self.new_ids = 0

    def _places(self, ids: np.ndarray) -> np.ndarray:
        """Return the counter of each id in each line, ``[lines, n]``."""
        hashes = np.stack([mix(ids, seed) for seed in range(_HASHES)])
        return hashes % np.uint64(self.lines.shape[1])


# Seed of the draws that raise a frequency class. The batch's number is added to it: admission's
# seeds begin at 1 << 20, so that the draws of the two differ for a million batches.
_POWER_SEED = 1 << 21

# Largest number of uses that wait, 4 bytes each (512 KiB), and of batches.
_MOST_USES = 1 << 17
_MOST_BATCHES = 32


class Uses:
    """Buffer of uses of rows, which it writes to the `Records` for several batches at once."""

    # Between two batches the training step drives the records out of the processor's cache, and
    # fetching them back takes longer than changing them. So the uses of several batches are
    # written together. Readers of counts and last uses call `record` first. `ids` and `born` do
    # not pass through here and are always up to date.

    def __init__(self, records: Records, policy: Eviction) -> None:
        self._records, self._policy = records, policy
        self._waiting: list[tuple[np.ndarray, int, int]] = []
        self._num_waiting = 0

    def add(self, rows: np.ndarray, batch: int) -> None:
        """Note the use of rows, int32 ``[n]``, by a batch; rows may repeat, and -1 is skipped.

        The array is kept and must not change. Batches come in ascending order.
        """
        # The time is read now, not in `record`, which may run many batches later.
        seconds = int(self._policy.seconds()) if self._policy.uses_seconds else 0
        self._waiting.append((rows, batch, seconds))
        self._num_waiting += rows.size
        if self._num_waiting >= _MOST_USES or len(self._waiting) >= _MOST_BATCHES:
            self.record()

    def take(self) -> list[tuple[np.ndarray, int]]:
        """Return the waiting uses, which the caller records: rows, int32 ``[n]``, and batches."""
        # Powers and times change with the counts, batch by batch.
        if self._policy.uses_power or self._policy.uses_seconds:
            self.record()
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        return [(rows, batch) for rows, batch, _ in waiting]

    def record(self) -> None:
        """Write the waiting uses to the records."""
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        for rows, batch, seconds in waiting:
            if self._policy.uses_power:
                self._raise_powers(rows, batch)
            if self._policy.uses_seconds:
                self._records.last_seconds[rows[rows >= 0]] = seconds
            # After the powers, which compare the last use of a row with this batch.
            record_uses(rows, batch, self._records.count, self._records.last_use)

    def _raise_powers(self, rows: np.ndarray, batch: int) -> None:
        """Raise the frequency class ``p`` of each used row with probability ``2**-p``."""
        records = self._records
        once = distinct(rows[rows >= 0].astype(np.int64))[0]
        power = records.power[once]
        # As many low bits of the draw as the class are zero with probability 2**-power.
        draws = mix(records.ids[once], _POWER_SEED + batch)
        masks = (np.uint64(1) << power.astype(np.uint64)) - np.uint64(1)
        raised = ((draws & masks) == 0) & (records.last_use[once] != batch)
        # The class of an id that is new in this batch stays.
        raised &= records.born[once] != batch
        records.power[once] = np.minimum(power + raised, MAX_POWER).astype(np.uint8)


# Number of batches over which evictions are summed, for the warning.
_RECENT = 100


class Statistics:
    """Counts over all training batches of this process; `jaxrec.tier.statistics` defines them."""

    def __init__(self, room: int) -> None:
        self.room, self.batches = room, 0
        self.counts: collections.Counter[str] = collections.Counter()
        self._recent_evictions: collections.deque[int] = collections.deque(maxlen=_RECENT)
        self._has_warned = False

    def add(self, **counts: int) -> None:
        """Add the counts of one batch."""
        self.batches += 1
        for name, count in counts.items():
            self.counts[name] += count
        self._recent_evictions.append(counts["evicted"])

    def summary(self, resident: int) -> dict[str, float]:
        """Return the counts by name, with ``resident``, its ``load``, and the ``hit_rate``."""
        names = ("lookups", "hits", "new", "admitted", "evicted", "refused")
        return {
            **{name: self.counts[name] for name in names},
            "resident": resident,
            "load": resident / self.room,
            "hit_rate": self.counts["hits"] / max(1, self.counts["lookups"]),
        }

    def warn_if_thrashing(self, name: str) -> None:
        """Warn, once, if the last 100 batches evicted as many rows as the table has for ids."""
        evicted = sum(self._recent_evictions)
        if self._has_warned or evicted < self.room:
            return
        self._has_warned = True
        warnings.warn(
            f"the table {name} thrashes: {evicted:,} rows were evicted in the last "
            f"{len(self._recent_evictions)} batches, and it has {self.room:,}, so that few ids are "
            "trained twice. Give it more rows (num_embeddings), admit ids later "
            "(Dynamic(admit_after=...)) or keep evicted rows (Dynamic(store='memory://'))",
            stacklevel=2,
        )
