"""Stable hashes, compared with the package xxhash, and fixed for all versions to come."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import KeyedJaggedArray, hash_ids

pytestmark = pytest.mark.every_case

SEEDS = st.integers(0, 2**64 - 1)


def expected(values, seed=0):
    def data(value):
        if isinstance(value, int):
            return (value % 2**64).to_bytes(8, "little")
        return value.encode() if isinstance(value, str) else value

    return [xxhash.xxh64_intdigest(data(value), seed) for value in values]


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=80) | st.binary(min_size=60, max_size=300)), SEEDS)
def test_bytes_agree_with_xxhash(values, seed):
    wanted = expected(values, seed)
    assert hash_ids(values, None, seed).tolist() == wanted
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        assert hash_ids(pa.array(values, kind), None, seed).to_pylist() == wanted


@settings(max_examples=40)
@given(st.lists(st.text()), SEEDS)
def test_strings_agree_with_xxhash(values, seed):
    wanted = expected(values, seed)
    assert hash_ids(values, None, seed).tolist() == wanted
    assert hash_ids(np.array(values, object), None, seed).tolist() == wanted
    array = pa.array(values, pa.string())
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        assert hash_ids(array.cast(kind), None, seed).to_pylist() == wanted
    assert hash_ids(array.dictionary_encode(), None, seed).to_pylist() == wanted
    assert hash_ids(array[1:], None, seed).to_pylist() == wanted[1:]


@given(st.lists(st.integers(-(2**63), 2**64 - 1)), SEEDS)
def test_integers_agree_with_xxhash(values, seed):
    assert hash_ids(values, None, seed).tolist() == expected(values, seed)


def test_every_length_and_more_strings_than_one_block():
    values = [bytes(range(256))[:length] * 2 for length in range(256)] * 70
    assert hash_ids(values, None, 9).tolist() == expected(values, 9)
    ids = list(range(20_000))
    assert hash_ids(np.array(ids), None).tolist() == expected(ids)


def test_values_are_fixed_for_all_platforms_and_versions():
    """A table that was trained keeps its rows."""
    values = ["", "a", "user_1", "Füße", "a string of more than thirty-two bytes"]
    assert hash_ids(values, None).tolist() == [
        17241709254077376921,
        15154266338359012955,
        6577861505116132482,
        14838834302708688616,
        3994418684681781537,
    ]
    assert hash_ids(np.array([0, 1, -1, 2**40]), None).tolist() == [
        3803688792395291579,
        11468921228449061269,
        9642548396912002761,
        11618905265722610771,
    ]
    assert hash_ids(values, 1000, seed=1).tolist() == [875, 246, 235, 106, 666]


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8"])
def test_the_type_of_an_integer_does_not_matter(dtype):
    values = [0, 1, 100] if np.dtype(dtype).kind == "u" else [-100, -1, 7]
    array = np.array(values, dtype)
    assert hash_ids(array, None).tolist() == expected(values)
    assert hash_ids(pa.array(array.astype(array.dtype.newbyteorder("="))), None).to_pylist() == (
        expected(values)
    )


@pytest.mark.parametrize("num_embeddings", [1, 2, 3, 1000, 2**31 - 1])
def test_rows_lie_in_the_table(num_embeddings):
    rows = hash_ids(np.arange(2000), num_embeddings)
    assert rows.dtype == np.int32
    assert rows.tolist() == [hash % num_embeddings for hash in expected(range(2000))]


def test_rows_are_spread_evenly():
    counts = np.bincount(hash_ids(np.arange(100_000), 100), minlength=100)
    # Chi-squared of 99 degrees of freedom: 150 has a probability of 0.0007.
    assert ((counts - 1000) ** 2 / 1000).sum() < 150


def test_the_form_of_the_values_stays():
    (a, b, c) = expected("abc")
    assert hash_ids(np.array([["a", "b"], ["c", "a"]]), None).tolist() == [[a, b], [c, a]]
    assert hash_ids(np.array(["a", "b"], "S"), None).tolist() == [a, b]
    assert [x.tolist() for x in hash_ids([["a", "b"], [], ["c"]], None)] == [[a, b], [], [c]]
    assert hash_ids([], 5).shape == (0,)
    chunked = pa.chunked_array([["a"], ["b", "c"]])
    assert hash_ids(chunked, None).num_chunks == 2
    assert hash_ids(chunked, None).to_pylist() == [a, b, c]
    assert hash_ids(pa.chunked_array([], pa.string()), None).to_pylist() == []


LISTS = {
    "list": pa.list_(pa.string()),
    "large": pa.large_list(pa.string()),
    "view": pa.list_view(pa.string()),
    "dictionary": pa.list_(pa.dictionary(pa.int32(), pa.string())),
}


@pytest.mark.parametrize("kind", LISTS.values(), ids=LISTS)
def test_lists_stay_lists(kind):
    (a, b) = expected("ab")
    array = pa.array([["a", "b"], None, [], ["b"]], kind)
    assert hash_ids(array, None).to_pylist() == [[a, b], None, [], [b]]
    assert hash_ids(array[1:], None).to_pylist() == [None, [], [b]]
    rows = hash_ids(array, 1000)
    bags = KeyedJaggedArray.from_arrow({"f": rows})["f"].to_lists()
    assert bags == [[a % 1000, b % 1000], [], [], [b % 1000]]


def test_fixed_size_lists_stay_lists():
    (a, b) = expected([1, 2])
    array = pa.array([[1, 2], None, [2, 2]], pa.list_(pa.int64(), 2))
    assert hash_ids(array, None).to_pylist() == [[a, b], None, [b, b]]


with_null = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
WRONG = {
    "arrow-null": (pa.array(["a", None]), ValueError, "value 1 is null"),
    "chunk-null": (pa.chunked_array([["a"], ["b", None]]), ValueError, "value 2 is null"),
    "list-null": (pa.array([["a"], ["b", None]]), ValueError, "value 1 of list 1 is null"),
    "null-list": (pa.array([["a"], None, [None]]), ValueError, "value 0 of list 2 is null"),
    "dictionary-null": (with_null, ValueError, "value 1 is null"),
    "none": (["a", None], ValueError, "value 1 is null"),
    "nan": (np.array(["a", float("nan")], object), ValueError, "value 1 is null"),
    "masked": (np.ma.array([1, 2], mask=[False, True]), ValueError, "value 1 is null"),
    "floats": (np.array([1.0]), TypeError, "value 0 is of type float"),
    "bool": ([True], TypeError, "value 0 is of type bool"),
    "mixed": (["a", 1], TypeError, "values mix int and str"),
    "arrow-floats": (pa.array([1.0]), TypeError, "values are of Arrow type double"),
    "table": (pa.table({"f": ["a"]}), TypeError, "expected an Arrow array or chunked"),
    "wide": ([2**64], ValueError, "value 0 is 18446744073709551616"),
}


@pytest.mark.parametrize(("values", "error", "message"), WRONG.values(), ids=WRONG)
def test_what_has_no_hash_is_named(values, error, message):
    with pytest.raises(error, match=message):
        hash_ids(values, 10)


@pytest.mark.parametrize("count", [0, -1, 2**31])
def test_rows_that_no_table_has(count):
    with pytest.raises(ValueError, match="num_embeddings must be from 1 to"):
        hash_ids([1], count)
    with pytest.raises(ValueError, match="seed must be from 0"):
        hash_ids([1], 1, seed=-1)
