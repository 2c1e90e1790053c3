"""Replacement of a batch's ids by slots, on one device or over a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int32, UInt32

from jaxrec.mesh.shard_access import first, stack
from jaxrec.mesh.store import MeshStore
from jaxrec.ragged import KeyedJaggedArray, WideIds
from jaxrec.ragged.offsets import bag_ids
from jaxrec.tier.managed_collision.id_batch import IdBatch
from jaxrec.tier.managed_collision.multi_probe import MultiProbeConfig, MultiProbeMap
from jaxrec.tier.managed_collision.policies import EvictedSlots
from jaxrec.tier.managed_collision.probing import murmur_hash3
from jaxrec.tier.managed_collision.sorted_map import SortedMap, SortedMapConfig

MapConfig: TypeAlias = SortedMapConfig | MultiProbeConfig
IdMap: TypeAlias = SortedMap | MultiProbeMap


@dataclasses.dataclass(frozen=True)
class MappedTables:
    """Tables that share a map of ids to slots, and the features that they read."""

    tables: tuple[str, ...]
    features: tuple[str, ...]  # the map takes their ids in this order
    num_slots: int  # rows of each table
    config: MapConfig

    @property
    def name(self) -> str:
        """Names of the tables, joined by "+"."""
        return "+".join(self.tables)

    @property
    def drops_ids(self) -> bool:
        """Whether ids without a slot are dropped from their bags."""
        return isinstance(self.config, MultiProbeConfig) and self.config.disable_fallback

    def update(
        self,
        id_map: IdMap,
        ids: UInt32[Array, "n 2"],
        is_valid: Bool[Array, " n"],
        hours: Int32[Array, " n"] | None,
        hour: Int32[Array, ""],
        key: Array,
    ) -> tuple[IdMap, Int32[Array, " n"], EvictedSlots]:
        """Return the map after a batch, the slot of each id, and the evicted slots.

        ``ids`` are those of the first feature, then of the second, and so on. ``hours`` has the
        hours to live of each id; None: ids do not expire. ``hour`` is the hour of the batch.
        """
        # The two kinds of map differ in what they give ids: a sorted map is updated first and then
        # looked up, a multi-probe map finds slots while it is updated.
        if isinstance(id_map, SortedMap):
            updated, evicted = id_map.update(ids, is_valid, key)
            return updated, updated.remap(ids), evicted
        expiry = None if hours is None else hour + hours
        rolls = None
        if self.config.opt_in_prob not in (None, 100):  # type: ignore[union-attr]
            rolls = _rolls(is_valid, key)
        return id_map.update(ids, is_valid, expiry, hour, rolls)


class Mapped(NamedTuple):
    """Result of `map_batch`: a batch with slots in place of ids, and the maps after it."""

    maps: tuple[IdMap, ...]
    features: KeyedJaggedArray  # without ids that were dropped
    evicted: tuple[EvictedSlots, ...]  # of each map; empty in evaluation


def map_batch(
    mapped: Sequence[MappedTables],
    maps: Sequence[IdMap],
    batch: IdBatch,
    key: Array,
    *,
    is_training: bool,
    store: MeshStore | None = None,
) -> Mapped:
    """Replace the ids of a batch by slots; in training, update the maps by the batch.

    ``store`` has the tables over a mesh; None: they are on one device.
    """
    # Every device has all maps. In training it gathers the ids of all devices, in the order of the
    # whole batch, and computes the same update. So maps and slots equal those on one device, and a
    # checkpoint does not depend on the mesh.
    if store is None:
        return _map_part(mapped, maps, batch, key, is_training, lambda values: values[None], 0)
    channel = store.channel_over(store.batch_axes)

    def on_device(
        maps: tuple[IdMap, ...], features: KeyedJaggedArray, hour: Array, key: Array
    ) -> Mapped:
        own = IdBatch(first(features), hour)

        def gather(values: Array) -> Array:
            return channel.gather(values).reshape(-1, *values.shape)

        result = _map_part(mapped, maps, own, key, is_training, gather, channel.index)
        return result._replace(features=stack(result.features))

    over_batch, everywhere = PartitionSpec(store.batch_axes), PartitionSpec()
    specs = Mapped(everywhere, over_batch, everywhere)  # type: ignore[arg-type]
    run = store.shard_map(on_device, (everywhere, over_batch, everywhere, everywhere), specs)
    return run(tuple(maps), batch.features, batch.hour, key)


def _map_part(
    mapped: Sequence[MappedTables],
    maps: Sequence[IdMap],
    batch: IdBatch,
    key: Array,
    is_training: bool,
    gather: Callable[[Array], Array],
    device: Int32[Array, ""] | int,
) -> Mapped:
    """Map the part of a batch that lies on one device; see `map_batch`.

    ``gather`` stacks the arrays of all devices, as ``[devices, ...]``; ``device`` is the index of
    this one.
    """
    segments, is_valid = batch.segments, batch.is_valid
    ids = WideIds(jnp.asarray(batch.ids.high), jnp.asarray(batch.ids.low))
    values = ids.narrow()
    new_maps, evicted = list(maps), []
    if is_training:
        # One message: the words of each id, and whether it is an id or padding.
        all_ids = gather(jnp.stack([ids.high, ids.low, is_valid.astype(jnp.uint32)], axis=1))
    for number, (each, id_map) in enumerate(zip(mapped, maps, strict=True)):
        parts = [segments[feature] for feature in each.features]
        if not is_training:
            for part in parts:
                values = values.at[part].set(id_map.remap(ids[part].words))
            continue
        blocks = [all_ids[:, part].reshape(-1, 3) for part in parts]
        of_map = jnp.concatenate(blocks)
        hours = _hours(each, [block.shape[0] for block in blocks])
        new_maps[number], slots, dropped = each.update(
            id_map, of_map[:, :2], of_map[:, 2] != 0, hours, jnp.asarray(batch.hour), key
        )
        evicted.append(dropped)
        ends = np.cumsum([block.shape[0] for block in blocks])
        for part, of_feature in zip(parts, jnp.split(slots, ends[:-1]), strict=True):
            # [devices * capacity] slots of the feature: this device's samples need its own.
            own = of_feature.reshape(all_ids.shape[0], -1)[device]
            values = values.at[part].set(own)
    lengths, weights = jnp.asarray(batch.features.lengths), batch.features.weights
    # Padding reads row 0, which every table has, and is in no bag.
    values = jnp.where(is_valid, values, 0)
    if any(each.drops_ids for each in mapped):
        is_dropped = jnp.zeros(values.shape, bool)
        for each in mapped:
            for feature in each.features if each.drops_ids else ():
                part = segments[feature]
                is_dropped = is_dropped.at[part].set(values[part] < 0)
        values, lengths, weights = _drop(batch, values, is_valid & ~is_dropped)
    features = batch.features._with(values=values, lengths=lengths, weights=weights)
    return Mapped(tuple(new_maps), features, tuple(evicted))


def _hours(mapped: MappedTables, counts: Sequence[int]) -> Int32[Array, " n"] | None:
    """Return the hours to live of each id, given how many ids each feature has; None: for ever."""
    if isinstance(mapped.config, SortedMapConfig) or mapped.config.eviction is None:
        return None
    hours = mapped.config.eviction.hours_to_live(mapped.features)
    return jnp.concatenate(
        [jnp.full(count, each, jnp.int32) for each, count in zip(hours, counts, strict=True)]
    )


def _rolls(is_valid: Bool[Array, " n"], key: Array) -> Int32[Array, " n"]:
    """Return a random number from 0 to 99 for each id; padding gets arbitrary ones."""
    seed = jax.random.key_data(key)
    # An id's number hangs on its rank among the valid ids. `jax.random.randint` would draw by
    # position, and padding, which differs between one device and a mesh, would change the draws.
    place = jnp.cumsum(is_valid, dtype=jnp.uint32)
    hashes = murmur_hash3(jnp.stack([jnp.broadcast_to(seed[0], place.shape), seed[1] ^ place], -1))
    return WideIds.of_words(hashes) % 100


def _drop(
    batch: IdBatch, values: Int32[Array, " n"], is_kept: Bool[Array, " n"]
) -> tuple[Int32[Array, " n"], Int32[Array, " bags"], Array | None]:
    """Return a batch's values, lengths and weights without the ids whose ``is_kept`` is False."""
    # Kept ids move up to the start of their key's segment, whose capacity stays.
    features = batch.features
    bags = bag_ids(features.lengths, features.strides, features.capacities)
    lengths = jnp.zeros(sum(features.strides), jnp.int32)
    lengths = lengths.at[bags].add(is_kept.astype(jnp.int32), mode="drop")
    before = jnp.cumsum(is_kept, dtype=jnp.int32) - is_kept.astype(jnp.int32)
    starts = np.repeat(
        np.array([part.start for part in batch.segments.values()], np.int32), features.capacities
    )
    place = jnp.where(is_kept, starts + before - before[starts], values.shape[0])

    def move(array: Array) -> Array:
        return jnp.zeros_like(array).at[place].set(array, mode="drop")

    weights = None if features.weights is None else move(jnp.asarray(features.weights))
    return move(values), lengths, weights
