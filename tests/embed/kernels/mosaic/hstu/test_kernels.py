"""HSTU attention on Hopper cards, by JAX's interpreter, beside sums in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.kernels import mosaic
from jaxrec.nn.attention_mask import key_intervals, make_mask
from tests.embed.kernels.gpu_cases import backend
from tests.nn import attention_oracle as oracle
from tests.nn.attention_oracle import Call, Mask

pytestmark = pytest.mark.jax_version

# Several blocks in a row, several rows in a block, and a row of targets alone. Of 256 elements the
# last 76 are padding: some of the third block of 64, and the fourth.
LENGTHS, PADDING = (5, 0, 150, 1, 12, 12), 76
TARGETS = (0, 0, 40, 1, 11, 0)
WINDOW = {"contextual_length": 3, "max_attention_length": 20, "min_full_attention_length": 4}
# Columns of queries and of values, type, mask.
CASES = {
    "causal": (64, 64, "bfloat16", Mask()),
    "targets": (32, 128, "float16", Mask(num_targets=TARGETS, contextual_length=3)),
    "wide": (256, 256, "bfloat16", Mask(num_targets=TARGETS, target_group_size=3, **WINDOW)),
}
ALPHA, SCALE = 0.3, 0.25


def operands(name):
    """Operands of the primitive with NaN at padding, the output's gradient, and the oracle's."""
    dim, value_dim, dtype, mask = CASES[name]
    lengths, rng = np.array(LENGTHS, np.int32), np.random.default_rng(0)
    n = int(lengths.sum())
    widths = (dim, dim, value_dim, value_dim)
    exact = [rng.uniform(-1, 1, (n, 1, width)).astype(dtype) for width in widths]
    given = [np.pad(x, [(0, PADDING), (0, 0), (0, 0)], constant_values=np.nan) for x in exact]
    intervals = key_intervals(make_mask(lengths, **mask.arguments()), lengths, n + PADDING)
    fields = (intervals.first, intervals.last, intervals.own, intervals.group)
    ranges = jnp.stack([each for each in fields if each is not None])
    offsets = np.tile(np.cumsum([0, *lengths], dtype=np.int32), (2, 1))
    *vectors, gradient = exact
    expected = oracle.hstu(Call(*vectors, lengths, mask, ALPHA, SCALE), gradient)
    given = list(map(jnp.asarray, given))
    return (*given[:3], ranges, jnp.asarray(offsets), jnp.zeros((0, 1))), given[3], expected


@functools.cache
def results(name):
    """Output and gradients by the interpreter."""
    arrays, gradient, expected = operands(name)

    @jax.jit
    def both(*arrays):
        *operands, _ = arrays
        out = mosaic.attention(*operands, ALPHA, SCALE, interpret=True)
        return out, mosaic.attention_gradients(*arrays, ALPHA, SCALE, interpret=True)

    return jax.tree.map(np.asarray, both(*arrays, gradient)), expected


def assert_near(found, expected):
    """Roundings of 16-bit operands: a term that is missing or too much is ten times larger."""
    exact = np.asarray(found, np.float64)
    n = len(expected)
    assert not exact[n:].any()
    bound = 0.01 * np.sqrt(np.mean(np.square(expected))) + 0.008 * np.abs(expected)
    np.testing.assert_array_less(np.abs(exact[:n] - expected), 3 * bound + 1e-6)


def test_a_causal_mask():
    check("causal")


def test_targets_and_context():
    check("targets")


def test_wide_heads():
    """Their sums for keys and for values do not fit the registers of one group of threads."""
    check("wide")


def check(name):
    """Compare output and gradients with those of the definition in float64."""
    backend("mosaic")
    (out, found), (expected, gradients) = results(name)
    assert out.dtype == CASES[name][2]
    assert_near(out, expected)
    for got, of in zip(found, "qkv", strict=False):
        assert got.dtype == out.dtype
        assert_near(got, gradients[of])


def test_what_the_kernels_do_not_take():
    query = jax.ShapeDtypeStruct((8, 2, 64), jnp.bfloat16)
    call = {"query": query, "key": query, "value": query, "bias": jnp.zeros((0, 2))}
    assert mosaic.hstu.refuse_attention(call) is None
    wide = jax.ShapeDtypeStruct((8, 2, 300), jnp.bfloat16)
    single = jax.ShapeDtypeStruct((8, 2, 64), jnp.float32)
    for changed, reason in (
        ({"key": single}, "bfloat16 or float16, not bfloat16, float32, bfloat16"),
        ({"bias": jnp.zeros((3, 2))}, "no bias"),
        ({"value": wide}, "up to 256 columns, and these have 300"),
        ({"query": jax.ShapeDtypeStruct((0, 2, 64), jnp.bfloat16)}, "an array is empty"),
    ):
        assert reason in mosaic.hstu.refuse_attention(call | changed)


def test_other_cards_than_hopper_are_refused(monkeypatch):
    query = jax.ShapeDtypeStruct((8, 2, 64), jnp.bfloat16)
    call = {"query": query, "key": query, "value": query, "bias": jnp.zeros((0, 2))}
    monkeypatch.setattr(mosaic.hstu, "_capability", lambda: "8.0")
    assert "compute capability 9.0, and this one has 8.0" in mosaic.hstu.refuse_attention(call)
