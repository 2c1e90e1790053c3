"""Exported models with max pooling and padding ids score as the model does."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.serve import by_norm, quantize

PAD, SAMPLES = 5, 8


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        configs = [
            jaxrec.EmbeddingBagConfig(
                name, 30, 8, ("user", "tags"), pooling=name, padding_id=PAD, initializer="normal"
            )
            for name in ("max", "mean")
        ]
        self.bags = jaxrec.EmbeddingBagCollection(configs, rngs=rngs)
        self.single = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("item", 30, 8, padding_id=PAD, initializer="normal")], rngs=rngs
        )

    def __call__(self, features):
        return self.bags(features).values, self.single(features)["item"].to_padded_dense(4)


def make_batch(samples: int = SAMPLES) -> jaxrec.KeyedJaggedArray:
    rng = np.random.default_rng(0)
    lists = {
        key: [
            np.where(rng.random(n) < 0.3, PAD, rng.integers(0, 30, n)).tolist()
            for n in rng.integers(0, 5, samples)
        ]
        for key in ("user", "tags", "item")
    }
    return jaxrec.KeyedJaggedArray.from_lists(lists, capacities=dict.fromkeys(lists, 4 * samples))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "float8"])
def test_quantized_models(dtype):
    """As a float model with the quantized rows; pruned rows are zeros."""
    model = Model()
    small = quantize(model, dtype, prune={"mean": by_norm(share=0.3), "item": by_norm(share=0.2)})
    for module in ("bags", "single"):
        collection = getattr(model, module)
        for config in collection.configs:
            rows = np.asarray(getattr(small, module).table(config.name))
            np.testing.assert_array_equal(rows[PAD], 0)
            collection.load_table(config.name, rows)
    batch = make_batch()
    for found, expected in zip(small(batch), model(batch), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_pruning_refuses_max_pooling():
    with pytest.raises(ValueError, match="table 'max' has pooling='max'"):
        quantize(Model(), "int8", prune={"max": by_norm(share=0.3)})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8"], ids=["float32", "int8"])
def test_exported_models(tmp_path, dtype):
    model = Model() if dtype is None else quantize(Model(), dtype)
    model.eval()
    jaxrec.serve.export(
        model,
        tmp_path / "model",
        example=(make_batch(),),
        batch_sizes=(SAMPLES,),
        platforms=("cpu",),
    )
    served = jaxrec.serve.load(tmp_path / "model")
    for found, expected in zip(served.predict(make_batch()), model(make_batch()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
