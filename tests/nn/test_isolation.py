"""NaN and infinity in an element reach its own row alone, and there what sees the element."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxrec.nn import hstu_attention, jagged_attention
from tests.nn.attention_oracle import Mask

pytestmark = [pytest.mark.usefixtures("compiled_fast"), pytest.mark.every_case]

# All rows lie in one tile. The last element is padding.
LENGTHS, CAPACITY = np.array([3, 0, 7, 2], np.int32), 13
MASK = Mask(num_targets=(1, 0, 3, 0))
ROWS = np.repeat(np.arange(4), LENGTHS)
NAMES = ("query", "key", "value", "cotangent")


def visible():
    mask = np.zeros((12, 12), bool)
    for row in range(4):
        part = np.flatnonzero(row == ROWS)
        mask[np.ix_(part, part)] = MASK.visible(row, len(part))
    return mask


@functools.cache
def program(attend):
    """The result, and the gradients of query, key, value and, for HSTU's, of a bias."""
    bias = {} if attend is jagged_attention else {"position_bias": np.ones((4, 1), np.float32)}

    def call(arrays):
        return attend(
            **arrays, lengths=LENGTHS, causal=True, num_targets=MASK.arguments()["num_targets"]
        )

    def run(arrays, cotangent):
        out, vjp = jax.vjp(call, arrays | bias)
        return out, vjp(cotangent)[0]

    return jax.jit(run)


def run(attend, arrays):
    arrays = dict(arrays)
    cotangent = arrays.pop("cotangent")
    return jax.tree.map(np.asarray, program(attend)(arrays, cotangent))


def draw():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((CAPACITY, 1, 4)).astype(np.float32) for name in NAMES}


@pytest.mark.parametrize("number", [np.nan, np.inf], ids=["nan", "infinity"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attend", [hstu_attention, jagged_attention])
def test_what_depends_on_an_element(attend, name, number):
    arrays = draw()
    clean, clean_gradients = run(attend, arrays)
    place = 5
    arrays[name][place, 0, 2] = number
    arrays[name][12:] = number  # padding, which nothing depends on
    out, gradients = run(attend, arrays)
    depends = {
        "query": np.arange(12) == place,
        "key": visible()[:, place],
        "value": visible()[:, place],
        "cotangent": np.zeros(12, bool),
    }[name]
    assert np.isnan(out[:12][depends]).all()
    np.testing.assert_allclose(out[:12][~depends], clean[:12][~depends], rtol=1e-5)
    for other in ("query", "key", "value"):
        found, expected = gradients[other], clean_gradients[other]
        assert np.isnan(found[:12][ROWS == 2]).all(), other
        np.testing.assert_allclose(
            found[:12][ROWS != 2], expected[:12][ROWS != 2], rtol=1e-5, err_msg=other
        )
        assert not found[12:].any(), other
    assert not out[12:].any()
    if attend is hstu_attention:
        assert np.isnan(gradients["position_bias"]).all()
