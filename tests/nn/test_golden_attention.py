"""HSTU's attention and block compute what the authors' and NVIDIA's code do, and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec.nn import HSTUBlock, hstu_attention
from jaxrec.nn.attention_mask import key_intervals, make_mask
from tests import golden

pytestmark = [
    pytest.mark.usefixtures("compiled_fast"),
    pytest.mark.every_case,
    pytest.mark.jax_version,
]

AREA = "hstu_attention"
CASES = dict(golden.cases(AREA))
MASKS = [name for name in CASES if "visible" in CASES[name]["outputs"]]
CACHED = [name for name in CASES if name.startswith("attention_delta")]
UNITS = [name for name in CASES if name.startswith("research_unit")]


def mask_of(meta, arrays):
    """The arguments of a case's mask."""
    return {
        "num_targets": arrays.get("num_targets"),
        "contextual_length": arrays.get("num_contextuals", meta.get("contextual_seq_len", 0)),
        "max_attention_length": meta.get("max_attn_len", 0),
        "min_full_attention_length": meta.get("min_full_attn_seq_len", 0),
        "target_group_size": meta.get("target_group_size", 1),
    }


def load(name):
    arrays = golden.load(AREA, name)
    ints = ("lengths", "num_targets", "num_contextuals", "timestamps")
    return {k: v.astype(np.int32) if k in ints else v for k, v in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    meta, arrays = CASES[name]["meta"], load(name)
    mask, lengths = mask_of(meta, arrays), arrays["lengths"]
    scale = arrays.get("attn_scale", 1 / (meta["divisor"] or 1))

    def attend(q, k, v):
        return hstu_attention(
            q, k, v, lengths, **mask, alpha=meta["alpha"], scale=scale, block_size=16
        )

    inputs = [arrays[x] for x in "qkv"]
    out, gradients = jax.jit(
        lambda *inputs: (attend(*inputs), jax.vjp(attend, *inputs)[1](arrays["grad_out"]))
    )(*inputs)
    np.testing.assert_allclose(out, arrays["out"], **CASES[name]["tolerance"])
    for x, gradient in zip("qkv", gradients, strict=True):
        np.testing.assert_allclose(gradient, arrays[f"grad__{x}"], **CASES[name]["tolerance"])

    described = make_mask(lengths, causal=True, **mask)
    intervals = key_intervals(described, lengths, int(lengths.sum()))
    visible = np.asarray(intervals.see(jnp.arange(lengths.sum(), dtype=jnp.int32)))
    starts = np.cumsum(lengths) - lengths
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        part = slice(start, start + length)
        expected = arrays["visible"][row, :length, :length].astype(bool)
        np.testing.assert_array_equal(visible[part, part], expected)


@pytest.mark.parametrize("name", CACHED)
def test_queries_at_the_end_of_rows(name):
    meta, arrays = CASES[name]["meta"], load(name)
    lengths = arrays["lengths"]
    out = hstu_attention(
        arrays["delta_q"],
        arrays["k"],
        arrays["v"],
        lengths,
        **mask_of(meta, arrays),
        query_lengths=np.full_like(lengths, meta["delta"]),
        alpha=meta["alpha"],
        scale=1 / meta["max_seq_len"],
        block_size=4,
    )
    np.testing.assert_allclose(out, arrays["out"], **CASES[name]["tolerance"])


@pytest.mark.parametrize("name", [name for name in UNITS if not CASES[name]["meta"]["concat_ua"]])
def test_block(name):
    """The paper's unit. The authors' norms have no weights, and all heads share a bias."""
    meta, arrays = CASES[name]["meta"], load(name)
    lengths, n, heads = arrays["lengths"], meta["n"], meta["heads"]
    has_times = "grad__p___rel_attn_bias___ts_w" in arrays
    block = HSTUBlock(
        arrays["x"].shape[1],
        heads,
        max_length=n,
        qk_dim=meta["attention_dim"],
        value_dim=meta["hidden_dim"],
        time_buckets=meta["num_buckets"] + 1 if has_times else 0,
        rngs=nnx.Rngs(0),
    )
    block.inputs.kernel[...] = arrays["p___uvqk"]
    block.out.kernel[...] = arrays["p___o__weight"].T
    block.out.bias[...] = arrays["p___o__bias"]
    for norm in (block.norm, block.attended_norm):
        norm.epsilon = meta["eps"]
    times = None
    block.position_bias[...] = jnp.zeros((n, heads))
    if has_times:
        by_distance = arrays["p___rel_attn_bias___pos_w"][n - 1 :: -1]
        block.position_bias[...] = np.repeat(by_distance[:, None], heads, 1)
        block.time_bias[...] = np.repeat(arrays["p___rel_attn_bias___ts_w"][:, None], heads, 1)
        times = arrays["timestamps"][np.arange(n) < lengths[:, None]]

    graph, parameters = nnx.split(block)

    def run(parameters, x):
        return nnx.merge(graph, parameters)(x, lengths, times)

    out, vjp = jax.vjp(jax.jit(run), parameters, arrays["x"])
    of_parameters, of_x = vjp(arrays["grad_out"])
    tolerance = CASES[name]["tolerance"]
    np.testing.assert_allclose(out, arrays["out"], **tolerance)
    np.testing.assert_allclose(of_x, arrays["grad__x"], **tolerance)
    np.testing.assert_allclose(
        of_parameters.inputs.kernel[...], arrays["grad__p___uvqk"], **tolerance
    )
    np.testing.assert_allclose(
        of_parameters.out.kernel[...].T, arrays["grad__p___o__weight"], **tolerance
    )
    if has_times:
        of_bias = of_parameters.time_bias[...].sum(1)
        np.testing.assert_allclose(of_bias, arrays["grad__p___rel_attn_bias___ts_w"], **tolerance)
        of_bias = of_parameters.position_bias[...].sum(1)[::-1]
        expected = arrays["grad__p___rel_attn_bias___pos_w"]
        np.testing.assert_allclose(of_bias, expected[:n], **tolerance)


@pytest.mark.slow
def test_block_with_the_querys_own_time_is_another_one():
    """Models of earlier versions: one token off from the authors' code."""
    meta, arrays = CASES["research_unit"]["meta"], load("research_unit")
    lengths = arrays["lengths"]
    times = arrays["timestamps"][np.arange(meta["n"]) < lengths[:, None]]
    x = arrays["x"]
    outputs = {}
    for query_time in ("own", "next"):
        block = HSTUBlock(x.shape[1], 2, max_length=8, time_buckets=41, query_time=query_time,
                          rngs=nnx.Rngs(0))  # fmt: skip
        block.time_bias[...] = np.repeat(arrays["p___rel_attn_bias___ts_w"][:, None], 2, 1)
        outputs[query_time] = np.asarray(block(x, lengths, times))
    # The time at the end of a row of one element: 0, and its own where there is no room for more.
    after = block(x, lengths, times, np.array([0, 0, times[13], 0], np.int32))
    np.testing.assert_allclose(after, outputs["next"], rtol=1e-5, atol=1e-6)
    assert np.abs(outputs["own"] - outputs["next"]).max() > 0.01
