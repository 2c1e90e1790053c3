"""Requests that are predicted together, and bodies of any bytes: each is answered or refused."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.serve.http.bodies import Payload
from jaxrec.serve.http.limits import RequestError
from jaxrec.serve.http.predictor import Predictor
from tests.fuzz import max_examples
from tests.serve.http.fuzz import Bodies, decoders, outcome
from tests.serve.http.models import columns_of, exported, raw_model, raw_table
from tests.serve.models import dlrm, sasrec

pytestmark = pytest.mark.every_case


@pytest.fixture(scope="module")
def predictors(tmp_path_factory):
    path = tmp_path_factory.mktemp("predictors")
    return {
        "raw": Predictor(raw_model(path / "raw")),
        "dlrm": Predictor(exported(dlrm(), path / "dlrm")),
        "sasrec": Predictor(exported(sasrec(), path / "sasrec")),
    }


COLUMNS = {
    "raw": lambda: raw_table(3).drop_columns("label").to_pydict(),
    "dlrm": lambda: columns_of(dlrm().batch(3)),
    "sasrec": lambda: columns_of(sasrec().batch(3)),
}


@functools.cache
def columns(name):
    return COLUMNS[name]()


@pytest.mark.parametrize("kind", ["json", "arrow"])
@pytest.mark.parametrize("name", COLUMNS)
@settings(max_examples=max_examples(60))
@given(seed=st.integers(0, 2**63))
def test_bodies_that_are_nearly_right(predictors, name, kind, seed):
    predictor, bodies = predictors[name], Bodies(columns(name), seed)
    decode_json, decode_arrow = decoders(predictor)
    if kind == "json":
        outcome(predictor, decode_json.decode, bodies.json_body())
    else:
        outcome(predictor, decode_arrow.decode, bodies.arrow_body())


@settings(max_examples=max_examples(100))
@given(body=st.binary(max_size=200))
def test_any_bytes(predictors, body):
    for decoder in decoders(predictors["raw"]):
        assert outcome(predictors["raw"], decoder.decode, body) == 400


def test_requests_that_are_right_alone_and_not_together(predictors):
    """A hashed column has a negative integer in one request, and one of 64 bits in another."""
    users = [[-2], [3], [2**63 + 5], [7]]
    payloads = [
        Payload({"age": [1.0], "city": ["Ulm"], "user": user, "tags": [[]]}, 1) for user in users
    ]
    together = predictors["raw"].predict(payloads)
    for payload, scores in zip(payloads, together, strict=True):
        (alone,) = predictors["raw"].predict([payload])
        np.testing.assert_allclose(scores.columns["score"], alone.columns["score"], rtol=1e-5)


def test_only_wrong_requests(predictors):
    wrong = Payload({"age": [float("inf")], "city": [""], "user": [1], "tags": [[]]}, 1)
    errors = predictors["raw"].predict([wrong, wrong])
    assert all(isinstance(error, RequestError) for error in errors)
    assert "row 0 (from 0), column 'age'" in errors[1].message
