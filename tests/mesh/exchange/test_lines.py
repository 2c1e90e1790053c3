"""Rows that an update wrote, and the lines that read them."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np

from jaxrec.mesh.exchange.lines import WrittenRows, take_lines

ROWS = 50


def test_written_rows_contain_the_rows_of_all_routes():
    random = np.random.default_rng(0)
    lists = [random.integers(-1, ROWS + 1, (4, 6)).astype(np.int32) for _ in range(2)]
    routes = [
        types.SimpleNamespace(owned_rows=jnp.asarray(rows), has_all_rows=is_whole)
        for rows, is_whole in zip(lists, (True, False), strict=True)
    ]
    rows = random.integers(-1, ROWS + 1, (3, 7)).astype(np.int32)
    written = WrittenRows.of(routes, ROWS)
    # Padding is ROWS, and a bad id -1: no update writes them.
    expected = np.isin(rows, np.stack(lists)) & (rows >= 0) & (rows < ROWS)
    np.testing.assert_array_equal(written.contain(jnp.asarray(rows)), expected)
    assert not written.is_all
    assert WrittenRows.of(routes[:1], ROWS).is_all


def test_lines_at_positions():
    lines = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    positions = np.array([[2, 3], [0, 1]], np.int32)
    expected = [[[4, 5], [-1, -1]], [[6, 7], [8, 9]]]
    np.testing.assert_array_equal(
        take_lines(jnp.asarray(lines), jnp.asarray(positions), -1), expected
    )
