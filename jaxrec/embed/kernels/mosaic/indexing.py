"""Loads and stores at computed indices, and running sums, for kernels in Pallas' Mosaic backend.

* `load`: elements ``array[index]``, or rows ``array[index, :]``.
* `store`: elements or rows at indices.
* `load_words`, `store_words`: 32-bit words of each row, such as the scale of a packed row.
* `running_sum`: a prefix sum.
* `wait_for_loads`: a barrier between the loads of rows and the stores to them.
* `add_rounded`, `keep_rolled`: what compilers must not do.

`lanes.Lanes` says which threads hold which elements.
"""

# Why this file exists
#
# Pallas' Mosaic backend reads memory by slices, or copies rectangles to shared memory. It has
# neither `table[rows]`, with `rows` in registers, nor a prefix sum. A lookup is little else than
# `table[rows]`. So the functions here write the instructions themselves, by
# `plgpu.inline_mgpu`; everything else in this folder is plain Pallas.
#
# A value in a kernel is an array; each of the 128 threads of a program holds some of its elements
# in registers, and a *layout* says which. Rows `[n, columns]` lie over the threads as `Lanes` says:
# of rows of 128 float32, the 32 threads of a warp share one row, each thread has four columns side
# by side, and the four warps have four rows at a time. Numbers `[n]`, one for each row, are held by
# all threads of their row, so that each thread computes the addresses of its own loads.
#
# For each group of columns that a thread has side by side, `load` writes
#
#     mov.b32 a, fill;  mov.b32 b, fill;  mov.b32 c, fill;  mov.b32 d, fill;
#     @used ld.global.v4.b32 {a, b, c, d}, [array + row * row_bytes + column * element_bytes];
#
# and `store` writes `@used st.global.v4.b32 [...], {a, b, c, d};`. The predicate `used` is false
# for columns of padding too: nothing outside of a row is read or written. `fill` is zero, or NaN
# where the caller asks for it, which so costs no instruction in the sums of rows. Loads and stores
# are as wide as the alignment of rows permits: 16, 8, 4, 2 or 1 bytes. Offsets have 64 bits.
#
# LLVM keeps the order of these instructions, because they are said to have side effects: a load
# behind a store to the same memory sees it. ptxas knows their meaning and schedules them freely.
# That is the order of one thread. Threads run at their own pace: `wait_for_loads` stands between
# the loads by several threads and a store by one of them to the same memory.
#
# Interpreters do not know `inline_mgpu`: for them, the functions of `stand_ins` index arrays.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed.kernels.mosaic import instructions as ins
from jaxrec.embed.kernels.mosaic import stand_ins
from jaxrec.embed.kernels.mosaic.lanes import FLAT, THREADS, WARP, Lanes
from jaxrec.embed.kernels.mosaic.programs import is_interpreted


@dataclasses.dataclass(frozen=True)
class _Access:
    """Loads or stores of the elements that each thread has of an array's rows, in chunks."""

    array: Any
    lanes: Lanes  # of rows; those of a vector have one element
    stored: int | None = None  # elements of a row that are stored; None: rows are loaded
    planes: int = 1

    @property
    def elements(self) -> int:
        """Number of elements that a thread has side by side."""
        return self.lanes.vector * self.planes

    @property
    def width(self) -> int:
        """Number of a row's elements that are not padding."""
        return self.stored or self.lanes.width

    @property
    def size(self) -> int:
        """Bytes of a chunk, as the alignment permits."""
        item = jnp.dtype(self.array.dtype).itemsize
        sizes = (self.elements * item, self.lanes.first * item, (self.stored or 0) * item)
        return math.gcd(16, *sizes, ins.stride(self.array))

    def chunks(
        self, ref: Any, index: Any, is_used: Any, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], list[tuple[ir.Value, ir.Value]]]]:
        """Yield the position of each of a thread's registers, and the chunks that it holds.

        A chunk is an address, and whether its row is used and has elements there.
        """
        item, stride = jnp.dtype(self.array.dtype).itemsize, ins.stride(self.array)
        lanes, width = self.lanes, self.width
        column = arith.muli(ins.first_column(lanes), ins.i32(self.planes))
        # Where the first thread stores a whole row, others have no address of their own.
        own = column if width > self.elements else ins.i32(0)
        start = ins.address(ins.pointer(ref), own, item, lanes.first * item)
        rows = list(zip(ins.numbers(index), ins.numbers(is_used), strict=True))
        for i in np.ndindex(*shape):
            (row, used), chunks = rows[i[0]], []
            for part in range(0, self.elements * item, self.size):
                at = i[1] * lanes.threads * self.elements + part // item
                is_whole = at + (lanes.threads - 1) * self.elements < width
                inside = used if is_whole else ins.and_below(used, column, width - at)
                chunks.append((ins.address(start, row, stride, at * item), inside))
            yield i, chunks


def load(
    array: Any,
    index: Int32[Array, " n"],
    is_used: Bool[Array, " n"],
    lanes: Lanes,
    is_nan: Bool[Array, " n"] | None = None,
) -> Array:
    """Load elements ``[n]`` of a vector, or rows ``[n, columns]`` of a matrix, in its type.

    Unused ones are zeros; those with ``is_nan``, which must be unused, are NaN. Indices that are
    not used may be out of range. Columns of padding are zeros, or other elements of the row.
    """
    if is_interpreted():
        return stand_ins.load(array, index, is_used, lanes, is_nan)
    dtype, is_row = jnp.dtype(array.dtype), len(array.shape) == 2
    shape = (*index.shape, lanes.columns) if is_row else index.shape
    layout = lanes.rows if is_row else lanes.line
    access = _Access(array, lanes if is_row else Lanes(1, 1, 1, 1))
    masks = (is_used,) if is_nan is None else (is_used, is_nan)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), lanes.line, *(lanes.line for _ in masks)),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
    )
    def load(_: Any, ref: Any, index: Any, is_used: Any, *is_nan: Any) -> Any:
        fills = [ins.i32(0) for _ in ins.numbers(is_used)]
        if is_nan:
            nan = ins.i32(ins.nan_bits(dtype))
            fills = [arith.select(each, nan, ins.i32(0)) for each in ins.numbers(is_nan[0])]
        registers = np.empty(layout.to_mgpu().registers_shape(shape), object)
        for i, chunks in access.chunks(ref, index, is_used, registers.shape):
            words = [word for each in chunks for word in ins.load(*each, access.size, fills[i[0]])]
            registers[i] = ins.from_words(words, access.elements, dtype)
        return ins.fragments(registers, layout, dtype)

    return load(array, index, *masks)


def load_words(
    array: Any,
    index: Int32[Array, " n"],
    is_used: Bool[Array, " n"],
    lanes: Lanes,
    first: int,
    count: int,
) -> list[Int32[Array, " n"]]:
    """Load ``count`` words of 32 bits from byte ``first`` on of each row of a matrix of bytes.

    Bytes are in little-endian order. Words of unused rows are zeros.
    """
    if is_interpreted():
        return stand_ins.load_words(array, index, is_used, first, count)
    access, dtype = _Access(array, Lanes(1, 4 * count, 4 * count, 4 * count, first)), np.dtype("i4")
    word = plgpu.ShapeDtypeStruct(index.shape, dtype, layout=lanes.line)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), lanes.line, lanes.line), return_type=(word,) * count
    )
    def load(_: Any, ref: Any, index: Any, is_used: Any) -> Any:
        registers = [np.empty(index.registers.shape, object) for _ in range(count)]
        for i, chunks in access.chunks(ref, index, is_used, index.registers.shape):
            parts = [part for each in chunks for part in ins.load(*each, access.size, ins.i32(0))]
            words = ins.elements_of(ins.from_words(parts, count, dtype))
            for of_word, each in zip(registers, words, strict=True):
                of_word[i] = ins.from_words([each], 1, dtype)
        return tuple(ins.fragments(each, lanes.line, dtype) for each in registers)

    return list(load(array, index, is_used))


def store(
    array: Any,
    index: Int32[Array, " n"],
    is_used: Bool[Array, " n"],
    lanes: Lanes,
    *planes: Array,
) -> None:
    """Store elements ``[n]`` to a vector, or rows ``[n, columns]`` to a matrix, in its type.

    Several ``planes`` are interleaved: the first column of each, then the second one of each, and
    so on. Neither unused rows nor columns of padding are stored.
    """
    planes = tuple(plane.astype(array.dtype) for plane in planes)
    if len(array.shape) == 1:
        # As a row of one column, which the first of its threads stores.
        access = _Access(array, Lanes(lanes.threads, 1, lanes.threads, 1), 1)
    else:  # the last byte of a row of 4-bit codes may have one column
        width = min(lanes.width * len(planes), array.shape[1] - lanes.first)
        access = _Access(array, lanes, width, len(planes))
    if is_interpreted():
        stand_ins.store(array, index, is_used, lanes.first, access.width, planes)
        return
    _store(access, index, is_used, lanes, planes)


def store_words(
    array: Any,
    index: Int32[Array, " n"],
    is_used: Bool[Array, " n"],
    lanes: Lanes,
    first: int,
    words: Sequence[Int32[Array, " n"]],
) -> None:
    """Store words of 32 bits from byte ``first`` on of rows of a matrix of bytes; see `load_words`.

    Unused rows are not stored.
    """
    if is_interpreted():
        stand_ins.store_words(array, index, is_used, first, words)
        return
    size = 4 * len(words)  # the first thread of a row stores all of them
    access = _Access(array, Lanes(lanes.threads, size, lanes.threads * size, size, first), size)
    _store(access, index, is_used, lanes, words)


def _store(
    access: _Access, index: Array, is_used: Array, lanes: Lanes, planes: Sequence[Array]
) -> None:
    line = lanes.line
    layout = line if planes[0].ndim == 1 else lanes.rows

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), line, line, *(layout for _ in planes)), return_type=()
    )
    def store(_: Any, ref: Any, index: Any, is_used: Any, *planes: Any) -> Any:
        shape = planes[0].registers.shape
        for i, chunks in access.chunks(ref, index, is_used, shape):
            words = ins.to_words([plane.registers[i] for plane in planes], access.size)
            for each, of_chunk in zip(chunks, words, strict=True):
                ins.store(*each, access.size, of_chunk)
        return ()

    store(access.array, index, is_used, *planes)


def running_sum(values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Return the sums of the first 1, 2, ..., ``n`` values, laid out as `FLAT`."""
    if is_interpreted():
        return jnp.cumsum(values, dtype=jnp.int32)
    count = values.size // THREADS  # values of a thread
    dtype = jnp.dtype("int32")

    def sum_up(totals: Any) -> Array:
        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), FLAT.line),
            return_type=plgpu.ShapeDtypeStruct(values.shape, dtype, layout=FLAT.line),
        )
        def run(_: Any, totals: Any, values: Any) -> Any:
            thread = mgpu.thread_idx()
            lane = arith.remui(thread, ins.i32(WARP))
            warp = arith.remui(arith.divui(thread, ins.i32(WARP)), ins.i32(4))
            sums = [ins.sum_in_warp(each) for each in ins.numbers(values)]
            # The last lane of each warp has the warp's total of each 128 values: they are added up
            # in the order of the values, by each warp for itself.
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, ins.i32(WARP - 1))):
                for i, each in enumerate(sums):
                    memref.store(each, totals, [ins.index(arith.addi(ins.i32(4 * i), warp))])
            mgpu.warpgroup_barrier()
            before, registers = ins.i32(0), []
            for i, each in enumerate(sums):
                if 4 * i % WARP == 0:
                    total = memref.load(totals, [ins.index(arith.addi(ins.i32(4 * i), lane))])
                    so_far = ins.sum_in_warp(total)
                    start = arith.addi(before, arith.subi(so_far, total))
                    before = arith.addi(before, ins.of_lane(so_far, ins.i32(WARP - 1)))
                mine = ins.of_lane(start, arith.addi(ins.i32(4 * i % WARP), warp))
                registers.append(ins.from_words([arith.addi(each, mine)], 1, dtype))
            # Mosaic's own sums over threads end so too, and begin without a barrier.
            mgpu.warpgroup_barrier()
            return ins.fragments(ins.array_of(registers, values.registers.shape), FLAT.line, dtype)

        return run(totals, values)

    size = -(-4 * count // WARP) * WARP  # each lane of a warp loads a number
    return pl.run_scoped(sum_up, plgpu.SMEM((size,), dtype))


def add_rounded(
    left: Float[Array, "n columns"], right: Float[Array, "n columns"], lanes: Lanes
) -> Float[Array, "n columns"]:
    """Add float32 rows, but not in one operation with a product: compilers would round once."""
    if is_interpreted():
        return jax.lax.optimization_barrier(left) + right

    @plgpu.inline_mgpu(
        arg_types=(lanes.rows, lanes.rows),
        return_type=plgpu.ShapeDtypeStruct(left.shape, left.dtype, layout=lanes.rows),
    )
    def add(_: Any, left: Any, right: Any) -> Any:
        registers = np.empty(left.registers.shape, object)
        for i in np.ndindex(*registers.shape):
            pairs = zip(
                ins.elements_of(left.registers[i]), ins.elements_of(right.registers[i]), strict=True
            )
            ptx = "add.rn.f32 $0, $1, $2;"
            sums: list[Any] = [
                llvm.inline_asm(ir.F32Type.get(), pair, ptx, "=f,f,f") for pair in pairs
            ]
            registers[i] = vector.from_elements(left.registers[i].type, sums)
        return ins.fragments(registers, lanes.rows, np.float32)

    return add(left, right)


def wait_for_loads(lanes: Lanes) -> None:
    """Wait until all threads of a row have come here and have what they loaded."""
    if is_interpreted():
        return

    @plgpu.inline_mgpu(arg_types=(), return_type=())
    def wait(_: Any) -> Any:
        if lanes.threads > WARP:
            mgpu.warpgroup_barrier()
        else:
            ins.asm(ins.nothing(), "bar.warp.sync 0xffffffff;", "")
        return ()

    wait()


def keep_rolled() -> None:
    """At the beginning of a loop's body: tell ptxas not to unroll the loop."""
    if is_interpreted():
        return

    @plgpu.inline_mgpu(arg_types=(), return_type=())
    def pragma(_: Any) -> Any:
        ins.asm(ins.nothing(), '.pragma "nounroll";', "")
        return ()

    pragma()
