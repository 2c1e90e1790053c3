"""Tiled attention equals the padded dense computation, forward and backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.nn import hstu_attention, jagged_attention, time_bucket
from tests.nn.dense_attention import (
    hstu_attention_reference,
    jagged_attention_reference,
)

pytestmark = pytest.mark.jax_version

HEADS, DIM, VALUE_DIM = 2, 4, 3

# Those of equal numbers of rows and elements, padding included, share a compiled program.
LENGTHS = {
    "short": [3, 0, 1, 5, 2, 4],
    "one-long": [1, 2, 37, 1, 0, 7],
    "power-law": [1, 1, 2, 1, 40, 3, 1, 9, 1, 2],
    "all-empty": [0] * 6,
    "one-row": [17],
    "full": [8] * 6,
}
EXTRA = {"short": 33, "one-long": 0, "power-law": 70, "all-empty": 48, "one-row": 0, "full": 0}


def draw(lengths, extra, seed=0):
    rng = np.random.default_rng(seed)
    capacity = sum(lengths) + extra
    shapes = [(capacity, HEADS, DIM), (capacity, HEADS, DIM), (capacity, HEADS, VALUE_DIM)]
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    times = np.cumsum(rng.integers(0, 5000, capacity)).astype(np.int32)
    return q, k, v, np.array(lengths, np.int32), times


def padded(array, lengths, longest):
    out = np.zeros((len(lengths), longest, *array.shape[1:]), np.float64)
    starts = np.cumsum([0, *lengths])
    for row, length in enumerate(lengths):
        out[row, :length] = array[starts[row] : starts[row] + length]
    return out


def packed(dense, lengths, capacity):
    rows = [dense[row, :length] for row, length in enumerate(lengths)]
    flat = np.concatenate([*rows, np.zeros((0, *dense.shape[2:]))])
    return np.pad(flat, [(0, capacity - len(flat))] + [(0, 0)] * (flat.ndim - 1))


def padded_attention(q, k, v, lengths, *, causal):
    """Softmax attention in float64 over rows padded to the longest."""
    longest = max(*lengths, 1)
    Q, K, V = (padded(array, lengths, longest) for array in (q, k, v))
    scores = np.einsum("rahd,rbhd->rhab", Q, K) / np.sqrt(DIM)
    places = np.arange(longest)
    mask = places[None, None, None, :] < np.array(lengths)[:, None, None, None]
    if causal:
        mask = mask & (places[:, None] >= places[None, :])[None, None]
    scores = np.where(mask, scores, -1e30)
    powers = np.where(mask, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights = powers / np.maximum(powers.sum(-1, keepdims=True), 1e-300)
    return packed(np.einsum("rhab,rbhe->rahe", weights, V), lengths, len(q))


def padded_hstu(q, k, v, lengths, times, position_bias, time_bias, *, scale):
    """Pointwise attention in float64 over rows padded to the longest."""
    longest = max(*lengths, 1)
    Q, K, V, T = (padded(array, lengths, longest) for array in (q, k, v, times))
    places = np.arange(longest)
    distance = np.clip(places[:, None] - places[None, :], 0, len(position_bias) - 1)
    elapsed = np.maximum(np.abs(T[:, :, None] - T[:, None, :]), 1)
    buckets = np.clip(np.log(elapsed) / 0.301, 0, len(time_bias) - 1).astype(int)
    scores = np.einsum("rahd,rbhd->rhab", Q, K)
    scores = scores + np.moveaxis(position_bias[distance], -1, 0)[None]
    scores = scores + np.moveaxis(time_bias[buckets], -1, 1)
    mask = places[None, None, None, :] < np.array(lengths)[:, None, None, None]
    mask = mask & (places[:, None] >= places[None, :])[None, None]
    weights = np.where(mask, scale * scores / (1 + np.exp(-scores)), 0)
    return packed(np.einsum("rhab,rbhe->rahe", weights, V), lengths, len(q))


@functools.cache
def both_attentions(causal):
    """Compiled: what the tiled and the plain form give, and their gradients."""

    def run(q, k, v, lengths, cotangent):
        def tiled(q, k, v):
            return jagged_attention(q, k, v, lengths, causal=causal, block_size=8)

        def plain(q, k, v):
            return jagged_attention_reference(q, k, v, lengths, causal=causal)

        return [with_gradients(form, cotangent, q, k, v) for form in (tiled, plain)]

    return jax.jit(run)


@functools.cache
def both_hstu():
    """The same of pointwise attention."""

    def run(q, k, v, lengths, times, biases, cotangent):
        def attend(function, **options):
            def form(q, k, v, position_bias, time_bias):
                return function(
                    q, k, v, lengths, scale=0.1, position_bias=position_bias, time_bias=time_bias,
                    timestamps=times, **options,
                )  # fmt: skip

            return with_gradients(form, cotangent, q, k, v, *biases)

        return attend(hstu_attention, block_size=8), attend(hstu_attention_reference)

    return jax.jit(run)


def with_gradients(function, cotangent, *args):
    out, vjp = jax.vjp(function, *args)
    return out, vjp(cotangent)


def check(found, expected):
    """The tiled form's output and gradients, and the plain form's."""
    (out, gradients), (same, plain_gradients) = found
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(same, expected, rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", LENGTHS)
def test_attention(name, causal):
    q, k, v, lengths, _ = draw(LENGTHS[name], EXTRA[name])
    expected = padded_attention(q, k, v, LENGTHS[name], causal=causal)
    cotangent = np.random.default_rng(1).standard_normal(v.shape).astype(np.float32)
    cotangent[sum(LENGTHS[name]) :] = 0
    check(both_attentions(causal)(q, k, v, lengths, cotangent), expected)


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("name", LENGTHS)
def test_hstu(name):
    q, k, v, lengths, times = draw(LENGTHS[name], EXTRA[name])
    rng = np.random.default_rng(2)
    biases = [rng.standard_normal((n, HEADS)).astype(np.float32) for n in (10, 12)]
    expected = padded_hstu(q, k, v, LENGTHS[name], times, *biases, scale=0.1)
    cotangent = rng.standard_normal(v.shape).astype(np.float32)
    cotangent[sum(LENGTHS[name]) :] = 0
    check(both_hstu()(q, k, v, lengths, times, biases, cotangent), expected)


@pytest.mark.usefixtures("compiled_fast")
def test_several_trips_a_step(monkeypatch):
    """With room for two tiles a trip, every tile is still made once."""
    monkeypatch.setattr("jaxrec.nn.jagged_tiles.PAIRS_AT_ONCE", 2 * 4 * 4 * HEADS)
    lengths = LENGTHS["power-law"]
    q, k, v, row_lengths, _ = draw(lengths, 3)
    attend = jax.jit(functools.partial(jagged_attention, block_size=4))
    out = attend(q, k, v, row_lengths)
    np.testing.assert_allclose(
        out, padded_attention(q, k, v, lengths, causal=False), rtol=1e-5, atol=1e-5
    )


@pytest.mark.usefixtures("compiled_fast")
def test_large_scores_do_not_overflow():
    q, k, v, lengths, _ = draw([5, 3], 0)
    attend = jax.jit(functools.partial(jagged_attention, causal=True, block_size=4))
    out = attend(q * 100, k * 100, v, lengths)
    expected = padded_attention(q * 100, k * 100, v, [5, 3], causal=True)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_memory_does_not_grow_with_the_square():
    """Ten times the elements take about ten times the memory, backward pass included."""

    def bytes_of(capacity):
        shape = jax.ShapeDtypeStruct((capacity, 1, 8), jnp.float32)
        lengths = jax.ShapeDtypeStruct((8,), jnp.int32)

        def loss(q, k, v, lengths):
            return jagged_attention(q, k, v, lengths, causal=True).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, lengths)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    # Both have more tiles than a trip takes.
    assert bytes_of(163840) < 12 * bytes_of(16384)


def test_memory_beside_padding():
    """Up to length 4,096 with power-law lengths, at most 0.3 of what padded rows take."""
    longest, rows = 4096, 16
    lengths = np.minimum(20 * np.random.default_rng(0).random(rows) ** (-1 / 1.2), longest)
    lengths[0] = longest
    lengths = lengths.astype(np.int32)

    def bytes_of(attend, *shape):
        vectors = jax.ShapeDtypeStruct((*shape, 1, 8), jnp.float32)

        def loss(q, k, v):
            return attend(q, k, v).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*[vectors] * 3).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def padded(q, k, v):
        scores = jnp.einsum("rahd,rbhd->rhab", q, k)
        weights = jnp.where(jnp.tri(longest, dtype=bool)[None, None], jax.nn.silu(scores), 0)
        return jnp.einsum("rhab,rbhe->rahe", weights, v)

    ragged = bytes_of(lambda *qkv: hstu_attention(*qkv, lengths, scale=1.0), int(lengths.sum()))
    assert ragged <= 0.3 * bytes_of(padded, rows, longest)


def test_time_bias_needs_timestamps():
    q, k, v, lengths, times = draw([2], 0)
    for given in ({"timestamps": times}, {"time_bias": jnp.ones((3, HEADS))}):
        with pytest.raises(ValueError, match="come together"):
            hstu_attention(q, k, v, lengths, scale=1.0, **given)


def test_time_buckets():
    assert time_bucket(jnp.array([-60, 60, 2**30]), 20).tolist() == [13, 13, 19]


def test_second_derivatives_in_forward_mode_over_reverse_mode():
    """As `jax.hessian` takes them, of a row of three elements and one of one."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 1, 2)), jnp.float32)

    def tiled(x):
        return (jagged_attention(x, x, x, jnp.array([3, 1]), block_size=2) ** 2).sum()

    def plain(x):
        rows = x[:3, 0], x[3:4, 0]
        attended = [jax.nn.softmax(row @ row.T * 2**-0.5) @ row for row in rows]
        return sum((row**2).sum() for row in attended)

    found, expected = (jax.jit(jax.hessian(loss))(x) for loss in (tiled, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
