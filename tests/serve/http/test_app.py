"""The endpoint: scores of the training model, and a clear error for each bad request."""

from __future__ import annotations

import concurrent.futures
import json

import numpy as np
import pyarrow as pa
import pytest

from jaxrec.serve.http.app import loopback_hosts
from jaxrec.serve.http.limits import Limits
from tests.serve.http.endpoint import ARROW, JSON, endpoint, stream
from tests.serve.http.models import columns_of, expected, exported, raw_model, raw_table
from tests.serve.models import MODELS, dlrm

pytestmark = pytest.mark.every_case


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """An endpoint of a model of raw columns, and the model."""
    served = raw_model(tmp_path_factory.mktemp("raw") / "model")
    with endpoint(served, Limits(drain=0.0, max_samples=5000, max_body=1 << 20)) as client:
        yield client, served


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """An endpoint of a quantized model of row indices."""
    with endpoint(exported(dlrm(), tmp_path_factory.mktemp("ids") / "model", "int8")) as client:
        yield client


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("samples", [1, 75])
def test_scores_of_the_training_model(name, samples, tmp_path):
    case = MODELS[name]()
    batch = case.batch(samples)
    columns, scores = columns_of(batch), expected(case, batch)
    with endpoint(exported(case, tmp_path / "model")) as client:
        as_json, as_arrow = client.post(columns), client.post(pa.table(columns))
    assert (as_json.status, as_arrow.status) == (200, 200), (as_json.body, as_arrow.body)
    assert as_json.headers["x-jaxrec-tables"] == "0"
    for column, values in scores.items():
        np.testing.assert_allclose(as_json.json[column], values, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(as_arrow.table[column].to_pylist(), values, rtol=1e-5, atol=1e-5)


def test_scores_of_quantized_tables(ids, tmp_path):
    batch = dlrm().batch(75)
    scores = exported(dlrm(), tmp_path / "model", "int8").predict(*batch)
    assert columns_of(batch)["tags"].count([]) > 0
    np.testing.assert_allclose(ids.post(columns_of(batch)).json["score"], scores, rtol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 3, 100])
def test_raw_columns(raw, rows):
    client, served = raw
    table = raw_table(rows, seed=1).drop_columns("label")
    scores = served.predict_columns(table)
    for answer in (client.post(table.to_pydict()), client.post(table)):
        assert answer.status == 200, answer.body
    assert client.post(table.to_pydict()).json["score"] == scores.tolist()
    assert client.post(table).table["score"].to_pylist() == scores.tolist()


def test_several_batches_of_a_stream(raw):
    client, served = raw
    table = raw_table(40, seed=2)
    parts = pa.Table.from_batches(table.to_batches(max_chunksize=7))
    answer = client.post(parts)
    assert answer.table["score"].to_pylist() == served.predict_columns(table).tolist()


@pytest.mark.parametrize(
    ("content", "accept", "answer"),
    [
        (JSON, "", JSON), (JSON, "*/*", JSON), (JSON, ARROW, ARROW), (ARROW, "", ARROW),
        (ARROW, JSON, JSON), (ARROW, "text/html, application/*;q=0.5", ARROW),
        (JSON, f"{ARROW};q=1, {JSON}", ARROW),
    ],
)  # fmt: skip
def test_the_client_chooses_the_type_of_the_response(raw, content, accept, answer):
    client, _ = raw
    table = raw_table(2)
    headers = {"accept": accept} if accept else {}
    columns = table if content == ARROW else table.to_pydict()
    given = client.post(columns, **headers)
    assert (given.status, given.headers["content-type"]) == (200, answer)
    scores = given.table["score"].to_pylist() if answer == ARROW else given.json["score"]
    assert len(scores) == 2


GOOD = {"age": [1.5, None], "city": ["Ulm", "?"], "user": [7, 2**62], "tags": [["Ulm"], []]}


def without(name: str) -> dict:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "the body is not JSON"),
        ('{"age": [1', "the body is not JSON"),
        ("[]", "the body must be an object of columns by name"),
        (b'{"city": ["\xff"]}', "the body is not JSON"),
        ("[" * 100_000, "the body"),
        (without("city"), "no column 'city'; the model reads 'age', 'city', 'user', 'tags'"),
        (GOOD | {"age": 3}, "column 'age': expected `array`, got `int`"),
        (GOOD | {"age": [1, "x"]}, "column 'age', sample 1: expected `float | null`, got `str`"),
        (GOOD | {"city": ["Ulm", 3]}, "column 'city', sample 1: expected `str | null`, got `int`"),
        (GOOD | {"user": [7, "x"]}, "column 'user', sample 1: expected `int | null`, got `str`"),
        (GOOD | {"user": [7, -(2**64)]}, "column 'user'"),
        (GOOD | {"user": [7, 10**30]}, "column 'user'"),
        (GOOD | {"tags": [["Ulm"], [None]]}, "column 'tags', sample 1: expected `str`, got `null`"),
        (GOOD | {"tags": ["Ulm", []]}, "column 'tags', sample 0: expected `array | null`"),
        (GOOD | {"age": [1]}, "column 'city' has 2 samples, but column 'age' has 1"),
        ('{"age": [1e400]}', "column 'age', sample 0: number out of range"),
        (GOOD | {"age": [1, 1e300]}, "row 1 (from 0), column 'age': the number 1e+300"),
    ],
)  # fmt: skip
def test_wrong_json(raw, body, message):
    answer = raw[0].post(body)
    assert answer.status == 400, answer.body
    assert message in answer.json["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": [[0], [50]]}, "feature 'user', sample 1: id 50 is outside [0, 50), the ids of"),
        ({"user": [[-1], [5]]}, "feature 'user', sample 0: id -1 is outside [0, 50)"),
        ({"user": [[2**40], [5]]}, f"feature 'user', sample 0: id {2**40} is outside"),
        ({"user": [[2**70], [5]]}, f"column 'user', sample 0: {2**70} does not fit 64 bits"),
        ({"tags": [[], [1] * 5000]}, "feature 'tags', sample 1: 5000 ids, and the model takes"),
        ({"tags": [[1.5], []]}, "column 'tags', sample 0: expected an integer, got 1.5"),
        ({"input0": [[1, 2], [1, 2, 3]]}, "column 'input0', sample 0: expected numbers of the"),
        ({"input0": [[1, 2, 1e39], [1, 2, 3]]}, "column 'input0'"),
        ({"input0": [1, 2]}, "column 'input0', sample 0: expected `array`, got `int`"),
        ({"input0": [[1, 2, 3]]}, "column 'user' has 2 samples, but column 'input0' has 1"),
    ],
)
def test_wrong_ids_and_arrays(ids, change, message):
    columns = columns_of(dlrm().batch(2)) | change
    answer = ids.post(columns)
    assert (answer.status, message in answer.json["error"]) == (400, True), answer.body
    kinds = {"user": pa.list_(pa.int64()), "tags": pa.list_(pa.int64())}
    sizes = {len(values) for values in columns.values()}
    if any(each in message for each in ("expected `", "an integer", "64 bits")) or len(sizes) > 1:
        return  # Arrow's types differ
    arrays = {name: pa.array(values, kinds.get(name)) for name, values in columns.items()}
    answer = ids.post(pa.table(arrays))
    assert (answer.status, message in answer.json["error"]) == (400, True), answer.body


def test_whole_floats_are_integers(ids, raw):
    columns = columns_of(dlrm().batch(3))
    floats = columns | {"tags": [[float(each) for each in bag] for bag in columns["tags"]]}
    assert any(floats["tags"])
    assert ids.post(floats).json == ids.post(columns).json
    client, _ = raw
    assert (
        client.post(GOOD | {"user": [7.0, 3e2]}).json == client.post(GOOD | {"user": [7, 300]}).json
    )
    answer = client.post(GOOD | {"user": [7.0, 3.5]})
    assert (answer.status, answer.json["error"]) == (
        400,
        "column 'user', sample 1: expected an integer, got 3.5",
    )
    # The numbers that floats this large stand for are not known.
    answer = client.post(GOOD | {"user": [2.0**53 + 2, 7]})
    assert "column 'user', sample 0: expected an integer" in answer.json["error"]


TABLE = pa.table(GOOD)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body is not an Arrow IPC stream, or is damaged"),
        (b"ARROW1", 400, "the body is not an Arrow IPC stream, or is damaged"),
        (stream(TABLE)[:-40], 400, "the body is not an Arrow IPC stream, or is damaged"),
        (stream(TABLE, "zstd"), 400, "the body is compressed"),
        (stream(TABLE.set_column(1, "city", TABLE["city"].dictionary_encode())), 400,
         "dictionar"),
        (stream(TABLE.drop_columns("tags")), 400, "no column 'tags'"),
        (stream(TABLE.append_column("age", TABLE["age"])), 400, "2 columns 'age'"),
        (stream(TABLE.set_column(0, "age", [["x", "y"]])), 400,
         "column 'age' is of type string; expected numbers"),
        (stream(TABLE.set_column(3, "tags", pa.array([["Ulm"], [None]]))), 400,
         "row 1 (from 0), column 'tags': a value of the list is null"),
        (stream(TABLE.set_column(0, "age", pa.array([float("nan"), 1.0]))), 400,
         "row 0 (from 0), column 'age': the number is nan"),
        (stream(TABLE.set_column(3, "tags", pa.array([[None], []]))), 400,
         "column 'tags': a value of a list is null"),
        (stream(TABLE.set_column(0, "age", pa.array([[[None]], []]))), 400, "column 'age' is of"),
        (stream(TABLE.append_column("x", pa.array([{"a": 1}, {"a": 2}]))), 400,
         "column 'x' is of type struct"),
        (stream(raw_table(5001)), 413, "5,001 samples or more, and the server takes 5,000"),
        (stream(TABLE).replace(b"Ulm", b"\xff\xff\xff"), 400, "UTF8"),
    ],
    ids=[
        "empty", "other", "truncated", "compressed", "dictionary", "missing", "twice", "type",
        "null", "nan", "nulls", "nested", "struct", "samples", "text",
    ],
)  # fmt: skip
def test_wrong_arrow(raw, body, status, message):
    answer = raw[0].post(body, content_type=ARROW)
    assert answer.status == status, answer.body
    assert message in answer.json["error"]


def test_arrow_columns_without_values(raw):
    client, served = raw
    table = pa.table(GOOD | {"age": [None, None], "city": [None, None], "tags": [[], None]})
    assert str(table.schema.types[0]) == "null"
    answer = client.post(table)
    assert answer.status == 200, answer.body
    same = table.to_pydict() | {"age": pa.nulls(2, pa.float64()), "city": pa.nulls(2, pa.string())}
    same["tags"] = pa.array([[], None], pa.list_(pa.string()))
    assert answer.table["score"].to_pylist() == served.predict_columns(same).tolist()


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content_type": "text/csv"}, 415, "the body is of type text/csv; send application/json"),
        ({"content_type": ""}, 415, "the body is of type unknown"),
        ({"accept": "text/html"}, 406, "accept application/json or"),
        ({"host": "evil.example"}, 421, "host 'evil.example' is not this server"),
    ],
)
def test_wrong_headers(raw, headers, status, message):
    answer = raw[0].post(GOOD, **headers)
    assert answer.status == status, answer.body
    assert message in answer.json["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/predict", 405), ("GET", "/nothing", 404)]
)
def test_other_routes(raw, method, path, status):
    answer = raw[0].request(method, path)
    assert answer.status == status
    assert path in answer.json["error"]


def test_a_wrong_request_fails_alone(raw):
    client, served = raw
    tables = [raw_table(3, seed) for seed in range(12)]
    bodies = [
        table.set_column(1, "age", pa.array([1.0, 1e300, 2.0])) if seed % 4 == 1 else table
        for seed, table in enumerate(tables)
    ]
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        answers = list(
            threads.map(
                lambda i: client.post(bodies[i] if i % 2 else bodies[i].to_pydict()), range(12)
            )
        )
    for seed, (table, answer) in enumerate(zip(tables, answers, strict=True)):
        if seed % 4 == 1:
            assert "row 1 (from 0), column 'age'" in answer.json["error"]
            continue
        assert answer.status == 200, answer.body
        scores = answer.table["score"].to_pylist() if seed % 2 else answer.json["score"]
        np.testing.assert_allclose(scores, served.predict_columns(table), rtol=1e-5, atol=1e-6)


def test_description_and_metrics(raw):
    client, _ = raw
    model = client.get("/model").json
    assert [each["name"] for each in model["inputs"]] == ["age", "city", "user", "tags"]
    assert model["inputs"][3] == {
        "name": "tags", "type": "text", "is_list": True, "shape": [], "num_ids": None,
        "may_be_null": True,
    }  # fmt: skip
    assert [table["rows"] for table in model["tables"]] == [4, 50, 4]
    assert model["outputs"] == [{"name": "score", "type": "float32", "shape": []}]
    assert client.get("/example").json == model["example"]
    assert client.post(model["example"]).status == 200
    assert client.get("/health").json == {"status": "alive"}
    assert client.get("/ready").json == {"status": "ready"}
    text = client.get("/metrics").body.decode()
    assert 'jaxrec_responses_total{status="200"}' in text
    assert "jaxrec_ready 1.0" in text
    assert "jaxrec_waiting_samples 0.0" in text


@pytest.mark.slow
def test_examples_of_all_models_are_answered(tmp_path):
    for name, make in MODELS.items():
        with endpoint(exported(make(), tmp_path / name)) as client:
            example = client.get("/model").json["example"]
            assert client.post(example).status == 200, json.dumps(example)


def test_names_of_a_loopback_address():
    assert loopback_hosts("localhost") == ("localhost", "127.0.0.1", "[::1]")
    assert "[::1]" in loopback_hosts("::1")
    assert loopback_hosts("10.0.0.1") == loopback_hosts("example.org") == ()
