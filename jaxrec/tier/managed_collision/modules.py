"""Collections of tables that take ids of any size."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.embed.config import MAX_ROWS
from jaxrec.embed.store import TableStore
from jaxrec.mesh.ahead import LookupProbe, RouteProbe
from jaxrec.mesh.store import MeshStore
from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray
from jaxrec.tier.managed_collision.batch_maps import IdMap, MapConfig, MappedTables, map_batch
from jaxrec.tier.managed_collision.id_batch import IdBatch, as_id_batch
from jaxrec.tier.managed_collision.multi_probe import MultiProbeConfig
from jaxrec.tier.managed_collision.row_reset import reset_rows
from jaxrec.tier.managed_collision.sorted_map import SortedMapConfig

Maps: TypeAlias = Mapping[str | tuple[str, ...], MapConfig]
"""Settings of maps, by the name of a table or by the names of tables that share a map."""


class MapVariable(nnx.Variable):
    """Variable of one array of a map; it is no `nnx.Param`, so that optax does not train it."""


class ManagedCollisions(nnx.Module):
    """Base of the two collections that map ids to slots: of pooled and of per-id tables.

    Each call in training mode changes the maps. After ``nnx.Module.eval``, which sets
    ``deterministic``, calls leave them unchanged.
    """

    changes_ids = True  # see `jaxrec.mesh.ahead.changes_ids`

    _collection_type: ClassVar[type[EmbeddingBagCollection | EmbeddingCollection]]

    def __init__(
        self,
        collection: EmbeddingBagCollection | EmbeddingCollection,
        managed_collisions: Maps,
        return_remapped_features: bool,
        rngs: nnx.Rngs,
    ):
        if not isinstance(collection, self._collection_type):
            raise TypeError(
                f"{type(self).__name__} takes an {self._collection_type.__name__}, got "
                f"{type(collection).__name__}"
            )
        self._mapped = _mapped_tables(collection, managed_collisions)
        # One variable for each array, not one for a map, so that checkpoints name the arrays.
        maps = {each.name: _named(each.config.init(each.num_slots)) for each in self._mapped}
        self.maps = nnx.Dict(
            {
                of_map: nnx.Dict({name: MapVariable(array) for name, array in arrays.items()})
                for of_map, arrays in maps.items()
            }
        )
        # The key of all first rows never changes; draws of maps fold `num_batches` into it.
        self.key = MapVariable(rngs.params())
        self.num_batches = MapVariable(jnp.int32(0))
        self.return_remapped_features = return_remapped_features
        self.deterministic = False

    @property
    @abc.abstractmethod
    def _collection(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """The collection that holds the tables."""

    @property
    def bounds(self) -> dict[str, int]:
        """Number of ids of each feature without a map, against which packing checks ids."""
        mapped = {feature for each in self._mapped for feature in each.features}
        bounds = self._collection.bounds
        return {feature: bound for feature, bound in bounds.items() if feature not in mapped}

    @property
    def open_slots(self) -> dict[str, Int32[Array, ""]]:
        """Number of slots without an id, by map."""
        return {each.name: self._map(each).open_slots for each in self._mapped}

    def id_map(self, table: str) -> IdMap:
        """Return the map of ids to slots of a table."""
        for each in self._mapped:
            if table in each.tables:
                return self._map(each)
        names = [name for each in self._mapped for name in each.tables]
        raise KeyError(f"table {table!r} has no map; tables with one are {names}")

    def _lookup(self, features: KeyedJaggedArray | IdBatch) -> Any:
        store: TableStore = self._collection.tables.get_value()
        batch = as_id_batch(features)
        self._check(batch, features, store)
        is_training = not self.deterministic
        key, count = self.key.get_value(), self.num_batches.get_value()
        result = map_batch(
            self._mapped,
            [self._map(each) for each in self._mapped],
            batch,
            jax.random.fold_in(key, count),
            is_training=is_training,
            store=None if store.devices.mesh is None else cast(MeshStore, store.placed),
        )
        # A pass that only computes routes for a later step must leave maps and rows as they are:
        # the step itself will count the batch.
        if is_training and not self._is_routed_ahead():
            for each, id_map, evicted in zip(
                self._mapped, result.maps, result.evicted, strict=True
            ):
                for name, array in _named(id_map).items():
                    self.maps[each.name][name].set_value(array)
                store = reset_rows(store, each.tables, evicted, key)
            self._collection.tables.set_value(store)
            self.num_batches.set_value(count + 1)
        embeddings = self._collection(result.features)
        return (embeddings, result.features) if self.return_remapped_features else embeddings

    def _is_routed_ahead(self) -> bool:
        """Return whether this call only computes the routes of an exchange for a later step."""
        probe = self._collection.probe
        if isinstance(probe, LookupProbe):
            raise TypeError(
                "embeddings of managed collisions cannot be looked up a step ahead, since rows of "
                "ids that lose their slots are reset in between; train without looking ahead"
            )
        return isinstance(probe, RouteProbe)

    def _map(self, mapped: MappedTables) -> IdMap:
        form = jax.eval_shape(lambda: mapped.config.init(mapped.num_slots))
        arrays = [self.maps[mapped.name][name].get_value() for name in _named(form)]
        return cast(IdMap, jax.tree.unflatten(jax.tree.structure(form), arrays))

    def _check(
        self, batch: IdBatch, features: KeyedJaggedArray | IdBatch, store: TableStore
    ) -> None:
        keys, shape = batch.features.keys, batch.features.values.shape
        for each in self._mapped:
            if missing := [feature for feature in each.features if feature not in keys]:
                raise KeyError(
                    f"the map of tables {', '.join(each.tables)} takes features {missing}, which "
                    f"the batch lacks; its keys are {', '.join(map(repr, keys))}"
                )
            has_hours = isinstance(each.config, MultiProbeConfig) and each.config.eviction
            if has_hours and not self.deterministic and features is not batch:
                raise TypeError(
                    f"the map of tables {', '.join(each.tables)} evicts ids by the hour, which the "
                    "batch lacks; make the batch by jaxrec.tier.managed_collision.id_words(batch)"
                )
        mesh = store.devices.mesh
        if mesh is not None and shape[:-1] != (mesh.size,):
            raise ValueError(
                f"the tables are over {mesh.size} devices, but the batch has ids of shape "
                f"{tuple(shape)}; put it there by id_words(batch, mesh)"
            )
        if mesh is None and len(shape) != 1:
            raise ValueError(
                "the batch lies over the devices of a mesh, but the tables are on one device; put "
                "the model on the mesh with jaxrec.shard(model, plan, mesh)"
            )


class ManagedCollisionEmbeddingBagCollection(ManagedCollisions):
    """An `EmbeddingBagCollection` for ids of any size, by maps that change in the step.

    TorchRec's class of this name (``mc_embedding_modules.py``). In training mode a call counts the
    ids of the batch, gives slots to new ids, resets the rows and the optimizer state of slots that
    got another id, and then looks rows up. All of this happens on the devices, in the compiled
    step. Call it once in a step: if an id lost its slot between two calls of one step, its gradient
    would train the next id of the slot.

    `jaxrec.train.CheckpointManager` saves maps with the model. Over a mesh (`jaxrec.shard`) each
    device has all maps, and in training it gathers the ids of the whole batch, 12 bytes an id.
    Results equal those on one device.

    Args:
        embedding_bag_collection: The collection of the tables.
        managed_collisions: `SortedMapConfig` or `MultiProbeConfig` of each table's map, by name. A
            tuple of names gives several tables one map; they must have equally many rows. Tables
            that read the same feature must share a map. Tables without a map take their ids as row
            indices.
        return_remapped_features: Whether calls also return the batch with slots in place of ids.
        rngs: Source of the random key of fresh rows.

    Raises:
        TypeError: An argument has another type.
        ValueError: Maps do not fit the tables.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=100, embedding_dim=8)
        >>> rngs = nnx.Rngs(0)
        >>> embeddings = ManagedCollisionEmbeddingBagCollection(
        ...     jaxrec.EmbeddingBagCollection([config], rngs=rngs),
        ...     {"item": SortedMapConfig(history_size=1000)}, rngs=rngs)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"item": [[10**12], [7, 10**12]]}, id_bits=64)
        >>> embeddings(batch)["item"].shape
        (2, 8)
        >>> int(embeddings.open_slots["item"])  # 99 slots, and one for unknown ids
        97
    """

    _collection_type = EmbeddingBagCollection

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collisions: Maps,
        *,
        return_remapped_features: bool = False,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            embedding_bag_collection, managed_collisions, return_remapped_features, rngs
        )
        self.embedding_bag_collection = embedding_bag_collection

    @property
    def _collection(self) -> EmbeddingBagCollection:
        return self.embedding_bag_collection

    def __call__(
        self, features: KeyedJaggedArray | IdBatch
    ) -> KeyedArray | tuple[KeyedArray, KeyedJaggedArray]:
        """Return the pooled embeddings of a batch.

        Args:
            features: The result of `id_words`, a raw batch on the host (outside of `jax.jit`), or a
                batch of 32-bit ids.

        Returns:
            The result of `EmbeddingBagCollection`; with ``return_remapped_features`` a pair of it
            and the batch with slots in place of ids.

        Raises:
            KeyError: The batch lacks a feature.
            TypeError: A map needs the hour of the batch, which `id_words` gives; or embeddings are
                looked up a step ahead.
            ValueError: The batch is not on the devices of the tables.
        """
        return self._lookup(features)


class ManagedCollisionEmbeddingCollection(ManagedCollisions):
    """An `EmbeddingCollection` for ids of any size, by maps that change in the step.

    TorchRec's class of this name. Arguments and errors are those of
    `ManagedCollisionEmbeddingBagCollection`.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingConfig("item", num_embeddings=100, embedding_dim=8)
        >>> rngs = nnx.Rngs(0)
        >>> embeddings = ManagedCollisionEmbeddingCollection(
        ...     jaxrec.EmbeddingCollection([config], rngs=rngs),
        ...     {"item": MultiProbeConfig()}, return_remapped_features=True, rngs=rngs)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[10**12], [7]]}, id_bits=64)
        >>> rows, remapped = embeddings(batch)
        >>> rows["item"].values.shape, remapped.lengths.tolist()
        ((8, 8), [1, 1])
    """

    _collection_type = EmbeddingCollection

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collisions: Maps,
        *,
        return_remapped_features: bool = False,
        rngs: nnx.Rngs,
    ):
        super().__init__(embedding_collection, managed_collisions, return_remapped_features, rngs)
        self.embedding_collection = embedding_collection

    @property
    def _collection(self) -> EmbeddingCollection:
        return self.embedding_collection

    def __call__(
        self, features: KeyedJaggedArray | IdBatch
    ) -> dict[str, JaggedArray] | tuple[dict[str, JaggedArray], KeyedJaggedArray]:
        """Return the embedding of each id of a batch, as `EmbeddingCollection` does.

        Arguments and errors are those of `ManagedCollisionEmbeddingBagCollection`.
        """
        return self._lookup(features)


def _mapped_tables(
    collection: EmbeddingBagCollection | EmbeddingCollection, maps: Maps
) -> tuple[MappedTables, ...]:
    configs = {config.name: config for config in collection.configs}
    mapped: list[MappedTables] = []
    map_of_table: dict[str, int] = {}
    for names, config in maps.items():
        tables = (names,) if isinstance(names, str) else tuple(names)
        if not isinstance(config, SortedMapConfig | MultiProbeConfig):
            raise TypeError(
                f"the map of {names!r} is a SortedMapConfig or a MultiProbeConfig, got {config!r}"
            )
        for name in tables:
            if name not in configs:
                raise ValueError(f"a map names table {name!r}, but the tables are {list(configs)}")
            if name in map_of_table:
                raise ValueError(f"table {name!r} has two maps; give it one")
            if configs[name].padding_id is not None:
                raise ValueError(
                    f"table {name!r} has padding_id={configs[name].padding_id} and a map, which "
                    "gives every id a row; leave padding ids out of the bags of its features"
                )
            map_of_table[name] = len(mapped)
        sizes = {name: configs[name].num_embeddings for name in tables}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"tables that share a map must have equally many rows, got {sizes}")
        if sizes[tables[0]] > MAX_ROWS:
            raise ValueError(
                f"table {tables[0]!r} has {sizes[tables[0]]} rows; a map gives ids rows that int32 "
                f"numbers, at most {MAX_ROWS}"
            )
        features = dict.fromkeys(f for name in tables for f in configs[name].feature_names)
        mapped.append(MappedTables(tables, tuple(features), sizes[tables[0]], config))
    # The batch has one slot for each id of a feature, so all tables that read it need one map.
    map_of_feature: dict[str, tuple[str, int | None]] = {}
    for table in configs.values():
        own = map_of_table.get(table.name)
        for feature in table.feature_names:
            other, others = map_of_feature.setdefault(feature, (table.name, own))
            if others != own:
                raise ValueError(
                    f"tables {other!r} and {table.name!r} read feature {feature!r} through "
                    f"different maps; let them share one: {{({other!r}, {table.name!r}): ...}}"
                )
    return tuple(mapped)


def _named(id_map: Any) -> dict[str, Any]:
    """Return the arrays of a map by name, such as ``metadata_counts``, for `MapVariable`s."""
    leaves: Sequence[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(id_map)
    return {
        "_".join(str(getattr(key, "name", getattr(key, "key", key))) for key in path): leaf
        for path, leaf in leaves
    }
