"""Loads and stores at computed indices, and running sums, for kernels in Pallas' Mosaic backend.

* `load`: elements ``array[index]``, or rows ``array[index, :]``.
* `store`: elements or rows at indices.
* `load_words`, `store_words`: 32-bit words of each row, such as the scale of a packed row.
* `running_sum`: a prefix sum.
* `add_rounded`, `keep_rolled`: what compilers must not do.

`Lanes` says which threads hold which elements.
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
#
# Interpreters do not know `inline_mgpu`. Within `stand_ins`, which `Tile.launch` enters for them,
# they index arrays instead.

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, Shaped

THREADS = 128  # of a program: one warpgroup
_WARP = 32
# Vectors of a row that a thread has, at most, where one warp shares the row. Two warps share wider
# rows. (Mosaic finds no layout where four do, and a program has a single row.)
_MOST_VECTORS = 8

# The grid's axis. Users' meshes have axes of other names.
PROGRAMS = "jaxrec_program"

# Within `stand_ins`: returns the program's number.
_stand_in: contextvars.ContextVar[Callable[[], Array] | None] = contextvars.ContextVar(
    "jaxrec_mosaic_stand_in", default=None
)


@contextlib.contextmanager
def stand_ins(number: Callable[[], Array]) -> Iterator[None]:
    """Trace a kernel for an interpreter: the functions here index arrays.

    ``number`` returns the program's number.
    """
    token = _stand_in.set(number)
    try:
        yield
    finally:
        _stand_in.reset(token)


def is_interpreted() -> bool:
    """Return whether kernels are traced for an interpreter."""
    return _stand_in.get() is not None


def program() -> Int32[Array, ""]:
    """Return this program's number among all programs."""
    return (_stand_in.get() or program_on_gpu)()


def program_on_gpu() -> Int32[Array, ""]:
    """Return a program's number, in a grid of programs by Mosaic."""
    return jax.lax.axis_index(PROGRAMS)


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Distribution of rows ``[n, columns]`` over the threads of a program."""

    threads: int  # threads that share a row: a power of two up to 64
    vector: int  # elements that a thread has side by side, and loads at once
    columns: int  # columns of a row, with padding: a multiple of ``threads * vector``
    width: int  # columns that are not padding
    first: int = 0  # element of a stored row that is column 0

    @classmethod
    def of(cls, width: int, vector: int, first: int = 0) -> Lanes:
        """Return the lanes of rows of ``width`` elements, of which a thread loads ``vector``."""
        vectors = -(-width // vector)
        threads = min(pl.next_power_of_2(vectors), _WARP)
        if vectors > _WARP * _MOST_VECTORS:
            threads = 2 * _WARP
        return cls(threads, vector, -(-vectors // threads) * threads * vector, width, first)

    @property
    def height(self) -> int:
        """Rows that the threads hold at a time: ``n`` is a multiple of it."""
        return THREADS // self.threads

    @property
    def steps(self) -> int:
        """Vectors of a row that each of its threads has."""
        return self.columns // (self.threads * self.vector)

    @property
    def rows(self) -> Any:
        """Layout of rows ``[n, columns]``."""
        return _layout(self.threads, self.vector)

    @property
    def line(self) -> Any:
        """Layout of a number for each row, ``[n]``: all threads of a row hold it."""
        return self.rows.reduce((1,))

    def cast(self, values: Array) -> Array:
        """Lay out ``[n]`` or ``[n, columns]`` as these lanes; constants and iotas need it."""
        if is_interpreted():
            return values
        return plgpu.layout_cast(values, self.line if values.ndim == 1 else self.rows)

    def spread(self, numbers: Shaped[Array, " n"]) -> Shaped[Array, "n columns"]:
        """Repeat each row's number in all of its columns."""
        return jax.lax.broadcast_in_dim(numbers, (*numbers.shape, self.columns), (0,))


# One number a thread, for kernels that go over all bags or all ids: 128 at a time, in order.
FLAT = Lanes(threads=1, vector=1, columns=1, width=1)


@functools.cache
def _layout(threads: int, vector: int) -> Any:
    """Return the layout of rows that ``threads`` threads share, ``vector`` elements each."""
    warps, lanes = max(threads // _WARP, 1), min(threads, _WARP)  # that share a row
    height, width = _WARP // lanes, lanes * vector  # of what a warp holds
    tiling = plgpu.Tiling(((4 // warps * height, warps * width), (height, width), (1, vector)))
    layout = mgpu.TiledLayout(
        tiling, warp_dims=(-6, -5), lane_dims=(-4, -3), vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling,
        warp_dims=layout.warp_dims,
        lane_dims=layout.lane_dims,
        vector_dim=layout.vector_dim,
    )


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
        return _load_interpreted(array, index, is_used, lanes, is_nan)
    dtype, is_row = jnp.dtype(array.dtype), len(array.shape) == 2
    shape = (*index.shape, lanes.columns) if is_row else index.shape
    layout = lanes.rows if is_row else lanes.line
    elements, size, stride = lanes.vector if is_row else 1, dtype.itemsize, _stride(array)
    chunk = math.gcd(16, elements * size, lanes.first * size if is_row else 0, stride)
    masks = (is_used,) if is_nan is None else (is_used, is_nan)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), lanes.line, *(lanes.line for _ in masks)),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
    )
    def load(_: Any, ref: Any, index: Any, is_used: Any, *is_nan: Any) -> Any:
        column = _first_column(lanes) if is_row else _int(0)
        start = _address(_pointer(ref), column, size, lanes.first * size if is_row else 0)
        fills = [_int(0) for _ in _numbers(is_used)]
        if is_nan:
            nan = _int(_nan_bits(dtype))
            fills = [arith.select(each, nan, _int(0)) for each in _numbers(is_nan[0])]
        rows = list(zip(_numbers(index), _numbers(is_used), fills, strict=True))
        registers = np.empty(layout.to_mgpu().registers_shape(shape), object)
        for i in np.ndindex(*registers.shape):
            row, used, fill = rows[i[0]]
            words = []
            for part in range(elements * size // chunk):
                at = (i[1] * lanes.threads * elements if is_row else 0) + part * chunk // size
                is_whole = not is_row or at + (lanes.threads - 1) * elements < lanes.width
                inside = used if is_whole else _and_below(used, column, lanes.width - at)
                words += _load(_address(start, row, stride, at * size), inside, chunk, fill)
            registers[i] = _from_words(words, elements, dtype)
        return _value(registers, layout, dtype)

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
        return _load_words_interpreted(array, index, is_used, first, count)
    size = math.gcd(4 * count, array.shape[1], first, 16)  # of a load, as the alignment permits
    dtype = jnp.dtype("int32")
    word = plgpu.ShapeDtypeStruct(index.shape, dtype, layout=lanes.line)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), lanes.line, lanes.line), return_type=(word,) * count
    )
    def load(_: Any, ref: Any, index: Any, is_used: Any) -> Any:
        start = _pointer(ref)
        words = []
        for row, used in zip(_numbers(index), _numbers(is_used), strict=True):
            addresses = (
                _address(start, row, array.shape[1], first + at) for at in range(0, 4 * count, size)
            )
            parts = [part for each in addresses for part in _load(each, used, size, _int(0))]
            words.append(parts if size >= 4 else _joined(parts, size))
        shape = index.registers.shape
        return tuple(
            _value(
                _array([_from_words([each], 1, dtype) for each in of_rows], shape),
                lanes.line,
                dtype,
            )
            for of_rows in zip(*words, strict=True)
        )

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
    is_row, line, layout = len(array.shape) == 2, lanes.line, lanes.rows
    if not is_row:
        # As a row of one column, which the first of its threads stores.
        layout, lanes = line, Lanes(lanes.threads, 1, lanes.threads, 1)
    width = lanes.width * len(planes)
    if is_row:  # the last byte of a row of 4-bit codes may have one column
        width = min(width, array.shape[1] - lanes.first)
    if is_interpreted():
        _store_interpreted(array, index, is_used, lanes.first, width, planes)
        return
    size, elements = jnp.dtype(array.dtype).itemsize, lanes.vector * len(planes)
    # The bytes of one store, as the alignment permits.
    chunk = math.gcd(16, elements * size, width * size, lanes.first * size, _stride(array))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), line, line, *(layout for _ in planes)), return_type=()
    )
    def store(_: Any, ref: Any, index: Any, is_used: Any, *planes: Any) -> Any:
        column = arith.muli(_first_column(lanes), _int(len(planes)))
        start = _address(_pointer(ref), column if is_row else _int(0), size, lanes.first * size)
        rows = list(zip(_numbers(index), _numbers(is_used), strict=True))
        for i in np.ndindex(*planes[0].registers.shape):
            row, used = rows[i[0]]
            words = _to_words([plane.registers[i] for plane in planes], chunk)
            for part, each in enumerate(words):
                at = (i[1] if is_row else 0) * lanes.threads * elements + part * chunk // size
                last = at + lanes.threads * elements - elements  # of the last thread
                inside = used if last < width else _and_below(used, column, width - at)
                _store(_address(start, row, _stride(array), at * size), inside, chunk, each)
        return ()

    store(array, index, is_used, *planes)


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
        _store_words_interpreted(array, index, is_used, first, words)
        return
    count = len(words)
    size = math.gcd(4 * count, array.shape[1], first, 16)  # of a store

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(lanes.line for _ in range(2 + count))), return_type=()
    )
    def store(_: Any, ref: Any, index: Any, is_used: Any, *words: Any) -> Any:
        start, column = _pointer(ref), _first_column(lanes)
        of_rows = zip(_numbers(index), _numbers(is_used), *map(_numbers, words), strict=True)
        for row, used, *each in of_rows:
            first_thread = _and_below(used, column, 1)
            for at, part in zip(range(0, 4 * count, size), _split(each, size), strict=True):
                address = _address(start, row, array.shape[1], first + at)
                _store(address, first_thread, size, part)
        return ()

    store(array, index, is_used, *words)


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
            lane = arith.remui(thread, _int(_WARP))
            warp = arith.remui(arith.divui(thread, _int(_WARP)), _int(4))
            sums = [_sum_in_warp(each) for each in _numbers(values)]
            # The last lane of each warp has the warp's total of each 128 values: they are added up
            # in the order of the values, by each warp for itself.
            mgpu.warpgroup_barrier()
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane, _int(_WARP - 1))):
                for i, each in enumerate(sums):
                    memref.store(each, totals, [_index(arith.addi(_int(4 * i), warp))])
            mgpu.warpgroup_barrier()
            before, registers = _int(0), []
            for i, each in enumerate(sums):
                if 4 * i % _WARP == 0:
                    total = memref.load(totals, [_index(arith.addi(_int(4 * i), lane))])
                    so_far = _sum_in_warp(total)
                    start = arith.addi(before, arith.subi(so_far, total))
                    before = arith.addi(before, _of_lane(so_far, _int(_WARP - 1)))
                mine = _of_lane(start, arith.addi(_int(4 * i % _WARP), warp))
                registers.append(_from_words([arith.addi(each, mine)], 1, dtype))
            return _value(_array(registers, values.registers.shape), FLAT.line, dtype)

        return run(totals, values)

    size = -(-4 * count // _WARP) * _WARP  # each lane of a warp loads a number
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
            pairs = zip(_elements(left.registers[i]), _elements(right.registers[i]), strict=True)
            ptx = "add.rn.f32 $0, $1, $2;"
            sums: list[Any] = [
                llvm.inline_asm(ir.F32Type.get(), pair, ptx, "=f,f,f") for pair in pairs
            ]
            registers[i] = vector.from_elements(left.registers[i].type, sums)
        return _value(registers, lanes.rows, np.float32)

    return add(left, right)


def keep_rolled() -> None:
    """At the beginning of a loop's body: tell ptxas not to unroll the loop."""
    if is_interpreted():
        return

    @plgpu.inline_mgpu(arg_types=(), return_type=())
    def pragma(_: Any) -> Any:
        _asm(_nothing(), '.pragma "nounroll";', "")
        return ()

    pragma()


# The stand-ins.


def _load_interpreted(
    array: Any,
    index: Array,
    is_used: Array,
    lanes: Lanes,
    is_nan: Array | None,
) -> Array:
    values = array[...]
    index = jnp.where(is_used, index, 0)
    if values.ndim == 1:
        found = jnp.where(is_used, values[index], 0)
        return found if is_nan is None else jnp.where(is_nan, jnp.nan, found)
    column = jnp.arange(lanes.columns, dtype=jnp.int32)[None]
    inside = is_used[:, None] & (column < lanes.width)
    place = jnp.where(column < lanes.width, lanes.first + column, 0)
    found = jnp.where(inside, values[index[:, None], place], 0).astype(values.dtype)
    return found if is_nan is None else jnp.where(is_nan[:, None], jnp.nan, found)


def _load_words_interpreted(
    array: Any, index: Array, is_used: Array, first: int, count: int
) -> list[Array]:
    octets = array[...][jnp.where(is_used, index, 0), first : first + 4 * count]
    octets = jnp.where(is_used[:, None], octets, 0).reshape(-1, count, 4)
    return list(jnp.unstack(jax.lax.bitcast_convert_type(octets, jnp.int32), axis=1))


def _store_words_interpreted(
    array: Any, index: Array, is_used: Array, first: int, words: Sequence[Array]
) -> None:
    whole = array[...]
    octets = jax.lax.bitcast_convert_type(jnp.stack(words, axis=1), jnp.uint8)
    octets = octets.reshape(index.size, -1)
    place = jnp.where(is_used, index, whole.shape[0])
    array[...] = whole.at[place, first : first + octets.shape[1]].set(octets, mode="drop")


def _store_interpreted(
    array: Any, index: Array, is_used: Array, first: int, width: int, planes: Sequence[Array]
) -> None:
    whole = array[...]
    place = jnp.where(is_used, index, whole.shape[0])
    if whole.ndim == 1:
        array[...] = whole.at[place].set(planes[0], mode="drop")
        return
    values = jnp.stack(planes, axis=-1).reshape(index.size, -1)[:, :width]
    array[...] = whole.at[place, first : first + width].set(values, mode="drop")


# Instructions. Values here are those of one thread.


def _int(value: int) -> ir.Value:
    return mgpu.c(value, _bits(32))


def _bits(count: int) -> ir.Type:
    return ir.IntegerType.get_signless(count)


def _nothing() -> ir.Type:
    return ir.Type.parse("!llvm.void")


def _index(value: ir.Value) -> ir.Value:
    return arith.index_castui(ir.IndexType.get(), value)


def _pointer(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(_bits(64), utils.memref_ptr(ref))


def _stride(array: Any) -> int:
    """Return the bytes from a row or an element to the next one."""
    return math.prod(array.shape[1:]) * jnp.dtype(array.dtype).itemsize


def _address(start: ir.Value, index: ir.Value, stride: int, more: int) -> ir.Value:
    """Return ``start + index * stride + more`` in 64 bits."""
    offset = arith.muli(arith.extsi(_bits(64), index), mgpu.c(stride, _bits(64)))
    address = arith.addi(start, offset)
    return arith.addi(address, mgpu.c(more, _bits(64))) if more else address


def _first_column(lanes: Lanes) -> ir.Value:
    """Return the first column of this thread."""
    return arith.muli(arith.remui(mgpu.thread_idx(), _int(lanes.threads)), _int(lanes.vector))


def _and_below(used: ir.Value, column: ir.Value, bound: int) -> ir.Value:
    return arith.andi(used, arith.cmpi(arith.CmpIPredicate.slt, column, _int(bound)))


def _numbers(value: Any) -> list[ir.Value]:
    """Return the numbers of this thread's rows, in order."""
    return [vector.extract(each, [], [0]) for each in value.registers.reshape(-1)]


def _elements(register: ir.Value) -> list[ir.Value]:
    (count,) = ir.VectorType(register.type).shape
    return [vector.extract(register, [], [i]) for i in range(count)]


def _array(values: Iterable[ir.Value], shape: tuple[int, ...]) -> np.ndarray:
    values, result = list(values), np.empty(math.prod(shape), object)
    result[:] = values
    return result.reshape(shape)


def _value(registers: np.ndarray, layout: Any, dtype: DTypeLike) -> Any:
    signed = (
        jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
    )
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def _nan_bits(dtype: np.dtype) -> int:
    """Return 32 bits of a float type's NaNs."""
    nan = np.full(4 // dtype.itemsize, jnp.nan).astype(dtype)
    return int(nan.view(np.int32)[0])


def _asm(kind: Any, ptx: str, constraints: str, *operands: ir.Value) -> Any:
    """Write PTX, which is neither left out nor moved before other PTX; return its result."""
    return llvm.inline_asm(kind, operands, ptx, constraints, has_side_effects=True)


def _load(address: ir.Value, used: ir.Value, size: int, fill: ir.Value) -> list[ir.Value]:
    """Load ``size`` bytes as words of 32 bits, which are ``fill`` where not ``used``."""
    count = max(size // 4, 1)
    words = [f"${i}" for i in range(count)]
    moves = " ".join(f"mov.b32 {word}, ${count + 2};" for word in words)
    kind = _bits(32)
    if count > 1:
        kind = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    result = _asm(
        kind,
        f"{moves} @${count + 1} ld.global.{_WIDTHS[size]} {_operand(words)}, [${count}];",
        ",".join([*["=&r"] * count, "l", "b", "r"]),
        *(address, used, fill),
    )
    if count == 1:
        return [result]
    return [llvm.extractvalue(_bits(32), result, [i]) for i in range(count)]


def _store(address: ir.Value, used: ir.Value, size: int, words: Sequence[ir.Value]) -> None:
    """Store ``size`` bytes of words of 32 bits where ``used``."""
    source = _operand([f"${i + 2}" for i in range(len(words))])
    ptx = f"@$1 st.global.{_WIDTHS[size]} [$0], {source};"
    _asm(_nothing(), ptx, ",".join(["l", "b", *["r"] * len(words)]), address, used, *words)


_WIDTHS = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "u16", 1: "u8"}  # PTX's, by bytes


def _operand(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else "{" + ", ".join(words) + "}"


def _joined(parts: Sequence[ir.Value], size: int) -> list[ir.Value]:
    """Join parts of ``size`` bytes, 1 or 2, to words."""
    result = []
    for start in range(0, len(parts), 4 // size):
        word = parts[start]
        for i in range(1, 4 // size):
            word = arith.ori(word, arith.shli(parts[start + i], _int(8 * size * i)))
        result.append(word)
    return result


def _split(words: Sequence[ir.Value], size: int) -> list[list[ir.Value]]:
    """Split words to what stores of ``size`` bytes store; bytes beyond those do not matter."""
    if size >= 4:
        return [list(words[i : i + size // 4]) for i in range(0, len(words), size // 4)]
    shifts = range(0, 32, 8 * size)
    return [[arith.shrui(word, _int(shift))] for word in words for shift in shifts]


def _from_words(words: Sequence[ir.Value], count: int, dtype: DTypeLike) -> ir.Value:
    """Return the ``count`` elements that words hold; words of fewer bytes hold them in low bits."""
    bits = min(8 * count * jnp.dtype(dtype).itemsize // len(words), 32)
    if bits < 32:
        words = [arith.trunci(_bits(bits), word) for word in words]
    packed = vector.from_elements(ir.VectorType.get((len(words),), words[0].type), words)
    return vector.bitcast(ir.VectorType.get((count,), utils.dtype_to_ir_type(dtype)), packed)


def _to_words(planes: Sequence[ir.Value], chunk: int) -> list[list[ir.Value]]:
    """Return the words of each ``chunk`` bytes of a thread's elements, planes interleaved."""
    elements: Any = planes[0]
    kind = ir.VectorType(elements.type)
    (length,), element = kind.shape, kind.element_type
    if len(planes) > 1:
        each = [x for of_planes in zip(*map(_elements, planes), strict=True) for x in of_planes]
        length = len(each)
        elements = vector.from_elements(ir.VectorType.get((length,), element), each)
    bits = 8 * min(chunk, 4)
    count = length * mgpu.bitwidth(element) // bits
    packed = vector.bitcast(ir.VectorType.get((count,), _bits(bits)), elements)
    words: list[ir.Value] = [vector.extract(packed, [], [i]) for i in range(count)]
    if bits < 32:
        words = [arith.extui(_bits(32), word) for word in words]
    step = max(chunk // 4, 1)
    return [words[i : i + step] for i in range(0, count, step)]


def _sum_in_warp(value: ir.Value) -> ir.Value:
    """Add up the values of a warp's threads, from its first one to this one."""
    for distance in (1, 2, 4, 8, 16):
        # `p` is false for lanes that have no lane at this distance before them.
        ptx = (
            "{ .reg .pred p; .reg .b32 other; "
            f"shfl.sync.up.b32 other|p, $1, {distance}, 0, 0xffffffff; "
            "mov.b32 $0, $1; @p add.s32 $0, other, $1; }"
        )
        value = _asm(_bits(32), ptx, "=&r,r", value)
    return value


def _of_lane(value: ir.Value, lane: ir.Value) -> ir.Value:
    """Return the value that a lane of this thread's warp has."""
    ptx = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return _asm(_bits(32), ptx, "=r,r,r", value, lane)
