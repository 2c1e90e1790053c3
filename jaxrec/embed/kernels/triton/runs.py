"""The list of the runs of sorted lookups, and the sum of each run's gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.triton.extents import sum_before
from jaxrec.embed.kernels.triton.sorted_lookups import SortedLookups, Terms
from jaxrec.embed.kernels.triton.tile import Source, Tile, cdiv

# Tile of the kernels that list runs: 1024 lookups a program, four a lane.
LISTING = Tile(dim=1, columns=1, groups=1024, depth=1, warps=8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """List of the runs of sorted lookups, arrays ``[lookups + 1]``; a run has one row's lookups."""

    # An update works on tiles of this list. On tiles of the lookups, a row that a batch looks up
    # many times would leave gaps: a tile in which no run begins has nothing to update.
    #
    # The last run has the row `num_rows`: it holds the padding, or is empty, and its start is the
    # end of the run before it. Entries behind it are not written.

    starts: Any  # index of the run's first lookup
    rows: Any  # the run's row, ascending
    bags: Any  # bag of the run's first lookup
    scales: Any  # factor of the run's first lookup; None: 1
    count: Any  # [1], the number of runs, the last one included

    @classmethod
    def of(
        cls, lookups: SortedLookups, *, interpret: bool
    ) -> tuple[SortedLookups, Runs, Float[Array, "parts dim"]]:
        """List the runs of sorted lookups, and sum the parts of long ones.

        Also sort the lookups' bags and scales, if they are not. A block's sum replaces that of its
        first part.
        """
        # Two passes without atomics: each program counts the runs that begin among its lookups, and
        # adds up the counts before its own, which tells it where its part of the list begins. A
        # prefix sum of the counts by XLA would be three launches more. The first pass gathers bags
        # and scales, and other programs of the second pass sum blocks: each saves a launch.
        count = lookups.rows.shape[0]
        num_programs = -(-(count + 1) // LISTING.groups)

        def array(size: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size,), dtype)

        counts, kernel = array(num_programs), functools.partial(_count_runs, tile=LISTING)
        launch = functools.partial(LISTING.launch, interpret=interpret)
        if lookups.order is None:
            counts = launch(kernel, (lookups,), counts, count + 1)
        else:
            outputs = counts, array(count), array(count, lookups.scales.dtype)
            counts, bags, scales = launch(kernel, (lookups,), outputs, count + 1)
            lookups = dataclasses.replace(lookups, bags=bags, scales=scales, order=None)

        sums = lookups.sum_parts(interpret=interpret)
        num_blocks = -(-lookups.num_parts // lookups.block) if lookups.has_blocks else 0
        tile = Tile.of(lookups.gradients.shape[1], 16, warps=LISTING.warps)
        first = -(-num_blocks // tile.groups)
        kernel = functools.partial(_list_runs, tile=tile, first=first)
        of_scales = None if lookups.scales is None else array(count + 1, lookups.scales.dtype)
        of_runs = array(count + 1)
        runs = cls(of_runs, of_runs, of_runs, of_scales, array(1))
        num_groups = (first + num_programs) * LISTING.groups
        runs, sums = launch(kernel, (lookups, counts), (runs, sums), num_groups)
        return lookups, runs, sums

    def load(self, run: Array, num_rows: int) -> Run:
        """Load the runs with these indices."""
        size = self.rows.shape[0]
        inside = run < size
        row = pltriton.load(self.rows.at[run], mask=inside, other=num_rows)
        start = pltriton.load(self.starts.at[run], mask=inside, other=size)
        end = pltriton.load(self.starts.at[run + 1], mask=run + 1 < size, other=0)
        bag = pltriton.load(self.bags.at[run], mask=inside, other=0)
        scale = None
        if self.scales is not None:
            scale = pltriton.load(self.scales.at[run], mask=inside, other=0)
        # The last run, which `count` includes, has no row.
        return Run(row, start, end, (bag, scale), inside & (run < self.count[0] - 1))


@dataclasses.dataclass(frozen=True)
class Run:
    """One run for each group of a tile; values are undefined where ``is_run`` is False."""

    row: Int32[Array, " groups"]
    start: Int32[Array, " groups"]  # index of its first lookup
    end: Int32[Array, " groups"]  # index of the next run's first lookup
    first: Terms  # bag and factor of its first lookup
    is_run: Array

    def sum(self, tile: Tile, lookups: SortedLookups, sums: Any) -> Float[Array, "groups columns"]:
        """Sum the gradients of each run; ``sums`` are from `Runs.of`."""
        # Most runs have one lookup. Its bag is in the list, so its gradient is requested together
        # with the row and its state, and no loop is entered. Longer runs take a loop up to the end
        # of their first part, and a second loop over the sums of their other parts.
        total = lookups.load_gradients(tile, self.first, self.is_run)
        second, part = self.start + 1, self.start // lookups.cut
        end = jnp.minimum(self.end, (part + 1) * lookups.cut)

        # Masks are computed from the turn, so that only bags and factors take registers from turn
        # to turn.
        def positions(turn: Array | int) -> tuple[Array, Array]:
            position = second[:, None] + tile.lanes(turn)
            return position, self.is_run[:, None] & (position < end[:, None])

        def find(turn: Array | int) -> tuple[Array | int, Terms]:
            return turn, lookups.load_terms(*positions(turn))

        def load(found: tuple[Array | int, Terms]) -> Array:
            turn, terms = found
            return lookups.load_gradients(tile, terms, positions(turn)[1])

        total += tile.sum_while(Source(find, lambda found: positions(found[0])[1], load))
        parts = OtherParts.of(lookups, part, self.end)

        def is_part(turn: Array | int) -> Array:
            return self.is_run[:, None] & (tile.lanes(turn) < parts.count[:, None])

        def load_parts(turn: Array | int) -> Array:
            return tile.load_rows(sums, parts.indices(tile.lanes(turn)), is_part(turn))

        return total + tile.sum_while(Source(lambda turn: turn, is_part, load_parts))


@dataclasses.dataclass(frozen=True)
class OtherParts:
    """Indices of the sums of a run's parts, without its first part."""

    # Single parts up to the start of a block, then whole blocks, each at the index of its first
    # part. With 16 parts a block, parts 13 to 50 are the sums 13, 14, 15, 16, 32 and 48.
    first: Int32[Array, " groups"]  # the run's second part
    block: Int32[Array, " groups"]  # the first part, there or later, at which a block begins
    size: int | None  # parts of a block; None: the batch is too small for blocks
    count: Int32[Array, " groups"]  # number of sums

    @classmethod
    def of(cls, lookups: SortedLookups, part: Array, end: Array) -> OtherParts:
        """Return the indices for runs, given each one's first part and the end of its lookups."""
        first, behind = part + 1, (end - 1) // lookups.cut + 1
        if not lookups.has_blocks:
            return cls(first, behind, None, behind - first)
        size = lookups.block
        block = cdiv(first, size) * size
        blocks = cdiv(jnp.maximum(behind - block, 0), size)
        return cls(first, block, size, jnp.minimum(behind, block) - first + blocks)

    def indices(self, number: Int32[Array, "1 depth"]) -> Int32[Array, "groups depth"]:
        """Return the indices of a run's sums number 0, 1, ..., ``count - 1``."""
        index = self.first[:, None] + number
        if self.size is None:
            return index
        beyond = index - self.block[:, None]
        return jnp.where(beyond < 0, index, self.block[:, None] + beyond * self.size)


def _count_runs(
    lookups: SortedLookups, out: Any, bags: Any = None, scales: Any = None, *, tile: Tile
) -> None:
    """Count the runs that begin among a program's lookups, and gather their bags and scales."""
    position = tile.group_ids()
    _, is_first = lookups.begin(position)
    # One lane writes. Masked places must be out of range as well: the interpreter writes back to
    # them what it read there.
    writes = position % tile.groups == 0
    place = jnp.where(writes, position // tile.groups, out.shape[0])
    count = jnp.broadcast_to(jnp.sum(is_first, dtype=jnp.int32), position.shape)
    pltriton.store(out.at[place], count, mask=writes)
    if lookups.order is None:
        return
    size = lookups.rows.shape[0]
    inside = position < size
    place = pltriton.load(lookups.order.at[position], mask=inside, other=0)
    # Without bags, each lookup has its own.
    bag = place if lookups.bags is None else _gather(lookups.bags, place, inside)
    target = jnp.where(inside, position, size)  # masked: out of range, as above
    pltriton.store(bags.at[target], bag, mask=inside)
    pltriton.store(scales.at[target], _gather(lookups.scales, place, inside), mask=inside)


def _gather(array: Any, place: Array, inside: Array) -> Array:
    return pltriton.load(array.at[place], mask=inside, other=0)


def _list_runs(
    lookups: SortedLookups, counts: Any, out: Runs, sums: Any, *, tile: Tile, first: int
) -> None:
    """Sum blocks of parts in the first programs, and list runs in the others."""
    number = pl.program_id(0)
    list_some = functools.partial(_list_some, lookups, counts, out, number - first)
    if first == 0:
        list_some()
        return
    pl.when(number < first)(functools.partial(lookups.sum_blocks, sums, tile, number))
    pl.when(number >= first)(list_some)


def _list_some(lookups: SortedLookups, counts: Any, out: Runs, number: Array) -> None:
    """List the runs that begin among the lookups of listing program ``number``."""
    size = out.rows.shape[0]
    position = LISTING.ids_of(number)
    row, is_first = lookups.begin(position)
    bag, scale = lookups.load_terms(position, position < size - 1)
    before = sum_before(counts, jnp.int32(0), number)
    here = jnp.cumsum(is_first.astype(jnp.int32), dtype=jnp.int32)
    place = jnp.where(is_first, before + here - 1, size)  # masked: out of range, as above
    pltriton.store(out.starts.at[place], position, mask=is_first)
    pltriton.store(out.bags.at[place], bag, mask=is_first)
    if scale is not None:
        pltriton.store(out.scales.at[place], scale, mask=is_first)
    pltriton.store(out.rows.at[place], row, mask=is_first)

    # The program of the last lookup knows the number of runs.
    @pl.when(number == counts.shape[0] - 1)
    def _() -> None:
        out.count[0] = before + jnp.sum(is_first, dtype=jnp.int32)
