"""Semantic ids of items and their generation on histories: training, test and time."""

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
from benchmarks.beauty import Histories, metrics_of
from jaxrec.nn import SemanticIdDecoder
from jaxrec.nn.semantic_ids import ResidualKMeans, SemanticIds
from jaxrec.train import compile_step


@dataclasses.dataclass(frozen=True)
class GenerativeSettings:
    """Sizes and training of semantic ids and of the decoder."""

    num_levels: int = 2
    codebook_size: int = 256
    balanced: bool = False
    epochs: int = 100
    seconds: float = 400.0
    """Processor time after which training ends."""
    patience: int = 4
    """Evaluations without a better NDCG@10 of validation items, after which training ends."""
    evaluate_every: int = 3
    """Epochs."""
    validation_users: int = 1000
    batch_size: int = 128
    longest: int = 20
    dim: int = 64
    num_layers: int = 2
    num_encoder_layers: int = 0
    num_heads: int = 4
    dropout_rate: float = 0.2
    learning_rate: float = 2e-3
    """After 200 steps of warming up."""
    beam_size: int = 20


def make_ids(
    vectors: np.ndarray, settings: GenerativeSettings, seed: int
) -> tuple[SemanticIds, ResidualKMeans]:
    """Return the semantic ids of items by their vectors, and the quantizer."""
    quantizer = ResidualKMeans(
        settings.num_levels, settings.codebook_size, balanced=settings.balanced, seed=seed
    ).fit(vectors)
    return SemanticIds.of(quantizer.encode(vectors), sizes=quantizer.sizes), quantizer


def make_model(
    ids: SemanticIds, quantizer: ResidualKMeans, settings: GenerativeSettings, seed: int
) -> SemanticIdDecoder:
    """Return a decoder whose codes begin with the vectors of the quantizer's centers."""
    model = SemanticIdDecoder(
        ids,
        dim=settings.dim,
        num_layers=settings.num_layers,
        num_encoder_layers=settings.num_encoder_layers,
        num_heads=settings.num_heads,
        max_length=settings.longest,
        dropout_rate=settings.dropout_rate,
        block_size=32,
        rngs=nnx.Rngs(seed),
    )
    assert quantizer.codebooks is not None
    centers = quantizer.codebooks.reshape(-1, quantizer.dim)
    if quantizer.dim == settings.dim:
        scale = np.linalg.norm(quantizer.codebooks[0], axis=1).mean()
        for vectors in (model.embedding.vectors, model.head):
            values = np.array(vectors[...])
            values[: len(centers)] = centers / scale
            vectors.set_value(jnp.asarray(values))
    return model


def train_step(model, optimizer, batch):
    loss, gradients = jaxrec.value_and_grad(lambda model: model.loss(batch))(model)
    optimizer.update(model, gradients)
    return loss


def compile_generate(settings: GenerativeSettings) -> Any:
    """Return the compiled beam search, without the items of the feature ``seen``."""

    def generate(model, batch):
        beams = model.generate(
            batch, k=settings.beam_size, beam_size=settings.beam_size, exclude=("seen",)
        )
        return beams.items

    return nnx.jit(generate)


def pack(packer: jaxrec.Packer, seen: list[np.ndarray], longest: int) -> jaxrec.KeyedJaggedArray:
    """Return a batch of all items that users had; the model reads the last ``longest``."""
    return packer.from_lists({"history": [row[-longest:] for row in seen], "seen": seen})


def evaluate(
    model: SemanticIdDecoder,
    data: Histories,
    place: int,
    settings: GenerativeSettings,
    generate: Any,
    users: int | None = None,
) -> dict[str, float]:
    """Return the metrics of the items at a place, of about ``users`` users or of all."""
    model.eval()
    packer, size, ranked = jaxrec.Packer(), settings.batch_size, []
    # Over the whole file: its first users have longer histories, which are harder to continue.
    every = 1 if users is None else max(1, len(data.rows) // users)
    asked = [row[:place] for row in data.rows[::every]]
    for start in range(0, len(asked), size):
        rows = asked[start : start + size]
        filled = rows + [np.zeros(0, np.int32)] * (size - len(rows))
        items = np.asarray(generate(model, pack(packer, filled, settings.longest)))
        ranked.append(items[: len(rows)])
    model.train()
    return metrics_of(np.concatenate(ranked), data.wanted(place)[::every])


def train(
    data: Histories, vectors: np.ndarray, settings: GenerativeSettings, seed: int
) -> tuple[dict[str, Any], SemanticIdDecoder]:
    """Train a decoder; return the test metrics of the best epoch, and that decoder."""
    begun = time.process_time()
    ids, quantizer = make_ids(vectors, settings, seed)
    seconds = time.process_time() - begun
    print(f"{ids.report()} ({seconds:.0f} s of processors)", file=sys.stderr, flush=True)
    model = make_model(ids, quantizer, settings, seed)
    rate = optax.warmup_constant_schedule(0.0, settings.learning_rate, 200)
    optimizer = jaxrec.Optimizer(model, optax.adamw(rate, weight_decay=0.01))
    step, rng = compile_step(train_step, model, optimizer), np.random.default_rng(seed)
    generate, packer = compile_generate(settings), jaxrec.Packer()
    rows = data.training(settings.longest)
    # A copy: training donates the model's arrays.
    kept = jax.tree.map(np.array, nnx.state(model, nnx.Param))
    best, most, waited = {}, -1.0, 0
    for epoch in range(1, settings.epochs + 1):
        order, losses = rng.permutation(len(rows)), []
        for start in range(0, len(order) - settings.batch_size + 1, settings.batch_size):
            chosen = [rows[row] for row in order[start : start + settings.batch_size]]
            losses.append(step(packer.from_lists({"history": chosen})))
        seconds = time.process_time() - begun
        is_last = epoch == settings.epochs or seconds > settings.seconds
        print(
            f"epoch {epoch}: loss {np.mean(jax.device_get(losses)):.4f}, {seconds:.0f} s of "
            "processors", file=sys.stderr, flush=True,
        )  # fmt: skip
        if epoch % settings.evaluate_every and not is_last:
            continue
        found = evaluate(model, data, -2, settings, generate, settings.validation_users)
        print(f"    validation {found}", file=sys.stderr, flush=True)
        waited += 1
        if found["ndcg@10"] > most:
            most, waited = found["ndcg@10"], 0
            kept = jax.tree.map(np.array, nnx.state(model, nnx.Param))
            best = {"epoch": epoch, "validation ndcg@10": most}
        if is_last or waited >= settings.patience:
            break
    nnx.update(model, jax.tree.map(jnp.asarray, kept))
    best |= {"processor_seconds": round(time.process_time() - begun)}
    report = dataclasses.asdict(ids.report())
    return evaluate(model, data, -1, settings, generate) | best | {"ids": report}, model
