"""The data types of the embedding kernels, and the rules that every implementation obeys.

A *group* is a set of tables of equal width and type stacked into one ``[num_rows, dim]`` array. A
batch reaches the kernels as the arrays of a `KeyedJaggedArray`, untouched: ``ids`` of all keys,
``lengths`` of all bags. A `BagLayout` says, statically, where each feature of the group lies in
them. `jaxrec.embed.kernels` lists the primitives; `reference.py` and `updates.py` define them.

Rules of all primitives:

* Row ``num_rows`` is padding: it contributes zeros and is never updated. So is each position behind
  a feature's ids.
* Any other row outside ``[0, num_rows)`` is bad and never touches memory: its lookup is NaN, which
  makes its bag and the loss NaN, and it is never updated. ``flatten_bags`` writes
  `BAD_ROW` for an id outside its table.
* Sums are taken in float32, and results repeat bit for bit.
* A primitive's keyword-only arguments are hints. Results do not depend on them, and an
  implementation may leave them out of its signature.

The hints ``parts_in`` and ``parts_out`` serve exchanges between simulated devices: XLA's CPU
all-to-all takes and returns one array per device. An exchange splits the array that a primitive
returns into ``parts_out`` equal parts, and has concatenated the array that a primitive reads from
``parts_in`` equal parts, both along the first axis. The CPU kernels read and write the parts
directly, and XLA removes the splits and concatenations between as dead code. No feature's bags lie
in two parts of a result.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
from jaxtyping import Array, Float, Int32

from jaxrec.embed.formats import TableArray

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
    """Positions of a group's features in the arrays of a batch: static, one entry per feature.

    Attributes:
        id_starts: First position of the feature's segment in ``ids``.
        capacities: Length of that segment; the feature's ids fill its front.
        length_starts: Position of the feature's first bag in ``lengths``.
        strides: Bags of the feature.
        row_offsets: First row of the feature's table in the group's array.
        row_counts: Rows of the feature's table.
        means: Whether bags are averaged rather than summed.
        interleave: Whether bags of all features alternate in the output, where each feature has
            the same number of bags.
    """

    id_starts: tuple[int, ...]
    capacities: tuple[int, ...]
    length_starts: tuple[int, ...]
    strides: tuple[int, ...]
    row_offsets: tuple[int, ...]
    row_counts: tuple[int, ...]
    means: tuple[bool, ...]
    interleave: bool = True

    @property
    def num_features(self) -> int:
        return len(self.strides)

    @property
    def num_positions(self) -> int:
        """Length of all the features' segments together, padding included."""
        return sum(self.capacities)

    @property
    def num_bags(self) -> int:
        return sum(self.strides)

    @property
    def is_interleaved(self) -> bool:
        """Whether bags of all features alternate in the output.

        Bag ``b`` of feature ``f`` is then row ``b * num_features + f`` of the output, which
        reshapes to ``[batch, num_features, dim]`` for free. Otherwise bags follow each other
        feature by feature. The two orders of a single feature are equal.
        """
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
        rows: Row of the group's table; ``num_rows`` at padding, `BAD_ROW` for an id outside its
            table.
        bags: Row of the output (and of its gradient) that the lookup belongs to; in range also at
            padding. None: lookup ``i`` belongs to output row ``i`` (per-id lookups).
        scales: Factor of the row: the weight, divided by the bag's length if averaged. None: 1.
        owners: Device of a mesh that has the row in its array, whose rows ``rows`` number, where
            int32 cannot number the rows of all devices; kernels do not look at it. None: ``rows``
            are rows of the group.
    """

    rows: Int32[Array, " lookups"]
    bags: Int32[Array, " lookups"] | None
    scales: Float[Array, " lookups"] | None
    owners: Int32[Array, " lookups"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Lookups sorted by row, cut into runs of equal rows.

    Attributes:
        order: Stable permutation that sorts the rows.
        segments: Run that each sorted lookup belongs to, ascending.
        unique: Row of each run, ascending; padded with ``num_rows``.
        inverse: Run that each lookup belongs to, lookups in their original order.
    """

    order: Int32[Array, " lookups"]
    segments: Int32[Array, " lookups"]
    unique: Int32[Array, " lookups"]
    inverse: Int32[Array, " lookups"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buckets:
    """Lookups grouped by the device that owns their row.

    Attributes:
        order: Stable permutation that sorts the lookups by owner; lookups without an owner come
            last.
        counts: Number of lookups of each owner.
    """

    order: Int32[Array, " lookups"]
    counts: Int32[Array, " owners"]
