"""Sorting, searching and distinct ids of two words against NumPy's int64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.ragged import join_int64, split_int64
from jaxrec.tier.managed_collision.id_order import argsort_ids, find_runs, search_ids

rng = np.random.default_rng(0)
EDGES = np.array([-(2**63), -1, 0, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
IDS = np.concatenate(
    [EDGES, EDGES, rng.integers(-(2**63), 2**63 - 1, 50), rng.integers(9, size=30)]
)


def words(ids):
    return jnp.asarray(split_int64(np.asarray(ids, np.int64)))


def test_order():
    np.testing.assert_array_equal(argsort_ids(words(IDS)), np.argsort(IDS, stable=True))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 64, 93])
def test_search(size):
    ordered = np.sort(IDS[:size])
    np.testing.assert_array_equal(
        search_ids(words(ordered), words(IDS)), np.searchsorted(ordered, IDS)
    )


@pytest.mark.parametrize("is_valid", [IDS < 5, IDS == 0, IDS != IDS], ids=["some", "one", "none"])
def test_distinct_ids(is_valid):
    runs = find_runs(words(IDS), jnp.asarray(is_valid))
    distinct, run = np.unique(IDS[is_valid], return_inverse=True)
    assert int(runs.count) == distinct.size
    np.testing.assert_array_equal(join_int64(np.asarray(runs.ids))[: distinct.size], distinct)
    np.testing.assert_array_equal(np.asarray(runs.run)[is_valid], run)
    assert (np.asarray(runs.run)[~is_valid] == IDS.size).all()
