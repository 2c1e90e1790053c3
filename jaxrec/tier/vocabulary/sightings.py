"""Counters of the ids that have no row yet."""

from __future__ import annotations

import numpy as np

from jaxrec.tier.ids.mixing import mix

_HASHES = 4
_MAX = 255


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
        return np.minimum(before + counts, _MAX)

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
