"""Rows of 8-, 4- or 2-bit codes with a scale and an offset each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxrec.embed.formats.base import RowFormat

HEADER_BYTES = 4


@dataclasses.dataclass(frozen=True)
class IntegerRows(RowFormat):
    """Codes of a few bits, with a float16 scale and a float16 offset for each row.

    A stored row is the layout of FBGEMM's inference tables: the scale, the offset, then the codes.
    The first column is in the lowest bits of the first byte. An element is
    ``scale * code + offset``. The offset is the row's smallest element, rounded to float16.
    `scale_last` and `scale_first` convert to and from the layout of FBGEMM's
    ``FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf``, which has the scale and the offset at the end.

    Attributes:
        bits: Bits of a code: 8, 4 or 2.
    """

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
        rows = rows.astype(jnp.float32)
        # The offset is rounded first, so that the codes make up for the rounding.
        offset = jnp.min(rows, axis=1, keepdims=True).astype(jnp.float16)
        low = offset.astype(jnp.float32)
        span = jnp.max(rows, axis=1, keepdims=True) - low
        # XLA multiplies by the reciprocal of a constant divisor, which rounds otherwise.
        top = jnp.where(jnp.isnan(span), jnp.nan, jnp.float32(2**self.bits - 1))
        scale = jnp.where(span == 0, 1, span / top).astype(jnp.float16)
        # A scale whose reciprocal is infinite stands for a row of equal elements.
        scale = jnp.where(jnp.isinf(1 / scale.astype(jnp.float32)), jnp.float16(1), scale)
        codes = jnp.round((rows - low) * (1 / scale.astype(jnp.float32)))
        codes = jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint8)
        return jnp.concatenate([_as_bytes(scale), _as_bytes(offset), self._join(codes)], axis=1)

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
        """Return stored rows with the scale and the offset behind the codes."""
        return jnp.roll(packed, -HEADER_BYTES, axis=1)

    def scale_first(self, fused: UInt8[Array, "n width"]) -> UInt8[Array, "n width"]:
        """Return the stored rows, given rows with the scale and the offset behind the codes."""
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


def _as_bytes(halves: Float[Array, "n 1"]) -> UInt8[Array, "n 2"]:
    return jax.lax.bitcast_convert_type(halves[:, 0], jnp.uint8)
