"""Parts that the three attention kernels share: warpgroups, copies, products and masks.

A program has three warpgroups. Two compute, and one only copies blocks into shared memory, into
buffers that it fills again as soon as both have read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed.kernels.mosaic.hstu.blocks import PART

_gpu: Any = plgpu  # older versions of JAX, on which no kernel runs, lack some of its names
WARPGROUPS = 2  # that compute
# Axes of the grid, and of the warpgroups. Users' meshes have axes of other names.
HEADS, TILES, WARPGROUP = "jaxrec_head", "jaxrec_tile", "jaxrec_warpgroup"
ROWS = plgpu.Layout.WGMMA.reduce(1)  # of a vector with a number for each row of a product
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# Registers of a thread. A multiprocessor has 65,536, and three warpgroups have 384 threads.
COMPUTING, COPYING = 240, 24
SHARED_MEMORY = 224 * 1024  # bytes that a program's arrays may take on a Hopper card


def each_block(
    stretches: Any,
    program: Array,
    step: Callable[..., None],
    facts: Callable[[Array], tuple[Array, ...]] = lambda _: (),
) -> None:
    """Call ``step(turn, block, *facts(block))`` for each block that a program visits, in order.

    Turns count from 0.
    """

    def stretch(number: Array, turn: Array) -> Array:
        begin, end = (stretches[program, 2 * number + i] for i in (1, 2))

        def visit(block: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            turn, *now = carry
            # The facts of the next block are loaded during this turn.
            following = facts(block + 1)
            step(turn, block, *now)
            return turn + 1, *following

        return jax.lax.fori_loop(begin, end, visit, (turn, *facts(begin)))[0]

    jax.lax.fori_loop(0, stretches[program, 0], stretch, jnp.int32(0))


def each_turn(index: Array, turn: Array) -> Array:
    """Return ``index``, hidden from the compiler so that each turn computes its addresses anew."""
    # The shift is 0, which the compiler does not know. Otherwise it computes the address of each
    # product's operand before the loop, and holds some dozens of them in registers that are needed.
    return index + jax.lax.shift_right_logical(turn, 30)


@dataclasses.dataclass(frozen=True)
class Source:
    """An array whose blocks are copied.

    Attributes:
        array: The array.
        edge: Its block with both elements and padding, with zeros at the padding; see
            `blocks.edge`. None: padding does not matter.
        edge_block: Index of that block.
    """

    array: Any
    edge: Any = None
    edge_block: Any = None

    def copy(self, block: Array, head: Array, target: Any, barrier: Any) -> None:
        """Start to copy a block into shared memory."""

        def copy(part: Any) -> None:
            plgpu.copy_gmem_to_smem(part, target, barrier)

        size = target.shape[0]
        whole = self.array.at[pl.ds(block * size, size), head]
        if self.edge is None:
            copy(whole)
            return
        is_edge = block == self.edge_block
        pl.when(is_edge)(lambda: copy(self.edge.at[:, head]))
        pl.when(jnp.logical_not(is_edge))(lambda: copy(whole))


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Buffers in shared memory for blocks of one or more arrays, which turns use in rotation.

    Attributes:
        count: Number of buffers.
        full: A barrier for each: the blocks are there.
        free: A barrier for each: both warpgroups have read the blocks.
        memory: For each array its blocks, ``[count, size, dim]``.
    """

    count: int
    full: Any
    free: Any
    memory: list[Any]

    @staticmethod
    def scratch(count: int, size: int, dims: Sequence[int], dtype: Any) -> list[Any]:
        """Return the scratch types of `full`, `free` and `memory`."""
        return [
            plgpu.Barrier(num_arrivals=len(dims), num_barriers=count),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=count),
            [plgpu.SMEM((count, size, dim), dtype) for dim in dims],
        ]

    def slot(self, turn: Array) -> Array:
        return jax.lax.rem(turn, jnp.int32(self.count))

    def wait(self, turn: Array) -> list[Any]:
        """Return a turn's blocks as soon as they are there."""
        slot = self.slot(turn)
        plgpu.barrier_wait(self.full.at[slot])
        return [each.at[slot] for each in self.memory]

    def release(self, turn: Array) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(turn)])

    def fill(self, turn: Array, block: Array, head: Array, *sources: Source) -> None:
        """Start to copy a turn's blocks, once their buffer is free."""
        slot = self.slot(turn)
        pl.when(turn >= self.count)(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, memory in zip(sources, self.memory, strict=True):
            source.copy(block, head, memory.at[slot], self.full.at[slot])


def buffers_that_fit(used: int, each: int) -> int:
    """Return the number of sets of ``each`` bytes that fit beside ``used`` bytes, 1 to 4."""
    return int(np.clip((SHARED_MEMORY - used) // each, 1, 4))


def products(
    *pairs: tuple[Any, Any], then: Callable[[], None] | None = None
) -> tuple[Float[Array, "rows columns"], ...]:
    """Return ``a b^T`` in float32 of each pair ``(a, b)`` in shared memory.

    ``then`` is called after the products have started.
    """

    def compute(*sums: Any) -> tuple[Array, ...]:
        for total, (a, b) in zip(sums, pairs, strict=True):
            plgpu.wgmma(total, a, b.transpose((1, 0)))
        if then is not None:
            then()
        return tuple(total[...] for total in sums)

    shapes = [plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32) for a, b in pairs]
    return pl.run_scoped(compute, *shapes)


def add_product(total: Any, a: Array, b: Any, stage: Any) -> None:
    """Start to add ``a b`` to ``total``; ``a`` is in registers, ``b`` in shared memory."""
    if stage is None:
        plgpu.wgmma(total, a, b)
        return
    # JAX's interpreter multiplies what is in shared memory alone.
    stage[...] = a
    plgpu.commit_smem()
    plgpu.wgmma(total, stage, b)


def silu(scores: Float[Array, "a b"], alpha: float) -> Float[Array, "a b"]:
    """Return ``SiLU(alpha * scores)``."""
    # By tanh, which is one instruction: a sigmoid takes two of that unit, an exponential and a
    # reciprocal.
    half = scores * (alpha / 2)
    return half + half * jnp.tanh(half)


def silu_and_slope(
    scores: Float[Array, "a b"], alpha: float
) -> tuple[Float[Array, "a b"], Float[Array, "a b"]]:
    """Return ``SiLU(x)`` and ``SiLU'(x)`` at ``x = alpha * scores``."""
    half = scores * (alpha / 2)
    tanh = jnp.tanh(half)
    value = half + half * tanh
    # sigmoid(x) (1 + x (1 - sigmoid(x))), with sigmoid(x) = (1 + tanh(x / 2)) / 2
    return value, 0.5 + 0.5 * (tanh + (value - value * tanh))


def read_ranges(ranges: Any, start: Array, layout: Any) -> list[Int32[Array, " queries"]]:
    """Return the ends of the intervals of a part's queries, a number for each row or column."""
    return [
        _gpu.load(ranges.at[i, pl.ds(start, PART)], layout=layout, optimized=False)
        for i in range(ranges.shape[0])
    ]


def seen(
    ends: Sequence[Int32[Array, " queries"]], first_key: Array, shape: tuple[int, ...], axis: int
) -> Bool[Array, "a b"]:
    """Return whether each query, along ``axis``, sees each key, along the other one."""
    layout = plgpu.Layout.WGMMA
    keys = plgpu.broadcasted_iota(jnp.int32, shape, 1 - axis, layout=layout) + first_key
    first, last, own, *group = (jax.lax.broadcast_in_dim(each, shape, [axis]) for each in ends)
    mask = (keys >= first) & (keys <= last)
    for start in group:
        mask = mask | ((keys >= start) & (keys <= own))
    return mask


def unless(is_whole: Array, mask: Callable[..., Any], *arrays: Array) -> Any:
    """Return ``mask(*arrays)``; where the whole tile is seen, the arrays as they are."""
    one = len(arrays) == 1
    return jax.lax.cond(is_whole, lambda *x: x[0] if one else x, mask, *arrays)


def hidden(mask: Array, values: Array) -> Array:
    """Return the values where the mask is true, and zeros elsewhere, also in place of NaN."""
    return jnp.where(mask, values, jnp.zeros((), values.dtype))


def launch(
    body: Callable[..., None],
    name: str,
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    grid: tuple[int, int],
    interpret: bool,
) -> list[Array]:
    """Run a kernel on a grid of heads and tiles."""
    return plgpu.kernel(
        body,
        out_type=list(outputs),
        scratch_types=tuple(scratch),
        grid=grid,
        grid_names=(HEADS, TILES),
        num_threads=WARPGROUPS + 1,
        thread_name=WARPGROUP,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_gpu.InterpretGPUParams() if interpret else None,
    )(*inputs)


def places() -> tuple[Array, Array, Array]:
    """Return the head, the tile and the warpgroup that a thread computes."""
    return jax.lax.axis_index(HEADS), jax.lax.axis_index(TILES), jax.lax.axis_index(WARPGROUP)
