"""Instructions of one thread, in MLIR and PTX, for the functions of `indexing`.

Values are those that one thread has; words have 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import DTypeLike

from jaxrec.embed.kernels.mosaic.lanes import Lanes


def i32(value: int) -> ir.Value:
    return mgpu.c(value, integer(32))


def integer(count: int) -> ir.Type:
    return ir.IntegerType.get_signless(count)


def nothing() -> ir.Type:
    return ir.Type.parse("!llvm.void")


def index(value: ir.Value) -> ir.Value:
    return arith.index_castui(ir.IndexType.get(), value)


def pointer(ref: ir.Value) -> ir.Value:
    return llvm.ptrtoint(integer(64), utils.memref_ptr(ref))


def stride(array: Any) -> int:
    """Return the bytes from a row or an element to the next one."""
    return math.prod(array.shape[1:]) * jnp.dtype(array.dtype).itemsize


def address(start: ir.Value, index: ir.Value, stride: int, more: int) -> ir.Value:
    """Return ``start + index * stride + more`` in 64 bits."""
    offset = arith.muli(arith.extsi(integer(64), index), mgpu.c(stride, integer(64)))
    address = arith.addi(start, offset)
    return arith.addi(address, mgpu.c(more, integer(64))) if more else address


def first_column(lanes: Lanes) -> ir.Value:
    """Return the first column of this thread."""
    return arith.muli(arith.remui(mgpu.thread_idx(), i32(lanes.threads)), i32(lanes.vector))


def and_below(used: ir.Value, column: ir.Value, bound: int) -> ir.Value:
    return arith.andi(used, arith.cmpi(arith.CmpIPredicate.slt, column, i32(bound)))


def numbers(value: Any) -> list[ir.Value]:
    """Return the numbers of this thread's rows, in order."""
    return [vector.extract(each, [], [0]) for each in value.registers.reshape(-1)]


def elements_of(register: ir.Value) -> list[ir.Value]:
    (count,) = ir.VectorType(register.type).shape
    return [vector.extract(register, [], [i]) for i in range(count)]


def array_of(values: Iterable[ir.Value], shape: tuple[int, ...]) -> np.ndarray:
    values, result = list(values), np.empty(math.prod(shape), object)
    result[:] = values
    return result.reshape(shape)


def fragments(registers: np.ndarray, layout: Any, dtype: DTypeLike) -> Any:
    signed = (
        jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
    )
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def nan_bits(dtype: np.dtype) -> int:
    """Return 32 bits of a float type's NaNs."""
    nan = np.full(4 // dtype.itemsize, jnp.nan).astype(dtype)
    return int(nan.view(np.int32)[0])


def asm(kind: Any, ptx: str, constraints: str, *operands: ir.Value) -> Any:
    """Write PTX, which is neither left out nor moved before other PTX; return its result."""
    return llvm.inline_asm(kind, operands, ptx, constraints, has_side_effects=True)


def load(address: ir.Value, used: ir.Value, size: int, fill: ir.Value) -> list[ir.Value]:
    """Load ``size`` bytes as words of 32 bits, which are ``fill`` where not ``used``."""
    count = max(size // 4, 1)
    words = [f"${i}" for i in range(count)]
    moves = " ".join(f"mov.b32 {word}, ${count + 2};" for word in words)
    kind = integer(32)
    if count > 1:
        kind = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    result = asm(
        kind,
        f"{moves} @${count + 1} ld.global.{_WIDTHS[size]} {_operand(words)}, [${count}];",
        ",".join([*["=&r"] * count, "l", "b", "r"]),
        *(address, used, fill),
    )
    if count == 1:
        return [result]
    return [llvm.extractvalue(integer(32), result, [i]) for i in range(count)]


def store(address: ir.Value, used: ir.Value, size: int, words: Sequence[ir.Value]) -> None:
    """Store ``size`` bytes of words of 32 bits where ``used``."""
    source = _operand([f"${i + 2}" for i in range(len(words))])
    ptx = f"@$1 st.global.{_WIDTHS[size]} [$0], {source};"
    asm(nothing(), ptx, ",".join(["l", "b", *["r"] * len(words)]), address, used, *words)


_WIDTHS = {16: "v4.b32", 8: "v2.b32", 4: "b32", 2: "u16", 1: "u8"}  # PTX's, by bytes


def _operand(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else "{" + ", ".join(words) + "}"


def from_words(words: Sequence[ir.Value], count: int, dtype: DTypeLike) -> ir.Value:
    """Return the ``count`` elements that words hold; words of fewer bytes hold them in low bits."""
    bits = min(8 * count * jnp.dtype(dtype).itemsize // len(words), 32)
    if bits < 32:
        words = [arith.trunci(integer(bits), word) for word in words]
    packed = vector.from_elements(ir.VectorType.get((len(words),), words[0].type), words)
    return vector.bitcast(ir.VectorType.get((count,), utils.dtype_to_ir_type(dtype)), packed)


def to_words(planes: Sequence[ir.Value], chunk: int) -> list[list[ir.Value]]:
    """Return the words of each ``chunk`` bytes of a thread's elements, planes interleaved."""
    elements: Any = planes[0]
    kind = ir.VectorType(elements.type)
    (length,), element = kind.shape, kind.element_type
    if len(planes) > 1:
        each = [x for of_planes in zip(*map(elements_of, planes), strict=True) for x in of_planes]
        length = len(each)
        elements = vector.from_elements(ir.VectorType.get((length,), element), each)
    bits = 8 * min(chunk, 4)
    count = length * mgpu.bitwidth(element) // bits
    packed = vector.bitcast(ir.VectorType.get((count,), integer(bits)), elements)
    words: list[ir.Value] = [vector.extract(packed, [], [i]) for i in range(count)]
    if bits < 32:
        words = [arith.extui(integer(32), word) for word in words]
    step = max(chunk // 4, 1)
    return [words[i : i + step] for i in range(0, count, step)]


def sum_in_warp(value: ir.Value) -> ir.Value:
    """Add up the values of a warp's threads, from its first one to this one."""
    for distance in (1, 2, 4, 8, 16):
        # `p` is false for lanes that have no lane at this distance before them.
        ptx = (
            "{ .reg .pred p; .reg .b32 other; "
            f"shfl.sync.up.b32 other|p, $1, {distance}, 0, 0xffffffff; "
            "mov.b32 $0, $1; @p add.s32 $0, other, $1; }"
        )
        value = asm(integer(32), ptx, "=&r,r", value)
    return value


def of_lane(value: ir.Value, lane: ir.Value) -> ir.Value:
    """Return the value that a lane of this thread's warp has."""
    ptx = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return asm(integer(32), ptx, "=r,r,r", value, lane)
