"""Schemas by the names and types of columns, and columns by pattern."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from jaxrec.data import Schema, SchemaError, infer_schema
from jaxrec.data.patterns import covered, matching
from jaxrec.data.schema import CategoricalColumn, DenseColumn

pytestmark = pytest.mark.every_case

COLUMNS = pa.schema(
    {
        "id": pa.int64(),
        "click": pa.bool_(),
        "price": pa.float64(),
        "paid": pa.decimal128(9, 2),
        "member": pa.bool_(),
        "city": pa.dictionary(pa.int32(), pa.string()),
        "tags": pa.list_(pa.string()),
        "when": pa.timestamp("us", "Europe/Berlin"),
        "day": pa.date32(),
        "vector": pa.list_(pa.float32(), 4),
        "half": pa.list_(pa.float16()),
        "user": pa.struct({"age": pa.int8(), "home": pa.struct({"at": pa.timestamp("s")})}),
        "items": pa.list_(pa.struct({"id": pa.int8()})),
        "span": pa.duration("s"),
    }
)
TIMES = ["when.age", "when.hour", "when.weekday", "when.month", "day.age", "day.weekday"]


def test_inferred_from_types():
    schema, left_out = infer_schema(COLUMNS)
    berlin = {"zone": "Europe/Berlin"}
    age = DenseColumn("log1p", part="age")
    assert schema == Schema(
        "click",
        {
            "price": DenseColumn(),
            "paid": DenseColumn(),
            "when.age": age,
            "day.age": age,
            "vector": DenseColumn(width=4),
            "user.home.at.age": age,
        },
        {
            **{name: CategoricalColumn() for name in ("id", "member", "city", "tags")},
            **{
                f"when.{x}": CategoricalColumn(part=x, **berlin)
                for x in ("hour", "weekday", "month")
            },
            **{f"day.{x}": CategoricalColumn(part=x) for x in ("weekday", "month")},
            "user.age": CategoricalColumn(),
            **{
                f"user.home.at.{x}": CategoricalColumn(part=x) for x in ("hour", "weekday", "month")
            },
        },
    )
    assert left_out == {
        "half": f"{pa.list_(pa.float16())}, lists of several lengths or without values",
        "items": f"{COLUMNS.field('items').type}; to have it as features, write a list for each "
        "field, such as 'items.id': [row['id'] for row in items]",
        "span": "duration[s]",
    }
    assert Schema.from_dict(schema.to_dict()) == schema
    assert infer_schema(COLUMNS, widths={"half": 3})[0].dense["half"] == DenseColumn(width=3)


def test_labels_weights_and_columns_to_leave_out():
    schema, _ = infer_schema(COLUMNS, label="user.age")
    assert schema.label == "user.age"
    assert "click" in schema.categorical
    with pytest.raises(SchemaError, match="there is no column 'y'; the columns are id, click"):
        infer_schema(COLUMNS, label="y")
    exclude = ["id", "when", "day", "user", "vector"]
    schema, left_out = infer_schema(COLUMNS, weight="paid", exclude=exclude, ids=["price"])
    assert (schema.label, schema.weight) == ("click", "paid")
    assert [*schema.dense] == []
    assert [*schema.categorical] == ["price", "member", "city", "tags"]
    assert [*left_out] == ["half", "items", "span"]
    for options, message in (
        ({"weight": "y"}, "there is no column 'y'"),
        ({"exclude": ["y"]}, "there is no column 'y'; the columns are id, click, price"),
        ({"label": "click", "exclude": ["click"]}, "'click' is the label; leave it out of --excl"),
        ({"weight": "paid", "exclude": ["paid"]}, "'paid' is the weight; leave it out of --excl"),
        ({"exclude": ["click"]}, "is named label, click or target"),
    ):
        with pytest.raises(SchemaError, match=message):
            infer_schema(COLUMNS, **options)
    with pytest.raises(SchemaError, match=r"span is named label, click or target; .* --label"):
        infer_schema(COLUMNS.remove(1))
    with pytest.raises(SchemaError, match="no categorical column"):
        infer_schema(pa.schema({"label": pa.int8(), "x": pa.float32()}))


def test_indexes_and_columns_without_values_are_left_out():
    kinds = {
        "label": pa.int8(),
        "user": pa.string(),
        "never": pa.null(),
        "empty": pa.list_(pa.null()),
        "id": pa.decimal128(38),
    }
    index = {"__index_level_0__": pa.int64(), "day": pa.string()}
    columns = pa.schema(
        kinds | index, {"pandas": '{"index_columns": ["__index_level_0__", "day"]}'}
    )
    schema, left_out = infer_schema(columns)
    assert schema.columns == ("label", "user", "id")
    assert left_out == {
        "never": "null, which has no values",
        "empty": f"{pa.list_(pa.null())}, which has no values",
        "__index_level_0__": "int64, an index of pandas",
        "day": "string, an index of pandas",
    }
    assert infer_schema(columns, "day")[0].label == "day"


def test_columns_by_pattern():
    schema, _ = infer_schema(
        COLUMNS,
        exclude=["*.month", "user.home", "t?gs"],
        dense=["id", "when.hour", "member", "user.a*"],
        categorical=["p[ar]*"],
    )
    assert schema.dense["when.hour"] == DenseColumn(part="hour", zone="Europe/Berlin")
    dense = ["id", "member", "when.age", "when.hour", "day.age", "vector", "user.age"]
    assert [*schema.dense] == dense
    assert [*schema.categorical] == ["price", "paid", "city", "when.weekday", "day.weekday"]
    back, _ = infer_schema(COLUMNS, categorical=["when.hour", "city"], dense=["vector", "when.age"])
    assert back == infer_schema(COLUMNS)[0]


WRONG = {
    "nothing": (
        {"dense": ["pr*", "x*"]},
        "no column matches 'x*'; the columns are id, click, price",
    ),
    "no-name": ({"categorical": ["prise"]}, "there is no column 'prise'; the columns are id"),
    "case": ({"exclude": ["ID"]}, "there is no column 'ID'"),
    "two-roles": (
        {"dense": ["pr*"], "exclude": ["price"]},
        "column 'price' is named by --exclude price and by --dense pr*; name it by one of them",
    ),
    "both": ({"dense": ["id"], "categorical": ["*d"]}, "by --dense id and by --categorical *d;"),
    "label": ({"dense": ["c*"]}, "column 'click' is the label; leave it out of --dense (c*)"),
    "weight": ({"weight": "paid", "categorical": ["paid"]}, "'paid' is the weight; leave it out"),
    "text": ({"dense": ["city"]}, "--dense: column 'city' is of type dictionary<"),
    "list": ({"dense": ["tags"]}, ", no number"),
    "half": ({"dense": ["half"]}, "lists of one length are vectors, whose width a --schema gives"),
    "vector": ({"categorical": ["vector"]}, "[4], no category"),
    "age": (
        {"categorical": ["when"]},
        "--categorical: 'when.age' is a number of days, no category",
    ),
    "structs": ({"categorical": ["items"]}, ">, no category; write a list for each field, such as"),
    "span": ({"dense": ["span"]}, "column 'span' is of type duration[s], no number"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(options, message):
    with pytest.raises(SchemaError, match=re.escape(message)):
        infer_schema(COLUMNS, **options)


def test_names_before_patterns():
    features = {"x": "x", "x.1": "x.1", "ts.age": "ts", "ts.hour": "ts", "[a]": "[a]", "a": "a"}
    for pattern, names in {
        "x": ["x"],  # and not x.1, as R names a second column x
        "x*": ["x", "x.1"],
        "ts": ["ts.age", "ts.hour"],
        "t*": ["ts.age", "ts.hour"],
        "ts.hour": ["ts.hour"],
        "[a]": ["[a]"],
        "[ab]": ["a"],
        "b": [],
    }.items():
        assert matching(pattern, features) == names, pattern
    assert covered(["ts", "a?", "[a]"], ["ts", "ts.x", "ab", "[a]", "a"]) == {"ts", "ab", "[a]"}


def test_columns_with_the_name_of_a_part_stand_for_themselves():
    columns = pa.schema({"label": pa.int8(), "ts": pa.timestamp("s"), "ts.hour": pa.string()})
    schema, _ = infer_schema(columns)
    assert schema.categorical["ts.hour"] == CategoricalColumn()
    assert [*schema.categorical] == ["ts.weekday", "ts.month", "ts.hour"]
