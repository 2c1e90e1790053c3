"""What the compiled training step may not contain: copies of tables, gradients of their shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from tests.copies import find_copies
from tests.users_xla import AS_USERS_DO

pytestmark = pytest.mark.jax_version

ROWS, DIM, SMALL = 20_011, 8, 100


class Ranker(nnx.Module):
    def __init__(self, optimizer, dtype="float32"):
        rngs = nnx.Rngs(0)
        configs = [
            jaxrec.EmbeddingBagConfig("big", ROWS, DIM, dtype=dtype),
            jaxrec.EmbeddingBagConfig("small", SMALL, DIM, feature_names=("f", "big"), dtype=dtype),
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=rngs)
        self.over = nnx.Linear(3 * DIM, 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def square_loss(model, features):
    return (model(features) ** 2).mean()


def linear_loss(model, features):
    """Its gradient does not depend on what was looked up."""
    return model.embeddings(features).values.sum()


def read_twice_loss(model, features):
    return square_loss(model, features) + linear_loss(model, features)


def make_batch():
    return jaxrec.KeyedJaggedArray(
        jnp.arange(16, dtype=jnp.int32),
        jnp.array([2, 3, 0, 1, 1, 1, 1, 1], jnp.int32),
        keys=("big", "f"),
        capacities=(8, 8),
        strides=(4, 4),
    )


def compile_step(optimizer, loss_fn, dtype="float32"):
    model = Ranker(optimizer, dtype)
    graphdef, state = nnx.split((model, jaxrec.Optimizer(model, optax.adam(1e-3))))

    def step(state, features):
        model, optimizer = nnx.merge(graphdef, state)
        loss, gradients = jaxrec.value_and_grad(loss_fn)(model, features)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    compiled = jax.jit(step, donate_argnums=0).lower(state, make_batch()).compile(AS_USERS_DO)
    return state, compiled


STEPS = {
    "sgd": (jaxrec.optim.sgd(0.1), square_loss, "float32"),
    "rowwise_adagrad": (jaxrec.optim.rowwise_adagrad(0.1), square_loss, "float32"),
    "adam": (jaxrec.optim.adam(0.1), square_loss, "float32"),
    "linear_loss": (jaxrec.optim.rowwise_adagrad(0.1), linear_loss, "float32"),
    "read_twice": (jaxrec.optim.rowwise_adagrad(0.1), read_twice_loss, "float32"),
    "bfloat16": (jaxrec.optim.rowwise_adagrad(0.1), square_loss, "bfloat16"),
    "clip_norm": (jaxrec.optim.sgd(0.1, clip_norm=1.0), square_loss, "float32"),
}


@pytest.mark.parametrize(("optimizer", "loss_fn", "dtype"), STEPS.values(), ids=STEPS)
def test_no_copy_of_a_table(optimizer, loss_fn, dtype):
    state, compiled = compile_step(optimizer, loss_fn, dtype)
    group_rows = ROWS + SMALL
    assert find_copies(compiled, (group_rows, DIM)) == []
    assert find_copies(compiled, (group_rows,)) == []
    table_bytes = group_rows * DIM * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < table_bytes / 10

    def pointers(state):
        leaves = jax.tree.leaves(state)
        return {x.unsafe_buffer_pointer() for x in leaves if x.shape[:1] == (group_rows,)}

    before = pointers(state)
    state, loss = compiled(state, make_batch())
    assert np.isfinite(loss)
    assert pointers(state) == before


def test_no_gradient_has_the_size_of_a_table():
    model = Ranker(jaxrec.optim.sgd(0.1))
    _, gradients = jaxrec.value_and_grad(square_loss)(model, make_batch())
    assert all(leaf.size < ROWS for leaf in jax.tree.leaves(gradients))
