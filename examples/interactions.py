"""Interaction sequences for `sasrec.py` and `bert4rec.py`: reading, splitting, packing, ranking.

A file has a line ``user item`` for each interaction, both integers from 1, a user's interactions in
time order; without one, sequences are generated in which two out of three items follow from the
item before. The last item of a sequence is for testing, the one before it for validation (leave one
out). An item is ranked among itself and 100 others that its user never met, drawn by popularity:
the protocol of the BERT4Rec paper (arXiv:1904.06690, section 4.2).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxrec
from jaxrec.nn import last_states
from jaxrec.ragged import grown

FEATURES = ("history", "targets", "negatives", "candidates")


@dataclasses.dataclass(frozen=True)
class Interactions:
    """Sequences of items from 1 to ``num_items``."""

    sequences: list[np.ndarray]
    num_items: int

    @property
    def popularity(self) -> np.ndarray:
        """``[num_items + 1]`` each item's share of the interactions."""
        counts = np.bincount(np.concatenate(self.sequences), minlength=self.num_items + 1)
        return counts / counts.sum()

    def at(self, place: int) -> list[np.ndarray]:
        """What comes before a place of each sequence, counted from its end: -1 is the last."""
        return [row[:place] for row in self.sequences]


def read(path: pathlib.Path) -> Interactions:
    pairs = np.loadtxt(path, dtype=np.int64)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    starts = np.flatnonzero(np.diff(pairs[:, 0], prepend=-1))
    rows = np.split(pairs[:, 1].astype(np.int32), starts[1:])
    return Interactions([row for row in rows if len(row) >= 3], int(pairs[:, 1].max()))


def generate(num_users: int, num_items: int, seed: int) -> Interactions:
    """Sequences of power-law lengths up to 50."""
    rng = np.random.default_rng(seed)
    follows = 1 + rng.permutation(num_items)
    rows = []
    for length in np.minimum(4 + rng.zipf(1.8, num_users), 50):
        row = [int(rng.integers(1, num_items + 1))]
        for _ in range(length - 1):
            known = rng.random() < 2 / 3
            row.append(int(follows[row[-1] - 1] if known else rng.integers(1, num_items + 1)))
        rows.append(np.array(row, np.int32))
    return Interactions(rows, num_items)


class Sampler:
    """Draws items in proportion to their weights."""

    def __init__(self, weights: np.ndarray):
        self.cumulative = np.cumsum(weights)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        found = np.searchsorted(self.cumulative, rng.random(shape) * self.cumulative[-1], "right")
        return found.astype(np.int32)


def candidates(data: Interactions, place: int, seed: int, others: int = 100) -> np.ndarray:
    """``[users, 1 + others]``: each sequence's item at ``place``, then items of no part in it."""
    rng, sampler = np.random.default_rng(seed), Sampler(data.popularity)
    longest = max(len({*row.tolist()}) for row in data.sequences)
    if np.count_nonzero(data.popularity) < longest + others:
        raise ValueError(f"too few items to find {others} that a user with {longest} never met")
    found = np.zeros((len(data.sequences), 1 + others), np.int32)
    for user, row in enumerate(data.sequences):
        taken, chosen = {*row.tolist()}, []
        while len(chosen) < others:
            for item in sampler.draw(rng, (2 * others,)).tolist():
                if item not in taken and len(chosen) < others:
                    taken.add(item)
                    chosen.append(item)
        found[user] = [row[place], *chosen]
    return found


class Packer:
    """Makes batches whose capacities only grow, so that few programs are compiled.

    They start with room for what ``size`` sequences have together nearly always.
    """

    def __init__(self, sequences: Sequence[np.ndarray], size: int) -> None:
        lengths = np.array([len(row) for row in sequences])
        room = int(size * lengths.mean() + 4 * size**0.5 * lengths.std())
        self.capacities = grown({}, dict.fromkeys(("history", "targets"), room))

    def __call__(self, **columns: Sequence[np.ndarray]) -> jaxrec.KeyedJaggedArray:
        size = len(next(iter(columns.values())))
        rows = [columns.get(key, [np.zeros(0, np.int32)] * size) for key in FEATURES]
        lengths = np.array([len(row) for column in rows for row in column], np.int32)
        counts = dict(
            zip(FEATURES, lengths.reshape(len(FEATURES), -1).sum(1).tolist(), strict=True)
        )
        self.capacities = grown(self.capacities, counts)
        values = np.concatenate([row for column in rows for row in column])
        # Negatives are as many in each batch, and have no padding among them.
        capacities = self.capacities | {"negatives": counts["negatives"]}
        return jaxrec.KeyedJaggedArray.from_lengths(
            list(FEATURES), values, lengths, capacities=capacities
        )


def evaluate(
    model: nnx.Module, histories: list[np.ndarray], chosen: np.ndarray, batch_size: int
) -> dict[str, float]:
    """Ranks candidates by their dot product with their history's last state."""
    graph, state = nnx.split(model)

    @jax.jit
    def score(state: nnx.State, batch: jaxrec.KeyedJaggedArray) -> jax.Array:
        model = nnx.merge(graph, state)
        model.eval()
        out = model(batch)
        last = last_states(out["history"])
        found = out["candidates"].values[: last.shape[0] * chosen.shape[1]]
        return jnp.einsum("bd,bcd->bc", last, found.reshape(len(last), -1, last.shape[1]))

    pack, scores = Packer(histories, batch_size), []
    for start in range(0, len(histories), batch_size):
        rows = np.minimum(np.arange(start, start + batch_size), len(histories) - 1)
        batch = pack(history=[histories[row] for row in rows], candidates=chosen[rows])
        scores.append(np.asarray(score(state, batch)))
    return ranking_metrics(np.concatenate(scores)[: len(histories)])


def ranking_metrics(scores: np.ndarray, k: int = 10) -> dict[str, float]:
    """HR@k, NDCG@k and MRR of the first column of ``[users, candidates]`` scores."""
    # A tie, or a NaN, counts against the item.
    rank = (~(scores[:, 1:] < scores[:, :1])).sum(axis=1)
    hit = rank < k
    return {
        f"HR@{k}": float(hit.mean()),
        f"NDCG@{k}": float((hit / np.log2(rank + 2)).mean()),
        "MRR": float((1 / (rank + 1)).mean()),
    }
