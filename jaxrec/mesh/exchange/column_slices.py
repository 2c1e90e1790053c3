"""The update of rows that are cut by columns, by an optimizer that needs sums over whole rows.

The owner of a column slice has a part of a row's sum. `update_slices` gives these parts to an
exchange, one for each lookup of the row that the owner received, and gets the whole sums back.

Where each slice lies whole on one device, `sums_of_bags` adds the parts. All owners of a table's
slices have the same lookups of it, in the same order (`OwnerFeatures`). So each writes its part to
the positions of the row's lookups in a list of all lookups; these lists are added up over the
devices, and each owner reads the sums of its lookups.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import BagLayout
from jaxrec.embed.kernels.reference import update_unique
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.exchange.clipping import clip_tables
from jaxrec.mesh.exchange.owner_features import OwnerFeatures
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.optim.hyperparameter import Step
from jaxrec.optim.norm import cut_rows


def update_slices(
    placed: PlacedGroup,
    table: Float[TableArray, "local_rows dim"],
    state: dict[str, TableArray],
    gradient: RowGradients,
    step: Step,
    channel: Channel,
    whole_sums: Callable[[Float[Array, " lookups"]], Float[Array, " lookups"]],
) -> tuple[Float[TableArray, "local_rows dim"], dict[str, TableArray]]:
    """Update each of this device's rows once, by sums over the whole rows.

    Args:
        placed: The group.
        table: This device's rows.
        state: Their optimizer state.
        gradient: The gradient of all devices' lookups of these rows.
        step: Number of updates made before.
        channel: Channel to the other devices.
        whole_sums: From this device's part of a sum over the row of each lookup, 0 where the lookup
            has no row, to the sum over the whole row.
    """
    gradient = clip_tables(placed, gradient, channel)
    bounded, looked_up = placed.group.optimizer, gradient.lookups.rows
    optimizer = dataclasses.replace(bounded, clip_value=None, clip_norm=None)
    runs, sums = gradient.sum_by_row(placed.local_rows, bounded.clip_value)
    is_row = (looked_up >= 0) & (looked_up < placed.local_rows)

    def total(partial: Float[Array, " runs"]) -> Float[Array, " runs"]:
        sums = whole_sums(jnp.where(is_row, partial[runs.inverse], 0))
        # All lookups of a row have the same sum; any of them will do.
        return jnp.zeros_like(partial).at[runs.inverse].set(jnp.where(is_row, sums, 0))

    is_column = placed.is_column(runs.unique, channel.index)
    with cut_rows(placed.whole_dim, total, is_column):
        rows = gradient.rows_to_write(runs.unique, placed.local_rows)
        return update_unique(table, state, rows, sums, optimizer, step, (0,))


@dataclasses.dataclass(frozen=True)
class _Positions:
    """Positions of each owner's lookups in a list of one sender's lookups; all static.

    Attributes:
        capacities: Number of lookups of each column of `OwnerFeatures`.
        starts: ``[owners, columns]``, the first position of each.
        size: Length of the list.
    """

    capacities: tuple[int, ...]
    starts: np.ndarray
    size: int

    @classmethod
    def of(cls, placed: PlacedGroup, layout: BagLayout) -> _Positions:
        """Return the positions of one batch; slices that read the same ids share them."""
        owned = OwnerFeatures.of_group(placed, layout)
        table = {placed.first_row: placed.table for placed in placed.shards}
        keys = [
            (table[row], start)
            for row, start in zip(layout.row_offsets, layout.id_starts, strict=True)
        ]
        sizes = dict(zip(keys, layout.capacities, strict=True))
        starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        # Empty columns lie behind the last feature, and a column's padding may reach beyond, too.
        end = sum(sizes.values())
        first = np.full((placed.num_devices, len(owned.capacities)), end, np.int32)
        for owner, features in enumerate(owned.features):
            first[owner, : len(features)] = [starts[keys[feature]] for feature in features]
        return cls(owned.capacities, first, end + max(owned.capacities, default=0))

    def total(
        self, partial: Float[Array, "senders lookups"], channel: Channel
    ) -> Float[Array, "senders lookups"]:
        """Return the sums over all owners' values of the same lookups; an absent value is 0."""
        starts = jnp.asarray(self.starts)[channel.index]
        columns = jnp.split(partial, np.cumsum(self.capacities)[:-1], axis=1)
        whole = jnp.zeros((partial.shape[0], self.size), partial.dtype)
        for start, column in zip(starts, columns, strict=True):
            there = jax.lax.dynamic_slice_in_dim(whole, start, column.shape[1], axis=1)
            whole = jax.lax.dynamic_update_slice_in_dim(whole, there + column, start, axis=1)
        whole = jax.lax.psum(whole, channel.axes)
        return jnp.concatenate(
            [
                jax.lax.dynamic_slice_in_dim(whole, start, size, axis=1)
                for start, size in zip(starts, self.capacities, strict=True)
            ],
            axis=1,
        )


def sums_of_bags(
    partial: Float[Array, " lookups"],
    *,
    placed: PlacedGroup,
    layouts: Sequence[BagLayout],
    channel: Channel,
) -> Float[Array, " lookups"]:
    """Return the whole sums of `update_slices` where each slice lies whole on one device.

    Args:
        partial: This device's part of the sum of each lookup that it received.
        placed: The group.
        layouts: Layouts of the group's features in the batches that were looked up, in turn.
        channel: Channel to the other devices.
    """
    positions = [_Positions.of(placed, layout) for layout in layouts]
    sizes = [len(each.starts) * sum(each.capacities) for each in positions]
    parts = jnp.split(partial, np.cumsum(sizes)[:-1])
    return jnp.concatenate(
        [
            each.total(part.reshape(len(each.starts), -1), channel).reshape(-1)
            for each, part in zip(positions, parts, strict=True)
        ]
    )
