"""The page at /, in Chromium: it shows the model, sends requests and plots their latencies."""

from __future__ import annotations

import json

import pytest

from tests.serve.http.browser import CHROMIUM, browser
from tests.serve.http.endpoint import endpoint
from tests.serve.http.models import raw_model

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a model of raw columns, in a browser, and a client of its endpoint."""
    served = raw_model(tmp_path_factory.mktemp("page") / "model")
    with endpoint(served) as client, browser() as page:
        page.open(f"http://localhost:{client.port}/")
        page.wait("document.getElementById('request')?.value.length > 2")
        yield page, client


def text(page, name: str) -> str:
    return page.run(f"document.getElementById('{name}').innerText")


def send(page, body: str) -> None:
    page.run(f"document.getElementById('request').value = {json.dumps(body)}")
    page.run("document.getElementById('status').textContent = ''")
    page.run("document.getElementById('send').click()")
    page.wait("document.getElementById('status').textContent != ''")


def test_the_model_is_shown(page):
    page, client = page
    assert "3 tables" in text(page, "summary")
    assert "tables of version 0" in text(page, "summary")
    inputs, tables = text(page, "inputs"), text(page, "tables")
    for name in ("age", "city", "user", "tags", "list of text"):
        assert name in inputs
    assert "user\t50\t8\tfloat32\tuser" in tables
    example = page.run("document.getElementById('request').value")
    assert json.loads(example) == client.get("/model").json["example"]


def test_a_request_is_edited_and_sent(page):
    page, client = page
    body = {"age": [30], "city": ["Ulm"], "user": [5], "tags": [["Bern"]]}
    send(page, json.dumps(body))
    assert text(page, "status").startswith("200 in ")
    assert json.loads(text(page, "scores")) == client.post(body).json


def test_an_error_is_shown(page):
    page, _ = page
    send(page, '{"age": [1]}')
    assert text(page, "status").startswith("400 in ")
    assert "the request has no column 'city'" in text(page, "scores")


def test_latencies_are_plotted(page):
    page, _ = page
    page.run("document.getElementById('example').click()")
    page.run("document.getElementById('repeat').click()")
    page.wait("document.querySelectorAll('#plot circle').length >= 50")
    assert "requests: p50 " in text(page, "latencies")
    assert page.run("document.querySelectorAll('#plot text').length") >= 3
    errors = [each for each in page.errors if "favicon" not in each and "400" not in each]
    assert errors == []
