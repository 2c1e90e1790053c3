"""Attention to a target, and Dice, are the paper's formulas in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import DIN, Dice, TargetAttention

pytestmark = pytest.mark.usefixtures("compiled_fast")

DIM = 4


def wide(x):
    return np.asarray(x, np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_target_attention():
    rng = np.random.default_rng(0)
    attention = TargetAttention(DIM, layer_sizes=(6, 3, 1), rngs=nnx.Rngs(0))
    values = rng.standard_normal((8, DIM)).astype(np.float32)  # the last two are padding
    targets = rng.standard_normal((3, DIM)).astype(np.float32)
    found = attention(jaxrec.JaggedArray(values, np.array([2, 0, 4], np.int32)), targets)
    expected, starts = np.zeros((3, DIM)), [0, 2, 2, 6]
    for row in range(3):
        for e in wide(values[starts[row] : starts[row + 1]]):
            t = wide(targets[row])
            x = np.concatenate([e, t, e - t, e * t])
            for layer in attention.hidden.layers:
                x = sigmoid(x @ wide(layer.kernel[...]) + wide(layer.bias[...]))
            weight = x @ wide(attention.score.kernel[...]) + wide(attention.score.bias[...])
            expected[row] += weight * e
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[1], 0)


def test_dice_uses_the_batch_in_training_and_averages_afterwards():
    rng = np.random.default_rng(0)
    dice = Dice(3, rngs=nnx.Rngs(0))
    dice.slopes[...] = jnp.array([0.0, 0.5, 2.0])
    x = rng.standard_normal((50, 3)).astype(np.float32) * 3 + 1
    y = wide(x)
    gate = sigmoid((y - y.mean(0)) / np.sqrt(y.var(0) + 1e-8))
    expected = gate * y + (1 - gate) * np.array([0, 0.5, 2]) * y
    np.testing.assert_allclose(dice(x), expected, rtol=1e-4, atol=1e-5)
    for _ in range(2000):
        dice.normal(x)
    dice.eval()
    np.testing.assert_allclose(dice(x[:1]), expected[:1], rtol=1e-3, atol=1e-3)


def make(pairs, tables=("item",), **options):
    rngs = nnx.Rngs(0)
    configs = [
        jaxrec.EmbeddingConfig(name, 20, DIM, (f"{name}_history", f"{name}_target"))
        for name in tables
    ]
    items = jaxrec.EmbeddingCollection(configs, rngs=rngs)
    return DIN(items, pairs, top_layer_sizes=(5, 1), rngs=rngs, **options)


def test_features_of_an_item_stand_side_by_side():
    model = make(
        {"item_history": "item_target", "shop_history": "shop_target"},
        ("item", "shop"),
        num_dense=2,
    )
    bags = {
        "item_history": [[1, 2, 3], []],
        "shop_history": [[4, 5, 6], []],
        "item_target": [[7], [8]],
        "shop_target": [[9], [10]],
    }
    batch = jaxrec.KeyedJaggedArray.from_lists(bags)
    predict = nnx.jit(lambda model, batch: model(jnp.zeros((2, 2)), batch))
    logits = predict(model, batch)
    assert logits.shape == (2,)
    other = jaxrec.KeyedJaggedArray.from_lists(bags | {"shop_history": [[4, 5, 11], []]})
    changed = predict(model, other)
    assert float(changed[0]) != float(logits[0])


def test_what_histories_must_be():
    with pytest.raises(ValueError, match="a history and its target each"):
        make({})
    with pytest.raises(ValueError, match="a history and its target each"):
        make({"item_history": "clicked"})
    model = make({"item_history": "item_target", "shop_history": "shop_target"}, ("item", "shop"))
    bags = {
        "item_history": [[1] * 9],
        "shop_history": [[4]],
        "item_target": [[7]],
        "shop_target": [[9]],
    }
    with pytest.raises(ValueError, match="one length and one capacity"):
        model(None, jaxrec.KeyedJaggedArray.from_lists(bags))
