"""The update of rows whose columns lie apart, where each piece lies whole on one device.

Some optimizers need sums over whole rows, of which an owner of a piece has a part. All owners of a
table's pieces have the same lookups of it, in the same order (`jaxrec.mesh.lanes`). So each writes
its part of a row's sum to the places of the row's lookups in a list of all lookups; these lists add
up over the devices, and each owner reads the sums of its lookups. All of this is inside
`jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout
from jaxrec.embed.kernels.reference import update_unique
from jaxrec.embed.update import RowGradients
from jaxrec.mesh.collectives import Channel
from jaxrec.mesh.lanes import Lanes
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.norms import clip_tables
from jaxrec.optim.hyperparameter import Step
from jaxrec.optim.norm import cut_rows


def update_pieces(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    state: dict[str, Array],
    gradient: RowGradients,
    step: Step,
    channel: Channel,
) -> tuple[Float[Array, "local_rows dim"], dict[str, Array]]:
    """Updates each of this device's rows once, by sums over the whole rows that it has a piece of.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        state: Their optimizer state.
        gradient: The gradient of all devices' lookups of these rows.
        step: Number of updates made before.
        channel: The way to the other devices.
    """
    gradient = clip_tables(placed, gradient, channel)
    bounded, lookups = placed.group.optimizer, gradient.lookups
    optimizer = dataclasses.replace(bounded, clip_value=None, clip_norm=None)
    runs = kernels.build_runs(lookups.rows, placed.local_rows)
    at = dataclasses.replace(lookups, rows=runs.inverse)
    sums = kernels.sum_rows(at, gradient.values, runs.unique.size, bounded.clip_value)
    total = functools.partial(
        _total,
        runs=runs,
        is_row=(lookups.rows >= 0) & (lookups.rows < placed.local_rows),
        places=[_Places.of(placed, layout) for layout in gradient.layouts],
        channel=channel,
    )
    with cut_rows(placed.whole_dim, total):
        rows = gradient.rows_to_write(runs.unique, placed.local_rows)
        return update_unique(table, state, rows, sums, optimizer, step, (0,))


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the lookups of each lane of each owner lie in a list of a sender's; all static.

    Attributes:
        capacities: Lookups that each lane has room for.
        starts: ``[owners, lanes]``, the first place of each.
        size: Places of the list.
    """

    capacities: tuple[int, ...]
    starts: np.ndarray
    size: int

    @classmethod
    def of(cls, placed: PlacedGroup, layout: BagLayout) -> _Places:
        """The places of one batch: pieces that read the same ids of a table share theirs."""
        lanes = Lanes.of_group(placed, layout)
        table = {block.first_row: block.table for block in placed.blocks}
        keys = [
            (table[row], start)
            for row, start in zip(layout.row_offsets, layout.id_starts, strict=True)
        ]
        sizes = dict(zip(keys, layout.capacities, strict=True))
        starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        # Lanes without a feature lie behind the last; a lane's unused room may reach beyond, too.
        end = sum(sizes.values())
        found = np.full((placed.num_devices, len(lanes.capacities)), end, np.int32)
        for owner, features in enumerate(lanes.features):
            found[owner, : len(features)] = [starts[keys[feature]] for feature in features]
        return cls(lanes.capacities, found, end + max(lanes.capacities, default=0))

    def total(
        self, partial: Float[Array, "senders lookups"], channel: Channel
    ) -> Float[Array, "senders lookups"]:
        """The sums of what all owners have for the same lookups; zeros where they have none."""
        starts = jnp.asarray(self.starts)[channel.index]
        parts = jnp.split(partial, np.cumsum(self.capacities)[:-1], axis=1)
        whole = jnp.zeros((partial.shape[0], self.size), partial.dtype)
        for start, part in zip(starts, parts, strict=True):
            there = jax.lax.dynamic_slice_in_dim(whole, start, part.shape[1], axis=1)
            whole = jax.lax.dynamic_update_slice_in_dim(whole, there + part, start, axis=1)
        whole = jax.lax.psum(whole, channel.axes)
        return jnp.concatenate(
            [
                jax.lax.dynamic_slice_in_dim(whole, start, size, axis=1)
                for start, size in zip(starts, self.capacities, strict=True)
            ],
            axis=1,
        )


def _total(
    partial: Float[Array, " runs"],
    *,
    runs: kernels.Runs,
    is_row: Bool[Array, " lookups"],
    places: list[_Places],
    channel: Channel,
) -> Float[Array, " runs"]:
    """Sums over parts of rows, one a run, as sums over whole rows."""
    of_lookups = jnp.where(is_row, partial[runs.inverse], 0)
    sizes = [len(each.starts) * sum(each.capacities) for each in places]
    totals = [
        each.total(part.reshape(len(each.starts), -1), channel).reshape(-1)
        for each, part in zip(places, jnp.split(of_lookups, np.cumsum(sizes)[:-1]), strict=True)
    ]
    # All lookups of a row have the same total; any of them will do.
    back = jnp.where(is_row, jnp.concatenate(totals), 0)
    return jnp.zeros_like(partial).at[runs.inverse].set(back)
