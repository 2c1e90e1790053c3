"""The pooled lookup on NVIDIA GPUs from Hopper on, by the Mosaic GPU backend of Pallas.

One block pools one bag. Its rows travel by asynchronous copies into a ring of two halves in shared
memory: while one half is being summed, the rows of the next are on their way. Vectors of this
backend have multiples of 128 elements, so rows must too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed.kernels.base import BagLayout
from jaxrec.embed.kernels.extents import bag_extents, bag_features

_LANES = 128
# Rows of half a ring. Two halves of 512-byte rows take 8 kB; a multiprocessor holds 16 such blocks.
_HALF = 8


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Why this kernel does not take a call of a primitive; None: it does."""
    dim = arguments["table"].shape[1]
    return f"it takes rows of a multiple of {_LANES} elements, not {dim}" if dim % _LANES else None


def pooled_lookup(
    table: Float[Array, "rows dim"],
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    interpret: Any = None,
) -> Float[Array, "bags dim"]:
    """The sum or mean of each bag's rows; see `jaxrec.embed.kernels.base`."""
    num_rows, dim = table.shape
    if 0 in (layout.num_bags, layout.num_positions):
        return jnp.zeros((layout.num_bags, dim), dtype)
    # An asynchronous copy takes at most 256 elements along an axis.
    row = (dim // _LANES, _LANES)
    features = jnp.array([layout.row_offsets, layout.row_counts, layout.means], jnp.int32)
    inputs = [ids, *bag_extents(lengths, layout), features, table.reshape(num_rows, *row)]
    if weights is not None:
        inputs.append(weights)
    pooled = plgpu.kernel(
        functools.partial(_pool, layout=layout, is_weighted=weights is not None),
        out_type=jax.ShapeDtypeStruct((layout.num_bags, *row), dtype),
        scratch_types=(
            plgpu.SMEM((2, _HALF, *row), table.dtype),
            plgpu.Barrier(num_arrivals=_HALF, num_barriers=2),
        ),
        grid=(layout.num_bags,),
        grid_names=("bag",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(*inputs)
    return pooled.reshape(layout.num_bags, dim)


def _pool(
    ids: Any,
    starts: Any,
    ends: Any,
    features: Any,
    table: Any,
    *rest: Any,
    layout: BagLayout,
    is_weighted: bool,
) -> None:
    *weights, out, ring, arrived = rest
    bag = jax.lax.axis_index("bag")
    start, end = starts[bag], ends[bag]
    feature = bag_features(bag, layout)
    offset, count, is_mean = (features[i, feature] for i in range(3))
    row_shape = ring.shape[2:]

    def position(turn: Array | int, i: int) -> tuple[Array, Array]:
        """The position of a turn's row and whether the bag has it; 0 where not."""
        place = start + turn * _HALF + i
        return jnp.where(place < end, place, 0), place < end

    def fetch(turn: Array | int) -> None:
        """Starts the copies of a turn's rows; what is not copied has arrived."""
        half = turn % 2
        for i in range(_HALF):
            place, used = position(turn, i)
            row = ids[place]
            found = used & (row >= 0) & (row < count)

            @pl.when(found)
            def _copy(row: Array = row, i: int = i) -> None:
                plgpu.copy_gmem_to_smem(table.at[row + offset], ring.at[half, i], arrived.at[half])

            @pl.when(jnp.logical_not(found))
            def _skip() -> None:
                plgpu.barrier_arrive(arrived.at[half])

    def add(turn: Array, total: Array) -> Array:
        # All warps must have read the half that the next rows go to: this waits for them.
        plgpu.commit_smem()
        pl.when((turn + 1) * _HALF < end - start)(lambda: fetch(turn + 1))
        half = turn % 2
        plgpu.barrier_wait(arrived.at[half])
        for i in range(_HALF):
            place, used = position(turn, i)
            row = ids[place]
            scale = weights[0][place] if is_weighted else jnp.float32(1)
            scale = jnp.where((row >= 0) & (row < count), scale, jnp.nan)
            values = ring[half, i].astype(jnp.float32)
            total += jnp.where(jnp.broadcast_to(used, row_shape), values * scale, 0.0)
        return total

    pl.when(end > start)(lambda: fetch(0))
    zeros = jnp.zeros(row_shape, jnp.float32)
    pooled = jax.lax.fori_loop(0, pl.cdiv(end - start, _HALF), add, zeros)
    divisor = jnp.where(is_mean > 0, jnp.maximum(end - start, 1), 1).astype(jnp.float32)
    out[bag] = (pooled / divisor).astype(out.dtype)
