"""How Mosaic kernels read rows: plain ones, and packed ones from their stored bytes.

A program reads a packed row's codes, scale and offset and computes the floats in registers: no
unpacked row is written to memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed.formats import PackedRows, RowFormat, TableArray
from jaxrec.embed.formats.floats import Float8Rows, ScaledFloat8Rows
from jaxrec.embed.formats.integers import HEADER_BYTES, Fused8Rows, IntegerRows
from jaxrec.embed.kernels.mosaic.indexing import add_rounded, load, load_words
from jaxrec.embed.kernels.mosaic.lanes import Lanes
from jaxrec.embed.kernels.mosaic.tile import Terms


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Position and type of a packed row's scale and optional offset."""

    first: int  # position of the first byte; a number's bytes are in little-endian order
    dtype: str  # "float16" or "float32"
    count: int  # 2, or 1 without an offset

    def load(
        self, stored: Any, rows: Int32[Array, " n"], is_row: Bool[Array, " n"], lanes: Lanes
    ) -> list[Float[Array, " n"]]:
        """Load each row's scale and offset in float32."""
        if self.dtype == "float32":
            words = load_words(stored, rows, is_row, lanes, self.first, self.count)
            return [jax.lax.bitcast_convert_type(word, jnp.float32) for word in words]
        (word,) = load_words(stored, rows, is_row, lanes, self.first, self.count // 2)
        return [_float16(word), _float16(jax.lax.shift_right_logical(word, jnp.int32(16)))]


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reader of rows of floats, or of packed rows, whose elements are ``scale * code + offset``."""

    # The terms of a row are an array for each plane (the columns at one position of their byte),
    # and the offset. A bag's offsets are added as one number, not once a column.
    lanes: Lanes  # of the floats, or of the bytes of codes
    planes: int = 1  # columns of a byte, the first one in its lowest bits
    numbers: Numbers | None = None  # the scale and the offset; None: 1 and 0
    # Turns int32 codes into float32, too small by the factor `unit`: the scale makes up for it, and
    # decoding takes fewer instructions. None: rows are floats.
    decode: Callable[[Int32[Array, "*n"]], Float[Array, "*n"]] | None = None
    unit: float = 1.0

    @classmethod
    def of(cls, table: TableArray) -> Reader | None:
        """Return the reader of a table's rows; None: no kernel reads them."""
        if isinstance(table, PackedRows):
            return cls._of_packed(table.row_format, table.dim)
        # A thread may load 16 bytes at once if each row begins at a multiple of as many.
        (_, width), size = table.shape, jnp.dtype(table.dtype).itemsize
        return cls(Lanes.of(width, max(math.gcd(16, width * size) // size, 1)))

    @classmethod
    def _of_packed(cls, row_format: RowFormat, dim: int) -> Reader | None:
        stride = row_format.width(dim)

        def lanes(width: int, first: int = 0) -> Lanes:
            return Lanes.of(width, math.gcd(16, stride, first), first)

        match row_format:
            case IntegerRows():
                planes = row_format.codes_per_byte
                codes = lanes(-(-dim // planes), HEADER_BYTES)
                return cls(codes, planes, Numbers(0, "float16", 2), _integers)
            case Fused8Rows():
                return cls(lanes(dim), 1, Numbers(dim, "float32", 2), _integers)
            case ScaledFloat8Rows("float8_e4m3fn", block=None):
                return cls(lanes(dim), 1, Numbers(dim, "float32", 1), _e4m3, 2.0**8)
            case ScaledFloat8Rows("float8_e5m2", block=None):
                return cls(lanes(dim), 1, Numbers(dim, "float32", 1), _e5m2)
            case Float8Rows():
                unit = 2.0 ** (15 - row_format.exponent_bias)
                return cls(lanes(dim), 1, None, _e4m3, unit)
        return None

    @property
    def has_offset(self) -> bool:
        return self.numbers is not None and self.numbers.count == 2

    def zeros(self, groups: int) -> Terms:
        """Return zeros in the shapes of the terms of one row of each group."""
        codes = self.lanes.cast(jnp.zeros((groups, self.lanes.columns), jnp.float32))
        offset = self.lanes.cast(jnp.zeros(groups, jnp.float32))
        return (codes,) * self.planes + (offset,) * self.has_offset

    def load(
        self, stored: Any, rows: Array, is_row: Array, is_bad: Array, weight: Array | None
    ) -> Terms:
        """Load rows as terms. The kernel adds them per bag; `finish` turns the totals into rows.

        Rows without ``is_row`` are zeros, and those with ``is_bad`` are NaN.
        """
        if self.decode is None:
            values = load(stored, rows, is_row, self.lanes, is_bad).astype(jnp.float32)
            return (values if weight is None else values * self.lanes.spread(weight),)
        codes = load(stored, rows, is_row, self.lanes).astype(jnp.int32)
        if self.numbers is None:
            scale, offset = self.lanes.cast(jnp.full(rows.shape, self.unit, jnp.float32)), []
        else:
            scale, *offset = self.numbers.load(stored, rows, is_row, self.lanes)
            scale = scale * self.unit if self.unit != 1 else scale
        if weight is not None:
            scale, offset = scale * weight, [each * weight for each in offset]
        # A bad row's codes were not loaded and are zeros. The NaN of its scale makes it NaN.
        scale = self.lanes.spread(jnp.where(is_bad, jnp.float32(jnp.nan), scale))
        bits = 8 // self.planes
        planes = [codes]
        if bits < 8:
            planes = [(codes >> i) & (2**bits - 1) for i in range(0, 8, bits)]
        return (*(self.decode(plane) * scale for plane in planes), *offset)

    def finish(self, sums: Terms) -> Terms:
        """Return a bag's sum, an array for each plane, given the sums of its rows' terms."""
        if not self.has_offset:
            return sums
        *planes, offset = sums
        # The planes of one row are products. They are rounded as in a sum over a bag: a row and a
        # bag of its id have the same bits.
        return tuple(add_rounded(plane, self.lanes.spread(offset), self.lanes) for plane in planes)


def stored_rows(table: TableArray) -> Array:
    """Return the array of a table's rows as they are stored."""
    return table.stored if isinstance(table, PackedRows) else table


def _integers(codes: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    return codes.astype(jnp.float32)


def _e5m2(codes: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    """Return float8_e5m2 codes as floats: a code is the first byte of a float16."""
    return _float16(codes << 8)


def _e4m3(codes: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    """Return float8_e4m3 codes as floats divided by 2**8 (bias 7)."""
    # A code is a float16 without its last bits, and with another bias of the exponent. The code
    # that means NaN in some formats is a number here: a row with a NaN has a scale of NaN.
    bits = codes << 7
    return _float16(bits + (bits & 0x4000))  # The sign lies one bit further up.


def _float16(bits: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    """Return float32 numbers of the float16 ones in the low 16 bits."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
