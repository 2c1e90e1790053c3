"""Ids of any kind as raw 64-bit ids, against the rules in plain Python."""

from __future__ import annotations

import fractions
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.ragged import KeyedJaggedArray, bounds, hash_ids

pytestmark = pytest.mark.every_case

# XXH64 of each, as its authors publish them.
HASHES = {"": 0xEF46DB3751D8E999, "a": 0xD24EC4F1A98C6E5B, "abc": 0x44BC2CF5AD770999}
EDGES = [-(2**63), -(2**31) - 1, -2, 0, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2]

raw_ids = (st.sampled_from(EDGES) | st.integers(-(2**63), 2**64 - 2)).filter(lambda i: i != -1)


def bits(number: int) -> int:
    """The signed integer with a number's lowest 64 bits."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def signed(rows):
    return [[bits(number) for number in row] for row in rows]


def hashed(rows):
    return [[bits(HASHES[text]) for text in row] for row in rows]


def pack_lists(rows):
    return KeyedJaggedArray.from_lists({"f": rows}, id_bits=64)


def pack_lengths(rows):
    flat = [value for row in rows for value in row]
    return KeyedJaggedArray.from_lengths(["f"], flat, [len(row) for row in rows], id_bits=64)


def pack_offsets(rows):
    flat = [value for row in rows for value in row]
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    return KeyedJaggedArray.from_offsets(["f"], flat, offsets, id_bits=64)


def pack_arrays(rows):
    """Each row as an array of the narrowest type that NumPy finds, object where there is none."""

    def array(row):
        wide = np.asarray(row, object)
        return np.asarray(row) if np.asarray(row).dtype.kind in "iuU" else wide

    return pack_lists([array(row) for row in rows])


PACKS = pytest.mark.parametrize("pack", [pack_lists, pack_lengths, pack_offsets, pack_arrays])


@PACKS
@given(rows=st.lists(st.lists(raw_ids, max_size=4), max_size=4))
def test_integers_keep_their_bits(pack, rows):
    batch = pack(rows)
    assert batch.values.dtype == np.int64
    assert batch.to_lists() == {"f": signed(rows)}


@PACKS
@given(rows=st.lists(st.lists(st.sampled_from(sorted(HASHES)), max_size=4), max_size=4))
def test_strings_are_hashed(pack, rows):
    assert pack(rows).to_lists() == {"f": hashed(rows)}


@given(st.lists(raw_ids, max_size=6))
def test_dense_integers(ids):
    expected = {"f": [[bits(number)] for number in ids]}
    assert KeyedJaggedArray.from_dense({"f": ids}, id_bits=64).to_lists() == expected
    twice = KeyedJaggedArray.from_dense({"f": [[number] * 2 for number in ids]}, id_bits=64)
    if ids:
        assert twice.to_lists() == {"f": [[bits(number)] * 2 for number in ids]}


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "abc"]),
        np.array([b"a", b"abc"]),
        np.array(["a", "abc"], object),
        np.array(["a", "abc"], np.dtypes.StringDType()),
        ["a", "abc"],
        ("a", b"abc".decode()),
        [b"a", b"abc"],
    ],
    ids=["str", "bytes", "object", "StringDType", "list", "tuple", "list_of_bytes"],
)
def test_dense_strings(array):
    batch = KeyedJaggedArray.from_dense({"f": array}, id_bits=64)
    assert batch.to_lists() == {"f": hashed([["a"], ["abc"]])}


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint64, ">i8"], ids=str
)
def test_arrays_of_every_integer_type(dtype):
    rows = [np.array([0, 7], dtype), np.array([np.iinfo(dtype).max - 1], dtype)]
    assert pack_lists(rows).to_lists() == {"f": signed([row.tolist() for row in rows])}


def test_hashes_of_the_hash_function_are_ids():
    hashes = hash_ids(["anna", "bob"], None)
    assert hashes.dtype == np.uint64
    batch = KeyedJaggedArray.from_dense({"f": hashes, "g": np.array(["anna", "bob"])}, id_bits=64)
    assert batch["f"].to_lists() == batch["g"].to_lists()


def test_features_may_differ_in_kind():
    batch = KeyedJaggedArray.from_lists(
        {"text": [["a"], []], "hash": [[2**64 - 2], [-5]], "small": [[3], [4]]}, id_bits=64
    )
    assert batch.to_lists() == {
        "text": hashed([["a"], []]),
        "hash": [[-2], [-5]],
        "small": [[3], [4]],
    }
    values = ["a", 2**63, 3]
    batch = KeyedJaggedArray.from_lengths(["text", "hash", "small"], values, [1, 1, 1], id_bits=64)
    assert batch.to_lists() == {"text": hashed([["a"]]), "hash": [[-(2**63)]], "small": [[3]]}


@pytest.mark.parametrize("make", [list, np.array], ids=["lists", "arrays"])
def test_the_hash_that_is_reserved_is_moved(monkeypatch, make):
    monkeypatch.setattr(
        bounds, "hash_ids", lambda values, _: np.full(len(values), 2**64 - 1, np.uint64)
    )
    assert pack_lists([make(["a"]), make(["b", "c"])]).to_lists() == {"f": [[-2], [-2, -2]]}


ARROW = {
    "strings": (pa.array(["a", None, "abc"]), ["a", None, "abc"]),
    "large_strings": (pa.array(["a", "abc"], pa.large_string()), ["a", "abc"]),
    "string_view": (pa.array(["a", None, "abc"], pa.string_view()), ["a", None, "abc"]),
    "binary": (pa.array([b"a", b"abc"]), ["a", "abc"]),
    "fixed_binary": (pa.array([b"abc", None], pa.binary(3)), ["abc", None]),
    "dictionary": (pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
    "null_in_dictionary": (
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None])),
        ["a", None, "a"],
    ),
    "chunks": (pa.chunked_array([["a"], [], [None, "abc"]], pa.string()), ["a", None, "abc"]),
    "no_chunks": (pa.chunked_array([], pa.string()), []),
    "sliced": (pa.array(["", "a", "abc", ""]).slice(1, 2), ["a", "abc"]),
}


@pytest.mark.parametrize(("array", "texts"), ARROW.values(), ids=ARROW)
def test_arrow_strings(array, texts):
    batch = KeyedJaggedArray.from_arrow({"f": array}, id_bits=64)
    assert batch.to_lists() == {"f": hashed([] if text is None else [text] for text in texts)}


def test_arrow_lists():
    batch = KeyedJaggedArray.from_arrow(
        {
            "strings": pa.array([["a", "abc"], None, []]),
            "dictionary": pa.ListArray.from_arrays(
                pa.array([0, 2, 2, 3], pa.int32()), pa.array(["a", "", "a"]).dictionary_encode()
            ),
            "views": pa.array([["a"], [], ["abc"]], pa.list_(pa.string_view())),
            "integers": pa.array([[2**64 - 2], [], [7, 2**63]], pa.list_(pa.uint64())),
            "dictionary_of_integers": pa.array([-5, None, -5]).dictionary_encode(),
        },
        {
            "strings": pa.array([[0.5, 1.0], None, []]),
            "dictionary": pa.array([[1.0, 2.0], [], [3.0]]),
            "views": pa.array([[1.0], [], [2.0]]),
            "integers": pa.array([[1.0], [], [2.0, 3.0]]),
            "dictionary_of_integers": pa.array([1.0, None, 2.0]),
        },
        id_bits=64,
    )
    assert batch.to_lists() == {
        "strings": hashed([["a", "abc"], [], []]),
        "dictionary": hashed([["a", ""], [], ["a"]]),
        "views": hashed([["a"], [], ["abc"]]),
        "integers": [[-2], [], [7, -(2**63)]],
        "dictionary_of_integers": [[-5], [], [-5]],
    }
    assert batch["strings"].weights_to_lists() == [[0.5, 1.0], [], []]


WRONG = {
    "reserved": ([1, -1], ValueError, "id -1 is reserved, .* leave padding out, or give such an"),
    "reserved_unsigned": ([1, 2**64 - 1], ValueError, "id 18446744073709551615 is reserved"),
    "too_large": (
        [1, 2**64],
        ValueError,
        "id 18446744073709551616 does not fit 64 bits, .*strings",
    ),
    "too_small": ([1, -(2**63) - 1], ValueError, "id -9223372036854775809 does not fit 64 bits"),
    "string": ([1, "a"], TypeError, r"id 'a' \(str\) is among integers; the ids of a feature are"),
    "integer": (["a", 1], TypeError, r"id 1 \(int\) is among strings"),
    "bytes": (["a", b"b"], TypeError, r"id b'b' \(bytes\) is among strings"),
    "none": (["a", None], ValueError, r"id None \(NoneType\) is null; drop nulls or fill them"),
    "none_of_integers": ([1, None], ValueError, r"id None \(NoneType\) is null"),
    "nan": (["a", float("nan")], ValueError, r"id nan \(float\) is null"),
    "float": ([1, 2.0], TypeError, r"id 2.0 \(float\) is neither an integer nor a string"),
    "bool": ([1, True], TypeError, r"id True \(bool\) is neither an integer nor a string"),
    "object": (
        [1, fractions.Fraction(2)],
        TypeError,
        r"id Fraction\(2, 1\) \(Fraction\) is neither",
    ),
}


@pytest.mark.parametrize(("ids", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_id_is_named(ids, error, message):
    first, wrong = ids
    in_place = f"feature 'f', sample 2: {message}"
    with pytest.raises(error, match=in_place):
        pack_lists([[first], [], [first, wrong], [first]])
    if not isinstance(wrong, bool):  # one of a list of bools and integers is an integer to NumPy
        with pytest.raises(error, match=in_place):
            pack_lengths([[first], [], [first, wrong], [first]])
        with pytest.raises(error, match=in_place):
            KeyedJaggedArray.from_dense({"f": [first, first, wrong]}, id_bits=64)
    rows = [np.array([first], object), np.array([], object), np.array([wrong], object)]
    with pytest.raises(error, match=in_place if type(first) is type(wrong) else "sample 2: id"):
        pack_lists(rows)


def test_rows_of_other_types_are_named():
    with pytest.raises(TypeError, match=r"sample 1: id 5 \(int\) is among strings"):
        pack_lists([np.array(["a"]), np.array([5])])
    with pytest.raises(ValueError, match=r"feature 'f', sample 1: id 18446744073709551615 is res"):
        pack_lists([np.array([5]), np.array([2**64 - 1], np.uint64)])
    with pytest.raises(TypeError, match=r"id 1.0 \(float\) is neither an integer nor a string"):
        KeyedJaggedArray.from_dense({"f": np.ones(2)}, id_bits=64)
    with pytest.raises(TypeError, match=r"id True \(bool\) is neither an integer"):
        KeyedJaggedArray.from_dense({"f": np.ones(2, bool)}, id_bits=64)
    with pytest.raises(TypeError, match="expected an array of"):
        KeyedJaggedArray.from_dense({"f": [["a"], ["b", "c"]]}, id_bits=64)
    with pytest.raises(ValueError, match="1 elements are masked"):
        KeyedJaggedArray.from_dense({"f": np.ma.masked_equal([1, 2], 2)}, id_bits=64)
    with pytest.raises(TypeError, match=r"sample 0 is 'ab' \(str\); expected a list of ids"):
        pack_lists(["ab"])


def test_nulls_in_arrow_lists_are_named():
    with pytest.raises(ValueError, match="feature 'f', sample 1 has a null inside its list"):
        KeyedJaggedArray.from_arrow({"f": pa.array([["a"], ["b", None]])}, id_bits=64)
    null = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    lists = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), null)
    with pytest.raises(ValueError, match="feature 'f', sample 0 has a null inside its list"):
        KeyedJaggedArray.from_arrow({"f": lists}, id_bits=64)
    with pytest.raises(TypeError, match="of Arrow type double; expected integers, strings or list"):
        KeyedJaggedArray.from_arrow({"f": pa.array([1.5])}, id_bits=64)


def test_bounds_are_checked_where_they_are_given():
    def pack(rows, **options):
        return KeyedJaggedArray.from_lists(
            {"f": rows, "raw": [[2**40]] * len(rows)}, bounds={"f": 5}, id_bits=64, **options
        )

    assert pack([[4], [0, 1]])["f"].to_lists() == [[4], [0, 1]]
    for wrong in (5, -1, 2**63, -(2**70)):
        with pytest.raises(ValueError, match=rf"sample 1: id {wrong} is outside \[0, 5\)"):
            pack([[4], [wrong]])
        repaired = pack([[4], [wrong]], bounds_mode="ignore")
        assert repaired.to_lists() == {"f": [[4], [0]], "raw": [[2**40]] * 2}
    with pytest.raises(ValueError, match=r"bounds names 'f', whose ids are strings: .*hash_ids"):
        pack([["a"]])
    with pytest.raises(TypeError, match=r"sample 1: id 1.5 \(float\) is neither"):
        pack([[1], [1.5]])


@pytest.mark.parametrize("id_bits", [48, "64", None])
@pytest.mark.usefixtures("unchecked")
def test_other_widths(id_bits):
    message = re.escape(f"id_bits is {id_bits!r}; expected 32 or 64")
    for pack in (
        lambda: KeyedJaggedArray.from_lists({"f": [["a"]]}, id_bits=id_bits),
        lambda: KeyedJaggedArray.from_dense({"f": [1]}, id_bits=id_bits),
        lambda: KeyedJaggedArray.from_arrow({"f": pa.array([1])}, id_bits=id_bits),
        lambda: KeyedJaggedArray.from_lengths(["f"], [1], [1], id_bits=id_bits),
        lambda: KeyedJaggedArray.from_offsets(["f"], [1], [0, 1], id_bits=id_bits),
        lambda: KeyedJaggedArray.from_dict({}, id_bits=id_bits),
    ):
        with pytest.raises(ValueError, match=message):
            pack()


@pytest.mark.parametrize(
    "pack",
    [
        lambda: KeyedJaggedArray.from_lists({"f": [[2**31]]}),
        lambda: KeyedJaggedArray.from_lists({"f": [[-(2**40)]]}),
        lambda: KeyedJaggedArray.from_lists({"f": [["a"]]}),
        lambda: KeyedJaggedArray.from_lists({"f": [np.array(["a"])]}),
        lambda: KeyedJaggedArray.from_dense({"f": np.array(["a"])}),
        lambda: KeyedJaggedArray.from_dense({"f": ["a", None]}),
        lambda: KeyedJaggedArray.from_lengths(["f"], ["a"], [1]),
        lambda: KeyedJaggedArray.from_arrow({"f": pa.array(["a"])}),
        lambda: KeyedJaggedArray.from_arrow({"f": pa.array([["a"]])}),
        lambda: KeyedJaggedArray.from_arrow({"f": pa.array([1]).dictionary_encode()}),
    ],
)
def test_without_raw_ids_the_error_says_what_to_do(pack):
    with pytest.raises((TypeError, ValueError), match=r"id_bits=64 .*hash_ids"):
        pack()
