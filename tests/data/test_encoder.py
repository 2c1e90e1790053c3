"""Columns of one's own as batches, compared with plain Python."""

from __future__ import annotations

import decimal
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data import DataError, ParquetGroups, Schema, TableEncoder, Vocabulary, learn_encoder
from jaxrec.data.encoder import EncodedGroups
from jaxrec.data.groups import GroupRange
from jaxrec.data.statistics import ListLengths
from jaxrec.ragged import hash_ids

pytestmark = pytest.mark.every_case

SCHEMA = Schema.from_dict(
    {
        "label": "clicked",
        "weight": "importance",
        "dense": {
            "age": {},
            "price": {"transform": "log1p", "missing": "zero"},
            "hour": {"transform": "none", "missing": "error"},
        },
        "categorical": {
            "city": {"min_count": 2},
            "user": {"encoding": "hash", "num_embeddings": 50},
            "shop": {"encoding": "ids", "num_embeddings": 9},
            "old": {"encoding": "modulo", "num_embeddings": 7},
            "tags": {"min_count": 1, "num_unknown": 2},
        },
    }
)
TABLE = pa.table(
    {
        "clicked": pa.array([0, 1, 1, 0], pa.int8()),
        "importance": pa.array([1, 0.5, 2, 0], pa.float64()),
        "age": pa.array([20, None, 40, 60], pa.int16()),
        "price": pa.array([0, math.e - 1, None, 1 - math.e], pa.float64()),
        "hour": pa.array([0, 23, 12, 1], pa.uint8()),
        "city": pa.array(["Rome", "Oslo", None, "Rome"]),
        "user": pa.array(["a", None, "b", "a"]).dictionary_encode(),
        "shop": pa.array([[1, 8], None, [], [0]], pa.list_(pa.uint64())),
        "old": pa.array([-1, 2**40, None, 6]),
        "tags": pa.array([["x", "y"], [], None, ["x"]], pa.large_list(pa.string())),
        "other": pa.array([None] * 4, pa.timestamp("s")),
    }
)


def bags(batch, key):
    return batch.features[key].to_lists()


def test_every_encoding():
    encoder = learn_encoder(SCHEMA, [TABLE])
    assert encoder.table_rows == {"city": 2, "user": 50, "shop": 9, "old": 7, "tags": 4}
    batch = encoder.batch(TABLE, 6)
    assert batch.labels.tolist() == [0, 1, 1, 0, 0, 0]
    assert batch.weights.tolist() == [1, 0.5, 2, 0, 0, 0]
    scale = math.sqrt(800 / 3)
    wanted = [[-20 / scale, 0, 0], [0, 1, 23], [0, 0, 12], [20 / scale, -1, 1], [0] * 3, [0] * 3]
    np.testing.assert_allclose(batch.dense, wanted, rtol=1e-6, atol=1e-7)
    a, b = hash_ids(["a", "b"], 50).tolist()
    assert bags(batch, "city") == [[1], [0], [0], [1], [], []]
    assert bags(batch, "user") == [[a], [], [b], [a], [], []]
    assert bags(batch, "shop") == [[1, 8], [], [], [0], [], []]
    assert bags(batch, "old") == [[6], [2**40 % 7], [], [6], [], []]
    assert bags(batch, "tags") == [[2, 3], [], [], [2], [], []]
    assert batch.features.keys == tuple(SCHEMA.categorical)
    # Rows to predict have no labels; what training has not seen is unknown.
    later = TABLE.drop(["clicked", "importance"]).set_column(5 - 2, "city", pa.array(["Bonn"] * 4))
    batch = encoder.batch(later)
    assert (batch.labels.tolist(), batch.weights.tolist()) == ([0] * 4, [1] * 4)
    assert bags(batch, "city") == [[0]] * 4


@settings(max_examples=20)
@given(st.lists(st.lists(st.sampled_from("abcdefg"), max_size=5), min_size=1, max_size=30))
def test_lists_agree_with_a_counter(rows):
    counter = Counter(value for row in rows for value in row)
    if not counter:
        return
    schema = Schema.from_dict({"label": "y", "categorical": {"f": {"min_count": 2}}})
    table = pa.table({"y": [0] * len(rows), "f": pa.array(rows, pa.list_(pa.string()))})
    middle = len(rows) // 2
    encoder = learn_encoder(schema, [table[:middle], table[middle:]])
    known = sorted((v for v in counter if counter[v] > 1), key=lambda v: (-counter[v], v))
    numbers = {value: 1 + place for place, value in enumerate(known)}
    wanted = [[numbers.get(value, 0) for value in row] for row in rows]
    assert bags(encoder.batch(table), "f") == wanted
    assert bags(encoder.pack(encoder.encode(table)[1:], len(rows)), "f") == [*wanted[1:], []]


def test_saved_and_loaded(tmp_path):
    encoder = learn_encoder(
        Schema.from_dict(SCHEMA.to_dict() | {"categorical": {"city": {}, "a/b c": {}}}),
        [TABLE.append_column("a/b c", TABLE["tags"])],
    )
    for _ in range(2):  # the second takes the place of the first
        encoder.save(str(tmp_path / "features"))
    assert [path.name for path in tmp_path.iterdir()] == ["features"]
    loaded = TableEncoder.load(str(tmp_path / "features"))
    assert loaded.schema == encoder.schema
    assert loaded.capacities(5) == encoder.capacities(5)
    table = TABLE.append_column("a/b c", TABLE["tags"])
    assert loaded.encode(table).equals(encoder.encode(table))
    (tmp_path / "features/statistics.json").write_text("{}")
    with pytest.raises(DataError, match=r"statistics.json is damaged"):
        TableEncoder.load(tmp_path / "features")


def test_damaged_examples(tmp_path):
    path = tmp_path / "features"
    learn_encoder(SCHEMA, [TABLE]).save(path)
    (example,) = path.glob("*example*.parquet")
    rows = pq.read_table(example)
    pq.write_table(rows.select(rows.column_names[:1]), example)
    with pytest.raises(
        DataError, match=rf"{example.name} has \d+ rows of the columns .*; expected"
    ):
        TableEncoder.load(path)
    example.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=rf"{example.name} is not a Parquet file, or damaged"):
        TableEncoder.load(path)


def changed(name, values):
    return TABLE.set_column(TABLE.column_names.index(name), name, values)


WRONG = {
    "label": ("clicked", pa.array([0, 1, 2, 0]), "row 12 .*: the label is 2; labels must be 0 or"),
    "label-null": ("clicked", pa.array([0, None, 1, 0]), "row 11 .*: the label is null"),
    "label-nan": ("clicked", pa.array([0.0, 1.0, 1.0, math.nan]), "row 13 .*: the label is nan"),
    "weight": ("importance", pa.array([1, -1, 1, 1]), "row 11 .*: the weight is -1"),
    "weight-nan": ("importance", pa.array([1, 1, math.nan, 1]), "row 12 .*: the weight is nan"),
    "nan": ("age", pa.array([1, 2, 3, math.nan]), "row 13 .*: the number is nan; replace it"),
    "infinite": ("price", pa.array([math.inf, 1, 1, 1]), "row 10 .*: the number is inf"),
    "null": ("hour", pa.array([1, None, 1, 1]), "row 11 .*: the number is null; fill it"),
    "large": ("hour", pa.array([1, 1e300, 1, 1]), "row 11 .*1e.300 does not fit float32"),
    "list-null": (
        "tags",
        pa.array([["x"], [], [None], []]),
        "row 12 .*: a value of the list is null; drop it",
    ),
    "outside": ("shop", pa.array([[1], [], [2, 9], []]), "row 12 .*id 9 is outside .* of 9 rows"),
    "negative": ("shop", pa.array([[1], [-1], [1], [1]]), "row 11 .*: id -1 is outside"),
    "kind": ("city", pa.array([1, 2, 3, 4]), "column 'city': the values are of Arrow type int64"),
    "type": ("city", pa.nulls(4, pa.date32()), "column 'city' is of type date32.* expected string"),
    "fraction": ("old", pa.array([1.0, 2.5, 3, 4]), "row 11 .*: 2.5 is not a whole number, as ids"),
    "wide": ("old", pa.array([1.0, 2, 1e17, 4]), "row 12 .*: 1e.17 is not a whole number, as ids"),
    "in-list": ("shop", pa.array([[1.0], [], [2, 2.5], []]), "row 12 .*: 2.5 is not a whole numbe"),
    "decimal": (
        "old",
        pa.array([decimal.Decimal(x) for x in ("1.00", "2.50", "3.00", "4.00")]),
        "row 11 .*: 2.50 is not an integer of 64 bits",
    ),
    "strings": ("age", pa.array(["1"] * 4), "column 'age' is of type string; expected numbers"),
    "text-label": ("clicked", pa.array(["1"] * 4), "is of type string; expected numbers, 0 or 1"),
}


@pytest.mark.parametrize(("name", "values", "message"), WRONG.values(), ids=WRONG)
def test_bad_values_are_named(name, values, message):
    encoder = learn_encoder(SCHEMA, [TABLE])
    with pytest.raises(DataError, match=r"^a.parquet, .*" + message) as raised:
        encoder.encode(changed(name, values), "a.parquet", 10)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("case", sorted(set(WRONG) - {"kind"}))
@pytest.mark.parametrize("rows", ["training", "held-out"])
def test_bad_values_are_found_before_training(case, rows):
    name, values, message = WRONG[case]
    before = [] if rows == "training" else [[TABLE]]
    with pytest.raises(DataError, match=message.replace("row 1", "row ")):
        learn_encoder(SCHEMA, *before, [changed(name, values)])


# Columns of other types with the values of TABLE, as programs write them.
SAME = {
    "floats": ("old", pa.array([-1.0, 2.0**40, None, 6.0])),
    "nan": ("old", pa.array(np.array([-1.0, 2.0**40, math.nan, 6.0]))),
    "categories": ("old", pa.array([-1.0, 2.0**40, None, 6.0]).dictionary_encode()),
    "decimals": ("old", pa.array([-1, 2**40, None, 6]).cast(pa.decimal128(38, 0))),
    "lists": ("shop", pa.array([[1.0, 8.0], None, [], [0.0]])),
    "labels": ("clicked", pa.array([False, True, True, False])),
    "hours": ("hour", pa.array([0.0, 23.0, 12.0, 1.0], pa.float32())),
}


@pytest.mark.parametrize(("name", "values"), SAME.values(), ids=SAME)
def test_numbers_of_any_type_are_the_same(name, values):
    encoder = learn_encoder(SCHEMA, [TABLE])
    assert encoder.encode(changed(name, values)).equals(encoder.encode(TABLE))
    learned = learn_encoder(SCHEMA, [changed(name, values)])
    assert learned.encode(TABLE).equals(encoder.encode(TABLE))


def test_bools_are_numbers_and_ids():
    schema = Schema.from_dict(
        {
            "label": "y",
            "dense": ["b"],
            "categorical": {"c": {"min_count": 1}, "d": {"min_count": 1}},
        }
    )
    table = pa.table({name: pa.array([True, False, True, None]) for name in "bcd"})
    table = table.append_column("y", pa.array([True, False, True, False]))
    encoder = learn_encoder(schema, [table])
    batch = encoder.batch(table)
    assert batch.labels.tolist() == [1, 0, 1, 0]
    np.testing.assert_allclose(batch.dense[:, 0], np.array([1, -2, 1, 0]) / math.sqrt(2), rtol=1e-6)
    assert encoder.vocabularies["c"].values.to_pylist() == [1, 0]
    assert bags(batch, "c") == bags(batch, "d") == [[1], [2], [1], [0]]
    text = table.set_column(table.column_names.index("d"), "d", pa.array(["True"] * 4))
    with pytest.raises(DataError, match="'d' is of type string; expected booleans, as in training"):
        encoder.batch(text)


def test_arrays_of_objects_may_have_nulls():
    """As columns of pandas: None, and NaN among strings, are nulls."""
    options = {"city": {"min_count": 1}, "tags": {"min_count": 1}}
    schema = Schema.from_dict({"label": "y", "dense": ["age"], "categorical": options})
    columns = {"y": [0, 1], "age": [1.0, 3.0], "city": ["a", "a"], "tags": [["t"], []]}
    encoder = learn_encoder(schema, [pa.table(columns)])
    for none in (None, math.nan):
        arrays = {
            "age": np.array([none, 3], object),
            "city": np.array(["a", none], object),
            "tags": np.array([["t"], none], object),
        }
        batch = encoder.batch(arrays)
        assert batch.dense.tolist() == [[0], [1]]
        assert bags(batch, "city") == [[1], [0]]
        assert bags(batch, "tags") == [[1], []]
        known = Vocabulary.build(arrays["city"])
        assert known.values.to_pylist() == ["a"]
        assert known(arrays["city"]).tolist() == [1, 0]
    with pytest.raises(DataError, match="column 'city': Arrow cannot make a column of its values"):
        encoder.batch(arrays | {"city": np.array(["a", 3], object)})
    with pytest.raises(DataError, match="the table: "):
        encoder.batch(arrays | {"city": ["a"]})
    with pytest.raises(TypeError, match="the values are of several kinds"):
        Vocabulary.build(np.array(["a", 3], object))


@pytest.mark.parametrize("encoding", ["vocabulary", "hash", "ids", "modulo", "dynamic"])
def test_columns_without_values(encoding):
    """Those of a new user in a request, and of a part file: as if their type were known."""
    rows = {} if encoding == "vocabulary" else {"num_embeddings": 9}
    options = {"encoding": encoding, **rows}
    schema = {"label": "y", "dense": ["x"], "categorical": {"c": options, "tags": options}}
    columns = {"x": [1.0, 3.0], "c": [5, 5], "tags": [[5, 5], []], "y": [0, 1]}
    unknown = pa.table({"x": pa.nulls(2), "c": pa.nulls(2), "tags": [[], []], "y": [0, 1]})
    assert unknown.schema.types[2] == pa.list_(pa.null())
    known = learn_encoder(Schema.from_dict(schema), [pa.table(columns)])
    nulls = pa.table({**columns, "x": pa.nulls(2, pa.float64()), "c": pa.nulls(2, pa.int64()),
                      "tags": pa.nulls(2, pa.list_(pa.int64()))})  # fmt: skip
    wanted = known.encode(nulls)
    for each in (unknown, unknown.set_column(2, "tags", pa.nulls(2))):
        assert known.encode(each).equals(wanted)
        parts = [each, pa.table(columns)]
        assert learn_encoder(Schema.from_dict(schema), parts).encode(each).equals(wanted)
    batch = known.batch(pa.Table.from_pylist([{"x": None, "c": None, "tags": None, "y": None}]))
    assert batch.dense.tolist() == [[0]]
    assert bags(batch, "c") == ([[0]] if encoding == "vocabulary" else [[]])
    assert bags(batch, "tags") == [[]]
    with pytest.raises(DataError, match="column 'y' is of type null; expected numbers"):
        learn_encoder(Schema.from_dict(schema), [unknown.set_column(3, "y", pa.nulls(2))])


def test_nulls_that_are_errors():
    schema = {"label": "clicked", "categorical": {"city": {"missing": "error"}}}
    with pytest.raises(DataError, match=r"row 2 .*'city': the value is null; fill it"):
        learn_encoder(Schema.from_dict(schema), [TABLE]).encode(TABLE)
    with pytest.raises(DataError, match="'city' has no values in the training rows"):
        learn_encoder(SCHEMA, [changed("city", pa.nulls(4, pa.string()))])
    with pytest.raises(DataError, match=r"'city' is of type int64, and of type string in the tabl"):
        learn_encoder(SCHEMA, [TABLE, changed("city", pa.array([1, 2, 3, 4]))])


def test_groups_say_where_their_rows_stand(tmp_path):
    paths = tuple(tmp_path / name for name in ("a.parquet", "b.parquet"))
    pq.write_table(TABLE, paths[0], row_group_size=3)
    pq.write_table(changed("clicked", pa.array([0, 1, 7, 0])), paths[1], row_group_size=1)
    groups = ParquetGroups(paths, SCHEMA.columns)
    encoder = learn_encoder(SCHEMA, GroupRange(groups, 1, 6))
    rest = EncodedGroups(GroupRange(groups, 2, 8), encoder)
    assert rest.sizes == (1, 1, 1, 1, 1, 1)
    assert rest.read(0)["label"].to_pylist() == [1]
    with pytest.raises(DataError, match=r"b.parquet, row 2 \(from 0\), column 'clicked'.* is 7"):
        rest.read(4)


def test_capacities_hold_batches():
    lengths = np.random.default_rng(0).poisson(5, 10_000)
    seen = ListLengths.of(lengths[:10]) + ListLengths.of(lengths[10:])
    assert seen.counts.sum() == 10_000
    assert np.sort(lengths)[-64:].sum() <= seen.most(64) <= 1.5 * np.sort(lengths)[-64:].sum()
    batches = lengths.reshape(-1, 50).sum(axis=1)
    assert batches.max() <= seen.usual(50) < 2 * batches.mean()
    assert ListLengths.of(np.empty(0, int)).most(4) == 8


def test_longer_lists_than_those_of_training_make_few_shapes():
    """And they do not change the shapes of other batches."""
    rng = np.random.default_rng(0)
    rows = [{"label": 1, "tags": ["a"] * int(n), "shop": "s"} for n in rng.geometric(0.2, 64 * 40)]
    table = pa.Table.from_pylist(rows)
    schema = Schema.from_dict({"label": "label", "categorical": ["tags", "shop"]})
    encoder = learn_encoder(schema, [table])
    shapes = [encoder.batch(table[start : start + 64]).features for start in range(0, 2560, 64)]
    usual = shapes[0].capacities
    assert {batch.capacities for batch in shapes} == {usual}
    assert usual[1] == 64  # one shop each, without padding
    long = [
        encoder.batch(pa.Table.from_pylist([rows[0] | {"tags": ["a"] * size}] * 64)).features
        for size in range(10, 90, 4)
    ]
    assert [batch["tags"].lengths[0] for batch in long] == list(range(10, 90, 4))
    assert len({batch.capacities for batch in long}) <= 4
    assert encoder.batch(table[:50], 64).features.capacities == usual


def test_standardized_logarithms():
    """The mean and the deviation are those of the logarithms, and a null is their mean."""
    values = [0, 3, None, -7, 1000]
    table = pa.table({"label": [0, 1, 0, 1, 0], "x": values, "id": ["a"] * 5})
    dense = {"x": {"transform": "log_standardize"}}
    schema = Schema.from_dict({"label": "label", "dense": dense, "categorical": ["id"]})
    encoded = learn_encoder(schema, [table]).batch(table).dense[:, 0]
    logarithms = np.log([1, 4, 8, 1001]) * [1, 1, -1, 1]
    wanted = (logarithms - logarithms.mean()) / logarithms.std()
    np.testing.assert_allclose(encoded, np.insert(wanted, 2, 0), rtol=1e-6, atol=1e-7)
