"""8-bit rows of tables that are trained.

Rows are unpacked, updated and packed again thousands of times, and checkpoints and row stores hold
them as floats. Stored rows unpack to floats that determine the stored bytes: the largest element
has the largest code, and a scale has so few significant bits that its multiples are exact. An
update rounds elements up or down at random, so that changes smaller than a code add up.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped, UInt8, UInt32

from jaxrec.embed.formats.base import RowFormat
from jaxrec.embed.formats.fused8 import Fused8Rows, as_bytes
from jaxrec.embed.formats.rounding import FloatGrid, cut_bits, round_up_or_down

# Smallest scale: far above subnormal floats, which devices may treat as zeros.
_SMALLEST_SCALE = 2.0**-100
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class TrainedInt8Rows(Fused8Rows):
    """Rows of integers in the layout of FBGEMM's 8-bit training tables.

    The row's smallest element has the code 0 and is the offset; its largest element has the code
    255. Where the elements spread over more than 1/64 of the offset, the scale is rounded to 16
    significant bits.
    """

    @property
    def name(self) -> str:
        return "int8"

    def pack(self, rows: Float[Array, "n dim"]) -> UInt8[Array, "n width"]:
        return self._pack(rows.astype(jnp.float32), None)

    def pack_at_random(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"]
    ) -> Shaped[Array, "n width"]:
        return self._pack(rows, noise)

    def _pack(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"] | None
    ) -> UInt8[Array, "n width"]:
        offset = jnp.min(rows, axis=1, keepdims=True)
        # Zeros have one sign, and subnormal numbers are zeros.
        offset = jnp.where(jnp.abs(offset) < _SMALLEST_NORMAL, 0, offset)
        largest = jnp.max(rows, axis=1, keepdims=True)
        exact = _divide(largest - offset, 255)
        rounded = cut_bits(exact, 8, None if noise is None else noise[:, :1] << 24)
        scale = jnp.where(rounded * 255 >= jnp.abs(offset) * (1 / 64), rounded, exact)
        scale = jnp.maximum(scale, _SMALLEST_SCALE)
        codes = (rows - offset) / scale
        codes = jnp.round(codes) if noise is None else round_up_or_down(codes, noise)
        codes = jnp.where((rows == largest) & (scale > _SMALLEST_SCALE), 255, codes)
        codes = jnp.clip(codes, 0, 255)
        if noise is not None:
            # Where the offset's last bit is larger than a code, several codes are one float.
            codes = jnp.round(((codes * scale + offset) - offset) / scale)
        return jnp.concatenate([codes.astype(jnp.uint8), as_bytes(scale), as_bytes(offset)], axis=1)


@dataclasses.dataclass(frozen=True)
class ScaledFloat8Rows(RowFormat):
    """Rows of 8-bit floats with a float32 scale each.

    A stored row is the codes, then the scale. An element is ``scale * code``. The scale has 20
    significant bits and takes the row's largest absolute value to the type's largest number.

    Attributes:
        code: Type of the codes: "float8_e4m3fn" (largest number 448) or "float8_e5m2" (57344).
    """

    code: str

    dtype = "uint8"
    max_abs = float(np.finfo(np.float32).max / 2)

    @property
    def name(self) -> str:
        return self.code.removesuffix("fn")

    def width(self, dim: int) -> int:
        return dim + 4

    def pack(self, rows: Float[Array, "n dim"]) -> UInt8[Array, "n width"]:
        return self._pack(rows.astype(jnp.float32), None)

    def pack_at_random(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"]
    ) -> Shaped[Array, "n width"]:
        return self._pack(rows, noise)

    def unpack(self, packed: UInt8[Array, "n width"], dim: int) -> Float[Array, "n dim"]:
        codes = jax.lax.bitcast_convert_type(packed[:, :dim], jnp.dtype(self.code))
        scale = jax.lax.bitcast_convert_type(packed[:, dim:], jnp.float32)
        return codes.astype(jnp.float32) * scale[:, None]

    def _pack(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"] | None
    ) -> UInt8[Array, "n width"]:
        grid = FloatGrid.of(self.code)
        sizes = jnp.abs(rows)
        largest = jnp.max(sizes, axis=1, keepdims=True)
        exact = _divide(largest, grid.largest)
        scale = cut_bits(exact, 4, None if noise is None else noise[:, :1] << 28)
        scale = jnp.maximum(scale, _SMALLEST_SCALE)
        is_largest = (sizes == largest) & (scale > _SMALLEST_SCALE)
        codes = _bound(rows / scale, is_largest, rows, grid.largest)
        if noise is not None:
            codes = jnp.where(is_largest, codes, grid.round(codes, noise))
        codes = jax.lax.bitcast_convert_type(codes.astype(self.code), jnp.uint8)
        return jnp.concatenate([codes, as_bytes(scale)], axis=1)


def _bound(
    codes: Float[Array, "n dim"],
    is_largest: Bool[Array, "n dim"],
    rows: Float[Array, "n dim"],
    bound: float,
) -> Float[Array, "n dim"]:
    """Return codes within a bound, which a row's largest elements have."""
    return jnp.where(is_largest, jnp.copysign(bound, rows), jnp.clip(codes, -bound, bound))


def _divide(values: Float[Array, "n 1"], divisor: float) -> Float[Array, "n 1"]:
    """Divide by a constant: XLA would multiply by its reciprocal, which rounds otherwise."""
    return values / jnp.where(jnp.isnan(values), jnp.nan, jnp.float32(divisor))
