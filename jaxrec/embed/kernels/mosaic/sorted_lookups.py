"""Lookups sorted by row, and the sums of gradients that frequent rows need."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed.kernels.base import Lookups
from jaxrec.embed.kernels.mosaic.indexing import load
from jaxrec.embed.kernels.mosaic.lanes import Lanes

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
        # As unsigned numbers, negative rows are past the end too. They stay as they are: to replace
        # them first would be a launch of its own.
        rows, bags, scales = lookups.rows, lookups.bags, lookups.scales
        rows = jax.lax.bitcast_convert_type(rows, jnp.uint32)
        # Two operands, so that XLA takes CUB's radix sort. With scales, positions are sorted, and
        # bags and scales are gathered by them.
        if scales is None and bags is not None:
            rows, bags = jax.lax.sort((rows, bags), num_keys=1, is_stable=False)
        else:
            positions = jnp.arange(rows.size, dtype=jnp.int32)
            rows, order = jax.lax.sort((rows, positions), num_keys=1, is_stable=False)
            bags = order if bags is None else bags[order]
            scales = None if scales is None else scales[order].astype(jnp.float32)
        rows = jax.lax.bitcast_convert_type(rows, jnp.int32)
        return cls(rows, bags, scales, gradients, num_rows, clip_value, cut, block)

    @property
    def size(self) -> int:
        return self.rows.shape[0]

    @property
    def num_parts(self) -> int:
        """Number of parts of ``cut`` lookups, whether or not a run goes on where a part begins."""
        return -(-self.size // self.cut)

    @property
    def has_blocks(self) -> bool:
        return self.num_parts > self.block

    def load_row(self, position: Int32[Array, " n"], lanes: Lanes) -> Int32[Array, " n"]:
        """Load the row index of the lookup at each position.

        It is ``num_rows`` where a position holds padding or lies outside of the list.
        """
        inside = (position >= 0) & (position < self.size)
        row = load(self.rows, position, inside, lanes)
        is_row = inside & (row >= 0) & (row < self.num_rows)
        return jnp.where(is_row, row, self.num_rows)

    def begin(
        self, position: Int32[Array, " n"], lanes: Lanes
    ) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
        """Return the row of the lookup at each position, and whether a run begins there."""
        # Behind the last lookup, a run of padding begins if none began before: `Runs` relies on it.
        row, before = self.load_row(position, lanes), self.load_row(position - 1, lanes)
        return row, (position == 0) | ((position <= self.size) & (row != before))

    def go_on(
        self, position: Int32[Array, " n"], lanes: Lanes
    ) -> tuple[Int32[Array, " n"], Bool[Array, " n"]]:
        """Return each position's row, and whether it goes on the run of the position before."""
        row, before = self.load_row(position, lanes), self.load_row(position - 1, lanes)
        return row, (row < self.num_rows) & (row == before)

    def load_terms(
        self, position: Int32[Array, " n"], is_used: Bool[Array, " n"], lanes: Lanes
    ) -> Terms:
        """Load the bag and the factor (None: 1) of the lookup at each position."""
        bag = load(self.bags, position, is_used, lanes)
        if self.scales is None:
            return bag, None
        return bag, load(self.scales, position, is_used, lanes)

    def load_gradients(
        self, terms: Terms, is_used: Bool[Array, " n"], lanes: Lanes
    ) -> Float[Array, "n columns"]:
        """Load the clipped and scaled gradients of lookups; unused ones are zeros."""
        bag, scale = terms
        rows = load(self.gradients, bag, is_used, lanes).astype(jnp.float32)
        if self.clip_value is not None:
            rows = jnp.minimum(jnp.maximum(rows, -self.clip_value), self.clip_value)
        # Factors of unused lookups were not loaded: they are zeros.
        return rows if scale is None else rows * lanes.spread(scale)
