"""Pointwise attention of ranges of keys, and its gradients, by every implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed import kernels
from jaxrec.nn.attention_mask import key_intervals, make_mask
from tests.nn import attention_oracle as oracle
from tests.nn.attention_oracle import Call, Mask

pytestmark = pytest.mark.jax_version

# Lengths, heads, columns of queries and of values, distances of the bias, mask.
CASES = {
    "one-tile": ((5, 0, 1, 20), 2, 8, 8, 0, Mask()),
    "several-tiles": ((130, 64, 1), 1, 16, 32, 9, Mask()),
    "odd-widths": ((70, 3), 3, 5, 21, 40, Mask(causal=False)),
    "targets": ((150, 9), 2, 33, 7, 0, Mask(num_targets=(70, 9))),
    "groups": ((131, 6, 2), 1, 4, 4, 3, Mask(num_targets=(66, 5, 0), target_group_size=3)),
    "window": ((200,), 2, 8, 8, 0, Mask(max_attention_length=5, contextual_length=2)),
    "everything": (
        (90, 140, 0, 3),
        1,
        16,
        16,
        200,
        Mask(
            num_targets=(3, 80, 0, 1),
            contextual_length=3,
            max_attention_length=30,
            min_full_attention_length=4,
        ),
    ),
    "no-elements": ((0, 0), 2, 4, 4, 5, Mask()),
    "no-columns": ((4,), 2, 0, 3, 0, Mask()),
}


def operands(name):
    """Those of the primitive, three elements of padding among them, and the oracle's call."""
    lengths, heads, dim, value_dim, distances, mask = CASES[name]
    rng = np.random.default_rng(0)
    lengths, n = np.array(lengths, np.int32), sum(lengths)
    q, k, v, gradient = (
        rng.standard_normal((n, heads, columns)).astype(np.float32)
        for columns in (dim, dim, value_dim, value_dim)
    )
    bias = rng.standard_normal((distances, heads)).astype(np.float32)
    intervals = key_intervals(make_mask(lengths, **mask.arguments()), lengths, n + 3)
    fields = [intervals.first, intervals.last, intervals.own, intervals.group]
    ranges = np.stack([field for field in fields if field is not None])
    offsets = np.tile(np.cumsum([0, *lengths], dtype=np.int32), (2, 1))
    padded = [np.pad(x, [(0, 3), (0, 0), (0, 0)]) for x in (q, k, v, gradient)]
    biases = {"position": bias} if distances else {}
    call = Call(q, k, v, lengths, mask, alpha=0.5, biases=biases)
    return (*padded[:3], ranges, offsets, bias), padded[3], oracle.hstu(call, gradient)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(implementation, name):
    arrays, gradient, (expected, gradients) = operands(name)
    n = len(expected)
    out = np.asarray(kernels.attention(*arrays, 0.5))
    np.testing.assert_allclose(out[:n], expected, rtol=1e-4, atol=1e-4)
    assert not out[n:].any()
    found = kernels.attention_gradients(*arrays, gradient, 0.5)
    for got, of in zip(found, ("q", "k", "v"), strict=False):
        np.testing.assert_allclose(got[:n], gradients[of], rtol=1e-4, atol=1e-4, err_msg=of)
        assert not np.asarray(got)[n:].any()
    if "position" in gradients:
        np.testing.assert_allclose(found[3], gradients["position"], rtol=1e-4, atol=2e-4)


def test_what_is_not_finite_stays_in_its_row(implementation):
    if implementation != "cpu":
        pytest.skip("the definition multiplies hidden keys by 0")
    arrays, gradient, _ = operands("one-tile")
    arrays[0][7] = arrays[1][8] = arrays[2][9] = np.inf  # in the last row
    out = np.asarray(kernels.attention(*arrays, 0.5))
    assert np.isfinite(out[:6]).all()
    assert not np.isfinite(out[6:]).all()
    for found in kernels.attention_gradients(*arrays, gradient, 0.5)[:3]:
        assert np.isfinite(np.asarray(found)[:6]).all()


def test_wide_types_are_left_to_xla():
    form = jax.ShapeDtypeStruct((4, 1, 2), jnp.bfloat16)
    ranges, offsets = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 4), (2, 2)))
    bias = jax.ShapeDtypeStruct((0, 1), jnp.float32)
    choice = kernels.describe("attention", form, form, form, ranges, offsets, bias, 1.0)
    assert "not cpu: queries are float32, not bfloat16" in str(choice)
