"""Runs of sorted lookups as a list, and the sum of each run's gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.triton.sorted_lookups import SortedLookups, Terms
from jaxrec.embed.kernels.triton.tile import Source, Tile, cdiv

# Tile of the kernels that list the runs: 1024 lookups a program, eight a lane.
LISTING = Tile(dim=1, columns=1, groups=1024, depth=1, warps=4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """List of the runs of sorted lookups: the lookups of one row are a run.

    An update works on tiles of this list, not of the lookups. Rows that a batch looks up many times
    then leave no gaps in a tile.

    The last run has the row ``num_rows``, which is none: it holds the padding, or is empty. The
    rows of all entries behind it are ``num_rows`` too; their other values are undefined.

    Attributes:
        starts: ``[lookups + 1]``, index of the run's first lookup.
        rows: ``[lookups + 1]``, the run's row, ascending.
        bags: ``[lookups + 1]``, bag of the first lookup.
        scales: ``[lookups + 1]``, factor of the first lookup; None: 1.
    """

    starts: Any
    rows: Any
    bags: Any
    scales: Any

    @classmethod
    def of(cls, lookups: SortedLookups, *, interpret: bool) -> Runs:
        """List the runs of sorted lookups."""
        size = lookups.rows.shape[0] + 1
        launch = functools.partial(LISTING.launch, num_groups=size, interpret=interpret)
        num_programs = -(-size // LISTING.groups)
        kernel = functools.partial(_count_runs, tile=LISTING)
        counts = launch(kernel, (lookups,), jax.ShapeDtypeStruct((num_programs,), jnp.int32))
        arrays = (lookups.rows, lookups.rows, lookups.bags, lookups.scales)
        outputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size,), x.dtype), cls(*arrays))
        kernel = functools.partial(_list_runs, tile=LISTING)
        return launch(kernel, (lookups, counts, jnp.cumsum(counts, dtype=jnp.int32)), outputs)

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
        return Run(row, start, end, (bag, scale), row < num_rows)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run for each group of a tile.

    Attributes:
        row: The run's row.
        start: Index of its first lookup.
        end: Index of the next run's first lookup.
        first: Bag and factor of its first lookup.
        is_run: Whether the group has a run; the other values are undefined where it has none.
    """

    row: Int32[Array, " groups"]
    start: Int32[Array, " groups"]
    end: Int32[Array, " groups"]
    first: Terms
    is_run: Array

    def sum(self, tile: Tile, lookups: SortedLookups, sums: Any) -> Float[Array, "groups columns"]:
        """Sum the gradients of each run.

        Most runs have one lookup. Its gradient is loaded together with the row and its state, and
        no loop is entered. A first loop adds the gradients up to the end of the run's first part, a
        second one the sums of its other parts.

        Args:
            tile: Shape of the tile.
            lookups: The sorted lookups.
            sums: Sums of their parts, from `SortedLookups.sum_parts`.
        """
        total = lookups.load_gradients(tile, self.first, self.is_run)
        second, part = self.start + 1, self.start // lookups.cut
        end = jnp.minimum(self.end, (part + 1) * lookups.cut)

        # The masks follow from the turn, so that only bags and factors pass from turn to turn.
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
    """Indices of the sums that make up a run, its first part left out.

    They are those of single parts up to the start of a block, and then those of whole blocks, each
    at the index of its first part.

    Attributes:
        first: Index of the run's second part.
        block: Index of the first block that begins there or later.
        size: Parts of a block; None: the batch is too small for blocks.
        count: Number of sums.
    """

    first: Int32[Array, " groups"]
    block: Int32[Array, " groups"]
    size: int | None
    count: Int32[Array, " groups"]

    @classmethod
    def of(cls, lookups: SortedLookups, part: Array, end: Array) -> OtherParts:
        """Return the indices for runs, given their first part and the end of their lookups."""
        first, behind = part + 1, (end - 1) // lookups.cut + 1
        if not lookups.has_blocks:
            return cls(first, behind, None, behind - first)
        size = lookups.block
        block = cdiv(first, size) * size
        blocks = cdiv(jnp.maximum(behind - block, 0), size)
        return cls(first, block, size, jnp.minimum(behind, block) - first + blocks)

    def indices(self, number: Int32[Array, "1 depth"]) -> Int32[Array, "groups depth"]:
        """Return the indices of the sums with these numbers, which count from 0."""
        index = self.first[:, None] + number
        if self.size is None:
            return index
        beyond = index - self.block[:, None]
        return jnp.where(beyond < 0, index, self.block[:, None] + beyond * self.size)


def _count_runs(lookups: SortedLookups, out: Any, *, tile: Tile) -> None:
    """Count the runs that begin among a program's lookups."""
    position = tile.group_ids()
    _, is_first = lookups.begin(position)
    # One lane writes. The interpreter writes to masked places too: it puts back the value there.
    writes = position % tile.groups == 0
    place = jnp.where(writes, position // tile.groups, out.shape[0])
    count = jnp.broadcast_to(jnp.sum(is_first, dtype=jnp.int32), position.shape)
    pltriton.store(out.at[place], count, mask=writes)


def _list_runs(
    lookups: SortedLookups, counts: Any, counts_so_far: Any, out: Runs, *, tile: Tile
) -> None:
    """List the runs that begin among a program's lookups."""
    size = out.rows.shape[0]
    position = tile.group_ids()
    row, is_first = lookups.begin(position)
    bag, scale = lookups.load_terms(position, position < size - 1)
    program = position // tile.groups  # the same in all lanes
    before = pltriton.load(counts_so_far.at[program]) - pltriton.load(counts.at[program])
    place = before + jnp.cumsum(is_first.astype(jnp.int32), dtype=jnp.int32) - 1
    place = jnp.where(is_first, place, size)  # masked, and out of range for the interpreter
    pltriton.store(out.starts.at[place], position, mask=is_first)
    pltriton.store(out.bags.at[place], bag, mask=is_first)
    if scale is not None:
        pltriton.store(out.scales.at[place], scale, mask=is_first)
    pltriton.store(out.rows.at[place], row, mask=is_first)

    # The entries behind the last run: each program fills those at its own positions.
    last = jnp.maximum(program, counts.shape[0] - 1)
    is_behind = (position >= pltriton.load(counts_so_far.at[last])) & (position < size)
    place = jnp.where(is_behind, position, size)
    none = jnp.full(row.shape, lookups.num_rows, row.dtype)
    pltriton.store(out.rows.at[place], none, mask=is_behind)
