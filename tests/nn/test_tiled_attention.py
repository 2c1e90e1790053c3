"""Tiled attention equals its definition pair by pair, forward and backward."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.nn import hstu_attention, jagged_attention, jagged_tiles, time_bucket
from tests.nn import attention_oracle as oracle
from tests.nn.attention_oracle import Call, Mask

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
    """Vectors, lengths and times, with NaN in padding."""
    rng = np.random.default_rng(seed)
    capacity = sum(lengths) + extra
    shapes = [(capacity, HEADS, DIM), (capacity, HEADS, DIM), (capacity, HEADS, VALUE_DIM)]
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    for array in (q, k, v):
        array[sum(lengths) :] = np.nan
    times = np.cumsum(rng.integers(0, 5000, capacity)).astype(np.int32)
    return q, k, v, np.array(lengths, np.int32), times


def call_of(q, k, v, lengths, times=None, **options):
    """The call of the oracle, without padding."""
    n = lengths.sum()
    pair = None if times is None else (times[:n], times[:n])
    return Call(q[:n], k[:n], v[:n], lengths, times=pair, **options)


@functools.cache
def compiled(attend, block_size=8, **options):
    """Compiled attention with gradients; options that hash are static."""

    def run(arrays, given, cotangent):
        def form(arrays):
            return attend(**arrays, **given, **options, block_size=block_size)

        out, vjp = jax.vjp(form, arrays)
        return out, vjp(cotangent)[0]

    return jax.jit(run)


def check(found, expected, lengths):
    """Output and gradients are those expected, and zero at padding."""
    n = sum(lengths)
    (out, gradients), (expected_out, expected_gradients) = found, expected
    for name, want in {"out": expected_out, **expected_gradients}.items():
        if name == "scale":
            continue
        got = np.asarray(out if name == "out" else gradients[ARGUMENTS.get(name, name)])
        padding = got[n:] if name in ("out", "q", "k", "v") else np.zeros(0)
        got = got[:n] if padding.ndim == want.ndim else got
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)
        assert not np.any(padding), name


ARGUMENTS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "position": "position_bias",
    "time": "time_bias",
}


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", LENGTHS)
def test_attention(name, causal):
    q, k, v, lengths, _ = draw(LENGTHS[name], EXTRA[name])
    cotangent = np.random.default_rng(1).standard_normal(v.shape).astype(np.float32)
    found = compiled(jagged_attention, causal=causal)(
        {"query": q, "key": k, "value": v}, {"lengths": lengths}, cotangent
    )
    call = call_of(q, k, v, lengths, mask=Mask(causal=causal))
    check(found, oracle.softmax(call, cotangent[: lengths.sum()]), lengths)


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("name", LENGTHS)
def test_hstu(name):
    q, k, v, lengths, times = draw(LENGTHS[name], EXTRA[name])
    rng = np.random.default_rng(2)
    biases = [rng.standard_normal((n, HEADS)).astype(np.float32) for n in (10, 12)]
    cotangent = rng.standard_normal(v.shape).astype(np.float32)
    arrays = {"query": q, "key": k, "value": v, "position_bias": biases[0], "time_bias": biases[1]}
    found = compiled(hstu_attention, scale=0.1)(
        arrays, {"lengths": lengths, "timestamps": times}, cotangent
    )
    tables = dict(zip(("position", "time"), biases, strict=True))
    call = call_of(q, k, v, lengths, times, mask=Mask(), scale=0.1, biases=tables)
    check(found, oracle.hstu(call, cotangent[: lengths.sum()]), lengths)


@pytest.mark.usefixtures("compiled_fast")
def test_a_group_that_begins_in_the_block_before():
    """A row of targets alone, of which one group lies in two blocks, and then a row of history."""
    q, k, v, lengths, _ = draw([5, 7], 0)
    mask = Mask(num_targets=(5, 0), target_group_size=5)
    attend = jax.jit(functools.partial(hstu_attention, target_group_size=5, block_size=4))
    found = attend(q, k, v, lengths, num_targets=np.array([5, 0], np.int32))
    expected, _ = oracle.hstu(call_of(q, k, v, lengths, mask=mask), v)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("compiled_fast")
def test_several_trips(monkeypatch):
    """With room for two tiles a trip, every tile is still made once."""
    monkeypatch.setattr("jaxrec.nn.jagged_tiles.PAIRS_AT_ONCE", 2 * 4 * 4 * HEADS)
    q, k, v, lengths, _ = draw(LENGTHS["power-law"], 3)
    found = jax.jit(functools.partial(jagged_attention, block_size=4))(q, k, v, lengths)
    call = call_of(q, k, v, lengths, mask=Mask(causal=False))
    expected, _ = oracle.softmax(call, call.v)
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("compiled_fast")
def test_large_scores_do_not_overflow():
    q, k, v, lengths, _ = draw([5, 3], 0)
    attend = jax.jit(functools.partial(jagged_attention, causal=True, block_size=4))
    out = attend(q * 100, k * 100, v, lengths)
    expected, _ = oracle.softmax(call_of(q * 100, k * 100, v, lengths, mask=Mask()), v)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_gpus_add_no_floats_by_atomics():
    """So that a step repeats bit for bit: each scatter adds to a place once."""
    q, k, v, lengths, _ = draw(LENGTHS["one-long"], 0)

    def loss(q, k, v):
        return hstu_attention(q, k, v, lengths, block_size=8).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    lowered = gradient.trace(q, k, v).lower(lowering_platforms=("cuda",))
    scatters = re.findall(
        r'"stablehlo.scatter".*?unique_indices = (\w+).*?\^bb0\(%\w+: tensor<(\w+)>',
        lowered.as_text(),
        re.DOTALL,
    )
    assert [is_unique for is_unique, dtype in scatters if dtype == "f32"] == ["true"] * 3


def test_sums_of_equal_blocks():
    """As on GPUs, here on a CPU."""
    rng = np.random.default_rng(0)
    array, parts = rng.standard_normal((4, 2, 3)), rng.standard_normal((6, 2, 3))
    blocks = np.array([1, 0, 1, 4, 4, 1], np.int32)  # 4: none
    expected = array.copy()
    np.add.at(expected, blocks[[0, 1, 2, 5]], parts[[0, 1, 2, 5]])
    arrays = (jnp.asarray(x, jnp.float32) for x in (array, parts))
    (array, parts), blocks = arrays, jnp.asarray(blocks)
    for add in (jagged_tiles._scatter_sums, jagged_tiles._scatter):
        np.testing.assert_allclose(
            add((array,), blocks, (parts,))[0], expected, rtol=1e-5, atol=1e-6
        )


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
