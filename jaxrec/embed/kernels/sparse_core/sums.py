"""Sums of rows by segment: the bags of a lookup, or the rows whose gradients an update adds up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.sparse_core.subcores import (
    IGNORED,
    LANES,
    Subcores,
    block_size,
    each_row,
    each_vector,
    entries,
    list_buffer,
    rows_buffer,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buffers:
    """A subcore's memory for the sums of a block."""

    indices: Any
    segments: Any  # counted from the block's first
    scales: Any
    targets: Any
    extent: Any
    rows: Any
    sums: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentTerms:
    """The terms of the sums, cut into blocks of segments. A subcore sums a block at a time.

    A block's terms lie side by side, but begin and end at any position. Copies begin at multiples
    of `LANES`, so that they bring terms of other blocks, too.
    """

    indices: Any  # row of the source that each term adds; `IGNORED` for none
    segments: Any  # segment of each term, ascending
    scales: Any  # factor of each term
    targets: Any  # row of the result that each segment has; `IGNORED` for none
    extents: Any  # first position and number of turns of each block, `LANES` numbers a block
    source: Any  # the rows that are added

    @classmethod
    def of(
        cls,
        source: Any,
        indices: Int32[Array, " terms"],
        segments: Int32[Array, " terms"],
        scales: Float[Array, " terms"] | None,
        targets: Int32[Array, " segments"],
    ) -> SegmentTerms:
        """Cut terms into blocks. Segments past the last target are left out."""
        size = block_size(source.shape[1])
        blocks = pl.cdiv(targets.size, size)
        bounds = jnp.searchsorted(
            segments, jnp.minimum(jnp.arange(blocks + 1, dtype=jnp.int32) * size, targets.size)
        )
        first = bounds[:-1] // LANES * LANES
        turns = jnp.where(bounds[1:] > bounds[:-1], pl.cdiv(bounds[1:] - first, size), 0)
        extents = jnp.stack([first, turns], axis=1).astype(jnp.int32)
        scales = jnp.ones(indices.shape) if scales is None else scales.astype(jnp.float32)
        # Room for the last copy.
        return cls(
            jnp.pad(indices, (0, size + LANES), constant_values=IGNORED),
            jnp.pad(segments, (0, size + LANES), mode="edge"),
            jnp.pad(scales, (0, size + LANES)),
            jnp.pad(targets, (0, blocks * size - targets.size), constant_values=IGNORED),
            jnp.pad(extents, ((0, 0), (0, LANES - 2))).ravel(),
            source,
        )

    @property
    def num_blocks(self) -> int:
        return self.extents.shape[0] // LANES

    @property
    def buffers(self) -> Buffers:
        """The types of the buffers that `sum_block` needs."""
        size, dim = block_size(self.source.shape[1]), self.source.shape[1]
        return Buffers(
            indices=list_buffer(size),
            segments=list_buffer(size),
            scales=list_buffer(size, jnp.float32),
            targets=list_buffer(size),
            extent=list_buffer(LANES),
            rows=rows_buffer(size, dim),
            sums=rows_buffer(size, dim),
        )

    def sum_block(
        self,
        subcores: Subcores,
        block: Int32[Array, ""],
        buffers: Buffers,
        change: Callable[[Array], Array] | None = None,
    ) -> Int32[Array, ""]:
        """Sum a block's segments into ``buffers.sums``, and load their targets.

        ``change`` is applied to rows of the source. Returns 0 if the block has no terms.
        """
        size = buffers.sums.shape[0]
        pltpu.sync_copy(self.targets.at[pl.ds(block * size, size)], entries(buffers.targets))
        pltpu.sync_copy(self.extents.at[pl.ds(block * LANES, LANES)], entries(buffers.extent))
        extent = buffers.extent[pl.ds(0, LANES)]
        first, turns = extent[0], extent[1]

        @pl.loop(0, size)
        def _(i: Array) -> None:
            buffers.sums[pl.ds(i, 1), :] = jnp.zeros((1, self.source.shape[1]), jnp.float32)

        def leave_out_others(vector: Any) -> None:
            segment = buffers.segments[vector] - block * size
            is_inside = (segment >= 0) & (segment < size)
            buffers.segments[vector] = segment
            buffers.indices[vector] = jnp.where(is_inside, buffers.indices[vector], IGNORED)

        def add(i: Array, _: Array, segment: Array, scale: Array) -> None:
            row = buffers.rows[pl.ds(i, 1), :]
            row = row if change is None else change(row)
            buffers.sums[pl.ds(segment, 1), :] += row * scale

        @pl.loop(0, turns)
        def _(turn: Array) -> None:
            here = pl.ds(pl.multiple_of(first + turn * size, LANES), size)
            pltpu.sync_copy(self.indices.at[here], entries(buffers.indices))
            pltpu.sync_copy(self.segments.at[here], entries(buffers.segments))
            pltpu.sync_copy(self.scales.at[here], entries(buffers.scales))
            each_vector(buffers.indices, leave_out_others)
            subcores.read_rows(self.source, buffers.indices, buffers.rows)
            each_row(buffers.indices, add, buffers.segments, buffers.scales)

        return turns
