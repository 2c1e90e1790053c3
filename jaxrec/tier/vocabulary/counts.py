"""What a vocabulary counts: ids that have no row yet, uses of rows, and totals of both."""

from __future__ import annotations

import collections
import warnings

import numpy as np

from jaxrec.tier.ids.batch_ops import distinct, mix, record_uses
from jaxrec.tier.vocabulary.eviction import MAX_POWER, Eviction, Records

_HASHES = 4
MAX_SIGHTINGS = 255


class Sightings:
    """Bounded counters of ids, a count-min sketch, which rarely counts too many.

    Source: Cormode and Muthukrishnan, "An improved data stream summary: the count-min sketch and
    its applications" (2005), with conservative update. Counters end at 255. To forget old ids, all
    counters are halved after as many new ids as a line has counters. Before that, no id is counted
    too few times.

    Args:
        counters: Number of counters in each of four lines, a byte each.
    """

    def __init__(self, counters: int) -> None:
        self.lines = np.zeros((_HASHES, counters), np.uint8)
        self.new_ids = 0

    def count(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the number of sightings of each id, this batch included; change nothing.

        Args:
            ids: Distinct ids, int64 ``[n]``.
            counts: Number of sightings of each in this batch.

        Returns:
            int64 ``[n]``, at most 255.
        """
        lines = np.arange(_HASHES)[:, None]
        before = self.lines[lines, self._places(ids)].min(axis=0).astype(np.int64)
        return np.minimum(before + counts, MAX_SIGHTINGS)

    def record(self, ids: np.ndarray, counted: np.ndarray) -> None:
        """Keep the counts that `count` returned for distinct ids."""
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


# Seed of the draws that raise a frequency class; beyond those of the hashes of `Sightings`.
_POWER_SEED = 1 << 21

# Uses that wait at most, with 4 bytes each, and batches.
_MOST_USES = 1 << 17
_MOST_BATCHES = 32


class Uses:
    """Uses of rows that wait to be written to the records, all at once.

    Between two batches the training step drives the records out of the processor's cache, and to
    fetch them back takes longer than to change them. So the uses of several batches are written
    together. Whoever reads the records calls `record` first; ``ids`` and ``born`` do not wait.

    Args:
        records: The records.
        policy: The eviction policy, which says what is recorded.
    """

    def __init__(self, records: Records, policy: Eviction) -> None:
        self._records, self._policy = records, policy
        self._waiting: list[tuple[np.ndarray, int, int]] = []
        self._num_waiting = 0

    def add(self, rows: np.ndarray, batch: int) -> None:
        """Note the use of rows by a batch.

        Args:
            rows: int32 ``[n]``, with repeats; -1 stands for no row. The array must not change
                afterwards.
            batch: Number of the batch; not less than that of any batch before.
        """
        seconds = int(self._policy.seconds()) if self._policy.uses_seconds else 0
        self._waiting.append((rows, batch, seconds))
        self._num_waiting += rows.size
        if self._num_waiting >= _MOST_USES or len(self._waiting) >= _MOST_BATCHES:
            self.record()

    def record(self) -> None:
        """Write all uses to the records."""
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        for rows, batch, seconds in waiting:
            if self._policy.uses_power:
                self._raise_powers(rows, batch)
            if self._policy.uses_seconds:
                self._records.last_seconds[rows[rows >= 0]] = seconds
            record_uses(rows, batch, self._records.count, self._records.last_use)

    def _raise_powers(self, rows: np.ndarray, batch: int) -> None:
        """Raise the frequency classes of rows by chance."""
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


# Batches over which evictions are added up.
_RECENT = 100


class Statistics:
    """Counts since the start of the process, of training batches.

    Attributes:
        counts: Totals by name: ``lookups`` of ids; ``hits``, lookups of ids that had a row before
            the batch; ``new``, distinct ids without a row; ``admitted``, ids that got a row;
            ``evicted`` rows; ``refused`` lookups, which read the row of unknown ids.
        room: Number of rows for ids.
        batches: Number of batches.
    """

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
        """Return the totals, the number of ``resident`` ids, ``load`` and ``hit_rate``."""
        names = ("lookups", "hits", "new", "admitted", "evicted", "refused")
        return {
            **{name: self.counts[name] for name in names},
            "resident": resident,
            "load": resident / self.room,
            "hit_rate": self.counts["hits"] / max(1, self.counts["lookups"]),
        }

    def warn_if_thrashing(self, name: str) -> None:
        """Warn, once, if the last 100 batches evicted as many rows as the table has for ids.

        Args:
            name: Name of the table.
        """
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
