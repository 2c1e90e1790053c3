"""The constructor of a keyed batch: what it checks, what it derives, what it leaves alone."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.ragged import JaggedArray, KeyedJaggedArray, fields

ROWS = {"a": [[1, 2], []], "b": [[3], [4, 5]]}
KEYS = {"keys": ("a", "b"), "capacities": (2, 4), "strides": (2, 2)}
VALUES = np.array([1, 2, 3, 4, 5, 0], np.int32)
LENGTHS = np.array([2, 0, 1, 2], np.int32)

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.every_case]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, ">i4", object, "list", "jax"], ids=str)
def test_padded_arrays(kind):
    values, lengths = (
        array.tolist()
        if kind == "list"
        else jnp.asarray(array)
        if kind == "jax"
        else array.astype(kind)
        for array in (VALUES, LENGTHS)
    )
    batch = KeyedJaggedArray(values, lengths, **KEYS)
    assert batch.to_lists() == ROWS
    assert batch.values.dtype == batch.lengths.dtype == np.int32
    assert KeyedJaggedArray(values, lengths, keys=["a", "b"], capacities=[2, 4]).strides == (2, 2)


def test_the_arrays_of_torchrec_are_packed():
    flat = {"keys": ["a", "b"], "values": [1, 2, 3, 4, 5], "lengths": [2, 0, 1, 2]}
    batch = KeyedJaggedArray(**flat, weights=[0.5, 1, 2, 3, 4])
    assert batch.to_lists() == ROWS
    assert batch["b"].weights_to_lists() == [[2.0], [3.0, 4.0]]
    assert batch.capacities == (8, 8)
    config = jaxrec.EmbeddingBagConfig("t", 6, 2, ["a", "b"])
    collection = jaxrec.EmbeddingBagCollection([config], is_weighted=True, rngs=nnx.Rngs(0))
    assert collection(batch).values.shape == (2, 4)
    varied = KeyedJaggedArray(keys=["a", "b"], values=[1, 2], lengths=[1, 1, 0], strides=[1, 2])
    assert varied.to_lists() == {"a": [[1]], "b": [[2], []]}


def test_names_of_torchrec():
    assert KeyedJaggedArray.from_lengths_sync(["a"], [1, 2], [1, 1]).to_lists() == {"a": [[1], [2]]}
    assert KeyedJaggedArray.from_offsets_sync(["a"], [1, 2], [0, 2]).to_lists() == {"a": [[1, 2]]}
    column = JaggedArray.from_lists([[1], [2]])
    assert KeyedJaggedArray.from_jt_dict({"a": column}).to_lists() == {"a": [[1], [2]]}


def make(**changes) -> KeyedJaggedArray:
    return KeyedJaggedArray(**{"values": VALUES, "lengths": LENGTHS} | KEYS | changes)


# Each: what the constructor is given in place of the right thing, the error, and what it must say.
ERRORS = {
    "wide_id": (
        {"values": np.array([1, 2, 2**33 + 1, 4, 5, 0])},
        ValueError,
        "feature 'b', sample 0: id 8589934593 does not fit int32",
    ),
    "wide_id_of_lengths_elsewhere": (
        {"values": np.array([1, 2, 2**33 + 1, 4, 5, 0]), "lengths": jnp.array(LENGTHS)},
        ValueError,
        "feature 'b', sample 0: id 8589934593 does not fit int32",
    ),
    "weight_of_lengths_elsewhere": (
        {"weights": np.array([1, 1, 1, np.nan, 1, np.nan]), "lengths": jnp.array(LENGTHS)},
        ValueError,
        "feature 'b', sample 1: weight nan is not finite",
    ),
    "length_elsewhere": (
        {"lengths": jnp.array([1, -1, 1, 2])},
        ValueError,
        "feature 'a', sample 1 has the negative length -1",
    ),
    "negative_id": (
        {"values": np.array([1, -2, 3, 4, 5, 0])},
        ValueError,
        "feature 'a', sample 0: id -2 is negative",
    ),
    "strings": ({"values": ["x"] * 6}, TypeError, "values: values must be integers, not of type"),
    # NumPy makes floats of ints that share no type of 64 bits.
    "wide_id_in_a_list": ({"values": [0, 1, 2, 3, 4, 2**63]}, TypeError, "must be integers, not"),
    "complex": ({"values": jnp.ones(6, complex)}, TypeError, "values must be real numbers, not of"),
    "keys_first": ({"values": ["a", "b"]}, TypeError, "values: values must be integers"),
    "no_values": ({"values": None}, TypeError, "values: values must be integers"),
    "masked": (
        {"values": np.ma.masked_equal(VALUES, 4)},
        ValueError,
        r"values: 1 elements are masked, .* array.compressed\(\)",
    ),
    "device_strings": (
        {"lengths": jnp.ones(4)},
        TypeError,
        "lengths must be integers, not .*float",
    ),
    "values_shape": (
        {"values": VALUES[:5]},
        ValueError,
        r"values has shape \(5,\); expected \(6,\), the capacities \(2, 4\)",
    ),
    "values_shape_device": (
        {"values": jnp.array(VALUES[:5])},
        ValueError,
        r"values has shape \(5,\); expected \(6,\)",
    ),
    "lengths_shape": ({"lengths": LENGTHS[:3]}, ValueError, r"strides \(2, 2\) do not fit 2 keys"),
    "lengths_scalar": ({"lengths": 3}, ValueError, "lengths is a single number"),
    "length_negative": (
        {"lengths": np.array([2, 0, -1, 2])},
        ValueError,
        "feature 'b', sample 0 has the negative length -1",
    ),
    "lengths_beyond": (
        {"lengths": np.array([2, 1, 1, 2])},
        ValueError,
        "feature 'a' has 3 ids, but its capacity is 2",
    ),
    "lengths_wrap": (
        {"lengths": np.array([2**62, 2**62, 2**62, 2**62])},
        ValueError,
        "feature 'a' has 4611686018427387904 ids, but its capacity is 2",
    ),
    "weights_shape": ({"weights": np.ones(3)}, ValueError, r"weights has shape \(3,\); expected"),
    "weights_nan": (
        {"weights": np.array([1, 1, 1, np.nan, 1, 1])},
        ValueError,
        "feature 'b', sample 1: weight nan is not finite in float32",
    ),
    "inverse_range": (
        {"inverse_indices": [[0, 1], [0, 2]]},
        ValueError,
        "inverse_indices of feature 'b', sample 1 is 2, but the feature has 2 bags",
    ),
    "inverse_shape": ({"inverse_indices": [0, 1]}, ValueError, r"inverse_indices has shape \(2,\)"),
    "keys_missing": (
        {"keys": (), "capacities": (), "strides": ()},
        ValueError,
        "6 values and 4 lengths, but keys=, the names of their features, is missing",
    ),
    "keys_string": ({"keys": "ab"}, TypeError, "keys is the string 'ab'"),
    "keys_numbers": ({"keys": (1, 2)}, TypeError, "keys are names of features, strings, but 1"),
    "keys_none": ({"keys": None}, TypeError, "keys is None"),
    "capacity_count": ({"capacities": (6,)}, ValueError, "1 capacities for 2 keys"),
    "capacity_float": ({"capacities": (2.7, 4)}, TypeError, "capacities: 2.7 is not an integer"),
    "capacity_number": (
        {"capacities": 6},
        TypeError,
        "capacities is 6; expected a number for each",
    ),
    "strides_names": ({"strides": {"a": 2}}, TypeError, "strides is {'a': 2}; expected a number"),
    "flat_sum": ({"capacities": ()}, ValueError, "lengths sum to 5, but there are 6 values"),
}


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(changes, error, message):
    with pytest.raises(error, match=message):
        make(**changes)


def test_traced_arrays_are_checked_by_shape():
    @jax.jit
    def lengths_of(values, lengths):
        return dataclasses.replace(make(values=values, lengths=lengths), weights=values * 0.5)

    assert lengths_of(VALUES, LENGTHS)["b"].weights_to_lists() == [[1.5], [2.0, 2.5]]
    with pytest.raises(ValueError, match=r"values has shape \(5,\); expected \(6,\)"):
        lengths_of(VALUES[:5], LENGTHS)
    wide = np.int64(2**33) + VALUES
    with pytest.raises(ValueError, match="values: 8589934597 does not fit int32"):
        jax.jit(lambda lengths: make(values=wide, lengths=lengths))(LENGTHS)
    with pytest.raises(TypeError, match="traced arrays needs capacities= and strides="):
        jax.jit(lambda values: KeyedJaggedArray(values, LENGTHS, keys=["a", "b"]))(VALUES[:5])


@pytest.mark.parametrize("lengths", [LENGTHS, jnp.array(LENGTHS)], ids=["host", "device"])
def test_padding_may_hold_anything(lengths):
    values = np.array([1, 2, 3, 4, 5, 2**40])
    weights = np.array([1, 1, 1, 1, 1, np.nan])
    batch = make(values=values, weights=weights, lengths=lengths)
    assert batch.to_lists() == ROWS
    assert make(values=np.array([1, 2, 3, 4, 5, -1]), lengths=lengths).to_lists() == ROWS


def test_stacked_batches():
    stacked = make(values=np.stack([VALUES, VALUES]), lengths=np.stack([LENGTHS, LENGTHS]))
    counts = jax.vmap(lambda batch: batch.length_per_key)(stacked)
    np.testing.assert_array_equal(counts, [[2, 3], [2, 3]])
    with pytest.raises(ValueError, match=r"values has shape \(6,\); expected \(2, 6\)"):
        make(lengths=np.stack([LENGTHS, LENGTHS]))
    with pytest.raises(ValueError, match="feature 'a', sample 0: id -1 is negative"):
        make(values=np.stack([VALUES, VALUES - 2]), lengths=np.stack([LENGTHS, LENGTHS]))


@pytest.mark.parametrize("leaf", [object(), None, "x", 1.5, jax.ShapeDtypeStruct((3,), np.int8)])
def test_a_tree_of_any_leaves_is_rebuilt(leaf):
    structure = jax.tree.structure(make())
    rebuilt = jax.tree.unflatten(structure, [leaf, leaf])
    assert rebuilt.values is leaf
    assert (rebuilt.keys, rebuilt.capacities, rebuilt.strides) == (("a", "b"), (2, 4), (2, 2))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([1], r"columns is \[1\] \(list\); expected a mapping by the names"),
        (
            {"a": [[1]]},
            r"feature 'a' is \[\[1\]\] \(list\); expected a JaggedArray; from_lists takes",
        ),
        (
            {"a": JaggedArray.from_lists([[1]]), "b": JaggedArray.from_lists([[True]])},
            "feature 'b': values must be real numbers, not of type bool",
        ),
        ({"a": JaggedArray([1], [1])}, r"feature 'a': values are \[1\]; expected an array"),
    ],
    ids=["list", "lists", "bools", "unchecked_column"],
)
def test_columns_of_another_type(columns, message):
    with pytest.raises(TypeError, match=message):
        KeyedJaggedArray.from_dict(columns)


def test_columns_are_checked():
    wide = JaggedArray(np.array([2**33 + 1]), np.array([1]))
    message = "feature 'a', sample 0: id 8589934593 does not fit int32"
    with pytest.raises(ValueError, match=message):
        KeyedJaggedArray.from_dict({"a": wide})
    beside = JaggedArray(jnp.array([3]), jnp.array([1]))
    with pytest.raises(ValueError, match="8589934593 does not fit int32"):
        KeyedJaggedArray.from_dict({"a": wide, "b": beside})


def test_ids_of_a_lookup_are_integers():
    batch = KeyedJaggedArray(jnp.array([1.0, 2.0]), jnp.array([1, 1]), keys=["t"], capacities=[2])
    config = jaxrec.EmbeddingBagConfig("t", 6, 2)
    collection = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="ids are integers, but the batch holds float32"):
        collection(batch)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4),
    st.sampled_from([(), (1,), (2,)]),
    st.sampled_from([np.int32, np.int64, np.uint32, object]),
    st.booleans(),
    st.data(),
)
def test_a_look_at_all_keys_finds_what_each_key_has(sizes, stacked, kind, on_device, data):
    """The look at all keys at once and the look at each give the same batch, or the same error."""
    capacities, strides = zip(*sizes, strict=True)
    good = st.integers(0, 2)
    odd = st.sampled_from([0, 1, 5, 2**31 - 1, 2**31, 2**32 - 1, -1, -(2**31)])
    numbers = st.one_of(good, good, good, odd)
    arrays = {}
    for name, counts in (("values", capacities), ("lengths", strides)):
        size = math.prod(stacked) * sum(counts)
        drawn = np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), np.int64)
        arrays[name] = drawn.astype(kind).reshape(*stacked, sum(counts))
    if on_device:
        arrays["lengths"] = jnp.asarray(arrays["lengths"].astype(np.int64).astype(np.int32))
    keys = [f"f{i}" for i in range(len(sizes))]

    def outcome():
        try:
            batch = KeyedJaggedArray(
                **arrays, keys=keys, capacities=list(capacities), strides=list(strides)
            )
        except ValueError as error:
            return str(error)
        return batch.values.tolist(), batch.lengths.tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fields, "_is_sound", lambda *_: False)
        expected = outcome()
    assert outcome() == expected


def test_sound_batches_are_checked_at_once(monkeypatch):
    """Also below a mesh's axis, and with lengths on a device."""
    monkeypatch.setattr(fields, "_check_each_key", lambda *_: pytest.fail("checked key by key"))
    for lengths in (np.array([1, 1, 2, 0]), jnp.array([1, 1, 2, 0])):
        KeyedJaggedArray(np.arange(6), lengths, **KEYS)
    KeyedJaggedArray(np.zeros((2, 6), np.int64), np.array([[1, 1, 2, 0], [0, 0, 0, 4]]), **KEYS)
