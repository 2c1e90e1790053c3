"""One suite for the primitives, which every implementation that runs here goes through."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from tests.embed.kernels import oracle
from tests.embed.kernels.cases import SMALL, Case, case

pytestmark = pytest.mark.jax_version

OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "sgd_clip_value": optim.sgd(0.1, clip_value=0.3),
    "adagrad": optim.adagrad(0.1),
    "adagrad_max_norm": optim.adagrad(0.5, max_norm=1.5),
    "rowwise_adagrad": optim.rowwise_adagrad(0.1),
    "rowwise_adagrad_l2": optim.rowwise_adagrad(0.1, weight_decay=0.2, weight_decay_mode="l2"),
    "rowwise_adagrad_decoupled": optim.rowwise_adagrad(
        0.1, weight_decay=0.2, weight_decay_mode="decoupled", max_norm=2.0, clip_value=0.5
    ),
    "rowwise_adagrad_no_decay": optim.rowwise_adagrad(0.1, weight_decay=0.2),
    "adam": optim.adam(0.1, weight_decay=0.1),
    "adam_rowwise_bias_correction": optim.adam(0.1, b1=0.0, rowwise_bias_correction=True),
    "partial_rowwise_adam": optim.partial_rowwise_adam(0.1, weight_decay=0.1),
    "schedule": optim.sgd(lambda step: 0.1 * (step + 1)),
}


@pytest.mark.parametrize(
    ("row", "num_rows"),
    [
        (np.float32([0.5, -2, 3]), 7),
        (np.float32(0.25), 70001),
        (np.zeros(20000, np.float32), 3),
        (np.arange(4, dtype=jnp.bfloat16), 5000),
        (np.zeros(2, np.float32), 0),
    ],
    ids=["vector", "number", "longer_than_a_pattern", "bfloat16", "none"],
)
def test_new_rows(implementation, row, num_rows):
    rows = kernels.new_rows(jnp.asarray(row), num_rows)
    assert rows.dtype == row.dtype
    np.testing.assert_array_equal(rows, np.broadcast_to(row, (num_rows, *row.shape)))


@pytest.mark.parametrize("shape", SMALL)
def test_pooled_lookup(implementation, shape):
    this = case(shape)
    result = kernels.pooled_lookup(this.table, *this.arrays, this.layout, "float32")
    expected = oracle.pooled(this.table, found(this), this.layout.num_bags)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_bags_by_feature(implementation):
    """The bags of features of equally many lie feature by feature where that is asked for."""
    this = case("uniform")
    layout = dataclasses.replace(this.layout, interleave=False)
    assert this.layout.is_interleaved
    order = np.concatenate(
        [
            np.arange(layout.num_bags)[this.layout.bag_rows(feature)]
            for feature in range(layout.num_features)
        ]
    )
    pooled = kernels.pooled_lookup(this.table, *this.arrays, layout, "float32")
    alternating = kernels.pooled_lookup(this.table, *this.arrays, this.layout, "float32")
    np.testing.assert_array_equal(pooled, np.asarray(alternating)[order])
    flat = kernels.flatten_bags(*this.arrays, layout, this.num_rows)
    alternating = kernels.flatten_bags(*this.arrays, this.layout, this.num_rows)
    is_used = np.asarray(flat.rows) < this.num_rows
    np.testing.assert_array_equal(order[flat.bags[is_used]], alternating.bags[is_used])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_type_of_pooled_lookup(implementation, dtype):
    this = case("float16")
    result = kernels.pooled_lookup(this.table, *this.arrays, this.layout, dtype)
    assert result.dtype == dtype
    expected = oracle.pooled(this.table, found(this), this.layout.num_bags)
    expected = jnp.asarray(expected, "float32").astype(dtype)
    # Sums that differ in the last bit of float32 may be rounded to neighbours.
    tolerance = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        result.astype("float32"), expected.astype("float32"), rtol=tolerance, atol=1e-5
    )


@pytest.mark.parametrize("shape", SMALL)
def test_flatten_bags(implementation, shape):
    this = case(shape)
    flat = kernels.flatten_bags(*this.arrays, this.layout, this.num_rows)
    rows = np.full(this.layout.num_positions, this.num_rows)
    bags, scales = np.array(flat.bags), np.zeros(rows.shape)
    for each in found(this):
        rows[each.position], bags[each.position] = each.row, each.bag
        scales[each.position] = each.scale
    np.testing.assert_array_equal(flat.rows, rows)
    np.testing.assert_array_equal(flat.bags, bags)
    if flat.scales is not None:
        used = np.where(rows == this.num_rows, 0, flat.scales)
        np.testing.assert_allclose(used, scales, rtol=1e-6)
    assert ((flat.bags >= 0) & (flat.bags < max(1, this.layout.num_bags))).all()
    has_scales = this.weights is not None or any(this.layout.means)
    assert (flat.scales is not None) == has_scales


def test_features_without_bags_are_padding(implementation):
    layout = BagLayout((0, 4), (4, 2), (0, 0), (0, 1), (0, 5), (5, 5), (True, False))
    ids, lengths = jnp.arange(6, dtype=jnp.int32), jnp.array([1], jnp.int32)
    flat = kernels.flatten_bags(ids, lengths, None, layout, 10)
    # The second feature's id is its table's row 4.
    assert flat.rows.tolist() == [10, 10, 10, 10, 9, 10]
    assert flat.bags.tolist() == [0] * 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [1, 3, 16, 100])
def test_row_lookup(implementation, dtype, dim):
    table = jax.random.normal(jax.random.key(0), (7, dim)).astype(dtype)
    rows = jnp.array([0, 6, 7, 3, 3, 8, -1, 2**31 - 1, -(2**31), 6], jnp.int32)
    result = kernels.row_lookup(table, rows)
    assert result.dtype == table.dtype
    padded = np.concatenate(
        [table.astype("float32"), np.zeros((1, dim)), np.full((1, dim), np.nan)]
    )
    expected = padded[[0, 6, 7, 3, 3, 8, 8, 8, 8, 6]]
    np.testing.assert_array_equal(result.astype("float32"), expected)


@pytest.mark.parametrize("num_rows", [1, 3, 1000, 2**31 - 2])
@pytest.mark.parametrize("size", [0, 1, 9, 5000])
def test_build_runs(implementation, size, num_rows):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, num_rows, size).astype(np.int32)
    rows[: size // 2] = num_rows - 1
    rows[::4], rows[1::8] = -(2**31), min(num_rows + 1, 2**31 - 1)
    runs = kernels.build_runs(jnp.asarray(rows), num_rows)
    known = np.where((rows < 0) | (rows > num_rows), num_rows, rows)
    order = np.argsort(known, kind="stable")
    unique, inverse = np.unique(known, return_inverse=True)
    np.testing.assert_array_equal(runs.order, order)
    np.testing.assert_array_equal(runs.inverse, inverse)
    np.testing.assert_array_equal(runs.segments, inverse[order])
    np.testing.assert_array_equal(runs.unique[: len(unique)], unique)
    assert (runs.unique[len(unique) :] == num_rows).all()


@pytest.mark.parametrize("num_owners", [1, 8])
def test_bucket(implementation, num_owners):
    owners = np.random.default_rng(0).integers(-1, num_owners + 2, 300).astype(np.int32)
    buckets = kernels.bucket(jnp.asarray(owners), num_owners)
    known = np.where((owners < 0) | (owners > num_owners), num_owners, owners)
    np.testing.assert_array_equal(buckets.order, np.argsort(known, kind="stable"))
    np.testing.assert_array_equal(buckets.counts, np.bincount(known)[:num_owners])


def test_shift_rows(implementation):
    rows = np.random.default_rng(0).integers(-5, 60, 20_000).astype(np.int32)
    starts, shifts = (0, 7, 8, 30), (100, -7, 1000, 2**31 - 60)
    shifted = kernels.shift_rows(jnp.asarray(rows), starts, shifts, 50, outside=-9)
    expected = rows + np.array(shifts)[np.searchsorted(starts, rows, side="right") - 1]
    np.testing.assert_array_equal(shifted, np.where((rows >= 0) & (rows < 50), expected, -9))


@pytest.mark.parametrize("bound", [None, 0.5])
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_sum_rows(implementation, dim, bound):
    rng = np.random.default_rng(0)
    rows = rng.integers(-2, 12, 5000).astype(np.int32)
    bags, scales = rng.integers(0, 40, 5000).astype(np.int32), rng.normal(size=5000)
    gradients = rng.normal(size=(40, dim))
    lookups = kernels.Lookups(jnp.asarray(rows), jnp.asarray(bags), jnp.float32(scales))
    sums = kernels.sum_rows(lookups, jnp.float32(gradients), 10, bound)
    bounded = gradients if bound is None else np.clip(gradients, -bound, bound)
    expected = np.zeros((10, dim))
    is_row = (rows >= 0) & (rows < 10)
    np.add.at(expected, rows[is_row], (bounded[bags] * scales[:, None])[is_row])
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-4)
    assert sums.dtype == jnp.float32


@pytest.mark.every_case
def test_sums_of_no_columns(implementation):
    lookups = kernels.Lookups(jnp.array([1, 1, 3], jnp.int32), None, None)
    assert kernels.sum_rows(lookups, jnp.zeros((3, 0)), 5).shape == (5, 0)


@pytest.mark.parametrize("shape", SMALL)
def test_fused_update(implementation, shape):
    check_update(case(shape), OPTIMIZERS["rowwise_adagrad"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(implementation, optimizer):
    check_update(case("d100"), optimizer)


@pytest.mark.parametrize("decay", [0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("kind", [optim.adam, optim.partial_rowwise_adam], ids=lambda k: k.__name__)
def test_moments_of_decays_near_one(implementation, kind, decay):
    """``1 - b`` has all its digits: taken in float32 the last of these would be off by 1e-3."""
    optimizer = kind(0.1, b1=decay, b2=decay)
    table = jnp.ones((3, 4))
    lookups = Lookups(jnp.array([1], jnp.int32), None, None)
    _, state = kernels.fused_update(
        table, optimizer.init(3, 4), lookups, jnp.ones((1, 4)), optimizer, jnp.int32(0)
    )
    for moment in state.values():
        np.testing.assert_allclose(moment[1], 1 - decay, rtol=2e-7)


def test_a_batch_without_samples_updates_nothing(implementation):
    lookups = Lookups(jnp.full(8, 4, jnp.int32), jnp.zeros(8, jnp.int32), None)
    table, optimizer = jnp.ones((4, 2)), optim.adam(0.1, weight_decay=0.1)
    new, state = kernels.fused_update(
        table, optimizer.init(4, 2), lookups, jnp.zeros((0, 2)), optimizer, jnp.int32(0)
    )
    np.testing.assert_array_equal(new, table)
    assert not any(np.any(array) for array in state.values())
    np.testing.assert_array_equal(kernels.sum_rows(lookups, jnp.zeros((0, 2)), 4), 0 * table)


@pytest.mark.parametrize(
    "optimizer",
    ["adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "adagrad_max_norm"],
)
def test_squares_beyond_float32_show(implementation, optimizer):
    """Rows of infinite state would never move again; other rows keep their numbers."""
    optimizer, table = OPTIMIZERS[optimizer], jnp.ones((40, 20))
    lookups = Lookups(jnp.arange(38, dtype=jnp.int32), None, None)
    gradients = jnp.ones((38, 20)).at[7].set(1e30).at[9].set(jnp.float32(2**50))
    state = optimizer.init(*table.shape)
    new, _ = kernels.fused_update(table, state, lookups, gradients, optimizer, jnp.int32(0))
    is_nan = np.isnan(new).all(axis=1)
    assert np.flatnonzero(is_nan).tolist() == [7]
    assert np.isfinite(new[~is_nan]).all()
    assert (new[:38][~is_nan[:38]] != 1).all()
    np.testing.assert_array_equal(new[38:], 1)


def check_update(this: Case, optimizer: optim.RowOptimizer) -> None:
    """Two steps, so that the second begins with a state."""
    table, state = this.table, optimizer.init(*this.table.shape)
    lookups = kernels.flatten_bags(*this.arrays, this.layout, this.num_rows)
    slope, occurs = oracle.gradient(
        table.shape, found(this), this.gradient, clip_value=optimizer.clip_value
    )
    for step in range(2):
        expected, expected_state = oracle.updated(table, state, slope, occurs, optimizer, step)
        table, state = kernels.fused_update(
            table, state, lookups, this.gradient, optimizer, jnp.int32(step)
        )
        assert_table_is(table, expected)
        assert state.keys() == expected_state.keys()
        for name, array in state.items():
            np.testing.assert_allclose(array, expected_state[name], rtol=1e-4, atol=1e-5)


def assert_table_is(table, expected):
    """Rows of 16-bit types are rounded up or down at random."""
    precision = {"float32": 1e-5}.get(table.dtype.name, float(jnp.finfo(table.dtype).eps))
    np.testing.assert_allclose(
        table.astype("float32"), expected, rtol=1.01 * precision, atol=precision / 8 + 1e-5
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bits(implementation, dtype):
    this = case("uniform")
    optimizer = OPTIMIZERS["sgd"]
    gradient = this.gradient.astype(dtype)
    lookups = kernels.flatten_bags(*this.arrays, this.layout, this.num_rows)
    table, _ = kernels.fused_update(this.table, {}, lookups, gradient, optimizer, jnp.int32(0))
    slope, occurs = oracle.gradient(table.shape, found(this), gradient)
    expected, _ = oracle.updated(this.table, {}, slope, occurs, optimizer, 0)
    assert_table_is(table, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_at_random(implementation, dtype):
    """The same noise in every implementation, and to nearest without it."""
    table = jnp.asarray(np.tile(np.logspace(-7, 4, 20), (300, 1)), dtype)
    gradient = table.astype("float32")
    lookups = Lookups(jnp.arange(300, dtype=jnp.int32), None, None)
    step = jnp.int32(5)

    def update(optimizer):
        return kernels.fused_update(table, {}, lookups, gradient, optimizer, step)[0]

    # A power of two makes the new row exact in float32, whether or not it is fused.
    rounded = update(optim.sgd(2.0**-11))
    nearest = update(optim.sgd(2.0**-11, stochastic_rounding=False))
    with kernels.use_kernels("reference"):
        np.testing.assert_array_equal(rounded, update(optim.sgd(2.0**-11)))
    exact = table.astype("float32") * (1 - 2.0**-11)
    np.testing.assert_array_equal(nearest, exact.astype(dtype))
    assert (rounded != nearest).any()
    # Of 300 draws of a mean the share that is rounded down is right within four deviations.
    error = jnp.mean(rounded.astype("float32") - exact, axis=0)
    step_size = jnp.abs(jnp.nextafter(table[0], jnp.zeros_like(table[0])) - table[0])
    assert (jnp.abs(error) <= 4 * 0.5 / np.sqrt(300) * step_size.astype("float32")).all()


def test_ids_outside_make_nan_and_update_nothing(implementation):
    this = Case("d100")
    bad = [-1, -(2**31), SMALL["d100"].V, 2**31 - 1]
    lengths = this.lengths[: SMALL["d100"].B]
    places = np.flatnonzero(np.cumsum(lengths) > 0)[0] + np.arange(len(bad)) * 3
    this.ids[places] = bad
    result = kernels.pooled_lookup(this.table, *this.arrays, this.layout, "float32")
    expected = oracle.pooled(this.table, found(this), this.layout.num_bags)
    assert np.isnan(expected).any()
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    check_update(this, OPTIMIZERS["sgd"])


def test_rows_outside_are_not_updated(implementation):
    table = jnp.ones((4, 2))
    rows = jnp.array([-1, 4, 5, 2**31 - 1, -(2**31), 3], jnp.int32)
    table, _ = kernels.fused_update(
        table, {}, Lookups(rows, None, None), jnp.ones((6, 2)), optim.sgd(1.0), jnp.int32(0)
    )
    assert table.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_nothing_to_look_up(implementation):
    layout = kernels.BagLayout((0,), (0,), (0,), (3,), (0,), (5,), (False,))
    ids, lengths = jnp.zeros(0, jnp.int32), jnp.zeros(3, jnp.int32)
    table = jnp.ones((5, 4))
    pooled = kernels.pooled_lookup(table, ids, lengths, None, layout, "float32")
    assert pooled.tolist() == [[0.0] * 4] * 3
    lookups = kernels.flatten_bags(ids, lengths, None, layout, 5)
    new, _ = kernels.fused_update(table, {}, lookups, pooled, optim.sgd(1.0), jnp.int32(0))
    assert (new == table).all()


def test_same_bits_again(implementation):
    this = case("half_one_row")
    optimizer = OPTIMIZERS["rowwise_adagrad"]

    def run():
        pooled = kernels.pooled_lookup(this.table, *this.arrays, this.layout, "float32")
        lookups = kernels.flatten_bags(*this.arrays, this.layout, this.num_rows)
        state = optimizer.init(*this.table.shape)
        return pooled, kernels.fused_update(
            this.table, state, lookups, this.gradient, optimizer, jnp.int32(0)
        )

    jax.tree.map(np.testing.assert_array_equal, run(), run())


def found(this: Case) -> list[oracle.Lookup]:
    return oracle.lookups(this.ids, this.lengths, this.weights, this.layout)


def test_tables_and_results_in_parts(implementation):
    """That an array is sent on or was received in parts changes no bit of a result."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(48, 24)), jnp.float32)
    rows = jnp.asarray(rng.integers(-1, 50, 80), jnp.int32)
    expected = kernels.row_lookup(table, rows)
    for parts in ({"parts_in": 4}, {"parts_out": 8}, {"parts_in": 3, "parts_out": 2}):
        np.testing.assert_array_equal(kernels.row_lookup(table, rows, **parts), expected)
    layout = kernels.BagLayout(
        (0, 20, 40, 60), (20,) * 4, (0, 6, 12, 18), (6,) * 4, (0, 10, 0, 30), (48, 38, 20, 18),
        (False, True, False, True), interleave=False,
    )  # fmt: skip
    lengths = jnp.asarray(rng.integers(0, 4, 24), jnp.int32)
    for weights in (None, jnp.asarray(rng.random(80), jnp.float32)):
        batch = (jnp.abs(rows), lengths, weights, layout, "float32")
        expected = kernels.pooled_lookup(table, *batch)
        for parts in ({"parts_in": 4}, {"parts_out": 4}, {"parts_in": 2, "parts_out": 2}):
            np.testing.assert_array_equal(kernels.pooled_lookup(table, *batch, **parts), expected)


@pytest.mark.parametrize(
    "rows", [np.full(3000, 5), np.r_[np.zeros(20), 3999], np.arange(4000), np.full(9, -1)], ids=str
)
def test_sums_in_parts(implementation, rows):
    """Long runs, rows without any lookup, one lookup a row and none at all."""
    rng = np.random.default_rng(1)
    gradients = jnp.asarray(rng.normal(size=(len(rows), 16)), jnp.float32)
    lookups = Lookups(jnp.asarray(rows, jnp.int32), None, None)
    expected = np.zeros((4000, 16))
    inside = rows >= 0
    np.add.at(expected, rows[inside].astype(int), np.asarray(gradients, float)[inside])
    sums = kernels.sum_rows(lookups, gradients, 4000)
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(kernels.sum_rows(lookups, gradients, 4000, parts_out=8), sums)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_in_parts(implementation, dtype):
    rng = np.random.default_rng(2)
    gradients = jnp.asarray(rng.normal(size=(64, 24)), dtype)
    table = jnp.asarray(rng.normal(size=(10, 24)), jnp.float32)
    lookups = Lookups(
        jnp.asarray(rng.integers(0, 12, 200), jnp.int32),
        jnp.asarray(rng.integers(0, 64, 200), jnp.int32),
        jnp.asarray(rng.random(200), jnp.float32),
    )
    optimizer = optim.adagrad(0.1)
    args = (table, optimizer.init(*table.shape), lookups, gradients, optimizer, jnp.int32(3), (0,))
    expected = kernels.fused_update(*args)
    found = kernels.fused_update(*args, parts_in=8)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_norm_of_each_table_is_bounded_by_itself(implementation):
    """The second table begins with the row that the first one ends before."""
    gradients = jnp.array([[3.0, 4.0], [0.0, 40.0]])
    lookups = Lookups(jnp.array([1, 2], jnp.int32), None, None)
    optimizer = optim.sgd(1.0, clip_norm=1.0)
    table, _ = kernels.fused_update(
        jnp.zeros((4, 2)), {}, lookups, gradients, optimizer, jnp.int32(0), (0, 2)
    )
    np.testing.assert_allclose(table, [[0, 0], [-0.6, -0.8], [0, -1], [0, 0]], rtol=1e-5)


def test_lengths_beyond_the_capacity_end_with_it(implementation):
    layout = BagLayout((0,), (4,), (0,), (2,), (0,), (5,), (False,))
    table = jnp.array([[1.0], [10.0], [100.0], [1000.0], [10000.0]])
    ids, lengths = jnp.array([0, 1, 2, 3, 4, 4], jnp.int32), jnp.array([3, 3], jnp.int32)
    pooled = kernels.pooled_lookup(table, ids, lengths, None, layout, "float32")
    assert pooled.tolist() == [[111.0], [1000.0]]


def test_runs_of_a_number_of_ids_that_threads_do_not_divide(implementation):
    rows = np.random.default_rng(0).integers(0, 1000, 20_001).astype(np.int32)
    runs = kernels.build_runs(jnp.asarray(rows), 1000)
    np.testing.assert_array_equal(runs.order, np.argsort(rows, kind="stable"))
