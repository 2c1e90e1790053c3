"""Updates of rows that are cut by columns, by an optimizer that needs sums over whole rows.

The owner of a column slice has a partial sum of each row. `update_slices` passes the partial sums
to its exchange, one for each lookup that the owner received, and gets whole sums back.

`sums_of_bags` adds them where each slice lies whole on one device. All owners of a table's slices
have the same lookups of it, in the same order (`OwnerFeatures`). Each writes its partial sums into
a list of all lookups. An all-reduce adds these lists, and each owner reads the sums of its lookups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import BagLayout
from jaxrec.embed.kernels.updates import update_unique
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.exchange.base import clip_tables
from jaxrec.mesh.exchange.owner_features import OwnerFeatures
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.optim.hyperparameters import Step
from jaxrec.optim.norm import cut_rows
from jaxrec.ragged.key_segments import starts_of


def update_slices(
    placed: PlacedGroup,
    table: Float[TableArray, "local_rows dim"],
    state: dict[str, TableArray],
    gradient: RowGradients,
    step: Step,
    channel: Channel,
    whole_sums: Callable[[Float[Array, " lookups"]], Float[Array, " lookups"]],
) -> tuple[Float[TableArray, "local_rows dim"], dict[str, TableArray]]:
    """Update each of this device's rows once, given the gradient of all devices' lookups.

    ``whole_sums`` gets, for each lookup, the sum over this device's columns of its row, or 0 if it
    has no row. It returns the sums over all columns of the row.
    """
    gradient = clip_tables(placed, gradient, channel)
    bounded, looked_up = placed.group.optimizer, gradient.lookups.rows
    optimizer = dataclasses.replace(bounded, clip_value=None, clip_norm=None)
    runs, sums = gradient.sum_by_row(placed.local_rows, bounded.clip_value)
    is_row = (looked_up >= 0) & (looked_up < placed.local_rows)

    def total(partial: Float[Array, " runs"]) -> Float[Array, " runs"]:
        sums = whole_sums(jnp.where(is_row, partial[runs.inverse], 0))
        # All lookups of a row have the same sum, so it does not matter which of them is kept.
        return jnp.zeros_like(partial).at[runs.inverse].set(jnp.where(is_row, sums, 0))

    is_column = placed.is_column(runs.unique, channel.index)
    with cut_rows(placed.whole_dim, total, is_column):
        rows = gradient.rows_to_write(runs.unique, placed.local_rows)
        return update_unique(table, state, rows, sums, optimizer, step, (0,))


@dataclasses.dataclass(frozen=True)
class _Positions:
    """Positions of each owner's lookups in the list of one sender's lookups; static.

    The list has a *segment* for each table and key of the batch. The lookups of an owner lie in the
    columns of `OwnerFeatures`. Positions count units, which are runs of `unit` lookups.

    Attributes:
        unit: Number of lookups of a unit.
        segment: For each unit of the list, the number of its segment and its position there.
        column: For each unit of an owner's lookups, the number of its column and its position
            there.
        columns: First unit of each column that has a segment, ``[owners, slices, segments]``; past
            the owner's lookups where it has fewer slices of the table.
        segments: First unit of each column's segment, ``[owners, columns]``; past the list where
            the column is empty.
    """

    # A unit is the greatest common divisor of the capacities, so segments and columns are whole
    # numbers of units. The static index arrays, which the program holds, are shorter by that.

    unit: int
    segment: tuple[np.ndarray, np.ndarray]
    column: tuple[np.ndarray, np.ndarray]
    columns: np.ndarray
    segments: np.ndarray

    @classmethod
    def of(cls, placed: PlacedGroup, layout: BagLayout) -> _Positions:
        """Return the positions of one batch. Slices that read the same ids share a segment."""
        owned = OwnerFeatures.of_group(placed, layout)
        table = {placed.first_row: placed.table for placed in placed.shards}
        keys = [
            (table[row], start)
            for row, start in zip(layout.row_offsets, layout.id_starts, strict=True)
        ]
        unit = math.gcd(*layout.capacities) or 1
        sizes = {key: size // unit for key, size in zip(keys, layout.capacities, strict=True)}
        segment_starts = dict(zip(sizes, starts_of(sizes.values()), strict=True))
        column_sizes = [size // unit for size in owned.capacities]

        owners = range(placed.num_devices)
        segments = np.full((len(owners), len(column_sizes)), sum(sizes.values()), np.int32)
        of_segment: list[dict[Any, list[int]]] = [{key: [] for key in sizes} for _ in owners]
        for owner, features in enumerate(owned.features):
            columns_of_owner = zip(starts_of(column_sizes), features, strict=False)
            for column, (start, feature) in enumerate(columns_of_owner):
                segments[owner, column] = segment_starts[keys[feature]]
                of_segment[owner][keys[feature]].append(start)
        slices = max((len(starts) for each in of_segment for starts in each.values()), default=0)
        columns = np.full((len(owners), slices, len(sizes)), sum(column_sizes), np.int32)
        for owner, of_owner in enumerate(of_segment):
            for number, starts in enumerate(of_owner.values()):
                columns[owner, : len(starts), number] = starts
        return cls(unit, _units(list(sizes.values())), _units(column_sizes), columns, segments)

    def total(
        self, partial: Float[Array, "senders lookups"], channel: Channel
    ) -> Float[Array, "senders lookups"]:
        """Return the sum of all owners' values of each lookup, which every owner gets."""

        def take(units: Array, starts: np.ndarray, numbers: tuple[np.ndarray, np.ndarray]) -> Array:
            number, place = numbers
            index = jnp.asarray(starts)[channel.index][..., number]
            index += jnp.broadcast_to(place, index.shape)
            return units.at[:, index].get(mode="fill", fill_value=0)

        if not partial.size:
            return partial
        units = partial.reshape(partial.shape[0], -1, self.unit)
        # An owner may have several slices of a table, so it adds its own ones first.
        whole = take(units, self.columns, self.segment).sum(axis=1)
        whole = jax.lax.psum(whole, channel.axes)
        return take(whole, self.segments, self.column).reshape(partial.shape)


def _units(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the segment of each unit, and the unit's position there, given segments' sizes."""
    segment = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return segment, np.arange(segment.size, dtype=np.int32) - np.array(starts_of(sizes))[segment]


def sums_of_bags(
    partial: Float[Array, " lookups"],
    *,
    placed: PlacedGroup,
    layouts: Sequence[BagLayout],
    channel: Channel,
) -> Float[Array, " lookups"]:
    """Turn partial sums into whole ones for `update_slices`, if each slice is on one device.

    ``layouts`` has the layout of each batch whose lookups the gradient has, in turn.
    """
    positions = [_Positions.of(placed, layout) for layout in layouts]
    sizes = [placed.num_devices * each.column[0].size * each.unit for each in positions]
    parts = jnp.split(partial, np.cumsum(sizes)[:-1])
    return jnp.concatenate(
        [
            each.total(part.reshape(placed.num_devices, -1), channel).reshape(-1)
            for each, part in zip(positions, parts, strict=True)
        ]
    )
