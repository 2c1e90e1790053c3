"""Transfer learning: tables that start from pretrained vectors, frozen or trained on.

A first model learns vectors of 1,000 items from what is bought together. A second task has labels
of few items: does somebody who had these items like that one? Its model takes the item vectors from
the first, once frozen (a row optimizer with learning rate 0), once trained on, and once starts from
nothing. Prints the AUC of each on items that have no labels in training: about 0.55 from nothing,
and near 1 from pretrained vectors.

    python examples/transfer_learning.py
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.metrics import auc
from jaxrec.nn import in_batch_softmax_loss
from jaxrec.train import compile_step


@dataclasses.dataclass(frozen=True)
class Settings:
    num_items: int = 1000
    num_kinds: int = 20
    """Items of a kind are bought together, and liked together."""
    dim: int = 16
    batch_size: int = 512
    pretraining_steps: int = 600
    steps: int = 200
    seed: int = 0


def item_table(settings: Settings, features: tuple[str, ...], learning_rate: float):
    table = jaxrec.EmbeddingBagConfig(
        "item", settings.num_items, settings.dim, features, initializer="normal"
    )
    return jaxrec.EmbeddingBagCollection(
        [table],
        optimizer=jaxrec.optim.adagrad(learning_rate),
        rngs=nnx.Rngs(settings.seed),
    )


def pack(**bags: np.ndarray) -> jaxrec.KeyedJaggedArray:
    """From ``[batch, length]`` ids."""
    return jaxrec.KeyedJaggedArray.from_lists({k: ids.tolist() for k, ids in bags.items()})


def pretrain(settings: Settings, kinds: np.ndarray) -> jax.Array:
    """``[num_items, dim]`` vectors under which items bought together are near."""
    rng = np.random.default_rng(settings.seed)
    embeddings = item_table(settings, ("one", "other"), 0.1)
    optimizer = jaxrec.Optimizer(embeddings, optax.identity())

    def step(embeddings, optimizer, features, ids):
        def loss_fn(embeddings):
            pooled = embeddings(features)
            return in_batch_softmax_loss(pooled["one"], pooled["other"], ids=ids).mean()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(embeddings)
        optimizer.update(embeddings, gradients)
        return loss

    compiled = compile_step(step, embeddings, optimizer)
    alike = [np.flatnonzero(kinds == kind) for kind in range(settings.num_kinds)]
    for _ in range(settings.pretraining_steps):
        one = rng.integers(0, settings.num_items, settings.batch_size)
        other = np.array([rng.choice(alike[kinds[item]]) for item in one])
        compiled(pack(one=one[:, None], other=other[:, None]), other.astype(np.int32))
    return embeddings.table("item")


class Liking(nnx.Module):
    """Whether somebody with a history likes an item, by the elementwise product of the two."""

    def __init__(self, settings: Settings, learning_rate: float):
        self.items = item_table(settings, ("history", "target"), learning_rate)
        self.over = nnx.Linear(settings.dim, 1, rngs=nnx.Rngs(settings.seed))

    def __call__(self, features: jaxrec.KeyedJaggedArray) -> jax.Array:
        pooled = self.items(features)
        return self.over(pooled["history"] * pooled["target"])[:, 0]


def draw(rng, kinds: np.ndarray, items: np.ndarray, size: int):
    """Histories of three items of one kind; half of the targets are of it too, and liked."""
    history = rng.choice(items, (size, 3))
    alike = {kind: items[kinds[items] == kind] for kind in np.unique(kinds[items])}
    history[:, 1:] = [rng.choice(alike[kinds[item]], 2) for item in history[:, 0]]
    target = np.where(
        rng.random(size) < 0.5,
        [rng.choice(alike[kinds[item]]) for item in history[:, 0]],
        rng.choice(items, size),
    )
    labels = (kinds[target] == kinds[history[:, 0]]).astype(np.float32)
    return pack(history=history, target=target[:, None]), labels


def finetune(settings: Settings, kinds: np.ndarray, model: Liking) -> float:
    """AUC on the half of the items that training has no labels of."""
    rng = np.random.default_rng(settings.seed + 1)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))

    def step(model, optimizer, features, labels):
        def loss_fn(model):
            return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    compiled, half = compile_step(step, model, optimizer), settings.num_items // 2
    for _ in range(settings.steps):
        compiled(*draw(rng, kinds, np.arange(half), settings.batch_size))
    features, labels = draw(rng, kinds, np.arange(half, settings.num_items), 4096)
    return auc(np.asarray(model(features)), labels)


def main(settings: Settings) -> dict[str, float]:
    kinds = np.random.default_rng(settings.seed).integers(0, settings.num_kinds, settings.num_items)
    vectors, found = pretrain(settings, kinds), {}
    for name, is_pretrained, learning_rate in (
        ("from nothing", False, 0.02),
        ("pretrained, frozen", True, 0.0),
        ("pretrained, trained on", True, 0.02),
    ):
        model = Liking(settings, learning_rate)
        if is_pretrained:
            model.items.load_table("item", vectors)
        found[name] = finetune(settings, kinds, model)
        kept = bool((model.items.table("item") == vectors).all())
        print(f"{name}: AUC {found[name]:.4f}; vectors {'as' if kept else 'not as'} pretrained")
    return found


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
