"""Keyed batches: reshaping them against nested lists, on the host, on a device and under jit."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.ragged import JaggedArray, KeyedJaggedArray, keyed_jagged_index_select
from tests.ragged.strategies import nested_batches, weights_like

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]

ROWS = {"a": [[1, 2], [], [3]], "b": [[4], [5, 6, 7], []], "c": [[], [], [8]]}

ON_HOST_AND_DEVICE = pytest.mark.parametrize(
    "place", [lambda x: x, jax.device_put], ids=["numpy", "jax"]
)


def make_batch(**options) -> KeyedJaggedArray:
    return KeyedJaggedArray.from_lists(ROWS, weights_like(ROWS), **options)


def weight_lists(batch: KeyedJaggedArray) -> dict:
    return {key: column.weights_to_lists() for key, column in batch.to_dict().items()}


def bags_of(batch: KeyedJaggedArray) -> list:
    """Keys with their bags and weights, in order: repeated keys too."""
    columns = [batch._column(index) for index in range(len(batch.keys))]
    return [
        (key, column.to_lists(), column.weights_to_lists())
        for key, column in zip(batch.keys, columns, strict=True)
    ]


@given(nested_batches(min_keys=0))
def test_lists_round_trip(rows):
    batch = KeyedJaggedArray.from_lists(rows, weights_like(rows))
    assert batch.to_lists() == rows
    assert weight_lists(batch) == weights_like(rows)
    assert KeyedJaggedArray.from_dict(batch.to_dict()).to_lists() == rows


@given(st.data(), nested_batches())
def test_permute_split_and_concat_agree_with_lists(data, rows):
    batch = KeyedJaggedArray.from_lists(rows, weights_like(rows))
    everything = bags_of(batch)

    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    assert bags_of(batch.permute(indices)) == [everything[index] for index in indices]

    cut = data.draw(st.integers(0, len(rows)))
    first, nothing, second = batch.split([cut, 0, len(rows) - cut])
    assert bags_of(first) == everything[:cut]
    assert bags_of(nothing) == []
    assert bags_of(second) == everything[cut:]
    assert bags_of(KeyedJaggedArray.concat([second, first])) == everything[cut:] + everything[:cut]


@ON_HOST_AND_DEVICE
def test_reshaping_stays_where_the_batch_is(place):
    batch = place(make_batch(inverse_indices=[[0, 1, 2, 2]] * 3))
    results = [
        batch,
        batch.permute([2, 0, 1, 1]),
        batch.select(["b"]),
        *batch.split([1, 2]),
        KeyedJaggedArray.concat(batch.split([1, 2])),
        KeyedJaggedArray.from_dict(batch.to_dict()),
        batch.with_capacities({"a": 16}),
        batch["a"],
        [batch.offsets, batch.length_per_key, batch.offset_per_key, batch["a"].offsets],
    ]
    for result in results:
        for leaf in jax.tree.leaves(result):
            assert isinstance(leaf, type(batch.values))
            assert leaf.dtype in (np.int32, np.float32)


@ON_HOST_AND_DEVICE
def test_shapes_and_counts(place):
    batch = place(make_batch())
    assert batch.keys == ("a", "b", "c")
    assert batch.capacities == (8, 8, 8)
    assert batch.capacity_per_key == {"a": 8, "b": 8, "c": 8}
    assert batch.strides == (3, 3, 3)
    assert batch.batch_size == 3
    assert list(batch) == ["a", "b", "c"]
    np.testing.assert_array_equal(batch.lengths, [2, 0, 1, 1, 3, 0, 0, 0, 1])
    np.testing.assert_array_equal(batch.offsets, [0, 2, 2, 3, 4, 7, 7, 7, 7, 8])
    np.testing.assert_array_equal(batch.length_per_key, [3, 4, 1])
    np.testing.assert_array_equal(batch.offset_per_key, [0, 3, 7, 8])
    np.testing.assert_array_equal(batch.values[8:16], [4, 5, 6, 7, 0, 0, 0, 0])
    np.testing.assert_array_equal(batch.weights[8:16], [0, 1, 1 + 1 / 64, 1 + 2 / 64, 0, 0, 0, 0])


BAGS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=3, max_size=3)


@given(BAGS, BAGS)
def test_segment_ids(first, second):
    # Twelve ids fill a segment to its end.
    batch = KeyedJaggedArray.from_lists({"a": first, "b": second}, capacities=[12, 12])
    expected = []
    for bags, start in ((first, 0), (second, 3)):
        ids = [bag for bag, values in enumerate(bags, start) for _ in values]
        expected += ids + [6] * (12 - len(ids))
    np.testing.assert_array_equal(segment_ids_of(batch), expected)


segment_ids_of = jax.jit(lambda batch: batch.segment_ids)


def test_segment_ids_of_full_segments_and_variable_strides():
    expected = [0, 0, 0, 1, 6, 6, 3, 3, 5, 5, 6]
    batch = KeyedJaggedArray.from_lengths(
        ["a", "b", "c"],
        np.arange(8),
        [3, 1, 0, 2, 0, 2],
        strides=[2, 1, 3],
        capacities=[4, 2, 5],
    )
    np.testing.assert_array_equal(batch.segment_ids, expected)


def test_variable_batch_keeps_bags_and_samples_apart():
    inverse = np.array([[0, 1, 1, 0], [2, 0, 1, 2]])
    batch = KeyedJaggedArray.from_lists(
        {"a": [[1], [2, 3]], "b": [[4], [], [5]]}, inverse_indices=inverse
    )
    assert batch.batch_size == 4
    assert batch.strides == (2, 3)
    assert batch.inverse_indices.dtype == np.int32
    assert batch["b"].to_lists() == [[4], [], [5]]
    permuted = batch.permute([1, 1, 0])
    np.testing.assert_array_equal(permuted.inverse_indices, inverse[[1, 1, 0]])
    together = KeyedJaggedArray.concat(batch.split([1, 1]))
    np.testing.assert_array_equal(together.inverse_indices, inverse)
    assert together.to_lists() == batch.to_lists()


def test_same_order_is_the_same_batch():
    batch = make_batch()
    assert batch.permute([0, 1, 2]) is batch
    assert batch.split([3])[0] is batch
    assert batch.with_capacities({}) is batch


def test_consecutive_keys_are_one_slice():
    batch = KeyedJaggedArray.from_dense({f"f{i}": np.arange(2) for i in range(40)})
    program = jax.make_jaxpr(lambda b: b.permute([*range(20, 40), *range(20)]))(batch)
    slices = [equation for equation in program.eqns if "slice" in str(equation.primitive)]
    assert len(slices) == 4  # two of values and two of lengths


def test_empty():
    for weighted in (False, True):
        batch = KeyedJaggedArray.empty(weighted=weighted)
        assert (batch.keys, batch.batch_size, batch.to_lists()) == ((), 0, {})
        assert (batch.weights is not None) == weighted
        np.testing.assert_array_equal(batch.offsets, [0])
        np.testing.assert_array_equal(batch.offset_per_key, [0])
        assert batch.length_per_key.shape == (0,)
        assert batch.segment_ids.shape == (0,)
    assert KeyedJaggedArray.concat([]).keys == ()
    assert KeyedJaggedArray.concat([batch, make_batch()]).to_lists() == ROWS


@given(nested_batches(), st.integers(0, 9))
def test_with_capacities(rows, more):
    batch = KeyedJaggedArray.from_lists(rows, weights_like(rows))
    key = batch.keys[0]
    counts = batch.length_per_key.tolist()
    for wanted in ({key: batch.capacities[0] + more}, counts):
        other = batch.with_capacities(wanted)
        assert other.to_lists() == rows
        assert weight_lists(other) == weights_like(rows)
        assert other.values.shape == (sum(other.capacities),)
    assert other.capacities == tuple(counts)


def test_with_capacities_under_jit_only_grows():
    batch = make_batch()
    grown = jax.jit(lambda b: b.with_capacities({"b": 12}))(batch)
    assert grown.capacities == (8, 12, 8)
    assert grown.to_lists() == ROWS
    with pytest.raises(ValueError, match="'b' has 8 ids, but its capacity is 4"):
        jax.jit(lambda b: b.with_capacities({"b": 4}))(batch)
    assert batch.with_capacities({"b": 4}).to_lists() == ROWS


def test_from_dict_under_jit():
    batch = jax.jit(lambda b: KeyedJaggedArray.from_dict(b.to_dict()))(make_batch())
    assert bags_of(batch) == bags_of(make_batch())


def test_from_dict_of_different_batch_sizes_has_variable_strides():
    columns = {
        "a": JaggedArray.from_lists([[1], [2]]),
        "b": JaggedArray.from_lists([[3, 4]], capacity=2),
    }
    batch = KeyedJaggedArray.from_dict(columns)
    assert batch.strides == (2, 1)
    assert batch.capacities == (8, 2)
    assert batch.to_lists() == {"a": [[1], [2]], "b": [[3, 4]]}


@ON_HOST_AND_DEVICE
def test_with_checked_ids(place):
    batch = place(make_batch())
    assert batch.with_checked_ids({"a": 4, "b": 8, "c": 9}) is batch
    with pytest.raises(ValueError, match=r"feature 'b', sample 1: id 6 is outside \[0, 6\)"):
        batch.with_checked_ids({"b": 6})
    with pytest.warns(UserWarning, match="2 of 8 ids became 0; the first: feature 'b', sample 1"):
        repaired = batch.with_checked_ids({"b": 6}, "clamp")
    assert repaired.to_lists() == ROWS | {"b": [[4], [5, 0, 0], []]}
    assert weight_lists(repaired) == weights_like(ROWS)
    assert batch.to_lists() == ROWS


def test_padding_is_never_checked():
    batch = make_batch()
    values = np.where(batch.segment_ids == 9, -5, batch.values)
    odd = dataclasses.replace(batch, values=values)
    assert odd.with_checked_ids({"a": 4}) is odd


def test_from_dict_takes_the_options_of_packing():
    columns = make_batch().to_dict()
    batch = KeyedJaggedArray.from_dict(
        columns, capacities={"a": 3}, bounds={"a": 3}, bounds_mode="ignore"
    )
    assert batch.capacities == (3, 8, 8)
    assert batch.to_lists() == ROWS | {"a": [[1, 2], [], [0]]}
    with pytest.raises(ValueError, match="feature 'a', sample 2: id 3 is outside"):
        KeyedJaggedArray.from_dict(columns, bounds={"a": 3})
    inverse = np.zeros((3, 5), np.int32)
    assert KeyedJaggedArray.from_dict(columns, inverse_indices=inverse).batch_size == 5


def test_numpy_and_jax_batches_share_a_program():
    traces = []

    @jax.jit
    def count(batch):
        traces.append(batch.capacities)
        return batch.lengths.sum()

    batch = make_batch()
    assert count(batch) == count(jax.device_put(batch)) == count(make_batch()) == 8
    assert len(traces) == 1
    count(batch.with_capacities({"a": 12}))
    assert len(traces) == 2


def test_scan_over_stacked_batches():
    batches = [make_batch(), make_batch()]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)

    def step(total, batch):
        return total + batch["b"].to_padded_dense(3).sum(), batch.permute([1, 0])

    total, permuted = jax.lax.scan(step, jnp.int32(0), stacked)
    assert total == 44
    for index in range(2):
        one = jax.tree.map(lambda leaf, index=index: leaf[index], permuted)
        assert one.to_lists() == {key: ROWS[key] for key in ("b", "a")}


def test_donation():
    batch = jax.device_put(make_batch())
    swapped = jax.jit(lambda b: b.permute([2, 1, 0]), donate_argnums=0)(batch)
    assert batch.values.is_deleted()
    assert swapped.to_lists() == {key: ROWS[key] for key in ("c", "b", "a")}
    assert "float32[24]" in repr(batch)  # what is gone can still be named
    again = jax.jit(lambda b: b.permute([2, 1, 0]), donate_argnums=0)(make_batch())
    assert again.to_lists() == swapped.to_lists()


def test_vmap():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), make_batch(), make_batch())
    sums = jax.vmap(lambda batch: batch["a"].to_padded_dense(2).sum())(stacked)
    np.testing.assert_array_equal(sums, [6, 6])


def test_a_tree_of_anything():
    batch = make_batch()
    names = jax.tree.map(lambda leaf: None, batch)
    assert names.values is None
    assert names.keys == batch.keys
    shapes = jax.eval_shape(lambda b: b.permute([0, 0]), batch)
    assert shapes.values.shape == (16,)
    leaves, structure = jax.tree.flatten(batch)
    assert jax.tree.unflatten(structure, leaves).to_lists() == ROWS
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    assert paths == [".values", ".lengths", ".weights"]


def test_weights_are_differentiable():
    batch = make_batch()

    def loss(weights):
        column = dataclasses.replace(batch, weights=weights).permute([1, 0])["b"]
        return (column.to_padded_dense_weights(2) * jnp.array([[1.0, 2], [3, 4], [5, 6]])).sum()

    gradient = jax.grad(loss)(jnp.asarray(batch.weights))
    expected = np.zeros(24)
    expected[8:11] = [1, 3, 4]  # the third id of the second bag is cut
    np.testing.assert_array_equal(gradient, expected)


def test_a_checkpoint_restores_a_batch(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    batch = jax.device_put(make_batch())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "batch", batch)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "batch", batch)
    assert bags_of(restored) == bags_of(batch)
    assert restored.capacities == batch.capacities


ERRORS = {
    "getitem": (lambda b: b["x"], KeyError, r"no key 'x' among \['a', 'b', 'c'\]"),
    "select": (lambda b: b.select(["a", "x"]), KeyError, r"no keys \['x'\] among"),
    "permute": (lambda b: b.permute([0, 3]), IndexError, r"no key at \[3\]: the batch has 3"),
    "permute_negative": (lambda b: b.permute([-1]), IndexError, r"no key at \[-1\]"),
    "split": (lambda b: b.split([1, 1]), ValueError, r"segments \[1, 1\] .* sum to 3"),
    "split_negative": (lambda b: b.split([4, -1]), ValueError, r"segments \[4, -1\]"),
    "concat_shared": (
        lambda b: KeyedJaggedArray.concat([b, b]),
        ValueError,
        r"keys \['a', 'b', 'c'\] are in more than one",
    ),
    "concat_weights": (
        lambda b: KeyedJaggedArray.concat([b, KeyedJaggedArray.from_lists({"d": [[], [], []]})]),
        ValueError,
        "1 of 2 parts have no weights",
    ),
    "concat_sizes": (
        lambda b: KeyedJaggedArray.concat([b, KeyedJaggedArray.from_lists({"d": [[]]})]),
        ValueError,
        r"different numbers of samples: \[3, 1\]",
    ),
    "concat_inverse": (
        lambda b: KeyedJaggedArray.concat(
            [b, KeyedJaggedArray.from_lists({"d": [[]]}, inverse_indices=[[0, 0, 0]])]
        ),
        ValueError,
        "some of the batches have inverse indices",
    ),
    "with_capacities": (
        lambda b: b.with_capacities({"b": 3}),
        ValueError,
        "'b' has 4 ids, but its capacity is 3; give it at least 4 .*: 8",
    ),
    "with_capacities_unknown": (
        lambda b: b.with_capacities({"x": 3}),
        ValueError,
        r"capacities name \['x'\]",
    ),
    "checked_repeated": (
        lambda b: b.permute([0, 0]).with_checked_ids({"a": 9}),
        ValueError,
        r"keys occur more than once in \('a', 'a'\)",
    ),
    "checked_traced": (
        lambda b: jax.jit(lambda b: b.with_checked_ids({"a": 9}))(b),
        TypeError,
        "values: the array is traced, but batches are packed and checked on the host",
    ),
    "from_dict_deep": (
        lambda b: KeyedJaggedArray.from_dict({"a": JaggedArray.from_lists([[[1.0, 2.0]]])}),
        ValueError,
        r"features \['a'\] have elements that are not scalars",
    ),
    "from_dict_inverse": (
        lambda b: KeyedJaggedArray.from_dict(
            {"a": b["a"]}, inverse_indices=np.zeros((2, 3), np.int32)
        ),
        ValueError,
        r"inverse_indices has shape \(2, 3\); expected \(1, 3\), \[keys, batch\]",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(make_batch())


def test_every_order_of_three_keys():
    batch = make_batch()
    orders = itertools.product(range(3), repeat=3)
    for order in orders:
        assert [key for key, _, _ in bags_of(batch.permute(order))] == [
            batch.keys[i] for i in order
        ]


def with_slots(*keys: str) -> KeyedJaggedArray:
    return dataclasses.replace(make_batch(), slot_keys=keys)


def test_slot_keys_follow_their_keys():
    batch = with_slots("c", "a")
    assert make_batch().slot_keys == ()
    assert batch.slot_keys == ("a", "c")  # in the order of the keys, whatever was given
    assert batch.permute([2, 1, 0, 2]).slot_keys == ("c", "a")
    assert batch.permute([0, 1, 2]).slot_keys == ("a", "c")
    assert batch.select(["b"]).slot_keys == ()
    assert [part.slot_keys for part in batch.split([2, 0, 1])] == [("a",), (), ("c",)]
    assert batch.with_capacities({"a": 16}).slot_keys == ("a", "c")
    assert dataclasses.replace(batch, weights=None).slot_keys == ("a", "c")
    assert batch.with_checked_ids({"a": 3}, "ignore").slot_keys == ("a", "c")
    assert keyed_jagged_index_select(batch, np.array([1])).slot_keys == ("a", "c")


def test_slot_keys_of_batches_are_joined():
    first, second = with_slots("a").select(["b", "a"]), with_slots("c").select(["c"])
    assert KeyedJaggedArray.concat([first, second]).slot_keys == ("a", "c")
    assert KeyedJaggedArray.concat([first, make_batch().select(["c"])]).slot_keys == ("a",)


def test_slot_keys_are_static():
    batch = with_slots("b")
    assert jax.tree.map(np.asarray, batch).slot_keys == ("b",)
    assert pickle.loads(pickle.dumps(batch)).slot_keys == ("b",)
    assert jax.jit(lambda batch: batch.select(["c", "b"]))(batch).slot_keys == ("b",)
    assert jax.tree.structure(batch) != jax.tree.structure(make_batch())
    assert len(jax.tree.leaves(batch)) == len(jax.tree.leaves(make_batch()))
    packed = KeyedJaggedArray(np.arange(2), np.ones(2, int), keys=("f", "g"), slot_keys=["g"])
    assert packed.slot_keys == ("g",)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("slot_keys", "error", "message"),
    [
        (("d",), ValueError, r"slot_keys names \['d'\], but the keys are \['a', 'b', 'c'\]"),
        ("a", TypeError, "slot_keys is the string 'a'; expected a sequence of keys"),
    ],
)
def test_wrong_slot_keys(slot_keys, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(make_batch(), slot_keys=slot_keys)
