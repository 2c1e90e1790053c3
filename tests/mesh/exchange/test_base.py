"""What every exchange does, beside NumPy: pooling, the update of rows, and norms of gradients."""

from __future__ import annotations

import numpy as np
import pytest

import jaxrec
from jaxrec.mesh import data_parallel, row_wise, table_wise
from jaxrec.mesh.exchange import ALONE, EXCHANGES, Cut, choose_exchange, find_exchange
from jaxrec.mesh.exchange.base import Request
from tests.mesh.exchange.harness import DEVICES, DIM, RATE, ROWS, Harness

pytestmark = pytest.mark.jax_version

PLACEMENTS = {
    "rows": row_wise(exchange="rows"),
    "pooled": row_wise(exchange="pooled"),
    "bags": table_wise(3, exchange="bags"),
    "replicated": data_parallel(),
    "alone": row_wise(),
}
IDS = {
    "even": [[i, (i + 5) % ROWS] for i in range(2 * DEVICES)],
    "one owner": [[0, 1, 1]] * 2 * DEVICES,
    "empty and long": [[], list(range(12))] * DEVICES,
}


@pytest.fixture(params=PLACEMENTS)
def make(request):
    """Makes a `Harness` of an exchange."""
    devices = 1 if request.param == "alone" else DEVICES

    def make(*arguments, **options):
        harness = Harness(PLACEMENTS[request.param], *arguments, devices=devices, **options)
        assert harness.exchange.name == request.param
        return harness

    return make


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("capacity", [1, 64], ids=["one_at_a_time", "all_at_once"])
def test_a_step_is_that_of_numpy(make, ids, capacity):
    harness = make(IDS[ids])
    np.testing.assert_allclose(harness.pool(capacity), harness.expected_bags(), rtol=1e-6)
    values = np.random.default_rng(0).normal(size=(2 * DEVICES, DIM))
    gradient = harness.expected_gradient(values)
    expected = harness.table - RATE * gradient
    np.testing.assert_allclose(harness.update(values, capacity), expected, rtol=1e-5, atol=1e-5)
    squares = harness.squares(values, capacity)
    np.testing.assert_allclose(squares, (gradient**2).sum(), rtol=1e-4)


def test_weights_and_means(make):
    weights = [[0.5, 2.0]] * 2 * DEVICES
    harness = make(IDS["even"], pooling="mean", weights=weights)
    np.testing.assert_allclose(harness.pool(4), harness.expected_bags(), rtol=1e-6)
    values = np.ones((2 * DEVICES, DIM))
    expected = harness.table - RATE * harness.expected_gradient(values)
    np.testing.assert_allclose(harness.update(values, 4), expected, rtol=1e-5, atol=1e-5)


def test_clip_norm_is_that_of_the_whole_table(make):
    optimizer = jaxrec.optim.sgd(RATE, clip_norm=1.0)
    harness = make(IDS["even"], optimizer=optimizer)
    values = np.ones((2 * DEVICES, DIM))
    gradient = harness.expected_gradient(values)
    expected = harness.table - RATE * gradient / np.linalg.norm(gradient)
    np.testing.assert_allclose(harness.update(values, 4), expected, rtol=1e-4, atol=1e-4)


SGD, LAMB = jaxrec.optim.sgd(0.1), jaxrec.optim.lamb()


@pytest.mark.parametrize(
    ("wanted", "cut", "expected"),
    [
        (None, Cut(True, SGD, 1, 1), "bags"),
        (None, Cut(True, SGD, 1, 8), "rows"),
        (None, Cut(False, SGD, 1, 1), "rows"),
        ("pooled", Cut(True, SGD, 2, 1), "bags"),
        ("pooled", Cut(True, SGD, 2, 4), "pooled"),
        ("pooled", Cut(True, LAMB, 1, 4), "pooled"),
        ("rows", Cut(True, LAMB, 2, 4), "rows"),
        ("replicated", Cut(True, SGD, 1, 1), "replicated"),
    ],
)
def test_choice(wanted, cut, expected):
    assert choose_exchange(wanted, cut) is EXCHANGES[expected]


@pytest.mark.parametrize("wanted", [None, "rows", "pooled", "bags"])
def test_a_single_device_sends_nothing(wanted):
    assert choose_exchange(wanted, Cut(True, SGD, 1, 1, is_alone=True)) is ALONE


@pytest.mark.parametrize(
    ("wanted", "cut", "expected"),
    [
        ("rows", Cut(True, SGD, 2, 1, is_alone=True), "rows"),
        (None, Cut(True, SGD, 2, 1, is_alone=True), "bags"),
        ("replicated", Cut(True, SGD, 1, 1, is_alone=True), "replicated"),
    ],
    ids=["two parts of columns", "two parts of columns by default", "replicated"],
)
def test_other_exchanges_of_a_single_device(wanted, cut, expected):
    assert choose_exchange(wanted, cut) is EXCHANGES[expected]


@pytest.mark.parametrize(
    ("wanted", "cut", "reason"),
    [
        (
            "pooled",
            Cut(False, SGD, 1, 8),
            "'pooled' is not possible, since its rows are not pooled",
        ),
        (
            "pooled_by_host",
            Cut(True, LAMB, 2, 4, 1, 2),
            "lamb with these settings needs whole rows, and its columns lie on several hosts",
        ),
        (
            "rows",
            Cut(True, LAMB, 2, 4, shares_devices=True),
            "lamb with these settings needs whole rows, and a device has two parts of its columns",
        ),
        ("bags", Cut(True, SGD, 1, 8), "its rows are cut over several devices"),
        ("bags", Cut(False, SGD, 1, 1), "its rows are not pooled"),
        ("pooled", Cut(False, SGD, 1, 1, is_alone=True), "its rows are not pooled"),
        ("replicated", Cut(True, SGD, 1, 8), "replicated tables lie whole on every device"),
        ("sums", Cut(True, SGD, 1, 1), "no exchange is named 'sums'; there are 'rows', 'pooled'"),
    ],
)
def test_refusal(wanted, cut, reason):
    with pytest.raises(ValueError, match=reason):
        choose_exchange(wanted, cut)


def test_an_exchange_is_found_by_its_name_or_as_itself():
    rows = find_exchange("rows")
    assert find_exchange(rows) is rows
    assert Request.__dataclass_fields__["layout"].metadata == {"static": True}
