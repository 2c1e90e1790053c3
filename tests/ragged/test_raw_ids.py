"""Raw 64-bit ids on the host: kept whole by every operation there, and refused by JAX."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import operator
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.ragged import (
    JaggedArray,
    KeyedJaggedArray,
    hash_ids,
    keyed_jagged_index_select,
    split_int64,
)
from jaxrec.ragged.raw_ids import RawIds, is_raw
from tests.ragged.strategies import weights_like

pytestmark = pytest.mark.every_case

ROWS = {"a": [[2**40, -7], [], [3]], "b": [[-(2**63)], [5], [2**63 - 1, 0]]}
REFUSED = "raw 64-bit ids stay on the host, .*jaxrec.tier.ahead.*jaxrec.ragged.hash_ids"

int64 = st.integers(-(2**63), 2**63 - 1).filter(lambda number: number != -1)


def make_batch(rows=ROWS, **options) -> KeyedJaggedArray:
    return KeyedJaggedArray.from_lists(rows, id_bits=64, **options)


@st.composite
def raw_rows(draw):
    batch = draw(st.integers(0, 3))
    bags = st.lists(st.lists(int64, max_size=4), min_size=batch, max_size=batch)
    return {key: draw(bags) for key in draw(st.sets(st.sampled_from("abc"), min_size=1))}


def assert_raw(batch: KeyedJaggedArray, rows: dict) -> None:
    assert is_raw(batch.values)
    assert batch.values.dtype == np.int64
    assert batch.to_lists() == rows


@given(st.data(), raw_rows())
def test_reshaping_keeps_every_bit(data, rows):
    batch = make_batch(rows, weights=weights_like(rows))
    assert_raw(batch, rows)
    keys = data.draw(st.permutations(sorted(rows)))
    assert_raw(batch.select(keys), {key: rows[key] for key in keys})

    cut = data.draw(st.integers(0, len(rows)))
    parts = batch.split([cut, len(rows) - cut])
    assert_raw(KeyedJaggedArray.concat(parts), rows)
    assert_raw(KeyedJaggedArray.from_dict(batch.to_dict()), rows)
    larger = batch.with_capacities([capacity + 3 for capacity in batch.capacities])
    assert_raw(larger, rows)
    assert_raw(dataclasses.replace(larger, weights=None), rows)
    assert {key: column.to_lists() for key, column in larger.to_dict().items()} == rows


@given(raw_rows())
def test_copies_keep_every_bit(rows):
    batch = make_batch(rows)
    for same in (
        pickle.loads(pickle.dumps(batch)),
        copy.copy(batch),
        copy.deepcopy(batch),
        jax.tree.map(lambda array: array, batch),
        jax.tree.map(np.copy, batch),
        jax.tree.map(np.asarray, batch),
        jax.device_get(batch),
        jax.tree.unflatten(jax.tree.structure(batch), jax.tree.leaves(batch)),
    ):
        assert_raw(same, rows)
        assert jax.tree.structure(same) == jax.tree.structure(batch)


def test_batches_are_stacked_on_the_host():
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), make_batch(), make_batch())
    assert is_raw(stacked.values)
    assert_raw(jax.tree.map(operator.itemgetter(1), stacked), ROWS)


def test_columns_are_raw_too():
    column = make_batch()["a"]
    assert is_raw(column.values)
    assert is_raw(jax.tree.map(np.asarray, column).values)
    assert column.to_lists() == ROWS["a"]
    assert str(column) == "JaggedArray([[1099511627776, -7], [], [3]], capacity=8)"
    assert "values=int64[8]" in repr(dataclasses.replace(column, lengths=np.zeros(99, np.int32)))


def test_a_column_is_made_of_lists():
    column = JaggedArray.from_lists(ROWS["a"], weights_like(ROWS)["a"], id_bits=64)
    assert is_raw(column.values)
    assert column.to_lists() == ROWS["a"]
    assert_raw(KeyedJaggedArray.from_dict({"a": column}), {"a": ROWS["a"]})
    text = JaggedArray.from_lists([["anna"], []], id_bits=64, capacity=3)
    assert text.to_lists() == [hash_ids(["anna"], None).view(np.int64).tolist(), []]
    assert text.capacity == 3
    with pytest.raises(ValueError, match="sample 1: id -1 is reserved"):
        JaggedArray.from_lists([[1], [-1]], id_bits=64)
    with pytest.raises(ValueError, match="does not fit int32; id_bits=64 keeps raw ids"):
        JaggedArray.from_lists([[2**40]])


@pytest.mark.usefixtures("unchecked")
def test_a_column_of_another_width():
    with pytest.raises(ValueError, match="id_bits is 16; expected 32 or 64"):
        JaggedArray.from_lists([[1]], id_bits=16)


def test_a_batch_of_columns():
    raw, small = make_batch()["a"], KeyedJaggedArray.from_lists({"c": [[1], [2], []]})["c"]
    both = {"a": ROWS["a"], "c": [[1], [2], []]}
    assert_raw(KeyedJaggedArray.from_dict({"a": raw, "c": small}), both)
    assert_raw(KeyedJaggedArray.from_dict({"a": raw, "c": small}, id_bits=64), both)
    wide = JaggedArray(np.array([2**40, -7, -1]), np.array([2, 0], np.int32))
    batch = KeyedJaggedArray.from_dict({"f": wide}, id_bits=64)  # the last is padding
    assert_raw(batch, {"f": [[2**40, -7], []]})
    assert batch.capacities == (3,)
    longer = dataclasses.replace(wide, lengths=np.array([2, 1], np.int32))
    with pytest.raises(ValueError, match="feature 'f', sample 1: id -1 is reserved"):
        KeyedJaggedArray.from_dict({"f": longer}, id_bits=64)
    with pytest.raises(ValueError, match=REFUSED):
        KeyedJaggedArray.from_dict({"a": raw, "c": jax.device_put(small)})


def test_the_constructor_takes_raw_ids():
    batch = make_batch()
    fields = (batch.values, batch.lengths)
    options = {"keys": batch.keys, "capacities": batch.capacities, "strides": batch.strides}
    assert_raw(KeyedJaggedArray(*fields, **options), ROWS)
    packed = KeyedJaggedArray(batch.values[:2], np.array([2, 0]), keys=("a",))
    assert_raw(packed, {"a": [[2**40, -7], []]})
    reserved = batch.values.copy()
    reserved[1] = -1
    with pytest.raises(ValueError, match="feature 'a', sample 0: id -1 is reserved"):
        dataclasses.replace(batch, values=reserved)
    with pytest.raises(ValueError, match=r"id 1099511627776 does not fit int32 .*id_bits=64"):
        dataclasses.replace(batch, values=np.asarray(batch.values))


def test_ids_are_checked_against_bounds_later():
    batch = make_batch({"a": [[1, 9]], "b": [[2**40]]})
    assert batch.with_checked_ids({"a": 10}) is batch
    with pytest.raises(ValueError, match=r"feature 'a', sample 0: id 9 is outside \[0, 9\)"):
        batch.with_checked_ids({"a": 9})
    assert_raw(batch.with_checked_ids({"a": 9}, "ignore"), {"a": [[1, 0]], "b": [[2**40]]})


def test_arithmetic_gives_plain_arrays():
    values = make_batch().values
    assert type(values[1:]) is type(values.copy()) is RawIds
    for result in (
        values % 100,
        values == 3,
        values & 7,
        np.asarray(values),
        np.unique(values) + 0,
    ):
        assert type(result) is np.ndarray
    assert values.max() == 2**63 - 1
    assert type(values.max()) is np.int64
    np.testing.assert_array_equal(jnp.asarray((values % 100).astype(np.int32))[:2], [76, 93])
    assert hash_ids(values, 1000).dtype == np.int32
    assert split_int64(values).shape == (16, 2)


def send(batch):
    return batch.select(["b", "a"])


def test_workers_and_threads_pass_raw_batches():
    batch, results = make_batch(), []
    thread = threading.Thread(target=lambda: results.append(send(batch)))
    thread.start()
    thread.join()
    ours, theirs = multiprocessing.Pipe()
    ours.send(batch)
    results.append(send(theirs.recv()))
    for result in results:
        assert_raw(result, {"b": ROWS["b"], "a": ROWS["a"]})


IN_JAX = {
    "jit": jax.jit(lambda tree: tree),
    "jit_that_ignores_it": jax.jit(lambda tree: 1),
    "device_put": jax.device_put,
    "device_put_there": lambda tree: jax.device_put(tree, jax.devices()[1]),
    "eval_shape": lambda tree: jax.eval_shape(lambda tree: tree, tree),
    "vmap": jax.vmap(lambda tree: tree),
    "grad": lambda tree: jax.grad(
        lambda x, tree: x * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))
    )(1.0, tree),
    "scan": lambda tree: jax.lax.scan(lambda carry, tree: (carry, 1), 0, tree),
    "cond": lambda tree: jax.lax.cond(True, lambda tree: 0, lambda tree: 1, tree),
    "constant": lambda tree: jax.jit(lambda x: [x + leaf[:1] for leaf in jax.tree.leaves(tree)])(1),
    "make_array": lambda tree: jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(jax.typeof(jnp.ones(8)).sharding, x), tree
    ),
}


@pytest.mark.parametrize("use", IN_JAX.values(), ids=IN_JAX)
@pytest.mark.parametrize(
    "part",
    [lambda batch: batch, operator.itemgetter("a"), operator.attrgetter("values")],
    ids=["batch", "column", "values"],
)
@pytest.mark.parametrize("rows", [ROWS, {"a": [[1], [2]], "b": [[3], []]}], ids=["wide", "small"])
def test_jax_refuses_raw_ids(use, part, rows):
    with pytest.raises(ValueError, match=REFUSED):
        use(part(make_batch(rows)))
    with pytest.raises(ValueError, match=REFUSED):
        use({"nested": (part(make_batch(rows)),)})


@pytest.mark.parametrize(
    "use",
    [
        jnp.asarray,
        jnp.array,
        lambda values: jnp.asarray(values, jnp.int32),
        lambda values: jnp.asarray([values, values]),
        lambda values: jnp.concatenate([values, values]),
        lambda values: jnp.stack([values]),
        lambda values: jnp.where(values > 0, values, 0),
        lambda values: values + jnp.arange(16),
        lambda values: jnp.arange(16) + values,
        lambda values: jnp.arange(16)[values],
        lambda values: jnp.zeros(16).at[values].add(1),
        lambda values: jnp.take(jnp.zeros(16), values),
        lambda values: jax.ops.segment_sum(jnp.ones(16), values, 4),
        lambda values: jax.lax.add(values, values),
        lambda values: jax.nn.one_hot(values, 3),
        lambda values: jnp.isin(jnp.arange(3), values),
    ],
)
def test_functions_of_jax_refuse_raw_ids(use):
    with pytest.raises(ValueError, match=REFUSED):
        use(make_batch().values)


def test_a_warm_jit_refuses_raw_ids():
    """Once jit has a program for a tree and shapes, it takes arrays of these without a check."""
    step = jax.jit(lambda features: features.values)
    small = {"a": [[1, 2], [], [3]], "b": [[4], [5], [6, 7]]}
    plain, raw = KeyedJaggedArray.from_lists(small), make_batch()
    for _ in range(3):
        step(plain), step(plain["a"])
    with pytest.raises(ValueError, match=REFUSED):
        step(raw)
    with pytest.raises(ValueError, match=REFUSED):
        step(raw["a"])


@pytest.mark.parametrize(
    "use",
    [
        lambda batch: keyed_jagged_index_select(batch, np.array([1, 0])),
        lambda batch: batch["a"].to_padded_dense(2),
        lambda batch: KeyedJaggedArray.concat(
            [batch, jax.device_put(KeyedJaggedArray.from_lists({"c": [[1], [2], [3]]}))]
        ),
    ],
    ids=["index_select", "to_padded_dense", "concat"],
)
def test_functions_on_batches_refuse_raw_ids(use):
    with pytest.raises(ValueError, match=REFUSED):
        use(make_batch())


def test_dense_arrays_are_not_cut():
    with pytest.raises(ValueError, match="1099511627776 does not fit int32"):
        JaggedArray.from_dense(np.array([[2**40]]))
