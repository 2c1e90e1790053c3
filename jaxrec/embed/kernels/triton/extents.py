"""Start and end of each bag's ids, for kernels that walk over bags or search them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int32

from jaxrec.embed.kernels.base import BagLayout
from jaxrec.embed.kernels.segments import segment_of
from jaxrec.embed.kernels.triton.tile import Tile, cdiv
from jaxrec.ragged.key_segments import starts_of

# Tile of the kernels that go over all bags or all ids: 1024 a program, eight a lane.
BLOCK = Tile(dim=1, columns=1, groups=1024, depth=1, warps=4)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The features' segments of an array, cut into blocks: one for each program of a kernel."""

    # A block never has entries of two features. Each program so has one feature, whose numbers
    # (first row, capacity, ...) it loads once, not once for each lane.
    sizes: tuple[int, ...]  # entries of each feature

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks of each feature."""
        return tuple(-(-size // BLOCK.groups) for size in self.sizes)

    def numbers(self, *of_features: Sequence[int]) -> Int32[Array, "numbers features"]:
        """Return an array for `here`: the blocks' own three numbers, then the given ones."""
        own = starts_of(self.counts), self.sizes, starts_of(self.sizes)
        return jnp.array([*own, *of_features], jnp.int32)

    def launch(self, kernel: Any, inputs: Any, outputs: Any, *, interpret: bool) -> Any:
        """Run a kernel with one program for each block; see `Tile.launch`."""
        num_groups = sum(self.counts) * BLOCK.groups
        kernel = functools.partial(kernel, blocks=self)
        return BLOCK.launch(kernel, inputs, outputs, num_groups, interpret=interpret)

    def here(self, numbers: Any) -> tuple[Array, ...]:
        """Return the feature of this program's block, and that feature's `numbers`.

        The first three numbers are the feature's first block, its entries, and the entries of the
        features before.
        """
        feature = segment_of(pl.program_id(0), self.counts)
        return feature, *(numbers[i, feature] for i in range(numbers.shape[0]))

    def places(self, first: Array) -> Int32[Array, " block"]:
        """Return the positions of the block's entries within their feature."""
        block = pl.program_id(0) - first
        return block * BLOCK.groups + jnp.arange(BLOCK.groups, dtype=jnp.int32)


def bag_extents(
    lengths: Int32[Array, " all_bags"], layout: BagLayout, *, interpret: bool
) -> tuple[Int32[Array, " bags"], Int32[Array, " bags"]]:
    """Return the start and end of each bag's ids among all ids, bags feature by feature."""
    # Lengths come from the user, perhaps unchecked. Extents are clipped to the feature's segment,
    # so that wrong lengths give wrong bags and never a read outside of the array.
    #
    # A prefix sum in two passes: the sums of blocks, and then each block from where those before it
    # end. With a block for each feature, the first pass is not needed.
    blocks = Blocks(layout.strides)
    numbers = blocks.numbers(layout.length_starts, layout.id_starts, layout.capacities)
    launch = functools.partial(blocks.launch, interpret=interpret)
    totals = None
    if max(blocks.counts) > 1:
        output = jax.ShapeDtypeStruct((sum(blocks.counts),), jnp.int32)
        totals = launch(_sum_lengths, (lengths, numbers), output)
    output = jax.ShapeDtypeStruct((layout.num_bags,), jnp.int32)
    return launch(_write_extents, (lengths, numbers, totals), (output, output))


def _load_counts(lengths: Any, place: Array, stride: Array, start: Array, capacity: Array) -> Array:
    """Load the lengths of a feature's bags, each clipped to ``[0, capacity]``."""
    counts = pltriton.load(lengths.at[start + place], mask=place < stride, other=0)
    return jnp.clip(counts, 0, capacity)


def _sum_lengths(lengths: Any, numbers: Any, out: Any, *, blocks: Blocks) -> None:
    """Sum the lengths of a block."""
    _, first, stride, _, length_start, _, capacity = blocks.here(numbers)
    counts = _load_counts(lengths, blocks.places(first), stride, length_start, capacity)
    out[pl.program_id(0)] = jnp.sum(counts, dtype=jnp.int32)


def _write_extents(
    lengths: Any, numbers: Any, totals: Any, starts: Any, ends: Any, *, blocks: Blocks
) -> None:
    """Write the extents of a block's bags, given ``totals``, the sum of each block's lengths."""
    _, first, stride, first_bag, length_start, id_start, capacity = blocks.here(numbers)
    place = blocks.places(first)
    counts = _load_counts(lengths, place, stride, length_start, capacity)
    sums = id_start + jnp.cumsum(counts, dtype=jnp.int32)
    if totals is not None:
        sums += sum_before(totals, first, pl.program_id(0))
    # Sums of wrong lengths may wrap around int32, and are clipped all the same.
    limit = id_start + capacity
    bag = jnp.where(place < stride, first_bag + place, starts.shape[0])
    for target, values in ((starts, sums - counts), (ends, sums)):
        pltriton.store(target.at[bag], jnp.clip(values, id_start, limit), mask=place < stride)


def sum_before(totals: Any, first: Array, end: Array) -> Array:
    """Return the sum of ``totals[first:end]``."""

    def add(turn: Array, sums: Array) -> Array:
        block = first + turn * BLOCK.groups + jnp.arange(BLOCK.groups, dtype=jnp.int32)
        return sums + pltriton.load(totals.at[block], mask=block < end, other=0)

    turns = cdiv(end - first, BLOCK.groups)
    return jnp.sum(
        jax.lax.fori_loop(0, turns, add, jnp.zeros(BLOCK.groups, jnp.int32)), dtype=jnp.int32
    )
