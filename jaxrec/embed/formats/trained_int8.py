"""Rows of 8-bit integers that are trained; see `jaxrec.embed.formats.scales`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8, UInt32

from jaxrec.embed.formats.fused8 import Fused8Rows, as_bytes
from jaxrec.embed.formats.rounding import cut_bits, round_up_or_down
from jaxrec.embed.formats.scales import SMALLEST_SCALE, divide

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
        exact = divide(largest - offset, 255)
        rounded = cut_bits(exact, 8, None if noise is None else noise[:, :1] << 24)
        scale = jnp.where(rounded * 255 >= jnp.abs(offset) * (1 / 64), rounded, exact)
        scale = jnp.maximum(scale, SMALLEST_SCALE)
        codes = (rows - offset) / scale
        codes = jnp.round(codes) if noise is None else round_up_or_down(codes, noise)
        codes = jnp.where((rows == largest) & (scale > SMALLEST_SCALE), 255, codes)
        codes = jnp.clip(codes, 0, 255)
        if noise is not None:
            # Where the offset's last bit is larger than a code, several codes are one float.
            codes = jnp.round(((codes * scale + offset) - offset) / scale)
        return jnp.concatenate([codes.astype(jnp.uint8), as_bytes(scale), as_bytes(offset)], axis=1)
