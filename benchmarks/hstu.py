"""HSTU's attention over ragged sequences beside attention over sequences padded to the longest.

Usage: python -m benchmarks.hstu [--length 4096] [--rows 32] [--timed-length 1024] [--seconds 5]
Lengths follow a power law, and one sequence has the greatest length. Prints a JSON line for each
way: bytes that the compiled forward and backward pass hold beyond inputs and outputs, from XLA's
memory analysis (at --length; nothing of that size runs), and milliseconds of it (at --timed-length;
minimum and median) by the clock and of processors; then the ratios, of processors' time. The ways:
`jaxrec.nn.hstu_attention` and `jaxrec.nn.jagged_attention`, HSTU's attention as plain matrices on
padded input, and `jax.nn.dot_product_attention` on padded input. JAXREC_KERNELS=reference times
`hstu_attention` in XLA, without its native kernels.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxrec.nn import hstu_attention, jagged_attention


@dataclasses.dataclass(frozen=True)
class Settings:
    rows: int = 32
    length: int = 4096
    """Length of the longest sequence in the analysis of memory."""
    timed_length: int = 1024
    """Length of the longest sequence in timed passes."""
    exponent: float = 1.2
    """Exponent of the power law: (shortest / n) ** exponent of the sequences are longer than n."""
    shortest: int = 20
    heads: int = 2
    dim: int = 32
    """Width of a head."""
    block_size: int = 64
    seconds: float = 5.0
    """Rounds of timing of each implementation."""
    seed: int = 0


def draw_lengths(settings: Settings, longest: int) -> np.ndarray:
    uniform = np.random.default_rng(settings.seed).random(settings.rows)
    lengths = settings.shortest * uniform ** (-1 / settings.exponent)
    lengths[0] = longest
    return np.minimum(lengths, longest).astype(np.int32)


def ways(settings: Settings, longest: int) -> dict[str, tuple[Callable, tuple[int, ...]]]:
    """For each way its attention, of q, k, v and lengths, and the shape of q without heads."""
    lengths = draw_lengths(settings, longest)
    ragged, padded = (int(lengths.sum()),), (settings.rows, longest)

    def hstu(q, k, v, lengths, bias):
        return hstu_attention(
            q, k, v, lengths,
            scale=1 / longest, position_bias=bias, block_size=settings.block_size,
        )  # fmt: skip

    def jagged(q, k, v, lengths, bias):
        return jagged_attention(q, k, v, lengths, causal=True, block_size=settings.block_size)

    def padded_hstu(q, k, v, lengths, bias):
        places = jnp.arange(longest)
        distance = places[:, None] - places[None]
        scores = jnp.einsum("rahd,rbhd->rhab", q, k)
        scores = scores + jnp.moveaxis(bias[jnp.maximum(distance, 0)], -1, 0)[None]
        mask = (distance >= 0)[None] & (places[None, None] < lengths[:, None, None])
        weights = jnp.where(mask[:, None], jax.nn.silu(scores) / longest, 0)
        return jnp.einsum("rhab,rbhd->rahd", weights, v)

    def dot_product(q, k, v, lengths, bias):
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths
        )

    return {
        "hstu_attention": (hstu, ragged),
        "jagged_attention": (jagged, ragged),
        "padded HSTU": (padded_hstu, padded),
        "padded dot_product_attention": (dot_product, padded),
    }


def compile_pass(settings: Settings, longest: int, way: str) -> tuple[Any, tuple[Any, ...]]:
    """Forward and backward pass of a way, and its inputs' shapes."""
    attend, shape = ways(settings, longest)[way]

    def loss(q, k, v, bias, lengths, weights):
        return jnp.vdot(attend(q, k, v, lengths, bias), weights)

    vectors = jax.ShapeDtypeStruct((*shape, settings.heads, settings.dim), jnp.float32)
    inputs = (
        *[vectors] * 3,
        jax.ShapeDtypeStruct((longest, settings.heads), jnp.float32),
        jax.ShapeDtypeStruct((settings.rows,), jnp.int32),
        vectors,
    )
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    return gradient.lower(*inputs).compile(), inputs


def bytes_held(settings: Settings, way: str) -> int:
    compiled, _ = compile_pass(settings, settings.length, way)
    return compiled.memory_analysis().temp_size_in_bytes


def time_pass(settings: Settings, way: str) -> list[tuple[float, float]]:
    """Milliseconds of each pass, by the clock and of processors."""
    longest = settings.timed_length
    compiled, shapes = compile_pass(settings, longest, way)
    rng = np.random.default_rng(settings.seed)
    inputs = [
        jnp.asarray(rng.standard_normal(x.shape) if x.dtype == jnp.float32
                    else draw_lengths(settings, longest), x.dtype)
        for x in shapes
    ]  # fmt: skip
    jax.block_until_ready(compiled(*inputs))
    times, end = [], time.perf_counter() + settings.seconds
    while len(times) < 3 or time.perf_counter() < end:
        start, busy = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(*inputs))
        times.append((1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - busy)))
    return times


def main(settings: Settings) -> dict[str, dict[str, float]]:
    for longest in (settings.length, settings.timed_length):
        lengths = draw_lengths(settings, longest)
        print(json.dumps({"longest": longest, "sum": int(lengths.sum()), "rows": settings.rows}))
    figures = {}
    for way in ways(settings, settings.length):
        held, times = bytes_held(settings, way), time_pass(settings, way)
        least, middle = np.min(times, 0), np.median(times, 0)
        figures[way] = {"bytes": held, "processor_ms": float(middle[1])}
        line = {"way": way, "bytes": held} | {
            name: [round(float(least[i]), 2), round(float(middle[i]), 2)]
            for i, name in enumerate(("ms", "processor_ms"))
        }
        print(json.dumps(line), flush=True)
    for padded in ("padded HSTU", "padded dot_product_attention"):
        ratios = {
            key: round(figures["hstu_attention"][key] / figures[padded][key], 4)
            for key in ("bytes", "processor_ms")
        }
        print(json.dumps({f"hstu_attention over {padded}": ratios}), flush=True)
    return figures


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
