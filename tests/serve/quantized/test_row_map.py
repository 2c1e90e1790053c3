"""Maps of pruned tables: the row of an id is the number of remaining ids before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.serve.quantized.pruned_tables import RowMap


def expected_rows(is_kept: np.ndarray) -> np.ndarray:
    return np.where(is_kept, np.cumsum(is_kept) - 1, is_kept.sum())


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rows_of_all_ids(count, share):
    is_kept = np.random.default_rng(count).random(count) >= share
    row_map = RowMap.of_kept(is_kept)
    ids = np.arange(count)
    expected = expected_rows(is_kept)
    np.testing.assert_array_equal(row_map.find(jnp.asarray(ids, jnp.int32)), expected)
    np.testing.assert_array_equal(row_map.find_on_host(ids), expected)
    np.testing.assert_array_equal(row_map.kept_ids(), np.flatnonzero(is_kept))
    assert (row_map.num_ids, row_map.num_rows) == (count, is_kept.sum())
    assert row_map.num_bytes == 8 * -(-count // 32)


@pytest.mark.parametrize("count", [32, 33])
def test_numbers_that_are_no_ids(count):
    row_map = RowMap.of_kept(np.ones(count, np.bool_))
    ids = jnp.array([-1, -(2**31), count, count + 31, 2**31 - 1], jnp.int32)
    assert jax.jit(lambda each, ids: each.find(ids))(row_map, ids).tolist() == [-1] * 5
