"""Rows of floats: plain, as integers of the same bits, and of 8 bits, scaled or not."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8, UInt16, UInt32

from jaxrec.embed.formats.base import RowFormat
from jaxrec.embed.formats.rounding import SMALLEST_SCALE, FloatGrid, as_bytes, cut_bits, divide

# Floats without a sign, 5 bits of exponent (bias 15) and 3 of fraction, all codes finite: sums of
# squares are never negative, and the sign's bit is worth another bit of fraction.
UNSIGNED = "ufloat8_e5m3"
_UNSIGNED_GRID = FloatGrid(fraction_bits=3, smallest_normal=2.0**-14, largest=1.875 * 2.0**16)

_FRACTION_BITS = 3  # of Float8Rows


class UnscaledRows(RowFormat):
    """Base of formats that store one number for each column and no scale."""

    def width(self, dim: int) -> int:
        return dim

    def take_columns(
        self, packed: Shaped[Array, "n dim"], dim: int, columns: tuple[int, int]
    ) -> Shaped[Array, "n part_dim"]:
        return packed[:, slice(*columns)]


@dataclasses.dataclass(frozen=True)
class PlainRows(UnscaledRows):
    """Rows of "float32", "bfloat16" or "float16", rounded to nearest, ties to even."""

    dtype: str

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def max_abs(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    def pack(self, rows: Float[Array, "n dim"]) -> Shaped[Array, "n dim"]:
        return rows.astype(self.dtype)

    def unpack(self, packed: Shaped[Array, "n dim"], dim: int) -> Float[Array, "n dim"]:
        return packed.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class BFloat16Bits(UnscaledRows):
    """Rows of bfloat16 stored as uint16."""

    # XLA's CPU backend scatters 16-bit floats through a float32 copy of the whole array.
    dtype = "uint16"
    max_abs = float(jnp.finfo(jnp.bfloat16).max)

    @property
    def name(self) -> str:
        return "bfloat16"

    def pack(self, rows: Float[Array, "n dim"]) -> UInt16[Array, "n dim"]:
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)

    def pack_at_random(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"]
    ) -> UInt16[Array, "n dim"]:
        return self.pack(FloatGrid.of("bfloat16").round(rows, noise))

    def unpack(self, packed: UInt16[Array, "n dim"], dim: int) -> Float[Array, "n dim"]:
        floats = jax.lax.bitcast_convert_type(packed, jnp.bfloat16)
        return floats.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Float8Rows(UnscaledRows):
    """Floats of a sign, 4 bits of exponent and 3 of fraction, without a scale, infinities or NaN.

    The layout of FBGEMM's inference tables and of its ``FloatToHFP8Quantized``. `pack` rounds to
    nearest, ties to even, and clips elements to `max_abs`.
    """

    # 7 in tables (largest element 240), 15 in FBGEMM's communication (largest element 0.9375). Both
    # are FBGEMM's bounds, which leave the topmost exponent unused.
    exponent_bias: int = 7

    dtype = "uint8"

    @property
    def name(self) -> str:
        return "float8"

    @property
    def max_abs(self) -> float:
        return 1.875 * 2.0 ** (14 - self.exponent_bias)

    def pack(self, rows: Float[Array, "n dim"]) -> UInt8[Array, "n dim"]:
        bits = jax.lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.uint32)
        size = jax.lax.bitcast_convert_type(bits & 0x7FFFFFFF, jnp.float32)
        size = jnp.minimum(size, jnp.float32(self.max_abs))
        size_bits = jax.lax.bitcast_convert_type(size, jnp.uint32)
        dropped = 23 - _FRACTION_BITS
        # Rounding to nearest on the bits: half of the last kept bit, less one if that bit is even,
        # carries upwards, into the exponent too.
        is_odd = (size_bits >> dropped) & 1
        rounded = (size_bits + (1 << (dropped - 1)) - 1 + is_odd) >> dropped
        normal = rounded - ((127 - self.exponent_bias) << _FRACTION_BITS)
        # Elements below the smallest normal one are multiples of its last bit.
        smallest = 2.0 ** (1 - self.exponent_bias)
        subnormal = jnp.round(size * (2**_FRACTION_BITS / smallest)).astype(jnp.uint32)
        codes = jnp.where(size < smallest, subnormal, normal) | ((bits >> 24) & 0x80)
        return codes.astype(jnp.uint8)

    def unpack(self, packed: UInt8[Array, "n dim"], dim: int) -> Float[Array, "n dim"]:
        codes = packed.astype(jnp.uint32)
        size = codes & 0x7F
        normal = (size << (23 - _FRACTION_BITS)) + ((127 - self.exponent_bias) << 23)
        smallest = 2.0 ** (1 - self.exponent_bias)
        floats = jnp.where(
            size < 2**_FRACTION_BITS,
            size.astype(jnp.float32) * (smallest / 2**_FRACTION_BITS),
            jax.lax.bitcast_convert_type(normal, jnp.float32),
        )
        return jnp.where(codes & 0x80 != 0, -floats, floats)


@dataclasses.dataclass(frozen=True)
class ScaledFloat8Rows(RowFormat):
    """Rows of 8-bit floats, then a float32 scale for each row or block: ``scale * code``."""

    # "float8_e4m3fn" (largest code 448), "float8_e5m2" (57344), or "ufloat8_e5m3" (122880) for
    # elements of 0 or more.
    code: str
    block: int | None = None  # columns that share a scale; None: the whole row

    dtype = "uint8"
    max_abs = float(np.finfo(np.float32).max / 2)

    @property
    def name(self) -> str:
        return self.code.removesuffix("fn")

    def num_blocks(self, dim: int) -> int:
        """Return the number of scales of a row of ``dim`` columns."""
        return 1 if self.block is None else -(-dim // self.block)

    def width(self, dim: int) -> int:
        return dim + 4 * self.num_blocks(dim)

    def unpack(self, packed: UInt8[Array, "n width"], dim: int) -> Float[Array, "n dim"]:
        blocks = self.num_blocks(dim)
        trailer = packed[:, dim:].reshape(packed.shape[0], blocks, 4)
        scales = jax.lax.bitcast_convert_type(trailer, jnp.float32)
        if self.block is not None:
            scales = jnp.repeat(scales, self.block, axis=1)[:, :dim]
        return _decode(packed[:, :dim], self.code) * scales

    def take_columns(
        self, packed: UInt8[Array, "n width"], dim: int, columns: tuple[int, int]
    ) -> UInt8[Array, "n part_width"] | None:
        first, stop = columns
        size = dim if self.block is None else self.block
        starts = range(first, stop, size)
        blocks = [start // size for start in starts]
        if blocks != [(min(start + size, stop) - 1) // size for start in starts]:
            # Blocks of the slice begin at its own first column, so that one of them has columns of
            # two blocks of the row, with two scales.
            return None
        scales = packed[:, dim:].reshape(packed.shape[0], -1, 4)[:, np.array(blocks)]
        return jnp.concatenate([packed[:, first:stop], scales.reshape(packed.shape[0], -1)], axis=1)

    def quantize(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"] | None
    ) -> tuple[Float[Array, "n dim"], Float[Array, "n 1"]]:
        """Divide rows of one block by their scales; return the quotients and the scales.

        Quotients lie between the smallest and the largest code. With ``noise``, as in
        `pack_at_random`, they are codes already, rounded at random. With None they are not rounded
        yet: conversion to the code's type rounds them to the nearest code.
        """
        grid = self.grid
        sizes = jnp.abs(rows)
        largest = jnp.max(sizes, axis=1, keepdims=True)
        exact = divide(largest, grid.largest)
        # With 20 significant bits, the scale's product with a code of 4 is exact in float32: a row
        # that is unpacked and packed again keeps its bytes.
        scale = cut_bits(exact, 4, None if noise is None else noise[:, :1] << 28)
        scale = jnp.maximum(scale, SMALLEST_SCALE)
        codes = jnp.clip(rows / scale, -grid.largest, grid.largest)
        if noise is not None:
            codes = grid.round(codes, noise)
        # A sum of squares that rounds to zero would make the next step of its row huge.
        if self.code == UNSIGNED:
            codes = jnp.where(rows > 0, jnp.maximum(codes, grid.spacing), codes)
        # The scale was rounded, so the largest element may have missed the largest code.
        is_largest = (sizes == largest) & (scale > SMALLEST_SCALE)
        return jnp.where(is_largest, jnp.copysign(grid.largest, rows), codes), scale

    @property
    def grid(self) -> FloatGrid:
        """The numbers that codes represent."""
        return _UNSIGNED_GRID if self.code == UNSIGNED else FloatGrid.of(self.code)

    def pack(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"] | None = None
    ) -> UInt8[Array, "n width"]:
        n, dim = rows.shape
        noise = None if noise is None else self._blocks(noise)
        codes, scale = self.quantize(self._blocks(rows.astype(jnp.float32)), noise)
        stored = _encode(codes, self.code).reshape(n, -1)[:, :dim]
        return jnp.concatenate([stored, as_bytes(scale).reshape(n, -1)], axis=1)

    pack_at_random = pack

    def _blocks(self, rows: Shaped[Array, "n dim"]) -> Shaped[Array, "blocks size"]:
        """Cut rows into the blocks that share a scale; zeros fill up each row's last block."""
        n, dim = rows.shape
        blocks = self.num_blocks(dim)
        size = dim if self.block is None or blocks == 1 else self.block
        return jnp.pad(rows, ((0, 0), (0, blocks * size - dim))).reshape(n * blocks, size)


def _encode(numbers: Float[Array, "n dim"], code: str) -> UInt8[Array, "n dim"]:
    """Return the nearest code of each number; none exceeds the largest code."""
    if code == UNSIGNED:
        return _UNSIGNED_GRID.encode(numbers).astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(numbers.astype(code), jnp.uint8)


def _decode(codes: UInt8[Array, "n dim"], code: str) -> Float[Array, "n dim"]:
    if code == UNSIGNED:
        return _UNSIGNED_GRID.decode(codes.astype(jnp.uint32))
    return jax.lax.bitcast_convert_type(codes, jnp.dtype(code)).astype(jnp.float32)
