"""BERT4Rec: what stood in the gaps? And so, what comes next?

Trains a bidirectional encoder on interaction sequences in which a share of the items is hidden
behind a mask; the state at each mask must score the hidden item above others drawn by popularity (a
sampled softmax, where the paper has one over all items). To predict what comes next the mask is
appended. Sequences are ragged from end to end. Prints HR@10, NDCG@10 and MRR of the held-out last
items among 100 popular ones, at the epoch that was best on the validation items.

    python examples/bert4rec.py                              # generated sequences, some minutes
    python examples/bert4rec.py --data amazon-beauty.txt     # "user item" a line, in time order

A third of the generated items is random. HR@10 ends near 0.6; chance is 0.1.

The loop and the evaluation are those of `sasrec.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import sasrec
import tyro
from flax import nnx

from jaxrec.nn import BERT4Rec


@dataclasses.dataclass(frozen=True)
class Settings(sasrec.Settings):
    epochs: int = 60
    mask_rate: float = 0.4
    """Share of a sequence's items that are hidden, at least one."""
    num_heads: int = 2
    evaluate_every: int = 10
    """Epochs."""


def hide(rng: np.random.Generator, row: np.ndarray, rate: float, mask: np.int32) -> np.ndarray:
    """The sequence with some items, at least one, replaced by the mask."""
    chosen = rng.random(len(row)) < rate
    chosen[rng.integers(len(row))] = True
    return np.where(chosen, mask, row)


def main(settings: Settings) -> dict[str, float]:
    data = sasrec.read(settings)
    longest, rngs = settings.max_length, nnx.Rngs(settings.seed)
    items = sasrec.item_table(settings, data.num_items + 2, rngs)  # the last id is the mask
    model = BERT4Rec(items, rngs=rngs, **sasrec.options_of(settings))
    mask = np.int32(data.num_items + 1)
    task = sasrec.Task(
        train=[row[-longest:] for row in data.before(-2) if len(row) > 1],
        sample=lambda rng, row: (hide(rng, row, settings.mask_rate, mask), row),
        question=lambda row: np.append(row[1 - longest :], mask),
        counts=lambda batch: batch["history"].values == mask,
    )
    return sasrec.train(settings, data, model, task)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
