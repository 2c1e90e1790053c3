"""The runs of sorted lookups, listed one behind the other, and the sums of their gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.triton.sorted_lookups import SortedLookups
from jaxrec.embed.kernels.triton.tile import Source, Tile, cdiv

# What lists the runs: 1024 lookups a program, eight of each lane.
LISTING = Tile(dim=1, columns=1, groups=1024, depth=1, warps=4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of lookups of one row, ascending, each with what tells its first lookup.

    All runs stand side by side, so that a tile of them has no gaps where a batch looks rows up many
    times. Lookups of no row are the last run, or an empty one behind the last lookup. Entries
    behind it have the row ``num_rows`` too, and nothing else that is known.

    Attributes:
        starts: ``[lookups + 1]``, the first lookup of each run.
        rows: ``[lookups + 1]``, its row; ``num_rows`` is none.
        bags: ``[lookups + 1]``, the bag of its first lookup.
        scales: ``[lookups + 1]``, the factor of its first lookup; None: 1.
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
        """Load what tells the runs of a tile."""
        size = self.rows.shape[0]
        inside = run < size
        row = pltriton.load(self.rows.at[run], mask=inside, other=num_rows)
        start = pltriton.load(self.starts.at[run], mask=inside, other=size)
        end = pltriton.load(self.starts.at[run + 1], mask=run + 1 < size, other=0)
        bag = pltriton.load(self.bags.at[run], mask=inside, other=0)
        scale = None
        if self.scales is not None:
            scale = pltriton.load(self.scales.at[run], mask=inside, other=0)
        return Run(row, start, end, bag, scale, row < num_rows)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run for each group of a tile.

    Attributes:
        row: Its row.
        start: Its first lookup.
        end: The first lookup behind it.
        bag: Bag of its first lookup.
        scale: Factor of its first lookup; None: 1.
        is_run: Whether there is one; without, nothing else is known.
    """

    row: Int32[Array, " groups"]
    start: Int32[Array, " groups"]
    end: Int32[Array, " groups"]
    bag: Int32[Array, " groups"]
    scale: Float[Array, " groups"] | None
    is_run: Array

    def sum(self, tile: Tile, lookups: SortedLookups, sums: Any) -> Float[Array, "groups columns"]:
        """Sum the gradients of each run.

        The first lookup's is under way together with all else that a tile loads: most runs have
        one. Then come those up to the end of its part, and the sums of further parts.

        Args:
            tile: The tile.
            lookups: The lookups.
            sums: Their `SortedLookups.sum_parts`.
        """
        total = lookups.load_gradients(tile, (self.bag, self.scale), self.is_run)
        first, part = self.start + 1, self.start // lookups.cut
        end = jnp.minimum(self.end, (part + 1) * lookups.cut)

        def positions(turn: Array | int) -> tuple[Array, Array]:
            position = first[:, None] + tile.lanes(turn)
            return position, self.is_run[:, None] & (position < end[:, None])

        def find(turn: Array | int) -> tuple[Array | int, Any]:
            return turn, lookups.load_terms(*positions(turn))

        def load(found: tuple[Array | int, Any]) -> Array:
            turn, terms = found
            return lookups.load_gradients(tile, terms, positions(turn)[1])

        total += tile.sum_while(Source(find, lambda found: positions(found[0])[1], load))
        places = Places.of(lookups, part, self.end)

        def is_part(turn: Array | int) -> Array:
            return self.is_run[:, None] & (tile.lanes(turn) < places.count[:, None])

        def load_parts(turn: Array | int) -> Array:
            return tile.load_rows(sums, places.at(tile.lanes(turn)), is_part(turn))

        return total + tile.sum_while(Source(lambda turn: turn, is_part, load_parts))


@dataclasses.dataclass(frozen=True)
class Places:
    """Places of the sums of a run's parts but its first: single parts, and then blocks.

    Attributes:
        first: Place of the second part.
        block: The first place from there on that is a block's.
        size: Parts of a block; None: there are none.
        count: Number of places.
    """

    first: Int32[Array, " groups"]
    block: Int32[Array, " groups"]
    size: int | None
    count: Int32[Array, " groups"]

    @classmethod
    def of(cls, lookups: SortedLookups, part: Array, end: Array) -> Places:
        """Return the places of runs that begin in a part and go on up to a lookup."""
        first, behind = part + 1, (end - 1) // lookups.cut + 1
        if not lookups.has_blocks:
            return cls(first, behind, None, behind - first)
        size = lookups.block
        block = cdiv(first, size) * size
        blocks = cdiv(jnp.maximum(behind - block, 0), size)
        return cls(first, block, size, jnp.minimum(behind, block) - first + blocks)

    def at(self, number: Array) -> Array:
        """Return the places of these numbers."""
        place = self.first[:, None] + number
        if self.size is None:
            return place
        beyond = place - self.block[:, None]
        return jnp.where(beyond < 0, place, self.block[:, None] + beyond * self.size)


def _count_runs(lookups: SortedLookups, out: Any, *, tile: Tile) -> None:
    """Count the runs that begin among a program's lookups."""
    position = tile.group_ids()
    _, is_first = lookups.begin(position)
    # One lane writes. The interpreter writes to places that are masked, too, what it has read.
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
    program = position // tile.groups  # the same for all lanes
    before = pltriton.load(counts_so_far.at[program]) - pltriton.load(counts.at[program])
    place = before + jnp.cumsum(is_first.astype(jnp.int32), dtype=jnp.int32) - 1
    place = jnp.where(is_first, place, size)  # where the interpreter writes what is masked
    pltriton.store(out.starts.at[place], position, mask=is_first)
    pltriton.store(out.bags.at[place], bag, mask=is_first)
    if scale is not None:
        pltriton.store(out.scales.at[place], scale, mask=is_first)
    pltriton.store(out.rows.at[place], row, mask=is_first)

    last = jnp.maximum(program, counts.shape[0] - 1)
    is_behind = (position >= pltriton.load(counts_so_far.at[last])) & (position < size)
    place = jnp.where(is_behind, position, size)
    none = jnp.full(row.shape, lookups.num_rows, row.dtype)
    pltriton.store(out.rows.at[place], none, mask=is_behind)
