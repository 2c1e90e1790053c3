"""Maxima of bags, their gradients, and dropped ids, by each implementation against plain Python."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed import kernels
from jaxrec.embed.formats import FORMATS, TABLE_FORMATS, as_table
from jaxrec.embed.kernels import BagLayout, DroppingFeature
from tests.embed.kernels import oracle

pytestmark = pytest.mark.jax_version

with_implementation = pytest.mark.parametrize(
    "implementation", ["reference", "cpu-avx512", "cpu-avx2", "cpu-portable"], indirect=True
)
LAYOUT = BagLayout((0, 30), (30, 20), (0, 8), (8, 8), (0, 6), (6, 5), (False,) * 2, takes_max=True)
NUM_ROWS = 11
LENGTHS = np.array([3, 0, 1, 9, 2, 7, 0, 4, 1, 1, 0, 5, 2, 0, 3, 6], np.int32)
FORMS = [
    ("float32", 3), ("float32", 16), ("float32", 40), ("float32", 128), ("bfloat16", 64),
    ("float16", 5), ("int8", 40), ("int4", 21), ("int2", 64), ("trained_int8", 33),
]  # fmt: skip


def ids_of(rng: np.random.Generator) -> np.ndarray:
    # Ids at padding are arbitrary; one bag of each feature has an id outside its table.
    ids = rng.integers(0, 5, 50).astype(np.int32)
    ids[[3, 30 + 7]] = 6, -1
    return ids


def expected(rows: np.ndarray, ids: np.ndarray):
    """The largest element of each bag and column, and the first lookup that has it."""
    dim = rows.shape[1]
    values = np.zeros((LAYOUT.num_bags, dim))
    winners = np.full(values.shape, -1)
    bags: dict[int, list[oracle.Lookup]] = {}
    for each in oracle.lookups(ids, LENGTHS, None, LAYOUT):
        bags.setdefault(each.bag, []).append(each)
    for bag, lookups in bags.items():
        if any(each.row is None for each in lookups):
            values[bag] = np.nan
            continue
        of_bag = rows[[each.row for each in lookups]]
        first = of_bag.argmax(axis=0)
        values[bag] = of_bag[first, range(dim)]
        winners[bag] = np.array([each.position for each in lookups])[first]
    return values, winners


@with_implementation
@pytest.mark.parametrize(("name", "dim"), FORMS, ids=[f"{name}-{dim}" for name, dim in FORMS])
def test_max_lookup(implementation, name, dim):
    rng = np.random.default_rng(dim)
    # Few different numbers: rows tie, and the first one wins.
    rows = jnp.asarray(rng.integers(-3, 1, (NUM_ROWS, dim)) / 4, jnp.float32)
    form = TABLE_FORMATS["int8"] if name == "trained_int8" else (TABLE_FORMATS | FORMATS)[name]
    table, ids = as_table(form.pack(rows), form, dim), ids_of(rng)
    values, winners = expected(np.asarray(form.unpack(form.pack(rows), dim), np.float64), ids)
    arrays = table, jnp.asarray(ids), jnp.asarray(LENGTHS), LAYOUT
    found, positions = kernels.max_lookup(*arrays, "float32")
    np.testing.assert_allclose(found, values, rtol=1e-6)
    np.testing.assert_array_equal(positions, winners)
    narrow, none = kernels.max_lookup(*arrays, "bfloat16", False)
    narrowed = found.astype("bfloat16").astype("float32")
    np.testing.assert_array_equal(narrow.astype("float32"), narrowed)
    assert none.shape == (0, dim)


@with_implementation
def test_gradients_go_to_the_winners(implementation):
    rng = np.random.default_rng(0)
    rows, ids = rng.integers(-3, 1, (NUM_ROWS, 5)) / 4, ids_of(rng)
    winners = expected(rows, ids)[1]
    gradient = rng.standard_normal((LAYOUT.num_bags, 5)).astype(np.float32)
    of_rows = np.zeros((LAYOUT.num_positions, 5), np.float32)
    for bag, column in np.argwhere(winners >= 0):
        of_rows[winners[bag, column], column] = gradient[bag, column]
    arrays = jnp.asarray(ids), jnp.asarray(LENGTHS), None, LAYOUT, NUM_ROWS
    bags = kernels.flatten_bags(*arrays).bags
    found = kernels.max_gradients(jnp.asarray(winners, jnp.int32), jnp.asarray(gradient), bags)
    np.testing.assert_array_equal(found, of_rows)


@with_implementation
def test_a_nan_and_infinities(implementation):
    """A NaN shows in the result, and a bag of -infinity has no winner."""
    rows = jnp.array([[jnp.nan, -jnp.inf, 1], [2, -jnp.inf, jnp.inf]], jnp.float32)
    layout = BagLayout((0,), (4,), (0,), (2,), (0,), (2,), (False,), takes_max=True)
    ids, lengths = jnp.array([1, 0, 1, 1], jnp.int32), jnp.array([2, 1], jnp.int32)
    found, winners = kernels.max_lookup(rows, ids, lengths, layout, "float32")
    np.testing.assert_array_equal(found, [[np.nan, -np.inf, np.inf], [2, -np.inf, np.inf]])
    np.testing.assert_array_equal(winners, [[1, -1, 0], [2, -1, 2]])


@with_implementation
@pytest.mark.parametrize("dim", [3, 16, 32, 64, 100, 128, 200])
def test_nan_among_infinities(implementation, dim):
    """In every column of every width: a NaN wins, whatever comes before and after it."""
    rng = np.random.default_rng(dim)
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 1.0], np.float32)
    rows = rng.choice(values, (400, dim), p=[0.02, 0.02, 0.06, 0.6, 0.3])
    layout = BagLayout((0,), (400,), (0,), (80,), (0,), (400,), (False,), takes_max=True)
    ids, lengths = jnp.arange(400, dtype=jnp.int32), jnp.full(80, 5, jnp.int32)
    found, winners = kernels.max_lookup(jnp.asarray(rows), ids, lengths, layout, "float32")
    bags = rows.reshape(80, 5, dim)
    np.testing.assert_array_equal(found, bags.max(axis=1))  # as NumPy's, NaN if one is
    winners = np.asarray(winners)
    elements = np.where(winners < 0, -np.inf, np.take_along_axis(rows, np.maximum(winners, 0), 0))
    np.testing.assert_array_equal(elements, bags.max(axis=1))
    is_nan = np.isnan(bags).any(axis=1)
    first = np.arange(0, 400, 5)[:, None] + bags.argmax(axis=1)
    first = np.where(bags.max(axis=1) == -np.inf, -1, first)
    np.testing.assert_array_equal(winners[~is_nan], first[~is_nan])


@with_implementation
def test_bags_whose_ids_are_used_up_are_empty(implementation):
    """Lengths may say more than there are ids, in a batch that was made without checks."""
    rows = -jnp.ones((2, 3), jnp.float32)
    layout = BagLayout((0,), (2,), (0,), (2,), (0,), (2,), (False,), takes_max=True)
    arrays = jnp.array([0, 1], jnp.int32), jnp.array([2, 5], jnp.int32), layout
    found, winners = kernels.max_lookup(rows, *arrays, "float32")
    np.testing.assert_array_equal(found, [[-1] * 3, [0] * 3])
    np.testing.assert_array_equal(winners, [[0] * 3, [-1] * 3])


@with_implementation
def test_drop_ids(implementation):
    """Any mix of kept and dropped ids, of features with and without one to drop."""
    features = (DroppingFeature(0, 30, 0, 8, 2), DroppingFeature(35, 15, 11, 5, 0))
    drop = jax.jit(lambda ids, lengths: kernels.drop_ids(ids, lengths, features))
    for seed in range(30):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, rng.integers(1, 5), 50).astype(np.int32)
        lengths = rng.integers(0, 4, 16).astype(np.int32)
        expected_ids, expected_lengths = ids.copy(), lengths.copy()
        for each in features:
            end, kept = each.id_start, []
            for bag in range(each.length_start, each.length_start + each.stride):
                begin, end = end, end + lengths[bag]
                left = [i for i in ids[begin:end] if i != each.dropped]
                expected_lengths[bag] = len(left)
                kept += left
            filling = [each.dropped] * (each.capacity - len(kept))
            expected_ids[each.id_start : each.id_start + each.capacity] = kept + filling
        found = drop(jnp.asarray(ids), jnp.asarray(lengths))
        np.testing.assert_array_equal(found.ids, expected_ids)
        np.testing.assert_array_equal(found.lengths, expected_lengths)
        is_id = np.concatenate([np.arange(30) < found.lengths[:8].sum(), np.arange(20) >= 5])
        is_id[35:] = np.arange(15) < found.lengths[11:].sum()
        is_id[30:35] = True
        np.testing.assert_array_equal(ids[found.sources][is_id], expected_ids[is_id])


def test_parts_of_a_table_are_one_table():
    rng = np.random.default_rng(0)
    table, ids = jnp.asarray(rng.standard_normal((12, 20)), jnp.float32), jnp.asarray(ids_of(rng))
    layout = dataclasses.replace(LAYOUT, row_counts=(6, 6))
    arrays = table, ids, jnp.asarray(LENGTHS), layout, "float32"
    with kernels.use_kernels("cpu", "reference"):
        whole, parts = kernels.max_lookup(*arrays), kernels.max_lookup(*arrays, parts_in=3)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, other)
