from __future__ import annotations

import pyarrow as pa
import pytest

from jaxrec.data import DataError, Schema, SchemaError, read_schema
from jaxrec.data.column_types import check_columns
from jaxrec.data.criteo.log import criteo_schema
from jaxrec.data.schema import CategoricalColumn, DenseColumn, LabelColumn

pytestmark = pytest.mark.every_case

TEXT = """
label: clicked
weight: importance
dense:
  price: {transform: log1p, missing: zero}
  age:
categorical:
  city: {min_count: 5, max_size: 100, num_unknown: 3}
  user: {encoding: hash, num_embeddings: 1000}
  tags: {pooling: mean, embedding_dim: 8}
"""
SCHEMA = Schema(
    "clicked",
    {"price": DenseColumn("log1p", "zero"), "age": DenseColumn()},
    {
        "city": CategoricalColumn(min_count=5, max_size=100, num_unknown=3),
        "user": CategoricalColumn("hash", 1000),
        "tags": CategoricalColumn(pooling="mean", embedding_dim=8),
    },
    "importance",
)


def test_read_and_written(tmp_path):
    path = tmp_path / "schema.yaml"
    path.write_text(TEXT)
    schema = read_schema(str(path))
    assert schema == SCHEMA
    assert schema.columns == ("clicked", "importance", "price", "age", "city", "user", "tags")
    path.write_text(schema.to_yaml())
    assert read_schema(path) == schema
    path.write_text("{label: y, dense: [a, b], categorical: [c]}")
    assert read_schema(path) == Schema(
        "y", {"a": DenseColumn(), "b": DenseColumn()}, {"c": CategoricalColumn()}
    )


def test_labels():
    """Several, of two kinds, and none."""
    both = Schema.from_dict({"label": {"y": {}, "z": {"kind": "number"}}, "categorical": ["a"]})
    assert both.labels == {"y": LabelColumn(), "z": LabelColumn("number")}
    assert (both.label, both.columns) == ("y", ("y", "z", "a"))
    assert both.to_dict()["label"] == {"y": {}, "z": {"kind": "number"}}
    plain = Schema.from_dict({"label": ["y", "z"], "categorical": ["a"]})
    assert plain.to_dict()["label"] == ["y", "z"]
    none = Schema.from_dict({"label": [], "categorical": ["a"]})
    assert (none.label, none.labels, none.columns) == (None, {}, ("a",))
    for schema in (both, plain, none):
        assert Schema.from_dict(schema.to_dict()) == schema
    with pytest.raises(SchemaError, match="label is 'z', not the first of labels"):
        Schema("z", {}, {"a": CategoricalColumn()}, labels={"y": LabelColumn()})


def test_columns_that_share_a_table():
    columns = {"item": {"min_count": 3, "pooling": "mean"}, "clicked": {"table": "item"}}
    schema = Schema.from_dict({"label": "y", "categorical": columns})
    assert schema.categorical["clicked"] == CategoricalColumn(
        min_count=3, pooling="mean", table="item"
    )
    assert Schema.from_dict(schema.to_dict()) == schema
    for clicked, message in (
        ({"table": "user"}, "shares the table of 'user'; it must name .*: item"),
        ({"table": "clicked"}, "shares the table of 'clicked'"),
        ({"table": "item", "min_count": 4}, "and so its min_count, 3; leave min_count out"),
        ({"table": 3}, "table must be the name of a column, got 3"),
    ):
        with pytest.raises(SchemaError, match=message):
            Schema.from_dict({"label": "y", "categorical": columns | {"clicked": clicked}})


WRONG = {
    "list": ("[1]", r"a schema must be a mapping, got \[1\]"),
    "yaml": ("{", "while parsing"),
    "key": ("{label: y, sparse: [a]}", "a schema has no key 'sparse'; its keys are label"),
    "label": ("{categorical: [a]}", "label must be the name of a column, got None"),
    "weight": ("{label: y, weight: 1, categorical: [a]}", "weight must be the name"),
    "none": ("{label: y}", "no categorical column"),
    "twice": ("{label: y, dense: [a], categorical: [a]}", "column 'a' has two roles"),
    "number": ("{label: y, categorical: [1]}", "categorical: 1 is not the name of a column"),
    "option": ("{label: y, categorical: {a: {size: 1}}}", "column 'a': it has no key 'size'"),
    "choice": ("{label: y, dense: {a: {transform: log}}}", "transform must be one of standardi"),
    "whole": ("{label: y, categorical: {a: {min_count: 1.5}}}", "min_count must be a whole number"),
    "bool": ("{label: y, categorical: {a: {min_count: true}}}", "a whole number, got True"),
    "range": ("{label: y, categorical: {a: {min_count: 0}}}", "min_count must be from 1 to"),
    "rows": ("{label: y, categorical: {a: {encoding: hash}}}", "hash needs num_embeddings"),
    "size": ("{label: y, categorical: {a: {num_embeddings: 5}}}", "as many rows as values"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(tmp_path, text, message):
    path = tmp_path / "schema.yaml"
    path.write_text(text)
    with pytest.raises(SchemaError, match=rf"schema.yaml: .*{message}"):
        read_schema(path)


COLUMNS = pa.schema(
    {
        "id": pa.int64(),
        "click": pa.bool_(),
        "price": pa.float64(),
        "paid": pa.decimal128(9, 2),
        "city": pa.dictionary(pa.int32(), pa.string()),
        "tags": pa.list_(pa.string()),
        "when": pa.timestamp("us"),
        "vector": pa.list_(pa.float32(), 4),
    }
)


def of(role, **options):
    roles = {"label": "y", "dense": {}, "categorical": {"c": {}}}
    roles |= {role: "x"} if role in ("label", "weight") else {role: {"x": options}}
    return Schema.from_dict(roles)


UNFIT = {
    "label": (of("label"), pa.string(), "expected numbers"),
    "weight": (of("weight"), pa.string(), "expected numbers"),
    "dense": (of("dense"), pa.list_(pa.float32()), "expected numbers"),
    "dates": (of("categorical"), pa.date32(), "expected strings, bytes or integers, or lists"),
    "no-label": (of("label"), pa.null(), "expected numbers"),
    "deep": (of("categorical"), pa.list_(pa.list_(pa.int8())), "expected strings"),
    "ids": (
        of("categorical", encoding="ids", num_embeddings=5),
        pa.string(),
        "expected integers, or lists",
    ),
}


@pytest.mark.parametrize(("schema", "kind", "message"), UNFIT.values(), ids=UNFIT)
def test_types_that_do_not_fit_are_named(schema, kind, message):
    columns = pa.schema({"y": pa.int8(), "c": pa.string(), "x": kind})
    with pytest.raises(DataError, match="a.parquet, column 'x' is of type .*" + message):
        check_columns(schema, columns, "a.parquet")


def test_columns_that_are_lacking_are_named():
    check_columns(SCHEMA, pa.schema([(name, pa.int32()) for name in SCHEMA.columns]), "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet has no columns 'clicked'; its columns are id"):
        check_columns(SCHEMA, COLUMNS, "a.parquet")
    twice = pa.schema([("clicked", pa.int8())] * 2)
    with pytest.raises(DataError, match="has 2 columns 'clicked'"):
        check_columns(SCHEMA, twice, "a.parquet")


def test_criteo():
    schema = criteo_schema(range(1, 27))
    assert len(schema.columns) == 1 + 13 + 26
    assert schema.categorical["cat_25"].num_embeddings == 26
    assert not any(column.is_learned for column in schema.dense.values())
