"""What the embedding kernels compute: the primitives, in words every implementation obeys.

A *group* is a set of tables of equal width and type stacked into one ``[num_rows, dim]`` array. A
batch reaches the kernels as the arrays of a `KeyedJaggedArray`, untouched: ``ids`` of all keys,
``lengths`` of all bags. `BagLayout` says, statically, where each feature of the group lies in them.

The primitives:

``new_rows(row, num_rows)``
    A new array of ``num_rows`` rows that all are ``row``: what tables and their state begin as.
``pooled_lookup(table, ids, lengths, weights, layout, dtype)``
    The sum or mean of each bag's rows, ``[layout.num_bags, dim]`` of ``dtype``.
``flatten_bags(ids, lengths, weights, layout)``
    The batch as flat `Lookups`: for every position its row, its bag and its scale.
``row_lookup(table, rows)``
    ``table[rows]``; zeros where ``rows`` is `num_rows` (padding), NaN at any other row outside.
``build_runs(rows, num_rows)``
    Stable sort of ``rows`` and the runs of equal rows in it, as `Runs`.
``bucket(owners, num_owners)``
    Groups lookups by owner, for the exchange between devices, as `Buckets`. An owner outside
    ``[0, num_owners)`` is none.
``shift_rows(rows, starts, shifts, num_rows, outside)``
    ``rows`` in another numbering: each plus the shift of the stretch of rows it lies in.
``sum_rows(lookups, gradients, num_rows, bound)``
    The sum of the gradients of each row's lookups, ``[num_rows, dim]`` float32.
``fused_update(table, state, lookups, gradients, optimizer, step)``
    Sums the gradients of each row that occurs, applies the row optimizer, writes each row once.

What holds for all of them: a position past a feature's ids is padding and contributes nothing. An
id outside ``[0, row_count)`` never touches memory: it makes the bag NaN (so that the loss shows it)
and updates nothing. Sums are taken in float32. Results repeat bit for bit.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int32


@dataclasses.dataclass(frozen=True)
class BagLayout:
    """Where a group's features lie in the arrays of a batch; one entry a feature, all static.

    Attributes:
        id_starts: First position of the feature's segment in ``ids``.
        capacities: Length of that segment; the feature's ids fill its front.
        length_starts: Position of the feature's first bag in ``lengths``.
        strides: Bags of the feature.
        row_offsets: First row of the feature's table in the group's array.
        row_counts: Rows of the feature's table.
        means: Whether bags are averaged rather than summed.
        interleave: Whether bags of all features alternate in the output, if they can.
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
        """Positions of all the features' segments, padding included."""
        return sum(self.capacities)

    @property
    def num_bags(self) -> int:
        return sum(self.strides)

    @property
    def is_interleaved(self) -> bool:
        """Whether bags of all features alternate in the output; they can if they are as many.

        Then bag ``b`` of feature ``f`` is row ``b * num_features + f`` of the output (so that it
        reshapes to ``[batch, num_features, dim]`` for free). Otherwise bags follow each other
        feature by feature. Of one feature that is the same.
        """
        return len(self.strides) == 1 or (self.interleave and len(set(self.strides)) <= 1)

    def bag_rows(self, feature: int) -> slice:
        """Rows of the output that hold the feature's bags, in order."""
        if self.is_interleaved:
            return slice(feature, None, self.num_features)
        start = sum(self.strides[:feature])
        return slice(start, start + self.strides[feature])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookups:
    """A batch as a flat list of lookups, in the order of the features' segments.

    Attributes:
        rows: Row of the group's table; ``num_rows`` or more where nothing is looked up.
        bags: Row of the output (and of its gradient) that the lookup belongs to; in range also at
            padding. None: lookup ``i`` belongs to output row ``i`` (per-id lookups).
        scales: What the row is multiplied by: the weight, over the bag's length if averaged.
            None: 1.
    """

    rows: Int32[Array, " lookups"]
    bags: Int32[Array, " lookups"] | None
    scales: Float[Array, " lookups"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Lookups sorted by row, cut into runs of equal rows.

    Attributes:
        order: Stable permutation that sorts the rows.
        segments: Run that each sorted lookup belongs to, ascending.
        unique: Row of each run, ascending; padded with ``num_rows``.
        inverse: Run that each lookup belongs to, in the order that they came in.
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
        order: Stable permutation that brings each owner's lookups together, owner by owner; those
            without an owner come last.
        counts: Lookups of each owner.
    """

    order: Int32[Array, " lookups"]
    counts: Int32[Array, " owners"]
