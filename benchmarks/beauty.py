"""Amazon Beauty as papers on generative retrieval use it, and metrics over all of its items."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
from jaxtyping import Float, Int32

from jaxrec.data import Interactions


@dataclasses.dataclass(frozen=True, eq=False)
class Histories:
    """The items of each user, oldest first, with items numbered from 0.

    The last item of a user is for testing, the one before for validation.
    """

    rows: list[Int32[np.ndarray, " length"]]
    num_items: int

    @classmethod
    def read(cls, path: pathlib.Path, core: int = 5) -> Histories:
        """Read a file with ``user item`` lines and keep its ``core``-core.

        Every user of the core has ``core`` of its items or more, and every item as many users.
        """
        rows = Interactions.read(path).sequences
        while True:
            counts = np.bincount(np.concatenate(rows))
            kept = [row[counts[row] >= core] for row in rows]
            kept = [row for row in kept if len(row) >= core]
            if sum(map(len, kept)) == sum(map(len, rows)):
                break
            rows = kept
        items, flat = np.unique(np.concatenate(rows), return_inverse=True)
        ends = np.cumsum([len(row) for row in rows])[:-1]
        return cls(np.split(flat.astype(np.int32), ends), len(items))

    def training(self, longest: int) -> list[np.ndarray]:
        """Return what models train on: all but two items, the last ``longest`` of these."""
        return [row[:-2][-longest:] for row in self.rows]

    def asked(self, place: int, longest: int) -> list[np.ndarray]:
        """Return the items before the one at ``place`` (-1 or -2), the last ``longest``."""
        return [row[:place][-longest:] for row in self.rows]

    def wanted(self, place: int) -> np.ndarray:
        """Return each user's item at ``place``."""
        return np.array([row[place] for row in self.rows])


def metrics_of(ranked: Int32[np.ndarray, "users k"], wanted: np.ndarray) -> dict[str, float]:
    """Return recall and NDCG at 5 and 10 of one wanted item a user, in ranked lists of items.

    Every list has 10 items or more; -1 stands for no item.
    """
    hits = ranked == wanted[:, None]
    found: dict[str, float] = {}
    for k in (5, 10):
        within = hits[:, :k]
        found[f"recall@{k}"] = float(within.any(axis=1).mean())
        found[f"ndcg@{k}"] = float((within / np.log2(np.arange(k) + 2)).sum(axis=1).mean())
    return found


def best_items(
    scores: Float[np.ndarray, "users items"], histories: list[np.ndarray], k: int
) -> Int32[np.ndarray, "users k"]:
    """Return the ``k`` items of the highest scores, without those of each user's history."""
    scores = scores.copy()
    users = np.repeat(np.arange(len(histories)), [len(row) for row in histories])
    scores[users, np.concatenate(histories)] = -np.inf
    best = np.argpartition(-scores, k, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
    return np.take_along_axis(best, order, 1)
