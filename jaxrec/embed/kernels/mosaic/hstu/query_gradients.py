"""The gradient of the queries of HSTU attention, by warpgroup matrix products.

A program has 128 queries of a head, as in `compute_output`, and computes the scores again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.mosaic.hstu import blocks
from jaxrec.embed.kernels.mosaic.hstu.blocks import PART, TILE, Ranges
from jaxrec.embed.kernels.mosaic.hstu.tiles import (
    COMPUTING,
    COPYING,
    ROWS,
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
    silu_and_slope,
    unless,
)


def compute_query_gradients(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    gradient: Float[Array, "queries heads value_dim"],
    ranges: Ranges,
    num_keys: Int32[Array, ""],
    *,
    alpha: float,
    scale: float,
    interpret: bool,
) -> Float[Array, "queries heads dim"]:
    """Return the gradient of the queries, given that of the output."""
    (queries, heads, dim), value_dim, dtype = query.shape, value.shape[2], query.dtype
    size = PART  # keys of a block
    meets = blocks.meetings(ranges, key.shape[0], queries=TILE, keys=size)
    inputs = [
        query,
        key,
        value,
        gradient,
        blocks.edge(key, num_keys, size),
        ranges,
        blocks.stretches(meets),
        blocks.common(ranges, PART),
        num_keys[None],
    ]
    bytes_each = dtype.itemsize * (dim + value_dim)
    count = buffers_that_fit(TILE * bytes_each, size * bytes_each)
    # Keys are read last and values first, so that one buffer of values delays less than one of
    # keys.
    key_count, value_count = max(count, 2), count
    scratch = [
        plgpu.SMEM((WARPGROUPS, PART, dim), dtype),
        plgpu.SMEM((WARPGROUPS, PART, value_dim), dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
        Buffers.scratch(key_count, size, [dim], dtype),
        Buffers.scratch(value_count, size, [value_dim], dtype),
        plgpu.SMEM((WARPGROUPS, PART, size), dtype) if interpret else None,
    ]

    def body(*refs: Any) -> None:
        q, k, v, dout, k_edge, ranges, stretches, common, total, out, *memory = refs
        q_memory, dout_memory, is_there, of_keys, of_values, stage = memory
        k_buffers, v_buffers = Buffers(key_count, *of_keys), Buffers(value_count, *of_values)
        head, tile, warpgroup = places()

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTING, action="increase")
            part = tile * WARPGROUPS + warpgroup
            rows = pl.ds(part * PART, PART), head
            own_q, own_dout = q_memory.at[warpgroup], dout_memory.at[warpgroup]
            for source, memory in ((q, own_q), (dout, own_dout)):
                plgpu.copy_gmem_to_smem(source.at[rows], memory, is_there.at[warpgroup])
            first_common, last_common = common[part, 0], common[part, 1]
            plgpu.barrier_wait(is_there.at[warpgroup])

            def attend(total: Any) -> Array:
                def step(turn: Array, block: Array) -> None:
                    first_key = block * size
                    (keys,) = k_buffers.wait(turn)
                    (values,) = v_buffers.wait(turn)
                    own = each_turn(warpgroup, turn)
                    scores, of_weights = products(
                        (q_memory.at[own], keys), (dout_memory.at[own], values)
                    )
                    v_buffers.release(turn)
                    of_scores = (silu_and_slope(scores, alpha)[1] * of_weights).astype(dtype)
                    is_whole = (first_common <= first_key) & (first_key + size <= last_common + 1)

                    def mask(of_scores: Array) -> Array:
                        # Read here, they take no registers in turns without a mask.
                        ends = read_ranges(ranges, part * PART, ROWS)
                        return hidden(seen(ends, first_key, of_scores.shape, 0), of_scores)

                    of_scores = unless(is_whole, mask, of_scores)
                    of_part = None if stage is None else stage.at[warpgroup]
                    add_product(total, of_scores, keys, of_part)
                    plgpu.wgmma_wait(0)
                    k_buffers.release(turn)

                each_block(stretches, tile, step)
                return total[...]

            sums = pl.run_scoped(attend, plgpu.ACC((PART, dim), jnp.float32))
            own_q[...] = (sums * (alpha * scale)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_q, out.at[rows])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(COPYING, action="decrease")
            keys = Source(k, k_edge, jax.lax.div(total[0], jnp.int32(size)))

            def step(turn: Array, block: Array) -> None:
                k_buffers.fill(turn, block, head, keys)
                v_buffers.fill(turn, block, head, Source(v))

            each_block(stretches, tile, step)

    (result,) = launch(
        body,
        "hstu_query_gradients",
        inputs,
        [jax.ShapeDtypeStruct(query.shape, dtype)],
        scratch,
        (heads, queries // TILE),
        interpret,
    )
    return result
