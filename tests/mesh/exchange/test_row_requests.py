"""Requests of rows by hand: two owners of four rows each."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrec
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.layout import layout_tables
from jaxrec.mesh import row_wise
from jaxrec.mesh.exchange.row_requests import RowRequests
from jaxrec.mesh.layout import layout_mesh
from jaxrec.mesh.shards import MeshShape

pytestmark = pytest.mark.jax_version

TABLES = layout_tables([jaxrec.EmbeddingBagConfig("t", 8, 2)], jaxrec.optim.sgd(0.1))
(PLACED,) = layout_mesh(TABLES, {"t": row_wise()}, MeshShape(1, 2)).groups


def lookups_of(rows, owners=None):
    owners = None if owners is None else jnp.array(owners, jnp.int32)
    return Lookups(jnp.array(rows, jnp.int32), None, None, owners)


@pytest.fixture
def requests():
    # Row 8 is padding, row -1 a bad id.
    return RowRequests.of(PLACED, lookups_of([5, 1, 5, 8, 7, -1, 4]))


def test_slots_without_repeats(requests):
    np.testing.assert_array_equal(requests.slots, [1, 4, 5, 7, 8, 8, 8])
    np.testing.assert_array_equal(requests.index, [2, 0, 2, -1, 3, -1, 1])
    np.testing.assert_array_equal(requests.begins, [0, 1])
    np.testing.assert_array_equal(requests.ends, [1, 4])


def test_rounds_of_two_rows(requests):
    first = requests.positions(requests.begins, 2)
    np.testing.assert_array_equal(first, [[0, 7], [1, 2]])
    np.testing.assert_array_equal(requests.local_rows(PLACED, first), [[1, 4], [0, 1]])
    np.testing.assert_array_equal(
        requests.index_in_round(requests.begins, 2), [3, 0, 3, -1, -1, -1, 2]
    )
    np.testing.assert_array_equal(
        requests.slots_in_round(requests.begins, 2), [0, 2, 3, -1, -1, -1, -1]
    )
    second = requests.positions(jnp.array([1, 3]), 2)
    np.testing.assert_array_equal(second, [[7, 7], [3, 7]])
    np.testing.assert_array_equal(requests.local_rows(PLACED, second), [[4, 4], [3, 4]])
    np.testing.assert_array_equal(
        requests.index_in_round(jnp.array([1, 3]), 2), [-1, -1, -1, -1, 2, -1, -1]
    )
    np.testing.assert_array_equal(
        requests.slots_in_round(jnp.array([1, 3]), 2), [-1, -1, -1, 2, -1, -1, -1]
    )


def test_requests_of_a_large_group():
    """The same lookups by owner and row of the owner's array; padding and the bad id have any."""
    placed = dataclasses.replace(PLACED, is_large=True)
    lookups = lookups_of([1, 1, 1, 4, 3, -1, 0], [1, 0, 1, 0, 1, 1, 1])
    requests = RowRequests.of(placed, lookups)
    np.testing.assert_array_equal(requests.slots[:4], [1, 0, 1, 3])
    np.testing.assert_array_equal(requests.index, [2, 0, 2, -1, 3, -1, 1])
    np.testing.assert_array_equal(requests.begins, [0, 1])
    np.testing.assert_array_equal(requests.ends, [1, 4])
    first = requests.positions(requests.begins, 2)
    np.testing.assert_array_equal(requests.local_rows(placed, first), [[1, 4], [0, 1]])
    np.testing.assert_array_equal(
        requests.index_in_round(requests.begins, 2), [3, 0, 3, -1, -1, -1, 2]
    )


@pytest.mark.parametrize("count", [0, 1, 2, 30, 200])
def test_slots_of_each_owner(count):
    """Lookups of any number, beside NumPy's search."""
    tables = layout_tables([jaxrec.EmbeddingBagConfig("t", 43, 2)], jaxrec.optim.sgd(0.1))
    (placed,) = layout_mesh(tables, {"t": row_wise()}, MeshShape(1, 5)).groups
    rows = np.random.default_rng(count).integers(0, 43, count)
    requests = RowRequests.of(placed, lookups_of(rows))
    slots = np.unique(np.asarray(placed.slots(jnp.array(rows, jnp.int32))))
    np.testing.assert_array_equal(requests.slots[: slots.size], slots)
    bounds = np.searchsorted(slots, np.arange(6) * placed.local_rows)
    np.testing.assert_array_equal(requests.begins, bounds[:-1])
    np.testing.assert_array_equal(requests.ends, bounds[1:])
