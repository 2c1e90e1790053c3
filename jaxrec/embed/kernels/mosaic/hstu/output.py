"""The output of HSTU attention, by warpgroup matrix products.

A program has 128 queries of a head, 64 for each of two warpgroups, and visits the blocks of keys
that meet them.
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
    hidden,
    launch,
    places,
    products,
    read_ranges,
    seen,
    silu,
    unless,
)


def compute_output(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    ranges: Ranges,
    num_keys: Int32[Array, ""],
    *,
    alpha: float,
    scale: float,
    interpret: bool,
) -> Float[Array, "queries heads value_dim"]:
    """Return ``scale * SiLU(alpha q k^T) v`` of whole tiles; padding follows ``num_keys`` keys."""
    (queries, heads, dim), value_dim, dtype = query.shape, value.shape[2], query.dtype
    size = TILE if max(dim, value_dim) <= 128 else PART
    meets = blocks.meetings(ranges, key.shape[0], queries=TILE, keys=size)
    inputs = [
        query,
        key,
        value,
        blocks.edge(value, num_keys, size),
        ranges,
        blocks.stretches(meets),
        blocks.common(ranges, PART),
        num_keys[None],
    ]
    # The result takes the place of the queries, if it has as many columns.
    result_dim = 0 if value_dim == dim else value_dim
    bytes_each = dtype.itemsize * (dim + value_dim)
    count = buffers_that_fit(dtype.itemsize * TILE * (dim + result_dim), size * bytes_each)
    scratch = [
        plgpu.SMEM((WARPGROUPS, PART, dim), dtype),
        plgpu.SMEM((WARPGROUPS, PART, result_dim), dtype) if result_dim else None,
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        Buffers.scratch(count, size, [dim], dtype),
        Buffers.scratch(count, size, [value_dim], dtype),
        plgpu.SMEM((WARPGROUPS, PART, size), dtype) if interpret else None,
    ]

    def body(*refs: Any) -> None:
        q, k, v, v_edge, ranges, stretches, common, total, out, *memory = refs
        q_memory, out_memory, q_there, tensor_cores, *both, stage = memory
        k_buffers, v_buffers = (Buffers(count, *each) for each in both)
        head, tile, warpgroup = places()

        @pl.when(warpgroup < WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTING, action="increase")
            part = tile * WARPGROUPS + warpgroup
            start = part * PART
            own = q_memory.at[warpgroup]
            plgpu.copy_gmem_to_smem(q.at[pl.ds(start, PART), head], own, q_there.at[warpgroup])
            ends = read_ranges(ranges, start, ROWS)
            first_common, last_common = common[part, 0], common[part, 1]
            plgpu.barrier_wait(q_there.at[warpgroup])

            # The warpgroups take turns: while one multiplies, the other computes SiLUs.
            def swap() -> None:
                plgpu.barrier_arrive(tensor_cores)
                plgpu.barrier_wait(tensor_cores)

            def attend(total: Any) -> Array:
                def step(turn: Array, block: Array) -> None:
                    first_key = block * size
                    (keys,) = k_buffers.wait(turn)
                    (scores,) = products((own, keys), then=swap)
                    k_buffers.release(turn)
                    weights = silu(scores, alpha)
                    is_whole = (first_common <= first_key) & (first_key + size <= last_common + 1)

                    def mask(weights: Array) -> Array:
                        return hidden(seen(ends, first_key, weights.shape, 0), weights)

                    weights = unless(is_whole, mask, weights).astype(dtype)
                    plgpu.barrier_arrive(tensor_cores)
                    (values,) = v_buffers.wait(turn)
                    plgpu.barrier_wait(tensor_cores)
                    of_part = None if stage is None else stage.at[warpgroup]
                    add_product(total, weights, values, of_part)
                    plgpu.wgmma_wait(0)
                    v_buffers.release(turn)

                each_block(stretches, tile, step)
                return total[...]

            pl.when(warpgroup == 1)(swap)
            sums = pl.run_scoped(attend, plgpu.ACC((PART, value_dim), jnp.float32))
            pl.when(warpgroup == 0)(swap)
            result = own if out_memory is None else out_memory.at[warpgroup]
            result[...] = (sums * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, out.at[pl.ds(start, PART), head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _copy() -> None:
            plgpu.set_max_registers(COPYING, action="decrease")
            values = Source(v, v_edge, jax.lax.div(total[0], jnp.int32(size)))

            def step(turn: Array, block: Array) -> None:
                k_buffers.fill(turn, block, head, Source(k))
                v_buffers.fill(turn, block, head, values)

            each_block(stretches, tile, step)

    form = jax.ShapeDtypeStruct((queries, heads, value_dim), dtype)
    (result,) = launch(
        body,
        "hstu_output",
        inputs,
        [form],
        scratch,
        (heads, queries // TILE),
        interpret,
    )
    return result
