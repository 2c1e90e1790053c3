"""Counts of a vocabulary's lookups, admissions and evictions."""

from __future__ import annotations

import collections
import warnings

# Batches over which evictions are added up.
_RECENT = 100


class Statistics:
    """Counts since the start of the process, of training batches.

    Attributes:
        counts: Totals by name: ``lookups`` of ids; ``hits``, lookups of ids that had a row before
            the batch; ``new``, distinct ids without a row; ``admitted``, ids that got a row;
            ``evicted`` rows; ``refused`` lookups, which read the row of unknown ids.
        room: Number of rows for ids.
        resident: Number of ids that have a row.
        batches: Number of batches.
    """

    def __init__(self, room: int, resident: int = 0) -> None:
        self.room, self.resident, self.batches = room, resident, 0
        self.counts: collections.Counter[str] = collections.Counter()
        self._recent_evictions: collections.deque[int] = collections.deque(maxlen=_RECENT)
        self._has_warned = False

    def add(self, *, resident: int, **counts: int) -> None:
        """Add the counts of one batch."""
        self.resident = resident
        self.batches += 1
        for name, count in counts.items():
            self.counts[name] += count
        self._recent_evictions.append(counts["evicted"])

    def summary(self) -> dict[str, float]:
        """Return the totals, ``resident`` ids, ``load`` and ``hit_rate``."""
        names = ("lookups", "hits", "new", "admitted", "evicted", "refused")
        return {
            **{name: self.counts[name] for name in names},
            "resident": self.resident,
            "load": self.resident / self.room,
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
