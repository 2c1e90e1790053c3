"""Attention runs in kernels in a process with one device, and in XLA elsewhere."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed import kernels
from jaxrec.embed.kernels import cpu
from jaxrec.nn import hstu_attention
from tests.embed.kernels.gpu_cases import backend, kernels_in, lowered_for_cuda
from tests.nn import attention_oracle as oracle

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("compiled_fast")]

LENGTHS = np.array([3, 0, 70, 6], np.int32)
TARGETS = np.array([1, 0, 20, 6], np.int32)
CAPACITY = 82


def draw(dtype):
    rng = np.random.default_rng(0)
    shapes = ((CAPACITY, 2, 4), (CAPACITY, 2, 4), (CAPACITY, 2, 3), (9, 2))
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    for array in arrays[:3]:
        array[LENGTHS.sum() :] = np.nan
    return arrays


def program(dtype, **options):
    """Attention with its gradients, lowered for the arrays."""

    def loss(query, key, value, bias):
        out = hstu_attention(
            query, key, value, LENGTHS, num_targets=TARGETS, contextual_length=2, alpha=0.5,
            scale=0.1, position_bias=bias, **options,
        )  # fmt: skip
        return (out.astype(jnp.float32) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).lower(*draw(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_device_and_eight(monkeypatch, dtype):
    eight = program(dtype)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    one = program(dtype)
    assert "jaxrec" not in calls(eight)
    if cpu.missing() is None:
        assert "jaxrec.attention.v1" in one.as_text()
        assert "jaxrec_attention_gradients" in one.as_text()
    arrays = draw(dtype)
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    found, expected = (jax.tree.leaves(each.compile()(*arrays)) for each in (one, eight))
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        want = np.asarray(want, np.float64)
        bound = tolerance * (1 + np.abs(want).max())
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=bound)


def test_what_native_kernels_leave_to_xla(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    times = np.arange(CAPACITY, dtype=np.int32)
    timed = program("float32", time_bias=np.ones((3, 2), np.float32), timestamps=times)
    with kernels.use_kernels("reference"):
        refused = program("float32")
    for each in (timed, refused):
        assert "jaxrec" not in calls(each)


@pytest.mark.skipif(cpu.missing() is not None, reason="without the native library XLA computes all")
def test_forward_passes(monkeypatch):
    query, key, value, _ = draw("float32")
    expected = hstu_attention(query, key, value, LENGTHS)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    lowered = jax.jit(lambda *arrays: hstu_attention(*arrays, LENGTHS)).lower(query, key, value)
    assert calls(lowered) == "jaxrec.attention.v1"
    found = lowered.compile()(query, key, value)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def calls(lowered):
    """The names of what a program calls."""
    return " ".join(re.findall(r"custom_call @([\w.]+)", lowered.as_text()))


def test_second_derivatives(monkeypatch):
    """In forward mode over reverse mode, as `jax.hessian` takes them."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 1, 2)), jnp.float32)

    def native(x):
        return (hstu_attention(x, x, x, jnp.array([3, 1]), block_size=2) ** 2).sum()

    def plain(x):
        rows = x[:3, 0], x[3:4, 0]
        weights = [jnp.tril(jax.nn.silu(row @ row.T)) for row in rows]
        return sum(((w @ row) ** 2).sum() for w, row in zip(weights, rows, strict=True))

    found, expected = (jax.jit(jax.hessian(loss))(x) for loss in (native, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


HOPPER = ["hstu_output", "hstu_query_gradients", "hstu_key_gradients"]


@pytest.mark.parametrize(
    ("dtype", "options", "names"),
    [
        ("bfloat16", {}, HOPPER),
        ("bfloat16", {"scale": np.full(CAPACITY, 0.1, np.float32)}, HOPPER),
        ("float16", {}, HOPPER),
        ("float16", {"scale": np.full(CAPACITY, 0.1, np.float32)}, []),
        ("float32", {}, []),
        ("bfloat16", {"position_bias": np.ones((9, 2), np.float32)}, []),
    ],
    ids=["bfloat16", "bfloat16-scaled", "float16", "float16-scaled", "float32", "biased"],
)
def test_programs_for_hopper_cards(monkeypatch, dtype, options, names):
    backend("mosaic")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    *vectors, _ = draw(dtype)

    def loss(*vectors):
        given = {"num_targets": TARGETS, "scale": 0.1} | options
        out = hstu_attention(*vectors, LENGTHS, **given)
        return (out.astype(jnp.float32) ** 2).sum()

    with kernels.use_kernels("mosaic", "reference"):
        program = lowered_for_cuda(jax.value_and_grad(loss, argnums=(0, 1, 2)), *vectors)
    assert kernels_in(program, *HOPPER) == names


# Sums of 2^18, and gradients of them of 2^-26: float16 holds neither, but all results.
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scale_of_each_query_in_every_type(monkeypatch, dtype, devices):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    rng = np.random.default_rng(0)
    lengths = np.array([40, 0, 25], np.int32)
    n = int(lengths.sum())

    def rounded(low, high, width):
        values = rng.uniform(low, high, (n, 2, width))
        return np.asarray(jnp.asarray(values, dtype), np.float64)

    call = oracle.Call(
        rounded(0.5, 2, 4), rounded(0.5, 2, 4), rounded(500, 1000, 3), lengths, oracle.Mask(),
        scale=np.full(n, 2.0**-14),
    )  # fmt: skip
    cotangent = rounded(0.5, 1, 3) * 2.0**-12
    out, gradients = oracle.hstu(call, cotangent)
    assert np.abs(out).max() * 2**14 > 65504  # the largest float16

    def attend(*arrays):
        return hstu_attention(*arrays[:3], lengths, scale=arrays[3])

    arrays = [jnp.asarray(x, dtype) for x in (call.q, call.k, call.v)]
    arrays.append(jnp.asarray(call.scale, jnp.float32))
    got, vjp = jax.vjp(attend, *arrays)
    found = got, *vjp(jnp.asarray(cotangent, dtype))
    wanted = out, *(gradients[name] for name in ("q", "k", "v", "scale"))
    bound = {"float16": 3e-3, "bfloat16": 2e-2, "float32": 1e-5}[dtype]
    for each, want in zip(found, wanted, strict=True):
        error = np.abs(np.asarray(each, np.float64) - want).max()
        # Below its normal numbers float16 has steps of 2^-24.
        step = 2.0**-24 if each.dtype == jnp.float16 else 0.0
        assert error <= bound * np.abs(want).max() + step
