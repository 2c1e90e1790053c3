"""Hit rates of eviction policies on ids of a power law.

See `benchmarks.tier`, whose command ``policies`` this is.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time

import numpy as np

from jaxrec.tier import Cached, Eviction, distance_lfu, farthest, lfu, lfu_lru, lru
from jaxrec.tier.vocabulary.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Policies:
    """Hit rates of a cache by eviction policy; no device takes part."""

    rows: int = 400_000
    """Rows of the table."""
    shares: tuple[float, ...] = (0.05, 0.1)
    """Shares of the rows in the cache."""
    batch: int = 8192
    """Ids of a batch."""
    steps: int = 400
    """Batches; those of the first half are not counted."""
    exponent: float = 1.05
    """The i-th most frequent id is drawn with a probability proportional to i**-exponent."""
    drifts: tuple[float, ...] = (0.0, 20.0)
    """Places by which the ranking moves with each batch."""
    windows: tuple[int, ...] = (4, 16, 64)
    """Batches that the policy `farthest` looks ahead."""
    held: int = 6
    """Batches whose rows stay, as with ``look_ahead=4``."""

    def run(self) -> None:
        policies: dict[str, Eviction] = {
            "lru": lru(),
            "lfu": lfu(),
            "lfu_lru": lfu_lru(),
            "distance_lfu": distance_lfu(),
        }
        for window in self.windows:
            policies[f"farthest({window})"] = farthest(window)
            policies[f"farthest({window}, lfu)"] = farthest(window, lfu())
        policies["all batches in sight"] = farthest(self.steps)
        for drift in self.drifts:
            batches = self.batches(drift)
            for share in self.shares:
                room = round(share * self.rows)
                for name, policy in policies.items():
                    line = {"drift": drift, "share": share, "policy": name}
                    print(json.dumps(line | self.measure(policy, room, batches)), flush=True)

    def measure(self, policy: Eviction, room: int, batches: list[np.ndarray]) -> dict[str, float]:
        """Return the hit rate, the misses and the planning time of a batch in the second half."""
        vocabulary = Vocabulary(room, Cached(room, eviction=policy).vocabulary)
        distinct = [np.unique(ids) for ids in batches] if policy.foresight else []
        before: collections.Counter[str] = collections.Counter()
        start = 0.0
        for number, ids in enumerate(batches, 1):
            if number == self.steps // 2 + 1:
                before = vocabulary.statistics.counts.copy()
                start = time.process_time()
            coming = distinct[number : number + policy.foresight]
            vocabulary.commit(vocabulary.propose(ids, number, self.held, None, coming))
        seconds = time.process_time() - start
        counts = vocabulary.statistics.counts - before
        measured = self.steps - self.steps // 2
        return {
            "hit_rate": round(counts["hits"] / counts["lookups"], 4),
            "misses_per_batch": round(counts["new"] / measured, 1),
            "ms": round(1e3 * seconds / measured, 2),
        }

    def batches(self, drift: float) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        shares = np.cumsum(np.arange(1, self.rows + 1) ** -self.exponent)
        scattered = rng.permutation(self.rows)
        return [
            scattered[
                (np.searchsorted(shares, shares[-1] * rng.random(self.batch)) + int(drift * step))
                % self.rows
            ]
            for step in range(self.steps)
        ]
