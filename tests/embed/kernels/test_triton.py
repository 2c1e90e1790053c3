"""The Triton kernels: interpreted on the CPU against the reference, and lowered for CUDA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed import EmbeddingBagConfig, apply_gradients, init_tables, lookup
from jaxrec.embed.kernels import Lookups, reference, triton, use_kernels
from jaxrec.ragged import KeyedJaggedArray
from tests.embed.kernels.gpu_cases import Batch, lowered_for_cuda

BATCHES = {
    "one_bag": Batch(4, ((3,),)),
    "by_feature": Batch(8, ((1, 3), (2, 0)), interleave=False),
    "odd_dim": Batch(3, ((1, 0, 2), (2, 2, 0))),
    "dim_1_weighted": Batch(1, ((4, 1), (0, 2)), weighted=True),
    "short_bags": Batch(16, ((1, 1, 0, 1, 1, 1, 2), (1, 0, 1, 1, 1, 1, 1)), outside=True),
    "long_bags": Batch(100, ((40, 0), (9, 21)), weighted=True, hot=0.5),
    "uneven": Batch(64, ((1, 2, 0), (5,), (0, 3)), slack=0, outside=True),
    "bfloat16": Batch(32, ((2, 3), (1, 4)), dtype="bfloat16", weighted=True),
    "float16_wide": Batch(600, ((2, 3),), dtype="float16"),
    "all_empty": Batch(8, ((0, 0), (0, 0))),
    "no_ids": Batch(8, ((0, 0),), slack=0),
}
OPTIMIZERS = {
    "sgd": optim.sgd(0.1, clip_value=0.5),
    "adagrad": optim.adagrad(0.1, max_norm=0.9),
    "rowwise_adagrad": optim.rowwise_adagrad(0.1),
    "rowwise_adagrad_l2": optim.rowwise_adagrad(0.1, weight_decay=0.1, weight_decay_mode="l2"),
    "adam": optim.adam(0.1, weight_decay=0.1),
    "partial_rowwise_adam": optim.partial_rowwise_adam(lambda step: 0.1 / (step + 1)),
}
# Compiled, each is one program, and not one for each of its operations.
flatten_bags = jax.jit(reference.flatten_bags, static_argnums=(3, 4))
reference_lookup = jax.jit(reference.pooled_lookup, static_argnums=(4, 5))
reference_update = jax.jit(reference.fused_update, static_argnums=4)
interpreted_lookup = jax.jit(
    functools.partial(triton.pooled_lookup, interpret=True), static_argnums=(4, 5)
)
interpreted_update = jax.jit(
    functools.partial(triton.fused_update, interpret=True), static_argnums=4
)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}

deprecated = pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_pooled_lookup(batch: Batch):
    arguments = (*batch.arrays(), batch.layout, jnp.float32)
    expected = reference_lookup(*arguments)
    result = interpreted_lookup(*arguments)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["odd_dim", "uneven", "bfloat16", "no_ids"])
def test_row_lookup(name: str):
    batch = BATCHES[name]
    table, lookups = batch.arrays()[0], flat(batch)
    result = triton.row_lookup(table, lookups.rows, interpret=True)
    np.testing.assert_array_equal(result, reference.row_lookup(table, lookups.rows))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("long_bags", name) for name in OPTIMIZERS]
    + [("odd_dim", "rowwise_adagrad"), ("uneven", "sgd"), ("bfloat16", "rowwise_adagrad")]
    + [("float16_wide", "adam"), ("all_empty", "rowwise_adagrad")],
)
def test_fused_update(name: str, optimizer: str):
    table, state, lookups, gradients = update_arguments(BATCHES[name], OPTIMIZERS[optimizer])
    arguments = (table, state, lookups, gradients, OPTIMIZERS[optimizer], jnp.int32(3))
    expected_table, expected_state = reference_update(*arguments)
    new_table, new_state = interpreted_update(*arguments)
    assert new_table.dtype == table.dtype
    assert set(new_state) == set(expected_state)
    np.testing.assert_allclose(
        np.float32(new_table), np.float32(expected_table), rtol=TOLERANCE[BATCHES[name].dtype]
    )
    for key, values in expected_state.items():
        np.testing.assert_allclose(new_state[key], values, rtol=1e-5, atol=1e-6)


def test_rows_without_lookups_keep_their_bits():
    batch = BATCHES["bfloat16"]
    optimizer = OPTIMIZERS["rowwise_adagrad"]
    table, state, lookups, gradients = update_arguments(batch, optimizer)
    new_table, new_state = interpreted_update(
        table, state, lookups, gradients, optimizer, jnp.int32(0)
    )
    untouched = np.setdiff1d(np.arange(table.shape[0]), lookups.rows)
    assert untouched.size > 0
    np.testing.assert_array_equal(new_table[untouched], table[untouched])
    np.testing.assert_array_equal(new_state["accumulator"][untouched], 1)


def test_update_without_lookups():
    optimizer = OPTIMIZERS["adagrad"]
    table, state, lookups, gradients = update_arguments(BATCHES["no_ids"], optimizer)
    new_table, new_state = interpreted_update(
        table, state, lookups, gradients, optimizer, jnp.int32(0)
    )
    np.testing.assert_array_equal(new_table, table)
    np.testing.assert_array_equal(new_state["accumulator"], state["accumulator"])


def test_lookups_one_by_one():
    # Per-id lookups have no bags: lookup i has the gradient's row i.
    table = jnp.zeros((4, 2))
    lookups = Lookups(jnp.array([2, 4, 2, 0], jnp.int32), None, None)
    gradients = jnp.arange(8.0).reshape(4, 2)
    new_table, _ = interpreted_update(table, {}, lookups, gradients, optim.sgd(1.0), jnp.int32(0))
    np.testing.assert_array_equal(new_table, [[-6, -7], [0, 0], [-4, -6], [0, 0]])


@deprecated
@pytest.mark.parametrize("name", ["dim_1_weighted", "short_bags", "long_bags", "uneven"])
def test_pooled_lookup_lowers_for_cuda(name: str):
    batch = BATCHES[name]
    kernel = functools.partial(triton.pooled_lookup, layout=batch.layout, dtype=jnp.bfloat16)
    assert "triton" in lowered_for_cuda(kernel, *batch.arrays())


@deprecated
def test_row_lookup_lowers_for_cuda():
    batch = BATCHES["odd_dim"]
    assert "triton" in lowered_for_cuda(triton.row_lookup, batch.arrays()[0], flat(batch).rows)


@deprecated
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("long_bags", name) for name in OPTIMIZERS]
    + [("bfloat16", "adam"), ("float16_wide", "rowwise_adagrad")],
)
def test_fused_update_lowers_for_cuda(name: str, optimizer: str):
    def update(table, state, lookups, gradients, step):
        rule = OPTIMIZERS[optimizer]
        return triton.fused_update(table, state, lookups, gradients, rule, step)

    arguments = update_arguments(BATCHES[name], OPTIMIZERS[optimizer])
    assert "triton" in lowered_for_cuda(update, *arguments, jnp.int32(0))


def flat(batch: Batch) -> Lookups:
    table, ids, lengths, weights = batch.arrays()
    return flatten_bags(ids, lengths, weights, batch.layout, table.shape[0])


def update_arguments(batch: Batch, optimizer: optim.RowOptimizer) -> tuple:
    """Table, state (ones), lookups and gradients."""
    table = batch.arrays()[0]
    state = {name: values + 1 for name, values in optimizer.init(*table.shape).items()}
    shape = (batch.layout.num_bags, batch.dim)
    return table, state, flat(batch), jax.random.normal(jax.random.key(0), shape)


@deprecated
def test_a_step_lowers_for_cuda_when_triton_is_named():
    config = EmbeddingBagConfig("user", num_embeddings=10, embedding_dim=4)
    tables = init_tables([config], optim.rowwise_adagrad(0.1), jax.random.key(0))
    batch = KeyedJaggedArray.from_lists({"user": [[1, 2], []]})

    def program() -> str:
        def step(tables, batch):
            activations, residuals = lookup(tables, batch)
            return apply_gradients(tables, residuals, activations, step=0)

        return lowered_for_cuda(step, tables, batch)

    with use_kernels("triton", "reference"):
        assert [
            name for name in ("pool", "sum_parts", "update") if f'"{name}"' not in program()
        ] == []
    assert "triton" not in program()
