"""Published versions during load: no request fails, and none has scores of two versions."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from jaxrec.serve import load, quantize
from jaxrec.serve.artifact.refresh import Refresher
from jaxrec.serve.http.limits import Limits
from jaxrec.tier import publish
from tests.serve.http.endpoint import endpoint, wait
from tests.serve.test_swap import Ranker, constant

VALUES = (1.0, 2.0, 3.0, 4.0)
COLUMNS = {"user": [[1, 2], [], [7]], "item": [[3], [4, 4], []], "seen": [[0], [5], [9]]}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A quantized model whose numbers are all 1, and one more batch size than a request has."""
    from jaxrec import KeyedJaggedArray
    from jaxrec.serve import export

    path = tmp_path_factory.mktemp("follow") / "model"
    example = (KeyedJaggedArray.from_lists(COLUMNS),)
    export(
        quantize(constant(VALUES[0])), path, example=example, batch_sizes=(1, 2),
        platforms=("cpu",),
    )  # fmt: skip
    return path


def test_versions_during_load(path, tmp_path):
    served = load(path)
    stop, answers, errors = threading.Event(), [], []
    with endpoint(
        served, Limits(drain=0.0), refresher=Refresher(served, tmp_path), poll_seconds=0.05
    ) as client:

        def send() -> None:
            while not stop.is_set():
                try:
                    answers.append(client.post(COLUMNS))
                except Exception as error:
                    errors.append(error)

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        for version, value in enumerate(VALUES[1:], 1):
            publish(constant(value), tmp_path)
            wait(lambda: errors or served.variables.version == version)  # noqa: B023
            time.sleep(0.2)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert client.get("/model").json["tables_version"] == len(VALUES) - 1
        assert "jaxrec_tables_version 3.0" in client.get("/metrics").body.decode()
    assert errors == []
    assert {answer.status for answer in answers} == {200}
    by_version: dict[str, set[str]] = {}
    for answer in answers:
        scores = str(answer.json["score"])
        by_version.setdefault(answer.headers["x-jaxrec-tables"], set()).add(scores)
    # Each version has scores of its own, and each response those of the version that it names.
    assert sorted(by_version) == ["0", "1", "2", "3"]
    assert all(len(scores) == 1 for scores in by_version.values())
    assert len(set.union(*by_version.values())) == len(VALUES)


def test_damaged_versions_leave_the_tables(path, tmp_path):
    served = load(path)
    with endpoint(
        served, Limits(drain=0.0), refresher=Refresher(served, tmp_path), poll_seconds=0.05
    ) as client:
        publish(constant(2.0), tmp_path)
        wait(lambda: served.variables.version == 1)
        before = client.post(COLUMNS)
        model = constant(3.0)
        model.embeddings.load_rows("item", [3], np.full((1, 8), np.nan))
        publish(model, tmp_path)
        wait(lambda: b"jaxrec_refresh_errors_total 0.0" not in client.get("/metrics").body)
        after = client.post(COLUMNS)
        assert (after.json, after.headers["x-jaxrec-tables"]) == (before.json, "1")
        publish(constant(4.0), tmp_path)
        wait(lambda: served.variables.version == 3)
        assert client.post(COLUMNS).json != before.json


def test_versions_of_another_model_end_the_start(path, tmp_path):
    from flax import nnx

    import jaxrec

    config = jaxrec.EmbeddingBagConfig("user", 3, 8)
    publish(jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)), tmp_path)
    served = load(path)
    with (
        pytest.raises(ConnectionError),  # refused, or reset as the server's socket closes
        endpoint(served, refresher=Refresher(served, tmp_path)) as client,
    ):
        wait(lambda: not client.get("/ready"), 5)


def test_a_first_version_is_there_before_the_first_request(path, tmp_path):
    publish(Ranker(1), tmp_path)
    served = load(path)
    with endpoint(served, refresher=Refresher(served, tmp_path)) as client:
        assert client.post(COLUMNS).headers["x-jaxrec-tables"] == "1"
