"""A ranker behind the endpoint: scores, caches by key, clear errors, restarts and new tables."""

from __future__ import annotations

import concurrent.futures
import re
import threading
import types

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.serve import load_ranker
from jaxrec.serve.artifact.refresh import Refresher
from jaxrec.serve.http import app
from jaxrec.serve.http.bodies import Payload, encode_json
from jaxrec.serve.http.limits import Limits
from jaxrec.serve.http.ranker_predictor import RankerPredictor
from jaxrec.tier import publish
from tests.fuzz import max_examples
from tests.nn import rankers
from tests.serve.http.endpoint import ARROW, endpoint, process, wait
from tests.serve.http.fuzz import Bodies, decoders, outcome
from tests.serve.rankers import OPTIONS, expected, exported, model, request

pytestmark = pytest.mark.usefixtures("compiled_fast")

BATCH = rankers.lists([12, 3, 0, 7], [3, 5, 2, 0])
KEYS = ["a", "7", None, "b"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return exported("small", tmp_path_factory.mktemp("rankers") / "small")


@pytest.fixture(scope="module")
def client(path):
    with endpoint(load_ranker(path), Limits(drain=0.0, max_samples=50)) as client:
        yield client


def metrics(client):
    """The metrics of caches by their short name."""
    text = client.get("/metrics").body.decode()
    found = re.findall(r"^jaxrec_history_(?:cache_)?(\w+) ([\d.e+]+)$", text, re.MULTILINE)
    return {name.removesuffix("_total"): float(value) for name, value in found}


def assert_scores(columns, batch, ranker=None):
    wanted = expected(ranker or model("small"), batch)
    lengths = [len(row) for row in batch["c_item"]]
    assert columns.keys() == wanted.keys()
    for name, values in wanted.items():
        assert [len(row) for row in columns[name]] == lengths
        np.testing.assert_allclose(np.concatenate(columns[name]), values, rtol=1e-5, atol=1e-5)


def test_scores_and_metrics(client):
    before = metrics(client)
    for answer in (client.post(request(BATCH, KEYS)), client.post(request(BATCH, KEYS))):
        assert answer.status == 200, answer.body
        assert_scores(answer.json, BATCH)
    # A row without a key is encoded each time.
    counts = {name: value - before[name] for name, value in metrics(client).items()}
    bytes_of_three = counts.pop("bytes")
    assert counts == {"hits": 3, "misses": 5, "appends": 0, "evictions": 0, "caches": 3}
    assert bytes_of_three > 0
    assert client.post(request(BATCH, [7, 8, 9, 10])).status == 200
    assert metrics(client)["misses"] - before["misses"] == 9, "7 is another key than its text"
    for keys in (KEYS, [7, 7, 7, 7], [None] * 4):
        answer = client.post(pa.table(request(BATCH, keys)))
        assert (answer.status, answer.headers["content-type"]) == (200, ARROW), answer.body
        assert_scores(answer.table.to_pydict(), BATCH)


def test_appended_events(client):
    half = {name: [row[: len(row) // 2] for row in rows] for name, rows in BATCH.items()}
    half |= {name: BATCH[name] for name in ("user", "c_item", "c_time", "c_action", "c_watch")}
    rows = {name: values[1:2] for name, values in half.items()}
    before = metrics(client)
    assert_scores(client.post(request(rows, ["grows"])).json, rows)
    rows = {name: values[1:2] for name, values in BATCH.items()}
    assert_scores(client.post(request(rows, ["grows"])).json, rows)
    after = metrics(client)
    assert {name: after[name] - before[name] for name in ("hits", "appends", "misses")} == {
        "hits": 0, "appends": 1, "misses": 1,
    }  # fmt: skip


def changed(**columns):
    return request(rankers.lists([3, 2], [2, 1]), ["a", "b"]) | columns


WRONG = {
    "unknown item": (
        changed(item=[[1, 2, 3], [4, 50]]),
        "feature 'item', sample 1: id 50 is outside [0, 50), the ids of its table",
    ),
    "events of other lengths": (
        changed(action=[[1, 2, 3], [0]]),
        "feature 'action', sample 1: 1 values, but 2 of feature 'item'",
    ),
    "candidates of other lengths": (
        changed(c_time=[[1], [5]]),
        "feature 'c_time', sample 0: 1 values, but 2 of feature 'c_item'",
    ),
    "too long history": (
        request(rankers.lists([13], [1]), ["a"]),
        "feature 'item', sample 0: 13 events, and the ranker takes 12 at most",
    ),
    "too many candidates": (
        request(rankers.lists([2], [21]), ["a"]),
        "feature 'c_item', sample 0: 21 candidates, and the ranker takes 20 at most",
    ),
    "too much context": (changed(user=[[1, 2], [3]]), "feature 'user', sample 0: 2 ids"),
    "no list": (changed(item=[1, 2]), "column 'item', sample 0: expected `array`"),
    "other rows": (changed(cache_key=["a"]), "has 2 samples, but column 'cache_key' has 1"),
    "key of floats": (changed(cache_key=[1.5, 2.5]), "column 'cache_key', sample 0: expected"),
    "key of bools": (changed(cache_key=[True, False]), "column 'cache_key'"),
    "keys of two types": (changed(cache_key=["a", 2]), "sample 1: 2 is of another type"),
    "value that is null": (changed(time=[[1, None, 3], [1, 2]]), "column 'time', sample 0"),
    "no body": ("", "the body is not JSON"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests(client, name):
    body, message = WRONG[name]
    answers = [client.post(body)]
    if isinstance(body, dict) and name not in ("no list", "other rows", "keys of two types"):
        answers.append(client.post(pa.table(body)))
    for answer in answers:
        assert answer.status == 400, answer.body
        if len(answers) == 1 or ("key" not in name and "null" not in name):
            assert message in answer.json["error"]
    assert client.post(request(BATCH, KEYS)).status == 200


@pytest.fixture(scope="module")
def predictor(path):
    return RankerPredictor(load_ranker(path, cache_bytes=1 << 16))


def test_a_request_of_too_many_rows_ends(predictor):
    """It would keep all others waiting."""
    hurried = RankerPredictor(predictor.served, timeout=0.0)
    misses = predictor.served.cache_counts.misses
    (refused,) = hurried.predict([Payload(request(BATCH, KEYS), len(KEYS))])
    assert (refused.status, predictor.served.cache_counts.misses) == (504, misses)
    assert "0 of 4 rows were scored in time; send fewer rows at once" in refused.message


def test_long_responses_are_encoded_in_a_thread(client, monkeypatch):
    """A few rows may have many candidates: 10 values of each task here."""
    threads = []

    def encode(columns):
        threads.append(threading.current_thread().name)
        return encode_json(columns)

    monkeypatch.setattr(app, "bodies", types.SimpleNamespace(encode_json=encode))
    for most in (10, 9):
        monkeypatch.setattr(app, "_INLINE_VALUES", most)
        assert client.post(request(BATCH, KEYS)).status == 200
    assert [name.startswith("predict") for name in threads] == [False, True]


@settings(max_examples=max_examples(60))
@given(seed=st.integers(0, 2**63), is_json=st.booleans())
def test_bodies_that_are_nearly_right(predictor, seed, is_json):
    bodies = Bodies(request(BATCH, KEYS), seed)
    decode_json, decode_arrow = decoders(predictor)
    if is_json:
        outcome(predictor, decode_json.decode, bodies.json_body())
    else:
        outcome(predictor, decode_arrow.decode, bodies.arrow_body())


def test_missing_columns_and_too_many_rows(client):
    body = changed()
    del body["cache_key"]
    answer = client.post(body)
    assert (answer.status, "no column 'cache_key'" in answer.json["error"]) == (400, True)
    many = request(rankers.lists([1] * 51, [1] * 51), [None] * 51)
    answer = client.post(many)
    assert (answer.status, "51 samples" in answer.json["error"]) == (413, True)
    empty = {name: [] for name in body} | {"cache_key": []}
    assert client.post(empty).json == {"click": [], "seconds": []}


def test_the_description_and_the_example(client):
    described = client.get("/model").json
    names = ["cache_key", "user", "item", "time", "action", "watch", "c_item", "c_time"]
    assert [each["name"] for each in described["inputs"]] == names
    assert [each["name"] for each in described["outputs"]] == ["click", "seconds"]
    assert (described["history_sizes"], described["max_candidates"]) == ([12], 20)
    example = client.get("/example").json
    answer = client.post(example)
    assert answer.status == 200, answer.body
    assert [len(row) for row in answer.json["click"]] == [2, 2]


def test_many_clients_within_the_bytes(path, client):
    """Users share keys, histories change, and caches are evicted all the time."""
    shared = load_ranker(path)
    with endpoint(shared) as probe:
        probe.post(request(rankers.lists([12], [1]), ["a"]))
        size = int(metrics(probe)["bytes"])
    bound = 3 * size + size // 2
    seen, stop = [], threading.Event()
    batches = [rankers.lists([12], [3], seed=seed) for seed in range(4)]
    wanted = [expected(model("small"), batch) for batch in batches]
    served = load_ranker(path, cache_bytes=bound)
    served._compiled = shared._compiled
    with endpoint(served) as loaded:

        def send(number):
            rng, results = np.random.default_rng(number), []
            for _ in range(12):
                which = int(rng.integers(len(batches)))
                key = f"user {rng.integers(6)}" if which else "one user"
                results.append((which, loaded.post(request(batches[which], [key]))))
            return results

        def watch():
            while not stop.is_set():
                seen.append(metrics(loaded)["bytes"])

        watcher = threading.Thread(target=watch)
        watcher.start()
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            answers = [each for results in threads.map(send, range(6)) for each in results]
        stop.set()
        watcher.join()
        counts = metrics(loaded)
    for which, answer in answers:
        assert answer.status == 200, answer.body
        for name, values in wanted[which].items():
            np.testing.assert_allclose(answer.json[name][0], values, rtol=1e-5, atol=1e-5)
    assert max(seen) <= bound
    assert counts["evictions"] > 0
    assert counts["hits"] > 0
    assert counts["hits"] + counts["misses"] == len(answers)


def test_new_tables_drop_the_caches(path, tmp_path):
    served = load_ranker(path)
    with endpoint(served, refresher=Refresher(served, tmp_path), poll_seconds=0.05) as client:
        assert_scores(client.post(request(BATCH, KEYS)).json, BATCH)
        assert metrics(client)["caches"] == 3
        ranker = rankers.small(**OPTIONS["small"])
        ranker.embeddings.load_rows("item", [BATCH["item"][0][0]], np.full((1, 8), 0.7))
        publish(ranker, tmp_path)
        wait(lambda: served.variables.version == 1)
        assert metrics(client)["bytes"] == 0
        answer = client.post(request(BATCH, KEYS))
        assert answer.headers["x-jaxrec-tables"] == "1"
        assert_scores(answer.json, BATCH, ranker)
        assert metrics(client)["hits"] == 0


@pytest.mark.slow
def test_a_killed_server_starts_again(path):
    """Its caches are gone, and its scores are the same."""
    answers = []
    for _ in range(2):
        with process(path, "--cache-mb", "0.5") as (client, server):
            for hits in (0, 3):
                answers.append(client.post(request(BATCH, KEYS)))
                assert metrics(client)["hits"] == hits
            server.kill()
            server.wait()
    assert {answer.status for answer in answers} == {200}
    assert_scores(answers[0].json, BATCH)
    assert len({answer.body for answer in answers}) == 1
