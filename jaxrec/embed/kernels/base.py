"""The data types of the embedding kernels, and the rules that every implementation obeys.

A *group* is a set of tables of equal width and type, stacked into one ``[num_rows, dim]`` array. A
kernel gets a batch as the arrays of a `KeyedJaggedArray`: ``ids`` of all keys, ``lengths`` of all
bags. A `BagLayout` says, statically, where each feature of the group lies in them. `reference` and
`updates` define the primitives that `jaxrec.embed.kernels` lists.

Rules of all primitives:

* Row ``num_rows`` is padding: its lookup is zeros, and it is never updated. Positions behind a
  feature's last id are padding too.
* Any other row outside ``[0, num_rows)`` is bad. Its memory is never read or written: its lookup is
  NaN, which makes its bag and the loss NaN, and it is never updated. ``flatten_bags`` writes
  `BAD_ROW` for an id outside its table.
* Sums are taken in float32, and results repeat bit for bit.
* A primitive's keyword-only arguments are hints: they change the speed and never the result. An
  implementation may leave them out of its signature.
"""

# The hints `parts_in` and `parts_out`
#
# On simulated devices, exchanges use XLA's CPU all-to-all, which takes and returns one array per
# device. So an exchange splits the result of one primitive into `parts_out` equal parts along the
# first axis, and concatenates `parts_in` equal parts into the operand of the next. A kernel that
# knows the number of parts reads and writes them directly; the splits and concatenations are then
# dead code, which XLA removes. Bags of one feature never lie in two parts of a result.

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
from jaxtyping import Array, Float, Int32

from jaxrec.embed.formats import TableArray

# Row of an id outside its table. Every negative row is bad; this is the one that we write.
BAD_ROW = -1

# Operands of the primitives. Every implementation has them, so that their shapes stand here.
Table: TypeAlias = Float[TableArray, "rows dim"]  # a group's rows, plain or packed
State: TypeAlias = dict[str, TableArray]  # their optimizer state, by the optimizer's names
Ids: TypeAlias = Int32[Array, " ids"]  # of all keys of a batch
Lengths: TypeAlias = Int32[Array, " all_bags"]  # of all its bags
Weights: TypeAlias = Float[Array, " ids"] | None  # of each id; None: 1
RowIndices: TypeAlias = Int32[Array, " n"]
BagRows: TypeAlias = Float[Array, "bags dim"]  # pooled rows, or their gradients: one row a bag


@dataclasses.dataclass(frozen=True)
class BagLayout:
    """Positions of a group's features in the arrays of a batch: static, one entry per feature."""

    id_starts: tuple[int, ...]  # first position of the feature's segment in ``ids``
    capacities: tuple[int, ...]  # length of the segment, whose front the feature's ids fill
    length_starts: tuple[int, ...]  # position of the feature's first bag in ``lengths``
    strides: tuple[int, ...]  # number of bags
    row_offsets: tuple[int, ...]  # first row of the feature's table in the group's array
    row_counts: tuple[int, ...]  # rows of the feature's table
    means: tuple[bool, ...]  # whether bags are averaged rather than summed
    interleave: bool = True  # whether output rows alternate between features; see `is_interleaved`
    takes_max: bool = False  # whether bags have the largest element of each column, not the sum

    @property
    def num_features(self) -> int:
        return len(self.strides)

    @property
    def num_positions(self) -> int:
        """Length of the features' segments together, padding included."""
        return sum(self.capacities)

    @property
    def num_bags(self) -> int:
        return sum(self.strides)

    @property
    def is_interleaved(self) -> bool:
        """Whether bag ``b`` of feature ``f`` is row ``b * num_features + f`` of the output.

        Otherwise bags come feature by feature.
        """
        # Interleaved rows reshape to [batch, num_features * dim], the collection's output, without
        # a transpose. That needs as many bags of each feature. With one feature both orders agree.
        return len(self.strides) == 1 or (self.interleave and len(set(self.strides)) <= 1)

    def bag_rows(self, feature: int) -> slice:
        """Return the rows of the output that hold the feature's bags, in order."""
        if self.is_interleaved:
            return slice(feature, None, self.num_features)
        start = sum(self.strides[:feature])
        return slice(start, start + self.strides[feature])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookups:
    """A batch as a flat list of lookups, in the order of the features' segments.

    Attributes:
        rows: Row of the group's array; ``num_rows`` at padding, `BAD_ROW` for an id outside its
            table.
        bags: Row of the output (and of its gradient) that the lookup belongs to; in range also at
            padding. None: lookup ``i`` belongs to output row ``i`` (per-id lookups).
        scales: Factor of the row: the weight, divided by the bag's length if averaged. None: 1.
        owners: Device of a mesh whose array has the row; ``rows`` then are slots on that device.
            Only where int32 cannot number the rows of all devices. Kernels ignore it.
        winners: Lookup that has the largest element of each column of a bag, -1 for none. Only in
            trained groups with max pooling. `jaxrec.embed.row_gradients` reads it, kernels do not.
    """

    rows: Int32[Array, " lookups"]
    bags: Int32[Array, " lookups"] | None
    scales: Float[Array, " lookups"] | None
    owners: Int32[Array, " lookups"] | None = None
    winners: Int32[Array, "bags dim"] | None = None


@dataclasses.dataclass(frozen=True)
class DroppingFeature:
    """Position of a feature in the arrays of a batch, and the id that its bags lose; static."""

    id_start: int
    capacity: int
    length_start: int
    stride: int
    dropped: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeptIds:
    """A batch's ids after `drop_ids`.

    Attributes:
        ids: The ids that stay, at the front of their feature's segment; then the dropped id.
        lengths: Lengths of the bags without the dropped ids.
        sources: Position in the batch that each id comes from; its own position at padding.
    """

    ids: Int32[Array, " ids"]
    lengths: Int32[Array, " all_bags"]
    sources: Int32[Array, " ids"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Lookups sorted by row, cut into runs of equal rows."""

    order: Int32[Array, " lookups"]  # the stable permutation that sorts the rows
    segments: Int32[Array, " lookups"]  # run of each sorted lookup, ascending
    unique: Int32[Array, " lookups"]  # row of each run, ascending; then ``num_rows``
    inverse: Int32[Array, " lookups"]  # run of each lookup, in the original order


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buckets:
    """Lookups grouped by the device that owns their row, and the number of each owner's."""

    # The stable permutation that sorts lookups by owner; those without an owner come last.
    order: Int32[Array, " lookups"]
    counts: Int32[Array, " owners"]
