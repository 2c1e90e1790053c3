"""Rows joined from parts, and pieces cut out of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.nn.row_pieces import cut_rows, join_rows
from tests.nn.ranker_cases import load, padded

DEVICES = 3


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["concat_split", "concat_dense_left"])
def test_recorded_rows(name):
    arrays = load(name)
    parts = [padded(arrays[key]) for key in ("left", "right")]
    lengths = [jnp.asarray(arrays[f"{key}_lengths"]) for key in ("left", "right")]
    joined = join_rows(lengths, parts)
    np.testing.assert_array_equal(joined[: len(arrays["joined"])], arrays["joined"])
    np.testing.assert_array_equal(joined[len(arrays["joined"]) :], 0)
    total = lengths[0] + lengths[1]
    for first, count, key in ((0, lengths[0], "left"), (lengths[0], lengths[1], "right")):
        cut = cut_rows(total, [(first, count)], joined, capacity=len(arrays[key]) + 1)
        np.testing.assert_array_equal(cut[:-1], arrays[key])


def test_two_pieces_of_each_row():
    values = jnp.array([0, 1, 2, 3, 10, 11, 20, 99])
    lengths = jnp.array([4, 2, 1], jnp.int32)
    pieces = [(0, jnp.array([1, 1, 1])), (jnp.array([2, 2, 1]), jnp.array([2, 0, 0]))]
    found = cut_rows(lengths, pieces, values, capacity=7)
    assert found.tolist() == [0, 2, 3, 10, 20, 0, 0]


def test_gradients_go_to_the_parts():
    parts = [jnp.ones((4, 2)), jnp.ones((3, 2))]
    lengths = [jnp.array([2, 1], jnp.int32), jnp.array([0, 2], jnp.int32)]
    weights = jnp.arange(14.0).reshape(7, 2)
    found = jax.grad(lambda parts: (join_rows(lengths, parts) * weights).sum())(parts)
    np.testing.assert_array_equal(found[0][:, 0], [0, 2, 4, 0])
    np.testing.assert_array_equal(found[1][:, 0], [6, 8, 0])


def test_over_devices():
    rng = np.random.default_rng(0)
    lengths = [rng.integers(0, 3, (DEVICES, 2)).astype(np.int32) for _ in range(2)]
    parts = [rng.standard_normal((DEVICES, 5, 2)) for _ in range(2)]
    found = join_rows(lengths, [jnp.asarray(part) for part in parts])
    for device in range(DEVICES):
        alone = join_rows([x[device] for x in lengths], [jnp.asarray(x[device]) for x in parts])
        np.testing.assert_array_equal(found[device], alone)
