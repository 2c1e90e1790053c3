"""What a step asks of each table: how many ids of which features, and which rows those are."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrec import optim
from jaxrec.embed.collection import Collection
from jaxrec.embed.config import EmbeddingBagConfig, TableConfig
from jaxrec.embed.layout import TableLayout, layout_tables
from jaxrec.embed.taps import tapped_modules
from jaxrec.optim import RowOptimizer
from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.heat import EvenHeat, Heat
from jaxrec.plan.statistics import Statistics
from jaxrec.ragged.capacity import rung


@dataclasses.dataclass(frozen=True)
class FeatureWork:
    """What one feature asks of its table, on one device, in one step.

    Attributes:
        name: The feature.
        lookups: Ids, on average.
        capacity: Room for them.
        bags: Bags.
        heat: How the ids fall on the table's rows.
    """

    name: str
    lookups: float
    capacity: int
    bags: int
    heat: Heat


@dataclasses.dataclass(frozen=True)
class TableWork:
    """What one table is asked, on one device, in one step.

    Attributes:
        table: The table.
        optimizer: How its rows change.
        collection: Path of the collection in the model; tables of different collections are
            stored and looked up apart.
        is_weighted: Whether ids have weights.
        features: The features that read it.
    """

    table: TableConfig
    optimizer: RowOptimizer
    collection: str
    is_weighted: bool
    features: tuple[FeatureWork, ...]

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def rows(self) -> int:
        return self.table.num_embeddings

    @property
    def dim(self) -> int:
        return self.table.embedding_dim

    @property
    def dtype(self) -> str:
        return jnp.dtype(self.table.dtype).name

    @property
    def is_pooled(self) -> bool:
        return isinstance(self.table, EmbeddingBagConfig)

    @property
    def lookups(self) -> float:
        return sum(feature.lookups for feature in self.features)

    @property
    def capacity(self) -> int:
        return sum(feature.capacity for feature in self.features)

    @property
    def bags(self) -> int:
        return sum(feature.bags for feature in self.features)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table and its optimizer state."""
        return self.rows * (self.dim * itemsize(self.dtype) + state_bytes(self.optimizer, self.dim))

    def distinct(self, devices: int = 1, cached: float = 0.0) -> float:
        """Expected number of distinct rows that the samples of so many devices look up.

        Rows that several features look up are counted for each: features are taken to differ.
        """
        found = sum(f.heat.distinct(f.lookups * devices, cached) for f in self.features)
        return min(found, self.rows * (1 - cached))

    def shares(self, parts: int, *, of_rows: bool) -> np.ndarray:
        """How lookups spread over ``parts`` equal runs of rows; see `Heat.shares`."""
        weights = [f.heat.distinct(f.lookups) if of_rows else f.lookups for f in self.features]
        shares = [f.heat.shares(parts, of_rows=of_rows) for f in self.features]
        if not sum(weights):
            return np.full(parts, 1 / parts)
        return np.average(shares, axis=0, weights=weights)


@functools.cache
def state_bytes(optimizer: RowOptimizer, width: int) -> int:
    """Bytes of optimizer state that ``width`` columns of a row have."""
    state = jax.eval_shape(lambda: optimizer.init(1, width))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


@functools.cache
def itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class ModelTables:
    """The tables of a model.

    Attributes:
        collections: For each collection its path, tables and whether ids have weights.
        dense_bytes: Bytes of the model's other parameters.
        is_configured: Whether the tables exist already, so that their types are decided.
    """

    collections: tuple[tuple[str, TableLayout, bool], ...]
    dense_bytes: int
    is_configured: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(table.name for _, layout, _ in self.collections for table in layout.tables)


def read_model(model: nnx.Module | Sequence[TableConfig]) -> ModelTables:
    """The tables of a model, real or abstract (`nnx.eval_shape`), or those of configurations.

    Raises:
        TypeError: If it is neither a model nor a sequence of configurations.
        ValueError: If there are no tables, or two collections have tables of one name.
    """
    if isinstance(model, nnx.Module):
        found = _read_module(model)
    elif isinstance(model, Sequence) and all(isinstance(table, TableConfig) for table in model):
        found = _read_configs(model)
    else:
        raise TypeError(
            "a plan is for a Flax model with jaxrec's collections or for a sequence of table "
            f"configurations, got {type(model).__name__}"
        )
    if not found.names:
        raise ValueError("there are no tables to plan: the model has no jaxrec collection")
    owner: dict[str, str] = {}
    for path, layout, _ in found.collections:
        for table in layout.tables:
            if table.name in owner:
                raise ValueError(
                    f"collections {owner[table.name]!r} and {path!r} both have a table "
                    f"{table.name!r}; a plan goes by name, so rename one of them"
                )
            owner[table.name] = path
    return found


def _read_module(model: nnx.Module) -> ModelTables:
    collections = []
    for path, module in tapped_modules(model).items():
        if isinstance(module, Collection):
            layout = module.tables.get_value().layout
            # Tables on a mesh have the layout that they had on one device inside theirs.
            layout = layout if isinstance(layout, TableLayout) else layout.tables
            collections.append((path, layout, module.is_weighted))
    dense = jax.tree.leaves(nnx.state(model, nnx.Param))
    dense_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in dense)
    return ModelTables(tuple(collections), dense_bytes, is_configured=True)


def _read_configs(configs: Sequence[TableConfig]) -> ModelTables:
    """Bags and per-id tables form a collection each."""
    kinds: dict[type, list[TableConfig]] = {}
    for config in configs:
        kinds.setdefault(type(config), []).append(config)
    collections = tuple(
        (kind.__name__, layout_tables(tables, optim.rowwise_adagrad()), False)
        for kind, tables in kinds.items()
    )
    return ModelTables(collections, 0, is_configured=False)


def measure_work(
    model: ModelTables,
    *,
    batch_size: int,
    num_devices: int,
    constraints: Mapping[str, ParameterConstraints],
    statistics: Statistics | None,
) -> tuple[TableWork, ...]:
    """What a step asks of each table of a model.

    Args:
        model: The tables.
        batch_size: Samples of all devices together.
        num_devices: Devices, each with an equal part of the samples.
        constraints: What is said of tables, by name.
        statistics: What was seen of features; None: nothing.

    Raises:
        ValueError: If constraints name a table that there is not, or do not fit their table.
    """
    if unknown := set(constraints) - set(model.names):
        raise ValueError(
            f"there are constraints for table {sorted(unknown)[0]!r}, which the model lacks; its "
            f"tables are {', '.join(map(repr, model.names))}"
        )
    works = []
    for path, layout, is_weighted in model.collections:
        for group in layout.groups:
            for table in group.tables:
                said = constraints.get(table.name, ParameterConstraints())
                if said.dtype is not None and said.dtype != table.dtype:
                    if model.is_configured:
                        raise ValueError(
                            f"table {table.name!r} is {table.dtype} in the model and {said.dtype} "
                            "in its constraints; make the model with the other dtype, or plan from "
                            "configurations"
                        )
                    table = dataclasses.replace(table, dtype=said.dtype)
                weighted = is_weighted if said.is_weighted is None else said.is_weighted
                features = _features(table, said, batch_size, num_devices, statistics)
                works.append(TableWork(table, group.optimizer, path, weighted, features))
    order = {name: i for i, name in enumerate(model.names)}
    return tuple(sorted(works, key=lambda work: order[work.name]))


def _features(
    table: TableConfig,
    said: ParameterConstraints,
    batch_size: int,
    num_devices: int,
    statistics: Statistics | None,
) -> tuple[FeatureWork, ...]:
    poolings = _each(table, "pooling_factors", said.pooling_factors)
    batches = _each(table, "batch_sizes", said.batch_sizes)
    works = []
    for name, pooling, bags in zip(table.feature_names, poolings, batches, strict=True):
        seen = None if statistics is None else statistics.features.get(name)
        own = math.ceil((batch_size if bags is None else bags) / num_devices)
        mean, deviation = (1.0, 0.0) if seen is None else (seen.mean_length, seen.length_deviation)
        if pooling is not None:
            deviation *= pooling / mean if mean else 0
            mean = pooling
        # Room for all but one batch in a thousand on a device.
        room = rung(math.ceil(own * mean + 3 * deviation * math.sqrt(own) - 1e-9))
        heat = EvenHeat(table.num_embeddings) if seen is None else seen.heat(table.num_embeddings)
        works.append(FeatureWork(name, own * mean, room, own, heat))
    return tuple(works)


def _each(
    table: TableConfig, field: str, value: Sequence[float] | float | None
) -> Sequence[float | None]:
    """The value for each feature."""
    if not isinstance(value, Sequence):
        return (value,) * len(table.feature_names)
    if len(value) != len(table.feature_names):
        raise ValueError(
            f"table {table.name!r} has {len(table.feature_names)} features and {len(value)} "
            f"{field}; give one for each or a single number"
        )
    return value
