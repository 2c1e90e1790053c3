"""Distribution of rows over the threads of a program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, Shaped

from jaxrec.embed.kernels.mosaic.programs import is_interpreted

THREADS = 128  # of a program: one warpgroup
WARP = 32
# Largest number of vectors of a row that a thread has, if one warp shares the row. In a lookup, two
# warps share wider rows: with four, a program would have one row, and Mosaic finds no layout for
# the maximum of one length. Updates let four warps share a row (`runs.row_lanes`), as each of their
# programs has two rows or more.
_MOST_VECTORS = 8


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Distribution of rows ``[n, columns]`` over the threads of a program."""

    threads: int  # threads that share a row: a power of two up to 128
    vector: int  # elements that a thread has side by side, and loads at once
    columns: int  # columns of a row, with padding: a multiple of ``threads * vector``
    width: int  # columns that are not padding
    first: int = 0  # element of a stored row that is column 0

    @classmethod
    def of(cls, width: int, vector: int, first: int = 0) -> Lanes:
        """Return the lanes of rows of ``width`` columns; a thread loads ``vector`` of them at once.

        ``first`` is the element of a stored row that is column 0.
        """
        vectors = -(-width // vector)
        threads = min(pl.next_power_of_2(vectors), WARP)
        if vectors > WARP * _MOST_VECTORS:
            threads = 2 * WARP
        return cls(threads, vector, -(-vectors // threads) * threads * vector, width, first)

    @property
    def height(self) -> int:
        """Number of rows that the threads hold at a time; ``n`` is a multiple of this number."""
        return THREADS // self.threads

    @property
    def steps(self) -> int:
        """Number of a row's vectors that each of the row's threads has."""
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

    def numbers(self, count: int) -> Int32[Array, " count"]:
        """Return 0, 1, ..., ``count - 1``."""
        return self.cast(jnp.arange(count, dtype=jnp.int32))

    def column_ids(self, count: int) -> Int32[Array, "count columns"]:
        """Return the number of each column, for ``count`` rows."""
        return self.cast(jax.lax.broadcasted_iota(jnp.int32, (count, self.columns), 1))

    def spread(self, numbers: Shaped[Array, " n"]) -> Shaped[Array, "n columns"]:
        """Repeat each row's number in all of its columns."""
        return jax.lax.broadcast_in_dim(numbers, (*numbers.shape, self.columns), (0,))


# One number a thread, for kernels that go over all bags or all ids: 128 at a time, in order.
FLAT = Lanes(threads=1, vector=1, columns=1, width=1)


@functools.cache
def _layout(threads: int, vector: int) -> Any:
    """Return the layout of rows that ``threads`` threads share, ``vector`` elements each."""
    warps, lanes = max(threads // WARP, 1), min(threads, WARP)  # that share a row
    height, width = WARP // lanes, lanes * vector  # of what a warp holds
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
