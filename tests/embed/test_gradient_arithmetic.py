"""Arithmetic on `Gradients`: right by its own methods, an error by `jax.tree.map`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec

ROWS = {"user": 8, "product": 10}
# Rows of `product` that are no rows of `user`, and a row that occurs more than once.
USERS = [[1, 2], [], [3, 3]]
PRODUCTS = [[4], [4, 5], [9]]


class Ranker(nnx.Module):
    def __init__(self, rngs):
        tables = [
            jaxrec.EmbeddingBagConfig("user", ROWS["user"], 4),
            jaxrec.EmbeddingBagConfig("product", ROWS["product"], 4, pooling="mean"),
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(
            tables, optimizer=jaxrec.optim.sgd(0.5), rngs=rngs
        )
        self.over = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def batch():
    return jaxrec.KeyedJaggedArray.from_lists({"user": USERS, "product": PRODUCTS})


def loss_fn(model):
    return (model(batch()) ** 2).mean()


@pytest.fixture(scope="module")
def gradients():
    return jaxrec.value_and_grad(loss_fn)(Ranker(nnx.Rngs(0)))[1]


def dense_gradients():
    """The same model's gradient with tables as parameters, in NumPy float64."""
    model = Ranker(nnx.Rngs(0))
    tables = {name: np.asarray(model.embeddings.table(name), np.float64) for name in ROWS}
    kernel = np.asarray(model.over.kernel[...], np.float64)
    user = np.stack([tables["user"][bag].sum(0) for bag in USERS])
    product = np.stack([tables["product"][bag].mean(0) for bag in PRODUCTS])
    pooled = np.concatenate([user, product], axis=1)
    bias = np.asarray(model.over.bias[...], np.float64)
    cotangent = 2 * (pooled @ kernel + bias) / 3
    gradient = {name: np.zeros_like(table) for name, table in tables.items()}
    for sample, (users, products) in enumerate(zip(USERS, PRODUCTS, strict=True)):
        for row in users:
            gradient["user"][row] += cotangent[sample] @ kernel[:4].T
        for row in products:
            gradient["product"][row] += cotangent[sample] @ kernel[4:].T / len(products)
    return gradient | {"kernel": pooled.T @ cotangent, "bias": cotangent.sum(0)}


def moved(gradients):
    """How an SGD step of rate 0.5 moves the tables, over the rate: the gradient that it took."""
    model = Ranker(nnx.Rngs(0))
    before = {name: np.asarray(model.embeddings.table(name)) for name in ROWS}
    jaxrec.Optimizer(model, optax.sgd(0.5)).update(model, gradients)
    return {name: (before[name] - model.embeddings.table(name)) / 0.5 for name in ROWS}


@pytest.mark.parametrize(
    ("arithmetic", "factor"),
    [
        (lambda g: 2 * g, 2),
        (lambda g: g * 0.5, 0.5),
        (lambda g: g / 4, 0.25),
        (lambda g: -g, -1),
        (lambda g: g + g, 2),
        (lambda g: sum([g, g, g]), 3),
        (lambda g: 3 * g - g, 2),
        (lambda g: g.scale(jnp.float32(3)), 3),
        (lambda g: g.map(lambda x: -2 * x), -2),
        (lambda g: g.astype("float32"), 1),
    ],
    ids=["2*g", "g*0.5", "g/4", "-g", "g+g", "sum", "3*g-g", "scale", "map", "astype"],
)
def test_own_arithmetic_moves_the_right_rows_of_the_right_tables(gradients, arithmetic, factor):
    expected = dense_gradients()
    for name, rows in moved(arithmetic(gradients)).items():
        np.testing.assert_allclose(rows, factor * expected[name], atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda g: jax.tree.map(lambda x: 2 * x, g),
        lambda g: jax.tree.map(lambda x: 0.5 * x, g),
        lambda g: jax.tree.map(jnp.negative, g),
        lambda g: jax.tree.map(lambda x: jnp.clip(x, -1, 1), g),
        lambda g: jax.tree.map(jnp.add, g, g),
        lambda g: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g),
        lambda g: jax.jit(lambda g: jax.tree.map(lambda x: x * 2, g))(g),
        optax.tree.norm,
        lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState()),
    ],
    ids=["2*x", "0.5*x", "-x", "clip", "x+y", "cast", "jit", "tree.norm", "clip_by_global_norm"],
)
def test_arithmetic_by_tree_map_is_an_error(gradients, function):
    with pytest.raises((TypeError, NotImplementedError)):
        function(gradients)


def test_the_error_names_what_to_use(gradients):
    with pytest.raises(TypeError, match=r"row indices of jaxrec\.Gradients: use its map, scale"):
        jax.tree.map(lambda x: 2 * x, gradients)


def test_norms_are_those_of_dense_gradients(gradients):
    expected = dense_gradients()
    norms = gradients.table_norms()["embeddings"]
    assert set(norms) == set(ROWS)
    for name in ROWS:
        np.testing.assert_allclose(norms[name], np.linalg.norm(expected[name]), rtol=1e-5)
    whole = np.sqrt(sum(np.sum(x**2) for x in expected.values()))
    np.testing.assert_allclose(gradients.norm(), whole, rtol=1e-5)


@pytest.mark.parametrize("share", [0.5, 2.0], ids=["above the bound", "below the bound"])
def test_clip_is_that_of_optax_over_dense_gradients(gradients, share):
    expected = {name: jnp.asarray(x, jnp.float32) for name, x in dense_gradients().items()}
    bound = share * float(optax.tree.norm(expected))
    clipped, _ = optax.clip_by_global_norm(bound).update(expected, optax.EmptyState())
    own = gradients.clip(bound)
    for name, rows in moved(own).items():
        np.testing.assert_allclose(rows, clipped[name], atol=1e-6)
    np.testing.assert_allclose(own.dense["over"]["kernel"][...], clipped["kernel"], atol=1e-6)
    np.testing.assert_allclose(own.norm(), optax.tree.norm(clipped), rtol=1e-5)


def test_a_function_that_changes_a_shape_is_an_error(gradients):
    with pytest.raises(ValueError, match="keeps their shapes"):
        gradients.map(jnp.sum)


def test_gradients_of_other_collections_are_not_added(gradients):
    single = jaxrec.EmbeddingBagCollection(
        [jaxrec.EmbeddingBagConfig("user", 8, 4)], rngs=nnx.Rngs(0)
    )
    users = jaxrec.KeyedJaggedArray.from_lists({"user": USERS})
    other = jaxrec.value_and_grad(lambda model: model(users).values.sum())(single)[1]
    with pytest.raises(ValueError, match="same collections"):
        gradients + other


def test_gradients_cross_jit_and_scan_with_the_same_bits(gradients):
    def body(carry, factor):
        return carry, 2 * gradients

    stacked = jax.jit(lambda: jax.lax.scan(body, 0, jnp.arange(3))[1])()
    first = jax.tree.map(lambda x: x[0], stacked)
    for name, rows in moved(first).items():
        np.testing.assert_array_equal(rows, moved(2 * gradients)[name])
    for name, rows in moved(jaxrec.mean_gradients(stacked)).items():
        np.testing.assert_allclose(rows, 2 * dense_gradients()[name], atol=1e-6)


def test_an_update_by_optax_of_accumulated_steps_is_refused(unchecked):
    model = Ranker(nnx.Rngs(0))
    for tx in (
        optax.MultiSteps(optax.adam(1e-3), 4),
        optax.chain(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
    ):
        with pytest.raises(ValueError, match=r"MultiSteps.*jaxrec\.mean_gradients"):
            jaxrec.Optimizer(model, tx)


@pytest.mark.parametrize("tx", [jaxrec.optim.sgd(0.1), 1e-3, "adam"], ids=["row", "float", "str"])
def test_an_optimizer_of_another_kind_is_named(tx, unchecked):
    with pytest.raises(TypeError, match="optax transformation"):
        jaxrec.Optimizer(Ranker(nnx.Rngs(0)), tx)
