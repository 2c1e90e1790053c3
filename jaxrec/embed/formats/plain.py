"""Rows stored as an ordinary array of floats."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxrec.embed.formats.base import RowFormat


@dataclasses.dataclass(frozen=True)
class PlainRows(RowFormat):
    """Rows of "float32", "bfloat16" or "float16", rounded to nearest, ties to even.

    Attributes:
        dtype: The type.
    """

    dtype: str

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def max_abs(self) -> float:
        return float(jnp.finfo(self.dtype).max)

    def width(self, dim: int) -> int:
        return dim

    def take_columns(
        self, packed: Shaped[Array, "n dim"], dim: int, columns: tuple[int, int]
    ) -> Shaped[Array, "n part_dim"]:
        return packed[:, slice(*columns)]

    def pack(self, rows: Float[Array, "n dim"]) -> Shaped[Array, "n dim"]:
        return rows.astype(self.dtype)

    def unpack(self, packed: Shaped[Array, "n dim"], dim: int) -> Float[Array, "n dim"]:
        return packed.astype(jnp.float32)
