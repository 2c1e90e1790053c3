"""Calls of HSTU attention's kernels as programs to compile, and what bounds their speed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.attention import SHAPES, Shape
from benchmarks.gpu.cards import Card
from benchmarks.gpu.programs import Program
from jaxrec.embed.kernels import mosaic
from jaxrec.embed.kernels.mosaic.hstu import blocks
from jaxrec.nn.attention_mask import key_intervals, make_mask

CAPACITY, HEADS, ROWS = 65536, 4, 32
# Columns of a head and type, with and without targets.
FORMS = [
    *((dim, "bfloat16", targets) for dim in (64, 128, 192, 256) for targets in (False, True)),
    (128, "float16", True),
    (256, "float16", True),
]
QUICK = [(128, "bfloat16", True), (256, "bfloat16", True)]

BOUND_HEADER = (
    "| shape | direction | visited pairs of needed ones | products of counted ones "
    "| TFLOP/s at most |",
    "|---|---|---|---|---|",
)


def calls(quick: bool) -> Iterator[Program]:
    """Yield the output and the gradients of each form."""
    for dim, dtype, targets in QUICK if quick else FORMS:
        vectors = jax.ShapeDtypeStruct((CAPACITY, HEADS, dim), dtype)
        ranges = jax.ShapeDtypeStruct((4 if targets else 3, CAPACITY), jnp.int32)
        offsets = jax.ShapeDtypeStruct((2, ROWS + 1), jnp.int32)
        operands = vectors, vectors, vectors, ranges, offsets
        bias = jnp.zeros((0, HEADS))
        factors = {"alpha": dim**-0.5, "scale": 1 / 2048}
        name = f"D{dim} {dtype} {'targets' if targets else 'causal'}"

        def output(*arrays: Any, factors: Any = factors, bias: Any = bias) -> Any:
            return mosaic.attention(*arrays, bias, **factors)

        def gradients(*arrays: Any, factors: Any = factors, bias: Any = bias) -> Any:
            *others, gradient = arrays
            return mosaic.attention_gradients(*others, bias, gradient, **factors)[:3]

        refuse = functools.partial(
            mosaic.refuse,
            "attention",
            {"query": vectors, "key": vectors, "value": vectors, "bias": bias},
        )
        yield Program(f"mosaic attention {name}", output, operands, frozenset(), refuse=refuse)
        yield Program(
            f"mosaic attention_gradients {name}",
            gradients,
            (*operands, vectors),
            frozenset(),
            refuse=refuse,
        )


def bounds(card: Card) -> Iterator[str]:
    """Yield rows of a table: the most TFLOP/s that the tensor cores allow for the timed shapes."""
    # Of 16-bit numbers: an H100's and an H200's 989 TFLOP/s are at this clock.
    peak = card.multiprocessors * 4096 * 1.83e9
    for shape in SHAPES:
        lengths = shape.lengths.astype(float)
        needed = float((lengths * (lengths + 1) / 2).sum())
        output, of_queries, of_keys = (visited(shape, *sizes) / needed for sizes in tiles(shape))
        # Products that the kernels compute for each tile, and those that are counted.
        products = 5 if shape.dim > 128 else 4
        forward, backward = 2 * output, 3 * of_queries + products * of_keys
        for direction, work, counted in (
            ("forward", forward, 2),
            ("both", forward + backward, 7),
        ):
            computed = {"forward": 2, "both": 2 + 3 + products}[direction]
            yield (
                f"| {shape.name.removeprefix('attention ')} | {direction} "
                f"| {work / computed:.2f} | {computed / counted:.2f} "
                f"| {peak * counted / work / 1e12:.0f} |"
            )


def tiles(shape: Shape) -> tuple[tuple[int, int], ...]:
    """Return queries and keys of the tiles of the three kernels."""
    part, tile, is_wide = blocks.PART, blocks.TILE, shape.dim > 128
    return (tile, part if is_wide else tile), (tile, part), (part, part if is_wide else tile)


def visited(shape: Shape, queries: int, keys: int) -> int:
    """Return the number of pairs in the tiles that a kernel visits."""
    mask = make_mask(
        shape.lengths,
        causal=True,
        num_targets=None,
        contextual_length=0,
        max_attention_length=0,
        min_full_attention_length=0,
        target_group_size=1,
    )
    capacity = shape.rows * shape.length
    found = key_intervals(mask, jnp.asarray(shape.lengths), capacity)
    ranges = jnp.stack([found.first, found.last, found.own])
    meets = blocks.meetings(ranges, capacity, queries=queries, keys=keys)
    return int(np.asarray(meets).sum()) * queries * keys
