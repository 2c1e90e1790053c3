"""A DLRM with a twentieth of its rows on the devices trains as with all of them.

All stores with all optimizers over 200 steps, which takes minutes: ``python -m benchmarks.tier
exact``.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from tests.tier import exact_runs
from tests.tier.exact_runs import Outcome, Sizes, train_cached, train_whole
from tests.tier.servers import redis_port  # noqa: F401

SIZES = Sizes(steps=60, tables=2, rows=4000, dim=4, batch=8)
whole = functools.cache(train_whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "optimizer", "devices", "look_ahead"),
    [
        ("memory", "adam", 1, 8),
        ("file", "rowwise_adagrad", 4, 3),
        ("rocksdb", "sgd", 1, 1),
        ("redis", "rowwise_adagrad", 1, 2),
        ("memory+rocksdb", "adam", 4, 5),
        ("memory", "sgd", 4, 8),
    ],
)
def test_caches_change_nothing(
    request, tmp_path, store: str, optimizer: str, devices: int, look_ahead: int
):
    """To the bit, with the first values of the initializers."""
    port = request.getfixturevalue("redis_port") if store == "redis" else 0
    expected = whole(SIZES, optimizer, devices)
    path = str(tmp_path / "rows")
    found = train_cached(SIZES, optimizer, store, path, port, devices, look_ahead)
    assert exact_runs.compare(found, expected) == {"losses": 0, "rows": 0}
    assert (found.misses, found.lookups) == (0, SIZES.steps * 2 * 8 * 3)
    assert found.statistics["written"] > 200
    assert found.statistics["fetched"] > 50


@pytest.mark.parametrize("name", ["losses", "t1", "t0 accumulator"])
def test_differences_are_found(name: str):
    expected = whole(dataclasses.replace(SIZES, steps=2), "rowwise_adagrad")
    arrays = {key: array.copy() for key, array in expected.arrays.items()}
    other = Outcome(expected.losses.copy(), arrays)
    assert exact_runs.compare(other, expected) == {"losses": 0, "rows": 0}
    array = other.losses if name == "losses" else arrays[name]
    array.flat[-1] = np.nextafter(array.flat[-1], np.float32(np.inf))
    part = "losses" if name == "losses" else "rows"
    assert exact_runs.compare(other, expected)[part] > 0
