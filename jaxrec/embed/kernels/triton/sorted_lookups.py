"""Lookups sorted by row, and the sums of gradients that frequent rows need."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from jaxrec.embed.kernels.base import Lookups
from jaxrec.embed.kernels.triton.tile import Source, Tile

Terms: TypeAlias = tuple[Array, Array | None]  # bags of lookups, and their factors; None: 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SortedLookups:
    """Lookups in the order of their rows, and the gradients that they add."""

    # The lookups of one row are a *run*. In a batch with a power law, one run may have half of all
    # lookups, and a single program would add up its gradients for longer than all others together.
    # So the list of lookups is cut into *parts* at each multiple of `cut`, and many programs sum
    # the parts of a run. In a batch with more than `block` parts, these are summed in *blocks*, cut
    # at multiples again. With a cut of 64, a run of the lookups 100 to 299 has the parts 100 to
    # 127, 128 to 191, 192 to 255 and 256 to 299. The cuts depend on the batch alone, and so does
    # the order of additions: results repeat bit for bit.

    rows: Any  # row of each lookup, ascending as unsigned numbers; those past the end are padding
    bags: Any  # bag of each lookup
    scales: Any  # factor of each lookup; None: 1
    order: Any  # place of each lookup in bags and scales; None: they are sorted as the rows are
    gradients: Any  # [bags, dim]
    num_rows: int = dataclasses.field(metadata={"static": True})
    clip_value: float | None = dataclasses.field(metadata={"static": True})
    cut: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        lookups: Lookups,
        gradients: Float[Array, "bags dim"],
        num_rows: int,
        clip_value: float | None,
        cut: int,
        block: int,
    ) -> SortedLookups:
        """Sort lookups by row."""
        # As unsigned numbers, negative rows are past the end as well. They stay as they are: to
        # replace them first would be a launch of its own.
        rows, bags, scales = lookups.rows, lookups.bags, lookups.scales
        rows = jax.lax.bitcast_convert_type(rows, jnp.uint32)
        # Two operands, so that XLA takes CUB's radix sort. With scales, positions are sorted, and
        # the kernel that counts runs gathers bags and scales by them.
        order = None
        positions = jnp.arange(rows.size, dtype=jnp.int32)
        if scales is None:
            bags = positions if bags is None else bags
            rows, bags = jax.lax.sort((rows, bags), num_keys=1, is_stable=False)
        else:
            rows, order = jax.lax.sort((rows, positions), num_keys=1, is_stable=False)
        rows = jax.lax.bitcast_convert_type(rows, jnp.int32)
        return cls(rows, bags, scales, order, gradients, num_rows, clip_value, cut, block)

    @property
    def num_parts(self) -> int:
        """Number of parts of ``cut`` lookups, whether or not a run goes on where a part begins."""
        return -(-self.rows.shape[0] // self.cut)

    @property
    def has_blocks(self) -> bool:
        return self.num_parts > self.block

    def load_row(self, position: Array) -> Array:
        """Return the row of the lookup at each position; ``num_rows`` at padding and outside."""
        inside = (position >= 0) & (position < self.rows.shape[0])
        row = pltriton.load(self.rows.at[position], mask=inside, other=self.num_rows)
        return jnp.where((row >= 0) & (row < self.num_rows), row, self.num_rows)

    def begin(self, position: Array) -> tuple[Array, Array]:
        """Return the row of the lookup at each position, and whether a run begins there."""
        # Behind the last lookup, a run of padding begins if none began before: `Runs` relies on it.
        row, before = self.load_row(position), self.load_row(position - 1)
        is_first = (position == 0) | ((position <= self.rows.shape[0]) & (row != before))
        return row, is_first

    def go_on(self, position: Array) -> tuple[Array, Array]:
        """Return each position's row, and whether it goes on the run of the position before."""
        row, before = self.load_row(position), self.load_row(position - 1)
        return row, (row < self.num_rows) & (row == before)

    def load_terms(self, position: Array, is_used: Array) -> Terms:
        """Load the bag and the factor (None: 1) of the lookup at each position."""
        bag = pltriton.load(self.bags.at[position], mask=is_used, other=0)
        if self.scales is None:
            return bag, None
        return bag, pltriton.load(self.scales.at[position], mask=is_used, other=0)

    def load_gradients(
        self, tile: Tile, terms: Terms, is_used: Array
    ) -> Float[Array, "*n columns"]:
        """Load the clipped and scaled gradients of lookups; unused ones are zeros."""
        bag, scale = terms
        rows = tile.load_rows(self.gradients, bag, is_used)
        if self.clip_value is not None:
            rows = jnp.clip(rows, -self.clip_value, self.clip_value)
        if scale is not None:
            # Factors of unused lookups are loaded too. They may be NaN, and NaN times zero is NaN.
            rows *= jnp.where(is_used, scale.astype(jnp.float32), 0)[..., None]
        return rows

    def part(self, tile: Tile, start: Array, row: Array, is_row: Array) -> Source:
        """Return the gradients of each row's lookups, from ``start`` to the end of its part."""
        end = (start // self.cut + 1) * self.cut

        def find(turn: Array | int) -> tuple[Array, Terms]:
            # No mask here depends on a loaded number, so that all of these loads are on their way
            # at once. `is_used` compares the rows later.
            position = start[:, None] + tile.lanes(turn)
            inside = position < jnp.minimum(end, self.bags.shape[0])[:, None]
            here = self.load_row(jnp.where(inside, position, -1))
            return here, self.load_terms(position, inside)

        def is_used(found: tuple[Array, Terms]) -> Array:
            return is_row[:, None] & (found[0] == row[:, None])

        def load(found: tuple[Array, Terms]) -> Array:
            return self.load_gradients(tile, found[1], is_used(found))

        return Source(find, is_used, load)

    def sum_parts(self, *, interpret: bool) -> Float[Array, "parts dim"]:
        """Return the sums of parts."""
        num_parts, dim = self.num_parts, self.gradients.shape[1]
        output = jax.ShapeDtypeStruct((num_parts, dim), jnp.float32)
        # At most multiples of `cut` no run goes on, and the part is empty: several side by side.
        tile = Tile.of(dim, 16)
        kernel = functools.partial(_sum_part, tile=tile)
        return tile.launch(kernel, (self,), output, num_parts, interpret=interpret)

    def sum_blocks(self, sums: Any, tile: Tile, number: Array) -> None:
        """Sum the blocks of tile ``number``, and write each in the place of its first part."""
        part = tile.ids_of(number) * self.block
        row, is_used = self.go_on(jnp.where(part < self.num_parts, part * self.cut, -1))
        end = jnp.minimum(part + self.block, self.num_parts)[:, None]

        def find(turn: Array | int) -> tuple[Array, Array]:
            place = part[:, None] + tile.lanes(turn)
            return place, self.load_row(jnp.where(place < end, place * self.cut, -1))

        def is_of_row(found: tuple[Array, Array]) -> Array:
            return is_used[:, None] & (found[1] == row[:, None])

        def load(found: tuple[Array, Array]) -> Array:
            return tile.load_rows(sums, found[0], is_of_row(found))

        total = tile.sum_while(Source(find, is_of_row, load))
        # Masked places must be out of range as well: the interpreter writes back to them what it
        # read.
        out = jnp.where(is_used, part, sums.shape[0])
        tile.store_rows(sums, out, is_used, total)


def _sum_part(lookups: SortedLookups, out: Any, *, tile: Tile) -> None:
    """Sum one part per group, if a run goes on where the part begins."""
    part = tile.group_ids()
    start = part * lookups.cut
    row, is_used = lookups.go_on(start)
    gradients = lookups.part(tile, start, row, is_used)
    total = tile.sum_while(gradients, 1, gradients.load(gradients.find(0)))
    tile.store_rows(out, part, is_used, total)
