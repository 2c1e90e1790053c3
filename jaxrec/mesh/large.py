"""Lookups of groups whose rows or slots int32 cannot number.

Ids reach the devices as two words (`jaxrec.ragged.wide_ids`). Each becomes the device that owns its
row, and the row of this device's array: two int32 numbers, which take the places of the one slot of
other groups.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.lookup import of_used_bags
from jaxrec.mesh.placed_group import PlacedGroup, PlacedShard
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.wide_ids import WideIds, widen


def flatten_large(features: KeyedJaggedArray, layout: BagLayout, placed: PlacedGroup) -> Lookups:
    """Return a large group's lookups in a batch, as `jaxrec.embed.lookup.flatten` does for others.

    Args:
        features: The batch of one device.
        layout: Layout of the group's features in the batch.
        placed: The group.
    """
    ids = widen(features.values)
    shards = _shards_by_table(placed)
    owners, rows = [], []
    for start, capacity, first_row in zip(
        layout.id_starts, layout.capacities, layout.row_offsets, strict=True
    ):
        of_feature = _locate(ids[start : start + capacity], shards[first_row], first_row)
        owners.append(of_feature[0])
        rows.append(of_feature[1])
    local = dataclasses.replace(
        layout,
        id_starts=tuple(itertools.accumulate(layout.capacities, initial=0))[:-1],
        row_offsets=(0,) * layout.num_features,
        row_counts=(placed.local_rows,) * layout.num_features,
    )
    lengths = jnp.asarray(features.lengths)
    lookups = kernels.flatten_bags(jnp.concatenate(rows), lengths, None, local, placed.local_rows)
    lookups = of_used_bags(lookups, features, layout, placed.group, placed.padding)
    return dataclasses.replace(lookups, owners=jnp.concatenate(owners))


def _shards_by_table(placed: PlacedGroup) -> dict[int, list[PlacedShard]]:
    """Return the shards of each of the group's tables by row, by the table's first row."""
    shards: dict[int, list[PlacedShard]] = {}
    for each in placed.shards:
        shards.setdefault(each.first_row - each.shard.rows[0], []).append(each)
    return shards


def _locate(
    ids: WideIds, shards: list[PlacedShard], first_row: int
) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
    """Return the owner of each id's row and the row of its array; `BAD_ROW` outside the table.

    Args:
        ids: Row indices of a table.
        shards: The table's shards by row.
        first_row: Row of the group that the table starts with.
    """
    owner = jnp.zeros(ids.shape, jnp.int32)
    row = jnp.full(ids.shape, kernels.BAD_ROW, jnp.int32)
    # From the last shard to the first: each takes the ids below its end.
    for each in reversed(shards):
        start = each.first_row - first_row
        is_below = ids.is_below(start + each.shard.num_rows)
        # The difference is right modulo 2**32, and int32 holds it where the id is in the shard.
        here = (ids.minus(start) + jnp.uint32(each.local_row)).astype(jnp.int32)
        owner = jnp.where(is_below, each.shard.device, owner)
        row = jnp.where(is_below, here, row)
    return owner, row
