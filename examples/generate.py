"""Generative retrieval: what does somebody want next? The model writes the item's code.

Histories are generated: an item usually follows from the one before it (`Interactions.generate`).
Item vectors come from a factorization of the pairs of neighbours; residual k-means makes codes of
them, and a decoder learns the codes of the next item. Beam search finds items, never a code that no
item has. At the end the model is exported and served, and a new item reaches the served model
without another export.

    python examples/generate.py
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time

import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.data import Interactions
from jaxrec.nn import SemanticIdDecoder
from jaxrec.nn.semantic_ids import ResidualKMeans, SemanticIds
from jaxrec.serve.artifact.refresh import Refresher
from jaxrec.train import compile_step


@dataclasses.dataclass(frozen=True)
class Settings:
    num_users: int = 4000
    num_items: int = 200
    steps: int = 500
    batch_size: int = 128
    max_length: int = 12
    dim: int = 32
    num_layers: int = 2
    codebook_size: int = 16
    learning_rate: float = 5e-3
    beam_size: int = 20
    seed: int = 0


def item_vectors(rows: list[np.ndarray], num_items: int, dim: int) -> np.ndarray:
    """Vectors of items by a factorization of how often one follows another."""
    counts = np.zeros((num_items, num_items))
    for row in rows:
        np.add.at(counts, (row[:-1], row[1:]), 1)
    left, values, right = np.linalg.svd(np.log1p(counts))
    both = np.concatenate([left[:, :dim] * values[:dim], right[:dim].T * values[:dim]], axis=1)
    return both.astype(np.float32)


def train_step(model, optimizer, batch):
    loss, gradients = jaxrec.value_and_grad(lambda model: model.loss(batch))(model)
    optimizer.update(model, gradients)
    return loss


def main(settings: Settings) -> dict[str, float]:
    data = Interactions.generate(settings.num_users, settings.num_items, settings.seed)
    rows = [row - 1 for row in data.sequences]  # items from 0
    train = [row[:-1][-settings.max_length :] for row in rows]
    vectors = item_vectors(train, settings.num_items, settings.dim)
    quantizer = ResidualKMeans(2, settings.codebook_size, seed=settings.seed).fit(vectors)
    ids = SemanticIds.of(quantizer.encode(vectors), sizes=quantizer.sizes)
    print(ids.report())

    model = SemanticIdDecoder(
        ids, dim=settings.dim, num_layers=settings.num_layers, num_heads=2,
        max_length=settings.max_length, capacity=settings.num_items + 50, block_size=32,
        rngs=nnx.Rngs(settings.seed),
    )  # fmt: skip
    optimizer = jaxrec.Optimizer(model, optax.adam(settings.learning_rate))
    step, rng = compile_step(train_step, model, optimizer), np.random.default_rng(settings.seed)
    packer, losses, begun = jaxrec.Packer(), [], time.perf_counter()
    for count in range(settings.steps):
        chosen = rng.choice(len(train), settings.batch_size, replace=False)
        batch = packer.from_lists({"history": [train[row] for row in chosen]})
        losses.append(float(step(batch)))
        if (count + 1) % 100 == 0:
            seconds = time.perf_counter() - begun
            print(f"step {count + 1}: loss {np.mean(losses[-100:]):.3f}, {seconds:.0f} s")
    model.eval()

    def recommend(model, features):
        beams = model.generate(features, k=10, beam_size=settings.beam_size)
        return {"items": beams.items, "scores": beams.scores}

    asked = [row[:-1][-settings.max_length :] for row in rows[:512]]
    wanted = np.array([row[-1] for row in rows[:512]])
    folder = pathlib.Path(tempfile.mkdtemp())
    batch = packer.from_lists({"history": asked[:64]})
    jaxrec.serve.export(
        model, folder / "model", function=recommend, example=batch, batch_sizes=(64,),
        platforms=("cpu",),
    )  # fmt: skip
    served = jaxrec.serve.load(folder / "model")
    found = served.predict(packer.from_lists({"history": asked}))["items"]
    recall = float((found == wanted[:, None]).any(axis=1).mean())
    print(f"recall@10 of the last items, served: {recall:.3f} (of any ten items: "
          f"{10 / settings.num_items:.3f})")  # fmt: skip

    # A new item takes the place of the first one of an answer: its vector is the same, so that the
    # two differ by the last code. The model was not trained on the fresh one, and would rarely
    # write it; the new item gets the trained one, and the old item the fresh one.
    first = int(found[0, 0])
    more = ids.append(quantizer.encode(vectors[[first]]), items=[settings.num_items])
    codes = more.codes.copy()
    codes[[first, -1]] = codes[[-1, first]]
    model.set_items(SemanticIds(more.items, codes, more.sizes))
    jaxrec.tier.publish(model, folder / "versions")
    Refresher(served, folder / "versions").update()
    again = served.predict(packer.from_lists({"history": asked}))["items"]
    share = float((again == settings.num_items).any(axis=1).mean())
    print(f"item {settings.num_items} is new, and in the answers of {share:.1%} of the users")
    return {"recall@10": recall, "share of the new item": share}


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
