"""The gradients of the keys and values of HSTU attention, by warpgroup matrix products.

A program has keys of a head, and visits the blocks of 64 queries that meet them. Each key's sums
belong to one program, so that nothing is added in memory, and every run gives the same bits.

In heads of up to 128 columns a program has 128 keys, and each of two warpgroups computes both
gradients of 64. In wider heads a thread cannot hold both sums: a program then has 64 keys, one
warpgroup computes the gradient of the values, and the other that of the keys. Both compute the
scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.mosaic.hstu import blocks
from jaxrec.embed.kernels.mosaic.hstu.blocks import PART, TILE, Ranges
from jaxrec.embed.kernels.mosaic.hstu.tiles import (
    COLUMNS,
    COMPUTING,
    COPYING,
    WARPGROUPS,
    Buffers,
    Source,
    add_product,
    buffers_that_fit,
    each_block,
    each_turn,
    hidden,
    launch,
    places,
    products,
    read_ranges,
    seen,
    silu,
    silu_and_slope,
    unless,
)

SHAPE = (PART, PART)  # keys and queries of a product


def compute_key_gradients(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    gradient: Float[Array, "queries heads value_dim"],
    ranges: Ranges,
    numbers: Int32[Array, "2"],
    *,
    alpha: float,
    scale: float,
    interpret: bool,
) -> tuple[Float[Array, "keys heads dim"], Float[Array, "keys heads value_dim"]]:
    """Return the gradients of keys and values, given that of the output.

    ``numbers`` has the number of queries and that of keys; later elements of the arrays are
    padding.
    """
    (keys, heads, dim), value_dim, dtype = key.shape, value.shape[2], key.dtype
    is_shared = max(dim, value_dim) > 128
    size = PART if is_shared else TILE  # keys of a program
    meets = blocks.meetings(ranges, keys, queries=PART, keys=size)
    inputs = [
        query,
        key,
        value,
        gradient,
        blocks.edge(query, numbers[0], PART),
        blocks.edge(gradient, numbers[0], PART),
        blocks.edge(value, numbers[1], PART),
        ranges,
        blocks.stretches(meets.T),
        blocks.common(ranges, PART),
        numbers,
    ]
    bytes_each = dtype.itemsize * (dim + value_dim)
    count = buffers_that_fit(size * bytes_each, PART * bytes_each)
    parts = size // PART
    scratch = [
        plgpu.SMEM((parts, PART, dim), dtype),
        plgpu.SMEM((parts, PART, value_dim), dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=parts),
        Buffers.scratch(count, PART, [dim, value_dim], dtype),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        plgpu.SMEM((2, WARPGROUPS, *SHAPE), dtype) if interpret else None,
    ]

    def body(*refs: Any) -> None:
        q, k, v, dout, *edges, ranges, stretches, common, totals, dk, dv = refs[:13]
        memory = refs[13:]
        k_memory, v_memory, is_there, of_queries, are_done, stage = memory
        buffers = Buffers(count, *of_queries)
        head, tile, warpgroup = places()

        def edge_of(index: int) -> Array:
            return jax.lax.div(totals[index], jnp.int32(PART))

        # Values at padding must be finite: the products with them are multiplied by slopes that the
        # mask has made zero, and NaN would stay. A part behind the edge is all padding, and gets
        # the values of the edge.
        def copy_keys(part: Array, slot: Any) -> None:
            values = Source(v, edges[2], jnp.maximum(part, edge_of(1)))
            for source, memory in ((Source(k), k_memory), (values, v_memory)):
                source.copy(part, head, memory.at[slot], is_there.at[slot])

        def store(sums: Array, factor: float, memory: Any, out: Any, part: Array) -> None:
            memory[...] = (sums * factor).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory, out.at[pl.ds(part * PART, PART), head])

        def visit(part: Array, step: Callable[[Array, Callable[..., Any]], None]) -> None:
            """Call ``step(turn, mask)`` for each block of queries."""
            first_key = part * PART

            def facts(block: Array) -> tuple[Array, Array]:
                # Behind the last block there is none.
                block = jnp.minimum(block, common.shape[0] - 1)
                return common[block, 0], common[block, 1]

            def one(turn: Array, block: Array, first: Array, last: Array) -> None:
                is_whole = (first <= first_key) & (first_key + PART <= last + 1)
                start = block * PART

                def mask(*arrays: Array) -> Any:
                    def hide(*arrays: Array) -> Any:
                        ends = read_ranges(ranges, start, COLUMNS)
                        is_seen = seen(ends, first_key, SHAPE, 1)
                        result = tuple(hidden(is_seen, each) for each in arrays)
                        return result if len(result) > 1 else result[0]

                    return unless(is_whole, hide, *arrays)

                step(turn, mask)

            each_block(stretches, tile, one, facts)

        def staged(index: int) -> Any:
            return None if stage is None else stage.at[index, warpgroup]

        def both(part: Array) -> tuple[Array, Array]:
            def attend(key_sums: Any, value_sums: Any) -> tuple[Array, Array]:
                def step(turn: Array, mask: Callable[..., Any]) -> None:
                    queries, gradients = buffers.wait(turn)
                    own = each_turn(warpgroup, turn)
                    (scores,) = products((k_memory.at[own], queries))
                    weights, slope = silu_and_slope(scores, alpha)
                    weights, slope = mask(weights.astype(dtype), slope)
                    add_product(value_sums, weights, gradients, staged(0))
                    (of_weights,) = products((v_memory.at[own], gradients))
                    of_scores = (slope * of_weights).astype(dtype)
                    add_product(key_sums, of_scores, queries, staged(1))
                    plgpu.wgmma_wait(0)
                    buffers.release(turn)

                visit(part, step)
                return key_sums[...], value_sums[...]

            return pl.run_scoped(
                attend,
                plgpu.ACC((PART, dim), jnp.float32),
                plgpu.ACC((PART, value_dim), jnp.float32),
            )

        def of_values(part: Array) -> Array:
            def attend(sums: Any) -> Array:
                def step(turn: Array, mask: Callable[..., Any]) -> None:
                    queries, gradients = buffers.wait(turn)
                    (scores,) = products((k_memory.at[0], queries))
                    weights = mask(silu(scores, alpha)).astype(dtype)
                    add_product(sums, weights, gradients, staged(0))
                    plgpu.wgmma_wait(0)
                    buffers.release(turn)

                visit(part, step)
                return sums[...]

            return pl.run_scoped(attend, plgpu.ACC((PART, value_dim), jnp.float32))

        def of_keys(part: Array) -> Array:
            def attend(sums: Any) -> Array:
                def step(turn: Array, mask: Callable[..., Any]) -> None:
                    queries, gradients = buffers.wait(turn)
                    slot = each_turn(jnp.int32(0), turn)
                    scores, of_weights = products(
                        (k_memory.at[slot], queries), (v_memory.at[slot], gradients)
                    )
                    of_scores = silu_and_slope(scores, alpha)[1] * of_weights
                    of_scores = mask(of_scores.astype(dtype))
                    add_product(sums, of_scores, queries, staged(0))
                    plgpu.wgmma_wait(0)
                    buffers.release(turn)

                visit(part, step)
                return sums[...]

            return pl.run_scoped(attend, plgpu.ACC((PART, dim), jnp.float32))

        def compute_separately() -> None:
            part = tile * WARPGROUPS + warpgroup
            copy_keys(part, warpgroup)
            keys, values = k_memory.at[warpgroup], v_memory.at[warpgroup]
            plgpu.barrier_wait(is_there.at[warpgroup])
            key_sums, value_sums = both(part)
            store(key_sums, alpha * scale, keys, dk, part)
            store(value_sums, scale, values, dv, part)
            plgpu.wait_smem_to_gmem(0)

        def compute_together() -> None:
            # The results take the place of the keys and values, which both warpgroups read.
            def wait_for_both() -> None:
                plgpu.barrier_arrive(are_done)
                plgpu.barrier_wait(are_done)

            keys, values = k_memory.at[0], v_memory.at[0]
            plgpu.barrier_wait(is_there.at[0])

            @pl.when(warpgroup == 0)
            def _values() -> None:
                sums = of_values(tile)
                wait_for_both()
                store(sums, scale, values, dv, tile)

            @pl.when(warpgroup == 1)
            def _keys() -> None:
                sums = of_keys(tile)
                wait_for_both()
                store(sums, alpha * scale, keys, dk, tile)

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTING, action="increase")
            (compute_together if is_shared else compute_separately)()

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(COPYING, action="decrease")
            if is_shared:
                copy_keys(tile, 0)
            queries = Source(q, edges[0], edge_of(0))
            gradients = Source(dout, edges[1], edge_of(0))

            def step(turn: Array, block: Array) -> None:
                buffers.fill(turn, block, head, queries, gradients)

            each_block(stretches, tile, step)

    forms = [jax.ShapeDtypeStruct(each.shape, dtype) for each in (key, value)]
    of_key, of_value = launch(
        body, "hstu_key_gradients", inputs, forms, scratch, (heads, keys // size), interpret
    )
    return of_key, of_value
