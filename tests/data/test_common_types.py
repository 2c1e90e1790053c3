"""Types on which the files of a data set agree, in any order."""

from __future__ import annotations

import datetime
import decimal
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import DataError
from jaxrec.data.column_types import index_columns
from jaxrec.data.common_types import CommonTypes, common_type
from jaxrec.train.config import DataConfig
from jaxrec.train.features import learn_features

pytestmark = pytest.mark.every_case

STRINGS = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))
LISTS = (pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.null()))
AGREE = {
    "strings": (STRINGS, pa.string()),
    "lists": (LISTS, pa.list_(pa.string())),
    "null": ((pa.null(), pa.int64(), pa.null()), pa.int64()),
    "null-list": ((pa.null(), pa.list_(pa.null()), pa.list_(pa.int8())), pa.list_(pa.int8())),
    "integers": ((pa.int8(), pa.int64(), pa.uint16()), pa.int64()),
    "floats": ((pa.int64(), pa.float64(), pa.int64()), pa.float64()),
    "numbers": ((pa.bool_(), pa.int64(), pa.decimal128(9, 2)), pa.decimal128(9, 2)),
    "times": (
        (pa.date32(), pa.timestamp("s"), pa.timestamp("us", "UTC")),
        pa.timestamp("us", "UTC"),
    ),
    "vectors": ((pa.list_(pa.float16()), pa.list_(pa.float32(), 3)), pa.list_(pa.float32())),
    "unused": ((pa.time32("s"), pa.struct([("a", pa.int8())])), pa.time32("s")),
}


@pytest.mark.parametrize(("kinds", "wanted"), AGREE.values(), ids=AGREE)
def test_types_that_agree(kinds, wanted):
    types = CommonTypes()
    for number, kind in enumerate(kinds):
        types.add(pa.schema({"x": kind}), f"{number}.parquet")
    assert types.schema.field("x").type == wanted
    assert types.mixed == ({"x"} if pa.float64() in kinds else set())


DIFFER = {
    "list": (pa.string(), pa.list_(pa.string())),
    "number": (pa.string(), pa.int64()),
    "bytes": (pa.string(), pa.binary()),
    "of-lists": (pa.list_(pa.int64()), pa.list_(pa.string())),
    "unused": (pa.string(), pa.timestamp("s")),
}


@pytest.mark.parametrize(("one", "other"), DIFFER.values(), ids=DIFFER)
def test_types_that_differ_are_named(one, other):
    for given in ({}, {"names": ["x"]}):
        types = CommonTypes(**given)
        types.add(pa.schema({"x": one}), "a.parquet")
        with pytest.raises(DataError, match=r"^b.parquet, column 'x' is of type .* in a.parquet; "):
            types.add(pa.schema({"x": other}), "b.parquet")
    for given in ({"exclude": ["x"]}, {"names": ["y"]}):
        types = CommonTypes(**given)
        types.add(pa.schema({"x": one}), "a.parquet")
        types.add(pa.schema({"x": other}), "b.parquet")


def test_columns_that_a_file_lacks_are_named():
    x, both = pa.schema({"x": pa.int8()}), pa.schema({"x": pa.int8(), "y": pa.string()})
    for files, lacks in (((x, both), "a"), ((both, x), "b")):
        types = CommonTypes()
        types.add(files[0], "a")
        with pytest.raises(DataError, match=rf"^{lacks} has no column 'y', .*--exclude y"):
            types.add(files[1], "b")
    with pytest.raises(DataError, match="a has 2 columns 'x'; give each a name"):
        CommonTypes().add(pa.schema([("x", pa.int8())] * 2), "a")


def test_indexes_of_pandas():
    names = ["__index_level_0__", "__null_dask_index__", "day", "x"]
    metadata = {"pandas": '{"index_columns": ["day", {"kind": "range", "name": "x"}]}'}
    columns = pa.schema(dict.fromkeys(names, pa.int64()), metadata)
    assert index_columns(columns) == {*names} - {"x"}
    types = CommonTypes()
    types.add(columns, "a")
    types.add(columns.remove(0), "b")
    assert index_columns(types.schema) == {*names} - {"x"}
    for strange in (b"\xff", b"[]", b'{"index_columns": 3}'):
        assert index_columns(pa.schema({"x": pa.int8()}, {b"pandas": strange})) == set()


FAMILIES = {
    "numbers": (pa.null(), pa.bool_(), pa.int32(), pa.decimal128(9, 2), pa.float16(), pa.float64()),
    "times": (pa.null(), pa.date32(), pa.timestamp("s"), pa.timestamp("ms", "UTC")),
    "lists": (
        pa.list_(pa.null()),
        pa.list_(pa.bool_()),
        pa.list_(pa.int8()),
        pa.list_(pa.float32()),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_widest_type_in_any_order(family):
    kinds = FAMILIES[family]
    for (low, narrow), (high, wide) in itertools.product(enumerate(kinds), repeat=2):
        assert common_type(narrow, wide) == kinds[max(low, high)]
    width = pa.list_(pa.float32(), 2)
    assert common_type(width, width) == width


ROWS = 20
TIMES = [datetime.datetime(2024, 3, 1) + datetime.timedelta(hours=n) for n in range(ROWS)]
COLUMNS = {
    "booleans": pa.array([n % 3 == 0 for n in range(ROWS)]),
    "integers": pa.array([n % 4 for n in range(ROWS)]),
    "whole": pa.array([n % 4 / 1 for n in range(ROWS)]),
    "fractions": pa.array([n / 4 for n in range(ROWS)], pa.float16()),
    "decimals": pa.array([decimal.Decimal(n) / 4 for n in range(ROWS)], pa.decimal128(9, 2)),
    "nulls": pa.nulls(ROWS),
    "texts": pa.array([f"{n % 4}" for n in range(ROWS)]),
    "structs": pa.array([{"a": n % 4, "b": {"c": n / 8}} for n in range(ROWS)]),
    "lists": pa.array([[n / 4, 1.0] for n in range(ROWS)]),
    "empty lists": pa.array([[]] * ROWS, pa.list_(pa.float32())),
    "zoneless": pa.array(TIMES, pa.timestamp("us")),
    "UTC": pa.array(TIMES, pa.timestamp("us", "UTC")),
    "Berlin": pa.array(TIMES, pa.timestamp("us", "Europe/Berlin")),
}
TABLES = {
    name: pa.table({"label": [0, 1] * (ROWS // 2), "user": ["a", "b"] * (ROWS // 2), "x": column})
    for name, column in COLUMNS.items()
}


def learned(tmp_path, *names):
    """Learn the encoder of a file for each name; return it with what it is in any other order."""
    for number, name in enumerate(names):
        pq.write_table(TABLES[name], tmp_path / f"{number}.parquet")
    # No row is held out of these: vocabularies would differ by the last rows.
    pq.write_table(TABLES[names[0]][:2], tmp_path / "held_out")
    data = DataConfig(path=tmp_path, eval_path=tmp_path / "held_out", label=("label",))
    return learn_features(data)


DENSE = {"transform": "standardize"}
AGREE = {
    ("booleans", "integers"): ["user", "x"],
    ("booleans", "whole"): ["user", "x"],
    ("booleans", "fractions"): ["x", "user"],
    ("booleans", "decimals"): ["x", "user"],
    ("integers", "decimals"): ["x", "user"],
    ("nulls", "booleans"): ["user", "x"],
    ("nulls", "texts"): ["user", "x"],
    ("nulls", "structs"): ["x.b.c", "user", "x.a"],
    ("zoneless", "UTC"): ["x.age", "user", "x.hour", "x.weekday", "x.month"],
}


@pytest.mark.parametrize("names", AGREE, ids=" and ".join)
def test_files_agree(tmp_path, names):
    encoders = []
    for number, order in enumerate((names, names[::-1])):
        (folder := tmp_path / str(number)).mkdir()
        encoders.append(learned(folder, *order))
        for name in order:
            assert len(encoders[-1](TABLES[name])) == ROWS
    one, other = encoders
    assert [*one.schema.dense, *one.schema.categorical] == AGREE[names]
    assert one.schema == other.schema
    assert one.moments == other.moments
    assert one.encoded_columns == other.encoded_columns
    assert one.is_text == other.is_text
    known = [{n: x.values.to_pylist() for n, x in each.vocabularies.items()} for each in encoders]
    assert known[0] == known[1]
    # A later file decides nothing: it has the values of the column, or lacks them.
    for name in names:
        assert one(TABLES[name]).equals(other(TABLES[name]))


DISAGREE = {
    ("texts", "integers"): "'x' is of type .*, and of type .* in .*; leave it out with --exclude x",
    ("zoneless", "Berlin"): "and of type .* in .* or write all files with times of one zone, such",
    ("texts", "structs"): "'x' is of type string, and a struct in .*--exclude x 'x.\\*', or write",
    ("lists", "empty lists"): "row 0 .* the vector has 0 numbers, and others have 2",
}


@pytest.mark.parametrize("names", DISAGREE, ids=" and ".join)
def test_files_disagree(tmp_path, names):
    for number, order in enumerate((names, names[::-1])):
        (folder := tmp_path / str(number)).mkdir()
        with pytest.raises(DataError, match=DISAGREE[names]) as error:
            learned(folder, *order)
        if "write all files" in DISAGREE[names]:
            assert {"0.parquet", "1.parquet"} <= {*_names(error.value)}


def _names(error):
    words = str(error).replace(",", " ").replace(";", " ").split()
    return [word.rpartition("/")[2] for word in words]


def all_types(order, kinds, names=None):
    types = CommonTypes(names)
    for name in order:
        types.add(pa.schema({"x": kinds[name]}), name)


def test_zones_in_any_order():
    kinds = {
        "zoneless": pa.timestamp("us"),
        "UTC": pa.timestamp("us", "UTC"),
        "Berlin": pa.timestamp("us", "Europe/Berlin"),
    }
    for order in itertools.permutations(kinds):
        with pytest.raises(DataError, match="of one zone"):
            all_types(order, kinds)
    all_types(kinds, kinds, ["x"])  # the parts of a schema have zones of their own


def test_a_null_struct(tmp_path):
    """A file without the struct has nulls in its fields, and so has a table to predict."""
    encoder = learned(tmp_path, "structs", "nulls")
    rows = encoder(TABLES["nulls"])
    assert rows["x.a"].unique().to_pylist() == [0]
    np.testing.assert_allclose(rows["x.b.c"], 0, atol=1e-6)  # the mean


def test_files_without_rows(tmp_path):
    """Names alone have no types, and may lack columns; an empty data frame is such a file."""
    for number, kept in enumerate((["label"], ["x", "user", "label"])):
        none = pa.table(dict.fromkeys(kept, pa.nulls(0)))
        pq.write_table(none, tmp_path / f"empty {number}.parquet")
    encoder = learned(tmp_path, "whole")
    assert encoder.encoded_columns.names == ["label", "weight", "x", "user"]
    for path in tmp_path.glob("[0-9]*.parquet"):
        path.unlink()
    with pytest.raises(DataError, match="it has no rows"):
        learn_features(DataConfig(path=tmp_path, label=("label",)))
