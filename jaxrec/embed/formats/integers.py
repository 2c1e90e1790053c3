"""Rows of integers with a scale and an offset each: an element is ``scale * code + offset``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8, UInt32

from jaxrec.embed.formats.base import RowFormat
from jaxrec.embed.formats.rounding import (
    SMALLEST_SCALE,
    as_bytes,
    cut_bits,
    divide,
    round_up_or_down,
)

HEADER_BYTES = 4  # of IntegerRows
_TRAILER_BYTES = 8  # of Fused8Rows
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class IntegerRows(RowFormat):
    """Codes of 8, 4 or 2 bits, with a float16 scale and a float16 offset for each row.

    The layout of FBGEMM's inference tables: the scale, the offset, then the codes, the first column
    in the lowest bits of a byte. The offset is the row's smallest element, rounded to float16.
    """

    # FBGEMM's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf` has the scale and the offset at the
    # end. `scale_last` and `scale_first` convert to and from it.
    bits: int

    dtype = "uint8"
    max_abs = 65504.0  # of a float16, the offset

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.bits

    def width(self, dim: int) -> int:
        return HEADER_BYTES + -(-dim // self.codes_per_byte)

    def refuse(self, dim: int) -> str | None:
        if dim % self.codes_per_byte == 0:
            return None
        return (
            f"{self.name} packs {self.codes_per_byte} columns in a byte, so the number of columns "
            f"must be a multiple of {self.codes_per_byte}, got {dim}"
        )

    def pack(self, rows: Float[Array, "n dim"]) -> UInt8[Array, "n width"]:
        # The arithmetic is FBGEMM's, step by step. The offset is rounded first, so that the codes
        # make up for its rounding.
        rows = rows.astype(jnp.float32)
        offset = jnp.min(rows, axis=1, keepdims=True).astype(jnp.float16)
        low = offset.astype(jnp.float32)
        span = jnp.max(rows, axis=1, keepdims=True) - low
        exact = divide(span, 2**self.bits - 1)
        scale = jnp.where(span == 0, 1, exact).astype(jnp.float16)
        # With an infinite reciprocal, a scale so small gives no codes: all elements are the offset.
        scale = jnp.where(jnp.isinf(1 / scale.astype(jnp.float32)), jnp.float16(1), scale)
        codes = jnp.round((rows - low) * (1 / scale.astype(jnp.float32)))
        codes = jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint8)
        return jnp.concatenate([as_bytes(scale), as_bytes(offset), self._join(codes)], axis=1)

    def unpack(self, packed: UInt8[Array, "n width"], dim: int) -> Float[Array, "n dim"]:
        header = packed[:, :HEADER_BYTES].reshape(packed.shape[0], 2, 2)
        halves = jax.lax.bitcast_convert_type(header, jnp.float16).astype(jnp.float32)
        scale, offset = halves[:, :1], halves[:, 1:]
        return self._split(packed[:, HEADER_BYTES:])[:, :dim].astype(jnp.float32) * scale + offset

    def take_columns(
        self, packed: UInt8[Array, "n width"], dim: int, columns: tuple[int, int]
    ) -> UInt8[Array, "n part_width"]:
        codes = self._split(packed[:, HEADER_BYTES:])[:, slice(*columns)]
        return jnp.concatenate([packed[:, :HEADER_BYTES], self._join(codes)], axis=1)

    def scale_last(self, packed: UInt8[Array, "n width"]) -> UInt8[Array, "n width"]:
        """Move the scale and the offset of stored rows behind the codes."""
        return jnp.roll(packed, -HEADER_BYTES, axis=1)

    def scale_first(self, fused: UInt8[Array, "n width"]) -> UInt8[Array, "n width"]:
        """Undo `scale_last`."""
        return jnp.roll(fused, HEADER_BYTES, axis=1)

    @property
    def _shifts(self) -> np.ndarray:
        """First bit of each code of a byte, ``[1, 1, codes_per_byte]``."""
        return np.arange(0, 8, self.bits, dtype=np.uint8)[None, None]

    def _join(self, codes: UInt8[Array, "n dim"]) -> UInt8[Array, "n bytes"]:
        n, dim = codes.shape
        codes = jnp.pad(codes, ((0, 0), (0, -dim % self.codes_per_byte)))
        num_bytes = codes.shape[1] // self.codes_per_byte
        codes = codes.reshape(n, num_bytes, self.codes_per_byte) << self._shifts
        return jnp.sum(codes, axis=2, dtype=jnp.uint8)

    def _split(self, codes: UInt8[Array, "n bytes"]) -> UInt8[Array, "n padded_dim"]:
        separate = (codes[:, :, None] >> self._shifts) & (2**self.bits - 1)
        return separate.reshape(codes.shape[0], codes.shape[1] * self.codes_per_byte)


@dataclasses.dataclass(frozen=True)
class Fused8Rows(RowFormat):
    """8-bit codes, a float32 scale, then a float32 offset: ``scale * code + offset``.

    The layout of FBGEMM's ``FloatToFused8BitRowwiseQuantized``; exchanges also send rows in it.
    """

    dtype = "uint8"
    max_abs = float(np.finfo(np.float32).max / 2)  # The difference of two elements is finite.

    @property
    def name(self) -> str:
        return "int8_float32"

    def width(self, dim: int) -> int:
        return dim + _TRAILER_BYTES

    def pack(self, rows: Float[Array, "n dim"]) -> UInt8[Array, "n width"]:
        rows = rows.astype(jnp.float32)
        offset = jnp.min(rows, axis=1, keepdims=True)
        span = jnp.max(rows, axis=1, keepdims=True) - offset
        scale = divide(span, 255)
        # FBGEMM's formula: 1e-8 keeps a row of equal elements from dividing by zero.
        codes = jnp.round((rows - offset) * (255 / (span + jnp.float32(1e-8))))
        return jnp.concatenate([codes.astype(jnp.uint8), as_bytes(scale), as_bytes(offset)], axis=1)

    def unpack(self, packed: UInt8[Array, "n width"], dim: int) -> Float[Array, "n dim"]:
        trailer = packed[:, dim:].reshape(packed.shape[0], 2, 4)
        floats = jax.lax.bitcast_convert_type(trailer, jnp.float32)
        return packed[:, :dim].astype(jnp.float32) * floats[:, :1] + floats[:, 1:]

    def take_columns(
        self, packed: UInt8[Array, "n width"], dim: int, columns: tuple[int, int]
    ) -> UInt8[Array, "n part_width"]:
        return jnp.concatenate([packed[:, slice(*columns)], packed[:, dim:]], axis=1)


@dataclasses.dataclass(frozen=True)
class TrainedInt8Rows(Fused8Rows):
    """Rows of 8-bit integers in the layout of FBGEMM's training tables.

    The row's smallest element is the offset and has the code 0; its largest has the code 255. A row
    that is unpacked and packed again keeps its bytes.
    """

    @property
    def name(self) -> str:
        return "int8"

    def quantize(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"] | None
    ) -> tuple[Float[Array, "n dim"], Float[Array, "n 1"], Float[Array, "n 1"]]:
        """Return rows as whole numbers from 0 to 255, with their scales and offsets.

        ``noise`` as in `pack_at_random`; None rounds to nearest.
        """
        offset = jnp.min(rows, axis=1, keepdims=True)
        # A row that is unpacked and packed again must keep its bytes. So the offset must not become
        # -0.0, and not a subnormal number either, which some devices treat as zero.
        offset = jnp.where(jnp.abs(offset) < _SMALLEST_NORMAL, 0, offset)
        largest = jnp.max(rows, axis=1, keepdims=True)
        exact = divide(largest - offset, 255)
        # A scale of 16 significant bits times a code of 8 bits is exact in float32. If the elements
        # spread over less than 1/64 of the offset, the sum with the offset rounds anyway.
        rounded = cut_bits(exact, 8, None if noise is None else noise[:, :1] << 24)
        scale = jnp.where(rounded * 255 >= jnp.abs(offset) * (1 / 64), rounded, exact)
        scale = jnp.maximum(scale, SMALLEST_SCALE)
        codes = (rows - offset) / scale
        codes = jnp.round(codes) if noise is None else round_up_or_down(codes, noise)
        # The scale was rounded, so the largest element may have missed its code.
        codes = jnp.where((rows == largest) & (scale > SMALLEST_SCALE), 255, codes)
        codes = jnp.clip(codes, 0, 255)
        if noise is not None:
            # If the scale is smaller than the offset's last bit, several codes unpack to one float.
            # We take the one that packing this float again gives.
            codes = jnp.round(((codes * scale + offset) - offset) / scale)
        return codes, scale, offset

    def pack(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"] | None = None
    ) -> UInt8[Array, "n width"]:
        codes, scale, offset = self.quantize(rows.astype(jnp.float32), noise)
        return jnp.concatenate([codes.astype(jnp.uint8), as_bytes(scale), as_bytes(offset)], axis=1)

    pack_at_random = pack
