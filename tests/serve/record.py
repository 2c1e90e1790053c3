"""Writes the exported models of tests/serve/recorded, which later versions must load.

    python -m tests.serve.record

They were recorded with the oldest supported JAX, and call each function of the native library that
exported programs may call, in its first version. They are never written again: a change that they
do not survive needs a new version of the function (`EXPORTED_VERSIONS`) and new recordings beside.
So the command only writes those that are missing.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import numpy as np
from flax import nnx

import jaxrec

RECORDED = pathlib.Path(__file__).parent / "recorded"
DTYPES = ("float32", "int8")
ATTENTION = "attention"


class Ranker(nnx.Module):
    """Bags that are added and averaged, some of them weighted, and a sequence."""

    def __init__(self, rngs: nnx.Rngs):
        config, normal = jaxrec.EmbeddingBagConfig, nnx.initializers.normal(1.0)
        pooled = (
            config("product", 40, 8, initializer=normal),
            config("user", 30, 8, ("user", "friends"), pooling="mean", initializer=normal),
        )
        items = jaxrec.EmbeddingConfig("item", 20, 8, initializer=normal)
        self.embeddings = jaxrec.EmbeddingBagCollection(pooled, is_weighted=True, rngs=rngs)
        self.sequence = jaxrec.EmbeddingCollection([items], rngs=rngs)
        self.over = nnx.Linear(8 * 4 + 2, 1, rngs=rngs)

    def __call__(self, dense, features):
        pooled = self.embeddings(features).values
        items = self.sequence(features)["item"].to_padded_dense(4).sum(axis=1)
        return self.over(jax.numpy.concatenate([dense, pooled, items], axis=1))[:, 0]


def make_batch(samples: int) -> tuple[np.ndarray, jaxrec.KeyedJaggedArray]:
    rng = np.random.default_rng(samples)
    bounds = {"product": 40, "user": 30, "friends": 30, "item": 20}
    lists = {
        key: [rng.integers(0, bound, rng.integers(0, 5)).tolist() for _ in range(samples)]
        for key, bound in bounds.items()
    }
    weights = {key: [rng.random(len(bag)).tolist() for bag in bags] for key, bags in lists.items()}
    features = jaxrec.KeyedJaggedArray.from_lists(lists, weights=weights)
    return rng.standard_normal((samples, 2)).astype(np.float32), features


class SequenceRanker(nnx.Module):
    """A layer of a ranker over a sequence, which is attention with a bias."""

    def __init__(self, rngs: nnx.Rngs):
        items = jaxrec.EmbeddingConfig("item", 20, 8, initializer=nnx.initializers.normal(1.0))
        self.sequence = jaxrec.EmbeddingCollection([items], rngs=rngs)
        self.block = jaxrec.nn.HSTUBlock(8, 2, max_length=4, rngs=rngs)

    def __call__(self, features):
        items = self.sequence(features)["item"]
        states = self.block(items.values, items.lengths)
        return dataclasses.replace(items, values=states).to_padded_dense(4).sum(axis=(1, 2))


def make_sequences(samples: int) -> tuple[jaxrec.KeyedJaggedArray]:
    rng = np.random.default_rng(samples)
    lists = [rng.integers(0, 20, rng.integers(0, 5)).tolist() for _ in range(samples)]
    return (jaxrec.KeyedJaggedArray.from_lists({"item": lists}),)


def main() -> None:
    # Programs name the source files of their operations: by name alone, not by this machine's path.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    model = Ranker(nnx.Rngs(0))
    quantized = functools.partial(jaxrec.serve.quantize, model)
    served = {
        dtype: (model if dtype == "float32" else quantized(dtype=dtype), make_batch)
        for dtype in DTYPES
    }
    served[ATTENTION] = (SequenceRanker(nnx.Rngs(0)), make_sequences)
    for name, (each, batch_of) in served.items():
        if (RECORDED / name).exists():
            continue
        jaxrec.serve.export(
            each,
            RECORDED / name,
            example=batch_of(50),
            batch_sizes=(1, 8),
            ids_per_sample=4,
            platforms=("cpu",),
        )
        np.save(RECORDED / f"{name}.npy", np.asarray(each(*batch_of(20))))


if __name__ == "__main__":
    main()
