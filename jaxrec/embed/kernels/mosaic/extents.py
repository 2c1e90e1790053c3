"""Start and end of each bag's ids, for kernels that walk over bags or search them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrec.embed.kernels.base import BagLayout
from jaxrec.embed.kernels.mosaic.indexing import keep_rolled, load, running_sum, store
from jaxrec.embed.kernels.mosaic.lanes import FLAT, THREADS
from jaxrec.embed.kernels.mosaic.programs import program
from jaxrec.embed.kernels.mosaic.tile import BLOCK
from jaxrec.embed.kernels.segments import segment_of
from jaxrec.ragged.key_segments import starts_of


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The features' segments of an array, cut into blocks: one for each program of a kernel."""

    # A block never has entries of two features. Each program so has one feature, whose numbers
    # (first row, capacity, ...) it loads once, not once for each thread.
    sizes: tuple[int, ...]  # entries of each feature

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks of each feature."""
        return tuple(-(-size // BLOCK.groups) for size in self.sizes)

    def numbers(self, *of_features: Sequence[int]) -> Int32[Array, "numbers features"]:
        """Return an array for `here`: the blocks' own three numbers, then the given ones."""
        own = starts_of(self.counts), self.sizes, starts_of(self.sizes)
        return jnp.array([*own, *of_features], jnp.int32)

    def launch(
        self, kernel: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...], *, interpret: bool
    ) -> Any:
        """Run a kernel with one program for each block; see `Tile.launch`."""
        num_groups = sum(self.counts) * BLOCK.groups
        kernel = functools.partial(kernel, blocks=self)
        return BLOCK.launch(kernel, inputs, outputs, num_groups, interpret=interpret)

    def here(self, numbers: Any) -> tuple[Array, ...]:
        """Return the feature of this program's block, and that feature's `numbers`.

        The first three numbers are the feature's first block, its entries, and the entries of the
        features before.
        """
        feature = segment_of(program(), self.counts)
        return feature, *(numbers[i, feature] for i in range(numbers.shape[0]))

    def places(self, first: Array) -> Int32[Array, " block"]:
        """Return the positions of the block's entries within their feature."""
        return BLOCK.group_ids() - first * BLOCK.groups


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
        (totals,) = launch(_sum_lengths, (lengths, numbers), (output,))
    output = jax.ShapeDtypeStruct((layout.num_bags,), jnp.int32)
    return launch(_write_extents, (lengths, numbers, totals), (output, output))


def _load_counts(lengths: Any, place: Array, stride: Array, start: Array, capacity: Array) -> Array:
    """Load the lengths of a feature's bags, each clipped to ``[0, capacity]``."""
    counts = load(lengths, start + place, place < stride, FLAT)
    return jnp.minimum(jnp.maximum(counts, 0), capacity)


def _sum_lengths(lengths: Any, numbers: Any, out: Any, *, blocks: Blocks) -> None:
    """Sum the lengths of a block."""
    _, first, stride, _, length_start, _, capacity = blocks.here(numbers)
    counts = _load_counts(lengths, blocks.places(first), stride, length_start, capacity)
    store_number(out, program(), jnp.sum(counts, dtype=jnp.int32))


def store_number(array: Any, index: Int32[Array, ""], number: Int32[Array, ""]) -> None:
    """Store one number of a program."""
    thread = FLAT.numbers(THREADS)
    everywhere = FLAT.cast(jnp.broadcast_to(number, thread.shape))
    store(array, thread + index, thread == 0, FLAT, everywhere)


def sum_between(array: Any, first: Array | int, end: Array, count: int) -> Int32[Array, ""]:
    """Return the sum of ``array[first:end]``; ``count`` numbers are loaded at once."""

    def add(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start, sums = carry
        keep_rolled()
        place = start + FLAT.numbers(count)
        return start + count, sums + load(array, place, place < end, FLAT)

    zeros = FLAT.cast(jnp.zeros(count, jnp.int32))
    begin = jnp.int32(first), zeros
    sums = jax.lax.while_loop(lambda carry: carry[0] < end, add, begin)[1]
    return jnp.sum(sums, dtype=jnp.int32)


def _write_extents(*refs: Any, blocks: Blocks) -> None:
    """Write the extents of a block's bags, given ``totals``, the sum of each block's lengths."""
    lengths, numbers, totals, starts, ends = refs
    _, first, stride, first_bag, length_start, id_start, capacity = blocks.here(numbers)
    place = blocks.places(first)
    counts = _load_counts(lengths, place, stride, length_start, capacity)
    # The totals are on their way together with the lengths.
    before = 0 if totals is None else sum_between(totals, first, program(), THREADS)
    sums = id_start + before + running_sum(counts)
    # Sums of wrong lengths may wrap around int32, and are clipped all the same.
    limit = id_start + capacity
    for target, values in ((starts, sums - counts), (ends, sums)):
        clipped = jnp.minimum(jnp.maximum(values, id_start), limit)
        store(target, first_bag + place, place < stride, FLAT, clipped)
