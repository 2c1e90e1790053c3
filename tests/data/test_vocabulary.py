"""Vocabularies, compared with collections.Counter and dictionaries."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data import DataError, ValueCounts, Vocabulary, vocabulary
from jaxrec.data.parquet import write_checked
from jaxrec.data.vocabulary import FrozenVocabulary
from jaxrec.ragged import KeyedJaggedArray

pytestmark = pytest.mark.every_case

STRINGS = st.sampled_from(["", "a", "b", "ab", "ä", "日本", "z"])


def ordered(counter, min_count=1, max_size=None):
    """The most frequent first, of equally frequent ones the smallest."""

    def rank(item):
        value, count = item
        return -count, value.encode() if isinstance(value, str) else value

    kept = sorted(((v, c) for v, c in counter.items() if c >= min_count), key=rank)
    return kept[:max_size]


@settings(max_examples=30)
@given(
    st.lists(st.lists(STRINGS), min_size=1),
    st.integers(1, 4),
    st.none() | st.integers(0, 4),
    st.integers(1, 3),
)
def test_values_are_counted_and_numbered(pieces, min_count, max_size, num_unknown):
    counter = Counter(value for piece in pieces for value in piece)
    if not counter:
        return
    found = Vocabulary.build(
        (pa.array(piece, pa.string()) for piece in pieces),
        min_count=min_count, max_size=max_size, num_unknown=num_unknown,
    )  # fmt: skip
    wanted = ordered(counter, min_count, max_size)
    assert list(zip(found.values.to_pylist(), found.counts.tolist(), strict=True)) == wanted
    assert found.num_embeddings == num_unknown + len(wanted) == num_unknown + len(found)
    rows = {value: num_unknown + place for place, (value, _) in enumerate(wanted)}
    for value, row in zip(counter, found(pa.array(list(counter))).to_pylist(), strict=True):
        assert row == rows[value] if value in rows else 0 <= row < num_unknown


def test_the_order_of_the_rows_does_not_matter(monkeypatch):
    monkeypatch.setattr(vocabulary, "_PENDING", 3)
    values = np.random.default_rng(0).zipf(1.5, 2000) % 300 - 5
    pieces = np.split(values, 40)
    first, second = (Vocabulary.build(p) for p in (pieces, [np.sort(values)]))
    assert first.values.equals(second.values)
    wanted = ordered(Counter(values.tolist()))
    assert list(zip(first.values.to_pylist(), first.counts.tolist(), strict=True)) == wanted


def test_few_pieces_are_kept():
    """Adding a piece looks at all of them, so that thousands would take long."""
    counts = ValueCounts.of(pa.array(range(20)))
    for _ in range(300):
        counts += ValueCounts.of(pa.array([3, 50]))
        assert len(counts.pieces) <= 64
    found = counts.vocabulary()
    assert dict(zip(found.values.to_pylist(), found.counts.tolist(), strict=True)) == (
        dict.fromkeys(range(20), 1) | {3: 301, 50: 300}
    )


COLUMNS = {
    "string": pa.array(["a", "b", "a"]),
    "large": pa.array(["a", "b", "a"], pa.large_string()),
    "view": pa.array(["a", "b", "a"], pa.string_view()),
    "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
    "chunked": pa.chunked_array([["a"], ["b", "a"]]),
    "list": pa.array([["a", "b"], None, [], ["a"]]),
    "fixed-list": pa.array([["a", "b"], ["a", "a"]], pa.list_(pa.string(), 2)),
    "binary": pa.array([b"a", b"b", b"a"]),
    "fixed-binary": pa.array([b"a", b"b", b"a"], pa.binary(1)),
    "int64": pa.array([2**40, -1, 2**40]),
    "uint64": pa.array([2**64 - 1, 5, 2**64 - 1], pa.uint64()),
    "int8": pa.array([1, -1, 1], pa.int8()),
    "numpy": np.array([["a", "b"], ["a", "a"]]),
    "numpy-int": np.array([[1, 2], [1, 1]], np.int32),
    "objects": np.array(["a", "b", "a"], object),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_every_kind_of_column_keeps_its_form(column):
    rows = Vocabulary.build(column)(column)

    def numbered(value):
        if isinstance(value, list):
            return [numbered(item) for item in value]
        return None if value is None else 1 if value in ("a", b"a", 2**40, 2**64 - 1, 1) else 2

    if isinstance(column, np.ndarray):
        assert rows.tolist() == numbered(column.tolist())
    else:
        assert rows.to_pylist() == numbered(column.to_pylist())
    if isinstance(column, np.ndarray):
        assert rows.dtype == np.int32
        assert rows.shape == column.shape


@pytest.mark.parametrize("kind", [pa.uint64(), pa.int64(), pa.int8()], ids=str)
@pytest.mark.parametrize("times", [1, 500])
def test_integers_at_the_ends_of_their_type(kind, times):
    """Many close ones, which are not hashed, and others; with nulls and in a slice."""
    bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    for values in ([high] * 3 + [high - 1], [low + 1, low, low], [low, high, low]):
        column = pa.array([7, None, *values * times, None], kind)[1:]
        known = Vocabulary.build(column)
        wrapped = [x - 2**64 if x >= 2**63 else x for x in values * times]
        wanted = ordered(Counter(wrapped))
        assert list(zip(known.values.to_pylist(), known.counts.tolist(), strict=True)) == wanted
        rows = {value: row for row, (value, _) in enumerate(wanted, 1)}
        assert known(column).to_pylist() == [0, *(rows[x] for x in wrapped), 0]


def test_a_dictionary_may_have_nulls_repeated_and_unused_values():
    codes = pa.array([0, 2, None, 1, 3, 0], pa.int8())
    column = pa.DictionaryArray.from_arrays(codes, pa.array(["a", None, "b", "a", "unused"]))
    known = Vocabulary.build(column, num_unknown=1)
    assert known.values.to_pylist() == ["a", "b"]
    assert known.counts.tolist() == [3, 1]
    assert known(column).to_pylist() == [1, 2, 0, 0, 1, 1]
    sure = Vocabulary.build(column, num_unknown=0)
    assert sure(column[:2]).to_pylist() == [0, 1]  # the value that no row has is not missed
    with pytest.raises(ValueError, match="a value is null"):
        sure(column)


def test_nulls_are_unknown_or_an_error():
    column = pa.array(["a", None, "x"])
    names = Vocabulary.build(column, num_unknown=3)
    assert names.counts.tolist() == [1, 1]
    assert names(column).to_pylist() == [3, 0, 4]
    with pytest.raises(ValueError, match="value 1 is null"):
        names(column, nulls="error")
    lists = pa.chunked_array([[["a"]], [["x", None], None]], pa.list_(pa.string()))
    assert names(lists).to_pylist() == [[3], [4, 0], None]
    with pytest.raises(ValueError, match="value 1 of list 1 is null"):
        names(lists, nulls="error")
    assert names(pa.nulls(2)).to_pylist() == [0, 0]


def test_unknown_values_are_spread_over_their_rows():
    known = Vocabulary.build(np.arange(5), num_unknown=4)
    rows = known(np.arange(5, 4000))
    assert np.bincount(rows).tolist() == pytest.approx([1000] * 4, abs=150)
    np.testing.assert_array_equal(rows, known(np.arange(5, 4000)))


def test_without_rows_for_unknown_values_they_are_named():
    known = Vocabulary.build(np.array(["a"]), num_unknown=0)
    assert known(np.array(["a"])).tolist() == [0]
    with pytest.raises(ValueError, match="'b' is not in the vocabulary"):
        known(np.array(["a", "b"]))
    with pytest.raises(ValueError, match="a value is null"):
        known(pa.array(["a", None]))


def test_saved_and_loaded(tmp_path):
    path = tmp_path / "city.parquet"
    column = pa.array(["b", "a", "b", "ä"])
    Vocabulary.build(column, num_unknown=2).save(str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    loaded = Vocabulary.load(path)
    assert loaded(column).to_pylist() == [2, 3, 2, 4]
    assert loaded.counts.tolist() == [2, 1, 1]
    assert (loaded.num_unknown, loaded.values.type) == (2, pa.large_string())
    pq.write_table(pa.table({"value": [1]}), path)
    with pytest.raises(DataError, match="holds no vocabulary"):
        Vocabulary.load(path)
    path.write_text("x")
    with pytest.raises(DataError, match="is not a Parquet file"):
        Vocabulary.load(path)


def test_values_whose_hashes_collide_have_rows_of_their_own(monkeypatch):
    """Hashes of a few bits, which always collide until a seed parts them."""
    hashes = vocabulary.hash_ids
    monkeypatch.setattr(
        vocabulary, "hash_ids", lambda v, n, seed: np.asarray(hashes(v, n, seed)) % np.uint64(64)
    )
    known = Vocabulary.build(np.arange(10))
    assert known.index.seed > 0
    # Many values are looked up in a table of Arrow's, few by their hashes.
    few = [known(np.arange(n, n + 2)).tolist() for n in range(0, 12, 2)]
    assert known(np.arange(12)).tolist() == [*itertools.chain(*few)] == [*range(1, 11), 0, 0]


@pytest.mark.usefixtures("unchecked")
def test_wrong_columns_are_named():
    names = Vocabulary.build(np.array(["a"]))
    with pytest.raises(ValueError, match="nulls must be 'unknown' or 'error'"):
        names(np.array(["a"]), nulls="drop")
    with pytest.raises(TypeError, match="type int64, but the vocabulary was made of large_str"):
        names(np.array([1]))
    with pytest.raises(TypeError, match="of Arrow type double; expected strings"):
        Vocabulary.build(np.array([1.0]))
    with pytest.raises(TypeError, match="a vocabulary has values of one kind"):
        Vocabulary.build([np.array([1]), np.array(["a"])])
    with pytest.raises(ValueError, match="needs at least one value, got none"):
        ValueCounts().vocabulary()
    for wrong in ({"min_count": 0}, {"max_size": -1}, {"num_unknown": -1}):
        with pytest.raises(ValueError, match="min_count must be 1 or more"):
            Vocabulary.build(np.array(["a"]), **wrong)


def test_rows_are_packed_as_they_are():
    tags = pa.array([["x", "y"], None, ["y"]])
    rows = Vocabulary.build(tags)(tags)
    batch = KeyedJaggedArray.from_arrow({"tags": rows})
    assert batch["tags"].to_lists() == [[2, 1], [], [1]]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"value": [1]}, "holds no frozen vocabulary"),
        ({"id": ["a"]}, "holds no frozen vocabulary"),
        ({"id": [2, 1]}, "holds ids that do not ascend"),
        ({"id": [1, None]}, "holds ids that do not ascend"),
    ],
    ids=["column", "type", "order", "null"],
)
def test_other_files_than_frozen_vocabularies(table, message, tmp_path):
    path = tmp_path / "user.parquet"
    write_checked(pa.table(table), path)
    with pytest.raises(DataError, match=message):
        FrozenVocabulary.load(path)


def test_values_of_a_vocabulary_differ():
    twice = Vocabulary(pa.array(["a", "b", "a"]), np.ones(3, np.int64))
    with pytest.raises(ValueError, match="must all be different"):
        assert twice.index
