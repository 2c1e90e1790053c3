"""BERT4Rec: what stood in the gaps? And so, what comes next?

Trains a bidirectional encoder on interaction sequences in which a share of the items is hidden
behind a mask; the state at each mask must score the hidden item above others drawn by popularity (a
sampled softmax, where the paper has one over all items). To predict what comes next the mask is
appended. Sequences are ragged from end to end. Prints HR@10, NDCG@10 and MRR of the held-out last
items among 100 popular ones, at the epoch that was best on the validation items.

    python examples/bert4rec.py                              # generated sequences, some minutes
    python examples/bert4rec.py --data amazon-beauty.txt     # "user item" a line, in time order

A third of the generated items is random. HR@10 ends near 0.6; chance is 0.1.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.data import Interactions, pad_batch
from jaxrec.metrics import rank_metrics
from jaxrec.nn import BERT4Rec, candidate_scores, sampled_softmax_loss
from jaxrec.train import compile_step

FEATURES = ("history", "targets", "negatives", "candidates")


@dataclasses.dataclass(frozen=True)
class Settings:
    data: pathlib.Path | None = None
    """File of interactions; generated ones if not given."""
    num_users: int = 10_000
    num_items: int = 500
    """Size of what is generated."""
    epochs: int = 60
    minutes: float = 60.0
    """Training ends after this time, whatever the epoch."""
    batch_size: int = 256
    negatives: int = 4
    """For each sequence of a batch; all masks of the batch see those of all sequences."""
    mask_rate: float = 0.4
    """Share of a sequence's items that are hidden, at least one."""
    max_length: int = 50
    dim: int = 64
    num_blocks: int = 2
    num_heads: int = 2
    dropout_rate: float = 0.2
    learning_rate: float = 1e-3
    evaluate_every: int = 10
    """Epochs."""
    seed: int = 0
    """Of first values, order, masks, dropout, negatives; evaluation draws the same ones always."""


def make_model(settings: Settings, num_items: int) -> BERT4Rec:
    rngs = nnx.Rngs(settings.seed)
    table = jaxrec.EmbeddingConfig(  # the last id is the mask
        "item", num_items + 2, settings.dim, FEATURES, initializer=nnx.initializers.normal(0.02)
    )
    optimizer = jaxrec.optim.adam(settings.learning_rate)
    return BERT4Rec(
        jaxrec.EmbeddingCollection([table], optimizer=optimizer, rngs=rngs),
        max_length=settings.max_length, num_blocks=settings.num_blocks,
        num_heads=settings.num_heads, dropout_rate=settings.dropout_rate,
        block_size=32, rngs=rngs,
    )  # fmt: skip


def hide(rng: np.random.Generator, row: np.ndarray, rate: float, mask: np.int32) -> np.ndarray:
    """The sequence with some items, at least one, replaced by the mask."""
    chosen = rng.random(len(row)) < rate
    chosen[rng.integers(len(row))] = True
    return np.where(chosen, mask, row)


def pack(packer: jaxrec.Packer, size: int, **rows: Sequence) -> jaxrec.KeyedJaggedArray:
    """A batch of some features; bags of the others are empty."""
    return packer.from_lists({key: list(rows.get(key, [()] * size)) for key in FEATURES})


def train_step(model, optimizer, batch, mask):
    def loss_fn(model):
        out = model(batch)
        losses = sampled_softmax_loss(
            out["history"].values, out["targets"].values, out["negatives"].values,
            positive_ids=batch["targets"].values, negative_ids=batch["negatives"].values,
        )  # fmt: skip
        masked = batch["history"].values == mask
        return jnp.where(masked, losses, 0).sum() / masked.sum()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def score(model, batch):
    out = model(batch)
    return candidate_scores(out["history"], out["candidates"].values)


def main(settings: Settings) -> dict[str, float]:
    made = Interactions.generate(settings.num_users, settings.num_items, seed=0)
    data = Interactions.read(settings.data) if settings.data else made
    print(f"{len(data.sequences)} sequences of {data.num_items} items\n{settings}")
    train = [row[-settings.max_length :] for row in data.before(-2) if len(row) > 1]
    candidates = {place: data.candidates(place, seed=-place) for place in (-1, -2)}
    packer, held_out_packer = jaxrec.Packer(), jaxrec.Packer()
    rng, popularity = np.random.default_rng(settings.seed), data.popularity
    size, mask = settings.batch_size, np.int32(data.num_items + 1)

    model = make_model(settings, data.num_items)
    optimizer = jaxrec.Optimizer(model, optax.adam(settings.learning_rate))
    step = compile_step(train_step, model, optimizer)

    def evaluate(place: int) -> dict[str, float]:
        histories = [np.append(row[1 - settings.max_length :], mask) for row in data.before(place)]
        model.eval()
        scores = []
        for start in range(0, len(histories), size):
            rows, ranked = histories[start : start + size], candidates[place][start : start + size]
            batch = pack(held_out_packer, len(rows), history=rows, candidates=ranked)
            padded, weights = pad_batch(batch, size)
            scores.append(np.asarray(score(model, padded))[weights > 0])
        model.train()
        return rank_metrics(np.concatenate(scores))

    best, most, begun = {}, -1.0, time.perf_counter()
    for epoch in range(1, settings.epochs + 1):
        order, losses = rng.permutation(len(train)), []
        for start in range(0, len(order) - size + 1, size):
            rows = [train[row] for row in order[start : start + size]]
            negatives = rng.choice(len(popularity), (size, settings.negatives), p=popularity)
            hidden = [hide(rng, row, settings.mask_rate, mask) for row in rows]
            batch = pack(packer, size, history=hidden, targets=rows, negatives=negatives)
            losses.append(step(batch, mask))
        minutes = (time.perf_counter() - begun) / 60
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}, {minutes:.1f} minutes", flush=True)
        last = epoch == settings.epochs or minutes > settings.minutes
        if last or epoch % settings.evaluate_every == 0:
            print(f"    validation HR@10 {(found := evaluate(-2)['HR@10']):.4f}", flush=True)
            if found > most:
                best, most = evaluate(-1) | {"epoch": epoch}, found
        if last:
            break
    print(f"test: last item among itself and 100 by popularity, seed {settings.seed}: {best}")
    return best


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
