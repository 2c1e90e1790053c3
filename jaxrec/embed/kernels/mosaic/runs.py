"""The list of the runs of sorted lookups, and the sum of each run's gradients."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed.kernels.mosaic.extents import store_number, sum_between
from jaxrec.embed.kernels.mosaic.indexing import load, running_sum, store
from jaxrec.embed.kernels.mosaic.lanes import FLAT, THREADS, Lanes
from jaxrec.embed.kernels.mosaic.programs import program
from jaxrec.embed.kernels.mosaic.sorted_lookups import SortedLookups, Terms
from jaxrec.embed.kernels.mosaic.tile import BLOCK, Tile, cdiv, loop

# Rows of a part or a block that are on their way at once, and the most elements of them a thread.
_DEPTH, _ELEMENTS = 8, 32

# Fewest groups of a tile: Mosaic finds no layout for the maximum of one number.
FEWEST = 2

# Most elements of a row that a thread of a warp has.
_WIDEST = 8


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
    def of(cls, lookups: SortedLookups, *, interpret: bool) -> tuple[Runs, Array]:
        """List the runs of sorted lookups, and sum the parts of long ones: ``[parts, dim]``.

        A block's sum replaces that of its first part.
        """
        # Two passes without atomics: each program counts the runs that begin among its lookups, and
        # the sums of the counts tell each program where its part of the list begins. Parts are
        # summed in the first pass and blocks in the second, by other programs of the same launch.
        size, num_parts = lookups.size + 1, lookups.num_parts
        gradients = lookups.gradients
        num_programs = -(-size // BLOCK.groups)
        lanes = row_lanes(gradients.shape[1])
        parts = Tile(lanes, max(lanes.height, FEWEST))

        def launch(kernel: Any, num_sums: int, inputs: Any, outputs: Any) -> Any:
            first = -(-num_sums // parts.groups)
            kernel = functools.partial(kernel, tile=parts, first=first)
            num_groups = (first + num_programs) * BLOCK.groups
            return BLOCK.launch(kernel, inputs, outputs, num_groups, interpret=interpret)

        integers = jax.ShapeDtypeStruct((num_programs,), jnp.int32)
        sums = jax.ShapeDtypeStruct((num_parts, gradients.shape[1]), jnp.float32)
        counts, sums = launch(_first_pass, num_parts, (lookups,), (integers, sums))
        arrays = cls(lookups.rows, lookups.rows, lookups.bags, lookups.scales, None)
        runs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size,), x.dtype), arrays)
        runs = dataclasses.replace(runs, count=jax.ShapeDtypeStruct((1,), jnp.int32))
        num_blocks = -(-num_parts // lookups.block) if lookups.has_blocks else 0
        return launch(_second_pass, num_blocks, (lookups, counts), (runs, sums))

    def load(self, number: Int32[Array, " groups"], num_rows: int, lanes: Lanes) -> Run:
        """Load the runs with these numbers."""
        size = self.rows.shape[0]
        inside = number < size
        row = load(self.rows, number, inside, lanes)
        start = load(self.starts, number, inside, lanes)
        end = load(self.starts, number + 1, number + 1 < size, lanes)
        bag = load(self.bags, number, inside, lanes)
        scale = None if self.scales is None else load(self.scales, number, inside, lanes)
        # The last run, which `count` includes, has no row.
        return Run(row, start, end, (bag, scale), inside & (number < self.count[0] - 1))


@dataclasses.dataclass(frozen=True)
class Run:
    """One run for each group of a tile; numbers are undefined where ``is_run`` is False."""

    row: Int32[Array, " groups"]
    start: Int32[Array, " groups"]  # index of its first lookup
    end: Int32[Array, " groups"]  # index of the next run's first lookup
    first: Terms  # bag and factor of its first lookup
    is_run: Bool[Array, " groups"]

    def sum(
        self, lookups: SortedLookups, sums: Any, lanes: Lanes
    ) -> Float[Array, "groups columns"]:
        """Sum the gradients of each run; ``sums`` are from `Runs.of`."""
        # Most runs have one lookup. Its bag is in the list, so its gradient is requested together
        # with the row and its state, and no loop is entered. Longer runs take a loop up to the end
        # of their first part, and a second loop over the sums of their other parts.
        total = lookups.load_gradients(self.first, self.is_run, lanes)
        part = jax.lax.div(self.start, jnp.int32(lookups.cut))
        end = jnp.minimum(self.end, (part + 1) * lookups.cut)
        count = jnp.where(self.is_run, end - self.start, 0)

        def find(turn: Array) -> Terms:
            return lookups.load_terms(self.start + turn, turn < count, lanes)

        def add(turn: Array, total: Array, terms: Terms) -> Array:
            return total + lookups.load_gradients(terms, turn < count, lanes)

        longest = jnp.max(count)
        carry: Any = jnp.int32(1), total, find(jnp.int32(1))
        total = loop(carry, find, add, lambda turn, _: turn < longest)
        parts = OtherParts.of(lookups, part, self.end)
        num_parts = jnp.where(self.is_run, parts.count, 0)

        def add_part(turn: Array, total: Array, _: None) -> Array:
            return total + load(sums, parts.index(turn), turn < num_parts, lanes)

        most = jnp.max(num_parts)
        begin = jnp.int32(0), total, None
        return loop(begin, lambda _: None, add_part, lambda turn, _: turn < most)


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
        first, behind = part + 1, cdiv(end, lookups.cut)
        if not lookups.has_blocks:
            return cls(first, behind, None, behind - first)
        size = lookups.block
        block = cdiv(first, size) * size
        blocks = cdiv(jnp.maximum(behind - block, 0), size)
        return cls(first, block, size, jnp.minimum(behind, block) - first + blocks)

    def index(self, number: Array) -> Int32[Array, " groups"]:
        """Return the index of each run's sum ``number``, from 0 to ``count - 1``."""
        index = self.first + number
        if self.size is None:
            return index
        beyond = index - self.block
        return jnp.where(beyond < 0, index, self.block + beyond * self.size)


def row_lanes(dim: int) -> Lanes:
    """Return the lanes of rows of ``dim`` columns in an update."""
    # One number of elements for all arrays of an update, whatever their types: as many as 16 bytes
    # of float32 have. It divides the width, so that each load is aligned in all of them.
    vector = next(size for size in (4, 2, 1) if dim % size == 0)
    lanes = Lanes.of(dim, vector)
    if lanes.steps * vector <= _WIDEST:
        return lanes
    # All four warps share a row. A warp would have too few registers for the row, its gradient and
    # its state.
    columns = -(-dim // (THREADS * vector)) * THREADS * vector
    return Lanes(THREADS, vector, columns, dim)


def _first_pass(lookups: SortedLookups, counts: Any, sums: Any, *, tile: Tile, first: int) -> None:
    """Sum parts in the first programs, and count runs in the others."""
    number = program()
    pl.when(number < first)(functools.partial(_sum_parts, lookups, sums, tile, number))
    pl.when(number >= first)(functools.partial(_count_runs, lookups, counts, number - first))


def _second_pass(
    lookups: SortedLookups, counts: Any, runs: Runs, sums: Any, *, tile: Tile, first: int
) -> None:
    """Sum blocks of parts in the first programs, and list runs in the others."""
    number = program()
    if first > 0:
        pl.when(number < first)(functools.partial(_sum_blocks, lookups, sums, tile, number))
    pl.when(number >= first)(functools.partial(_list_runs, lookups, counts, runs, number - first))


def _count_runs(lookups: SortedLookups, counts: Any, number: Array) -> None:
    """Count the runs that begin among the lookups of block ``number``."""
    _, is_first = lookups.begin(BLOCK.ids_of(number), FLAT)
    store_number(counts, number, jnp.sum(is_first.astype(jnp.int32), dtype=jnp.int32))


def _list_runs(lookups: SortedLookups, counts: Any, out: Runs, number: Array) -> None:
    """List the runs that begin among the lookups of block ``number``."""
    position = BLOCK.ids_of(number)
    row, is_first = lookups.begin(position, FLAT)
    bag, scale = lookups.load_terms(position, position < lookups.size, FLAT)
    # Many at a time: a batch may have thousands of programs, each of which waits for each turn.
    before = sum_between(counts, 0, number, 16 * THREADS)
    place = before + running_sum(is_first.astype(jnp.int32)) - 1
    store(out.starts, place, is_first, FLAT, position)
    store(out.bags, place, is_first, FLAT, bag)
    if scale is not None:
        store(out.scales, place, is_first, FLAT, scale)
    store(out.rows, place, is_first, FLAT, row)
    # The program of the last lookup knows the number of runs.
    is_last = number == counts.shape[0] - 1
    count = before + jnp.sum(is_first.astype(jnp.int32), dtype=jnp.int32)
    pl.when(is_last)(lambda: store_number(out.count, jnp.int32(0), count))


def _sum_parts(lookups: SortedLookups, out: Any, tile: Tile, number: Array) -> None:
    """Sum the parts of one program, where a run goes on at the part's beginning."""
    part, lanes = tile.ids_of(number), tile.lanes
    start = part * lookups.cut
    row, is_used = lookups.go_on(start, lanes)
    end = jnp.minimum(start + lookups.cut, lookups.size)

    def find(place: Array) -> tuple[Array, Terms]:
        # No mask here depends on a loaded number, so that all of these loads are on their way at
        # once. `add` compares the rows later.
        position = start + place
        inside = position < end
        here = lookups.load_row(jnp.where(inside, position, -1), lanes)
        return here, lookups.load_terms(position, inside, lanes)

    def add(terms: Terms, is_row: Array) -> Array:
        return lookups.load_gradients(terms, is_row, lanes)

    store(out, part, is_used, lanes, _sum_equal(row, is_used, find, add, lanes))


def _sum_blocks(lookups: SortedLookups, sums: Any, tile: Tile, number: Array) -> None:
    """Sum the blocks of one program, and write each in the place of its first part."""
    first, lanes = tile.ids_of(number) * lookups.block, tile.lanes
    is_block = first < lookups.num_parts
    row, is_used = lookups.go_on(jnp.where(is_block, first * lookups.cut, -1), lanes)
    end = jnp.minimum(first + lookups.block, lookups.num_parts)

    def find(place: Array) -> tuple[Array, Array]:
        part = first + place
        return lookups.load_row(jnp.where(part < end, part * lookups.cut, -1), lanes), part

    def add(part: Array, is_row: Array) -> Array:
        return load(sums, part, is_row, lanes)

    store(sums, first, is_used, lanes, _sum_equal(row, is_used, find, add, lanes))


def _sum_equal(
    row: Int32[Array, " groups"],
    is_used: Bool[Array, " groups"],
    find: Callable[[Array], tuple[Array, Any]],
    add: Callable[[Any, Array], Float[Array, "groups columns"]],
    lanes: Lanes,
) -> Float[Array, "groups columns"]:
    """Sum each group's terms up to its first place that has another row than ``row``.

    ``find(place)`` returns the row at a place of each group, and the indices of its term, which
    ``add(indices, is_used)`` loads.
    """
    # Several places at a time. Groups that have come to their end wait for the others.
    depth = max(min(_ELEMENTS // (lanes.steps * lanes.vector), _DEPTH), 1)

    def find_turn(turn: Array) -> list[tuple[Array, Any]]:
        return [find(turn * depth + i) for i in range(depth)]

    def is_left(here: Array) -> Bool[Array, " groups"]:
        return is_used & (here == row)

    def add_turn(_: Array, total: Array, found: list[tuple[Array, Any]]) -> Array:
        for each in [add(indices, is_left(here)) for here, indices in found]:
            total += each
        return total

    def goes_on(_: Array, found: list[tuple[Array, Any]]) -> Bool[Array, ""]:
        return jnp.max(is_left(found[0][0]).astype(jnp.int32)) > 0

    zeros = lanes.cast(jnp.zeros((is_used.size, lanes.columns), jnp.float32))
    carry = jnp.int32(0), zeros, find_turn(jnp.int32(0))
    return loop(carry, find_turn, add_turn, goes_on)
