"""SASRec and HSTU on histories: trained by a sampled softmax, ranked over all items."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxrec
from benchmarks.beauty import Histories, best_items, metrics_of
from jaxrec.nn import HSTU, SASRec, last_states, sampled_softmax_loss
from jaxrec.train import compile_step

FEATURES = ("history", "next", "negatives")


@dataclasses.dataclass(frozen=True)
class SequenceSettings:
    """Sizes and training of SASRec and HSTU."""

    epochs: int = 100
    patience: int = 4
    """Evaluations without a better NDCG@10 of the validation items, after which training ends."""
    evaluate_every: int = 5
    """Epochs."""
    batch_size: int = 256
    negatives: int = 8
    """Uniformly drawn items for each sequence of a batch; all states see those of all sequences."""
    longest: int = 50
    dim: int = 64
    num_blocks: int = 2
    num_heads: int = 2
    dropout_rate: float = 0.5
    learning_rate: float = 1e-3


def make_model(kind: str, settings: SequenceSettings, num_items: int, seed: int) -> Any:
    rngs = nnx.Rngs(seed)
    table = jaxrec.EmbeddingConfig(
        "item", num_items, settings.dim, FEATURES, initializer=nnx.initializers.normal(0.02)
    )
    optimizer = jaxrec.optim.adam(settings.learning_rate)
    options: dict[str, Any] = {
        "max_length": settings.longest,
        "num_blocks": settings.num_blocks,
        "num_heads": settings.num_heads,
        "dropout_rate": settings.dropout_rate,
        "block_size": 16,
        "rngs": rngs,
    }
    tables = jaxrec.EmbeddingCollection([table], optimizer=optimizer, rngs=rngs)
    return {"SASRec": SASRec, "HSTU": HSTU}[kind](tables, **options)


def train_step(model, optimizer, batch):
    def loss_fn(model):
        out = model(batch)
        losses = sampled_softmax_loss(
            out["history"].values,
            out["next"].values,
            out["negatives"].values,
            positive_ids=batch["next"].values,
            negative_ids=batch["negatives"].values,
        )
        is_item = jnp.arange(batch["history"].capacity) < batch["history"].lengths.sum()
        return jnp.where(is_item, losses, 0).sum() / is_item.sum()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def score_all(model, batch):
    """Return the scores of all items for each history, ``[rows, items]``."""
    return last_states(model(batch)["history"]) @ model.items.table("item").T


def pack(packer: jaxrec.Packer, size: int, **rows: Any) -> jaxrec.KeyedJaggedArray:
    return packer.from_lists({key: list(rows.get(key, [()] * size)) for key in FEATURES})


def evaluate(model, data: Histories, place: int, settings: SequenceSettings) -> dict[str, float]:
    """Return the metrics of each user's item at a place, among all items but those before it."""
    model.eval()
    packer, size, ranked = jaxrec.Packer(), settings.batch_size, []
    asked = data.asked(place, settings.longest)
    before = [row[:place] for row in data.rows]
    for start in range(0, len(asked), size):
        rows = asked[start : start + size]
        filled = rows + [np.zeros(0, np.int32)] * (size - len(rows))
        scores = np.asarray(score_all(model, pack(packer, size, history=filled)))[: len(rows)]
        ranked.append(best_items(scores, before[start : start + size], 10))
    model.train()
    return metrics_of(np.concatenate(ranked), data.wanted(place))


def train(
    kind: str, data: Histories, settings: SequenceSettings, seed: int
) -> tuple[dict[str, float], np.ndarray]:
    """Train a model; return the test metrics and the item table of the best epoch."""
    model = make_model(kind, settings, data.num_items, seed)
    optimizer = jaxrec.Optimizer(model, optax.adam(settings.learning_rate))
    step, rng, packer = (
        compile_step(train_step, model, optimizer),
        np.random.default_rng(seed),
        jaxrec.Packer(),
    )
    rows = [row for row in data.training(settings.longest + 1) if len(row) > 1]
    best, most, table, waited = {}, -1.0, np.zeros(0), 0
    begun = time.process_time()
    for epoch in range(1, settings.epochs + 1):
        order, losses = rng.permutation(len(rows)), []
        for start in range(0, len(order) - settings.batch_size + 1, settings.batch_size):
            chosen = [rows[row] for row in order[start : start + settings.batch_size]]
            negatives = rng.integers(
                0, data.num_items, (settings.batch_size, settings.negatives), np.int32
            )
            batch = pack(
                packer,
                settings.batch_size,
                history=[row[:-1] for row in chosen],
                next=[row[1:] for row in chosen],
                negatives=negatives,
            )
            losses.append(step(batch))
        if epoch % settings.evaluate_every and epoch < settings.epochs:
            continue
        validation = evaluate(model, data, -2, settings)["ndcg@10"]
        seconds = time.process_time() - begun
        print(
            f"{kind}, seed {seed}, epoch {epoch}: loss {np.mean(jax.device_get(losses)):.4f}, "
            f"validation NDCG@10 {validation:.4f}, {seconds:.0f} s of processors",
            file=sys.stderr,
            flush=True,
        )
        waited += 1
        if validation > most:
            most, waited = validation, 0
            best = evaluate(model, data, -1, settings)
            best |= {"epoch": epoch, "validation ndcg@10": validation}
            table = np.asarray(model.items.table("item"))
        if waited >= settings.patience:
            break
    return best | {"processor_seconds": round(time.process_time() - begun)}, table
