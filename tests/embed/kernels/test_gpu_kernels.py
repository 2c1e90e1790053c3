"""The kernels for GPUs: interpreted on the CPU against the reference, and lowered for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxrec import optim
from jaxrec.embed import EmbeddingBagConfig, apply_gradients, init_tables, kernels, lookup
from jaxrec.embed.kernels import Lookups, reference, use_kernels
from jaxrec.optim.hyperparameters import UpdateStep
from jaxrec.ragged import KeyedJaggedArray
from tests.embed.kernels.gpu_cases import (
    Batch,
    compiled_fast,
    gpu_kernels,
    kernels_in,
    lowered_for_cuda,
    name_of,
)

pytestmark = pytest.mark.jax_version

BATCHES = {
    "dim_1_weighted": Batch(1, ((4, 1), (0, 2)), weighted=True),
    "short_bags": Batch(16, ((1, 1, 0, 1, 1, 1, 2), (1, 0, 1, 1, 1, 1, 1)), outside=True),
    "long_bags": Batch(100, ((40, 0), (9, 21)), weighted=True, hot=0.5),
    "uneven": Batch(64, ((1, 2, 0), (5,), (0, 3)), slack=0, outside=True),
    "bfloat16": Batch(32, ((2, 3), (1, 4)), dtype="bfloat16", weighted=True),
    "float16_wide": Batch(600, ((2, 3),), dtype="float16"),
}
RATE = optim.hyperparameter("rate", 0.1)
OPTIMIZERS = {
    "sgd": optim.sgd(0.1, clip_value=0.5),
    "hyperparameter": optim.sgd(RATE),
    "momentum_sgd": optim.momentum_sgd(0.1, nesterov=True, clip_norm=1.0),
    "adagrad": optim.adagrad(0.1, max_norm=0.9, clip_norm=0.5),
    "rowwise_adagrad": optim.rowwise_adagrad(0.1),
    "rowwise_adagrad_l2": optim.rowwise_adagrad(0.1, weight_decay=RATE, weight_decay_mode="l2"),
    "counter_adagradw": optim.rowwise_adagrad_with_counter(
        0.1, weight_decay=0.1, weight_decay_mode="adagradw", learning_rate_mode="sqrt_counter"
    ),
    "counter_tail": optim.rowwise_adagrad_with_counter(
        0.1, halflife=2, learning_rate_mode="tail_increase", max_counter=RATE
    ),
    "cowclip": optim.rowwise_adagrad_cowclip(
        0.1, clip_ratio=0.5, weight_decay=0.1, weight_decay_mode="l2"
    ),
    "adam": optim.adam(0.1, weight_decay=0.1),
    "adam_rowwise": optim.adam(0.1, rowwise_bias_correction=True),
    "partial_rowwise_adam": optim.partial_rowwise_adam(lambda step: 0.1 / (step + 1)),
    "lamb": optim.lamb(0.1, weight_decay=0.1),
    "partial_rowwise_lamb": optim.partial_rowwise_lamb(0.1),
    "lars_sgd": optim.lars_sgd(0.1),
    "ftrl": optim.ftrl(0.1),
    "rmsprop": optim.rmsprop(0.1),
    "rowwise_rmsprop": optim.rowwise_rmsprop(0.1),
    "ema": optim.ema(optimizer=optim.rowwise_adagrad(0.1)),
}
# Compiled, each is one program, and not one for each of its operations.
flatten_bags = jax.jit(reference.flatten_bags, static_argnums=(3, 4))
reference_update = jax.jit(reference.fused_update, static_argnums=(4, 6))


@functools.cache
def interpreted_update(gpu: ModuleType) -> Callable:
    kernel = functools.partial(gpu.fused_update, interpret=True)
    return compiled_fast(kernel, static_argnums=(4, 6))


TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}

deprecated = pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("long_bags", name) for name in OPTIMIZERS] + [("float16_wide", "adam")],
)
def test_every_optimizer(gpu: ModuleType, name: str, optimizer: str):
    """Rows of 100 columns are padded, which no sum over a row may count."""
    rule = OPTIMIZERS[optimizer]
    table, state, lookups, gradients = update_arguments(BATCHES[name], rule)
    step = UpdateStep(jnp.int32(3), {"rate": jnp.float32(0.3)})
    arguments = (table, state, lookups, gradients, rule, step, (0, 7))
    expected_table, expected_state = reference_update(*arguments)
    new_table, new_state = interpreted_update(gpu)(*arguments)
    assert new_table.dtype == table.dtype
    assert set(new_state) == set(expected_state)
    np.testing.assert_allclose(
        np.float32(new_table),
        np.float32(expected_table),
        rtol=TOLERANCE[BATCHES[name].dtype],
        atol=1e-6,
    )
    for key, values in expected_state.items():
        np.testing.assert_allclose(new_state[key], values, rtol=1e-5, atol=1e-6)


def test_optimizers_that_sum_rows_in_their_own_way_are_refused(gpu: ModuleType):
    class Own(optim.RowOptimizer):
        def init(self, num_rows, dim):
            return {}

        def update(self, rows, gradients, state, step):
            return rows - gradients / jnp.linalg.norm(gradients, axis=1), state

    arguments = {"table": jnp.zeros((2, 4)), "state": {}, "optimizer": Own()}
    reason = gpu.refuse("fused_update", arguments)
    assert reason == "Own has neither is_elementwise nor sums_rows"
    assert gpu.refuse("row_lookup", {}) is None


@pytest.mark.parametrize(
    ("num_lookups", "cut", "block"),
    [(1000, 2, 3), (100_000, 64, 256), (50_000, 8, 4), (100_000, 64, 10_000)],
    ids=["small_cuts", "as_gpus_cut", "many_blocks", "no_blocks"],
)
@pytest.mark.parametrize("share", [0.9, 1.0], ids=["mixed", "one_row"])
def test_a_hot_row(gpu: ModuleType, num_lookups: int, cut: int, block: int, share: float):
    # Whole numbers add up exactly.
    rng = np.random.default_rng(0)
    others = rng.integers(0, 50, num_lookups)
    rows = np.where(rng.random(num_lookups) < share, 3, others).astype(np.int32)
    gradients = rng.integers(-9, 9, (num_lookups, 4)).astype(np.float32)
    options = {"cut": cut, "block": block, "interpret": True}
    lookups = Lookups(jnp.asarray(rows), None, None)
    update = functools.partial(gpu.fused_update, optimizer=optim.sgd(1.0), **options)
    table = jnp.zeros((50, 4))
    new_table, _ = compiled_fast(update)(table, {}, lookups, gradients, step=jnp.int32(0))
    expected = np.zeros((50, 4), np.float32)
    np.add.at(expected, rows, gradients)
    np.testing.assert_array_equal(new_table, -expected)
    sum_rows = compiled_fast(functools.partial(gpu.sum_rows, num_rows=50, **options))
    np.testing.assert_array_equal(sum_rows(lookups, gradients), expected)


CUT, BLOCK, NUM_ROWS, NUM_LOOKUPS = 4, 3, 5, 120  # of all examples: one program is compiled


@functools.cache
def sum_by_small_cuts(gpu: ModuleType) -> Callable:
    options = {"num_rows": NUM_ROWS, "cut": CUT, "block": BLOCK, "interpret": True}
    return compiled_fast(functools.partial(gpu.sum_rows, **options))


@given(rows=st.lists(st.integers(-1, NUM_ROWS + 1), min_size=NUM_LOOKUPS, max_size=NUM_LOOKUPS))
@example(rows=[2] * NUM_LOOKUPS)
@example(rows=[NUM_ROWS] * NUM_LOOKUPS)
@example(rows=[4] * (NUM_LOOKUPS - 1) + [0])
@example(rows=[i // CUT % NUM_ROWS for i in range(NUM_LOOKUPS)])
@example(rows=[i // (CUT * BLOCK) % NUM_ROWS for i in range(NUM_LOOKUPS)])
def test_runs_of_any_lengths_at_any_cuts(gpu: ModuleType, rows: list[int]):
    gradients = np.random.default_rng(len(set(rows))).integers(-9, 9, (NUM_LOOKUPS, 2))
    lookups = Lookups(jnp.asarray(rows, jnp.int32), None, None)
    sums = sum_by_small_cuts(gpu)(lookups, jnp.asarray(gradients, jnp.float32))
    known, expected = np.array(rows), np.zeros((NUM_ROWS, 2))
    inside = (known >= 0) & (known < NUM_ROWS)
    np.add.at(expected, known[inside], gradients[inside])
    np.testing.assert_array_equal(sums, expected)


def test_weights_of_64_bits(gpu: ModuleType):
    batch = BATCHES["dim_1_weighted"]
    table, ids, lengths, weights = batch.arrays()
    expected = reference.pooled_lookup(table, ids, lengths, weights, batch.layout, "float32")
    with jax.enable_x64(True), gpu_kernels(name_of(gpu)):
        wide = jnp.asarray(np.float64(weights))
        pooled = kernels.pooled_lookup(table, ids, lengths, wide, batch.layout, "float32")
        np.testing.assert_allclose(pooled, expected, rtol=1e-6)
        lookups = kernels.flatten_bags(ids, lengths, wide, batch.layout, table.shape[0])
        arguments = (jnp.ones_like(pooled), optim.adam(0.1), jnp.int32(0))
        state = optim.adam().init(*table.shape)
        table, _ = kernels.fused_update(table, state, lookups, *arguments)
    assert table.dtype == "float32"


def test_rows_without_lookups_keep_their_bits(gpu: ModuleType):
    batch = BATCHES["bfloat16"]
    optimizer = OPTIMIZERS["rowwise_adagrad"]
    table, state, lookups, gradients = update_arguments(batch, optimizer)
    new_table, new_state = interpreted_update(gpu)(
        table, state, lookups, gradients, optimizer, jnp.int32(0)
    )
    untouched = np.setdiff1d(np.arange(table.shape[0]), lookups.rows)
    assert untouched.size > 0
    np.testing.assert_array_equal(new_table[untouched], table[untouched])
    np.testing.assert_array_equal(new_state["accumulator"][untouched], 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [16, 64, 100, 128, 256, 600])
@pytest.mark.parametrize("lengths", [(3, 0, 2, 9, 1), (20, 33, 0, 9, 41), (300, 2)], ids=str)
def test_tiles_of_any_shape(gpu: ModuleType, dim: int, dtype: str, lengths: tuple[int, ...]):
    """Tiles differ in the number of bags side by side, and in that of rows of each."""
    batch = Batch(dim, (lengths, lengths[::-1]), dtype=dtype, weighted=True, outside=True)
    arrays, options = batch.arrays(), {"layout": batch.layout, "dtype": jnp.float32}
    pool = compiled_fast(functools.partial(gpu.pooled_lookup, **options, interpret=True))
    pooled = pool(*arrays)
    expected = compiled_fast(functools.partial(reference.pooled_lookup, **options))(*arrays)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(pool(*arrays), pooled)


@deprecated
@pytest.mark.parametrize("name", ["dim_1_weighted", "short_bags", "long_bags", "uneven"])
def test_pooled_lookup_lowers_for_cuda(gpu: ModuleType, name: str):
    batch = BATCHES[name]
    kernel = functools.partial(gpu.pooled_lookup, layout=batch.layout, dtype=jnp.bfloat16)
    assert kernels_in(lowered_for_cuda(kernel, *batch.arrays()), "pool") == ["pool"]


@deprecated
def test_row_lookup_lowers_for_cuda(gpu: ModuleType):
    batch = BATCHES["dim_1_weighted"]
    text = lowered_for_cuda(gpu.row_lookup, batch.arrays()[0], flat(batch).rows)
    assert kernels_in(text, "copy_rows") == ["copy_rows"]


@deprecated
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("long_bags", name) for name in OPTIMIZERS]
    + [("bfloat16", "adam"), ("float16_wide", "rowwise_adagrad")],
)
def test_fused_update_lowers_for_cuda(gpu: ModuleType, name: str, optimizer: str):
    def update(table, state, lookups, gradients, step):
        rule = OPTIMIZERS[optimizer]
        return gpu.fused_update(table, state, lookups, gradients, rule, step)

    arguments = update_arguments(BATCHES[name], OPTIMIZERS[optimizer])
    assert kernels_in(lowered_for_cuda(update, *arguments, jnp.int32(0)), "update") == ["update"]


@pytest.mark.parametrize("shape", [(0, 8), (5, 0)], ids=["no_rows", "no_columns"])
def test_empty_tables_are_refused(gpu: ModuleType, shape: tuple[int, int]):
    reason = gpu.refuse("row_lookup", {"table": jnp.zeros(shape), "rows": jnp.zeros(3, jnp.int32)})
    assert "this one has none" in str(reason)


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
def test_a_step_lowers_for_cuda_when_kernels_are_named(gpu: ModuleType):
    config = EmbeddingBagConfig("user", num_embeddings=10, embedding_dim=4)
    tables = init_tables([config], optim.rowwise_adagrad(0.1), jax.random.key(0))
    batch = KeyedJaggedArray.from_lists({"user": [[1, 2], []]})

    def program() -> str:
        def step(tables, batch):
            activations, residuals = lookup(tables, batch)
            return apply_gradients(tables, residuals, activations, step=0)

        return lowered_for_cuda(step, tables, batch)

    names = "pool", "flatten", "update"
    with use_kernels(name_of(gpu), "reference"):
        assert kernels_in(program(), *names) == list(names)
    assert kernels_in(program(), *names) == []
