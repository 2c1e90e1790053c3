"""Raw columns of requests: examples are training rows, and booleans are true and false."""

from __future__ import annotations

import dataclasses
import decimal
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from flax import nnx

import jaxrec
from jaxrec.data import DataError, Schema, learn_encoder
from jaxrec.serve import export, load
from jaxrec.serve.http.bodies import JsonDecoder
from jaxrec.serve.http.limits import RequestError
from jaxrec.serve.http.predictor import Predictor
from jaxrec.serve.http.raw_columns import RawColumns

TABLE = pa.table(
    {
        "label": [0, 1, 1, 0],
        "age": pa.array([32, None, 51, 18]),
        "share": pa.array([0.1, 0.7, 0.3, 0.2], pa.float32()),
        "price": pa.array([decimal.Decimal("2.50"), None, None, decimal.Decimal(3)]),
        "member": pa.array([True, None, False, True]),
        "city": ["Ulm", "Bern", "Ulm", "Bern"],
        "tags": pa.array([[b"a"], [], [b"a", b"b"], None], pa.list_(pa.binary())),
        "user": pa.array([2**64 - 7, 5, 5, 2**64 - 7], pa.uint64()),
        "shop": ["x", None, "y", "y"],
        "zip": pa.array([[7], [], [8, 9], [7]]),
    }
)
EXAMPLE = {
    "age": [32, None],
    "share": [0.1, 0.7],
    "price": [2.5, None],
    "member": [True, None],
    "city": ["Ulm", "Bern"],
    "tags": [["a"], []],
    "user": [-7, 5],
    "shop": ["x", None],
    "zip": [[7], []],
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    dense = ["age", "share", "price", "member"]
    hashed = {"encoding": "hash", "num_embeddings": 20}
    categorical = {"city": {}, "tags": {}, "user": {}, "shop": hashed, "zip": hashed}
    columns = {"label": "label", "dense": dense, "categorical": categorical}
    encoder = learn_encoder(Schema.from_dict(columns), [TABLE[:3], TABLE[3:]])
    tables = [
        jaxrec.EmbeddingBagConfig(name, rows, 4, initializer="normal")
        for name, rows in encoder.table_rows.items()
    ]
    model = jaxrec.nn.DLRM(
        jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0)),
        num_dense=4, bottom_layer_sizes=(4,), top_layer_sizes=(4, 1), rngs=nnx.Rngs(0),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("raw") / "model"
    export(model, path, encoder=encoder, batch_sizes=(4,), platforms=("cpu",))
    return load(path)


def scores_of(served, columns):
    predictor = Predictor(served)
    payload = JsonDecoder(predictor.columns, 10).decode(json.dumps(columns).encode())
    (scores,) = predictor.predict([payload])
    if isinstance(scores, RequestError):
        raise scores
    return scores.columns["score"]


def test_examples_are_training_rows(served):
    example = Predictor(served).columns.example()
    assert json.loads(json.dumps(example)) == EXAMPLE
    assert [type(value) for value in example["age"] + example["member"]] == [
        int, type(None), bool, type(None),
    ]  # fmt: skip
    expected = served.predict_columns(TABLE[:2].drop_columns("label"))
    np.testing.assert_allclose(scores_of(served, example), expected, rtol=1e-5)


def test_booleans(served):
    (column,) = (x for x in Predictor(served).columns.columns if x.name == "member")
    assert column.describe()["type"] == "bool"
    by_json = scores_of(served, EXAMPLE | {"member": [False, True]})
    rows = TABLE[:2].drop_columns("label")
    index = rows.column_names.index("member")
    for values in ([False, True], [0, 1], [0.0, 1.0]):
        given = rows.set_column(index, "member", pa.array(values))
        np.testing.assert_array_equal(served.predict_columns(given), by_json)
    assert by_json[0] != scores_of(served, EXAMPLE | {"member": [True, True]})[0]


@pytest.mark.parametrize("value", [7.0, 7, "yes", 1])
def test_other_values_are_no_booleans(served, value):
    with pytest.raises(RequestError, match=r"column 'member', sample 1: expected `bool \| null`"):
        scores_of(served, EXAMPLE | {"member": [True, value]})
    if isinstance(value, str) or value == 1:
        return
    rows = TABLE[:2].drop_columns("label")
    given = rows.set_column(rows.column_names.index("member"), "member", pa.array([0, value]))
    with pytest.raises(DataError, match=r"row 1 .*'member': the value is 7; expected true or fals"):
        served.predict_columns(given)


@pytest.mark.parametrize(
    ("name", "values", "by_columns", "by_json"),
    [
        ("shop", [7, 8], "'shop' is of type int64; expected text, as in training, where it was of "
         "type string", "'shop', sample 0: expected `str | null`, got `int`"),
        ("zip", [[], ["7"]], f"'zip' is of type {pa.list_(pa.string())}; expected numbers, as in "
         "training, where it was of type list<",
         "'zip', sample 1: expected `int`, got `str`"),
    ],
)  # fmt: skip
def test_text_and_numbers_are_those_of_training(served, name, values, by_columns, by_json):
    """Their hashes differ: the row of "7" is not that of 7."""
    with pytest.raises(RequestError) as refused:
        scores_of(served, EXAMPLE | {name: values})
    assert refused.value.message == f"column {by_json}"
    rows = TABLE[:2].drop_columns("label")
    index = rows.column_names.index(name)
    with pytest.raises(DataError, match=re.escape(f"the table, column {by_columns}")):
        served.predict_columns(rows.set_column(index, name, pa.array(values)))
    # Nothing is known of a column without any value, and a float may be whole.
    for missing in (pa.nulls(2), pa.array([[], []]) if name == "zip" else pa.nulls(2, pa.string())):
        served.predict_columns(rows.set_column(index, name, missing))
    if name == "zip":
        floats = rows.set_column(index, name, pa.array([[7.0], []]))
        expected = served.predict_columns(rows)
        np.testing.assert_array_equal(served.predict_columns(floats), expected)


def test_examples_without_rows_are_of_the_types_of_training(served):
    encoder = dataclasses.replace(served.encoder, example=served.encoder.example.slice(0, 0))
    example = RawColumns(encoder, served.manifest.batch).example()
    assert (example["shop"], example["zip"]) == (["a", "b"], [[0, 1], []])
