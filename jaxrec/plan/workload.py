"""Lookups of a step in each table, on one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrec.embed.config import EmbeddingBagConfig, TableConfig
from jaxrec.embed.formats import RowFormat
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.state import state_bytes
from jaxrec.optim import RowOptimizer
from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.feature_statistics import EvenHeat, Heat, Statistics
from jaxrec.plan.model_tables import ModelTables
from jaxrec.ragged.capacity import capacity_for

# A cache that holds the rows of this many steps misses none; beyond it, the search for the number
# of steps would not end.
_MAX_STEPS = 1e9


@dataclasses.dataclass(frozen=True)
class FeatureWorkload:
    """Lookups of one feature on one device in one step: their mean, capacity, bags and heat."""

    name: str
    lookups: float
    capacity: int
    bags: int
    heat: Heat


@dataclasses.dataclass(frozen=True)
class TableWorkload:
    """Lookups of one table on one device in one step.

    ``joined`` names the tables that share features with this one, itself included: an id has a row
    in all of them or in none. ``joined_features`` read any of these tables. Both are empty if the
    table shares no feature.
    """

    table: TableConfig
    optimizer: RowOptimizer
    # Path of the collection in the model. Tables of different collections are stored and looked up
    # apart.
    collection: str
    is_weighted: bool
    features: tuple[FeatureWorkload, ...]
    joined: tuple[str, ...] = ()
    joined_features: tuple[FeatureWorkload, ...] = ()

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
        return self.table.row_format.name

    @property
    def is_pooled(self) -> bool:
        return isinstance(self.table, EmbeddingBagConfig)

    @property
    def takes_max(self) -> bool:
        return getattr(self.table, "pooling", None) == "max"

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
        row = self.table.row_format.row_bytes(self.dim)
        return self.rows * (row + state_bytes(self.optimizer, self.dim))

    def distinct(self, devices: int = 1) -> float:
        """Return the expected number of distinct rows that ``devices`` devices look up together."""
        # A row counts once for each feature that looks it up: features are taken to have different
        # ids, since the statistics do not say how many they share.
        return min(sum(f.heat.distinct(f.lookups * devices) for f in self.features), self.rows)

    @property
    def assigned_ids(self) -> float:
        """Number of one device's ids to which a cache assigns rows, `joined` tables included."""
        return sum(feature.lookups for feature in self.joined_features or self.features)

    def used_rows(self, steps: float, devices: int) -> float:
        """Return the expected number of distinct rows that ``steps`` steps look up.

        Rows of `joined` tables count once.
        """
        features = self.joined_features or self.features
        rows = sum(f.heat.distinct(f.lookups * devices * steps) for f in features)
        return min(rows, self.rows)

    def missed_rows(self, cache_rows: int, devices: int) -> float:
        """Return the expected number of rows that a step looks up and the cache lacks.

        The cache keeps the ``cache_rows`` rows used last, over all devices. They are the rows of
        the last ``t`` steps, where ``used_rows(t) = cache_rows`` (Che, Tung and Wang 2002,
        "Hierarchical web caching systems"). A step misses ``used_rows(t + 1) - used_rows(t)`` rows.
        """
        steps = 1.0
        while self.used_rows(steps, devices) < cache_rows:
            if steps > _MAX_STEPS:
                return 0.0
            steps *= 2
        # `used_rows` has no inverse in closed form, but it only grows: double, then bisect.
        low, high = 0.0, steps
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            if self.used_rows(middle, devices) < cache_rows:
                low = middle
            else:
                high = middle
        return self.used_rows(high + 1, devices) - self.used_rows(high, devices)

    def shares(self, sizes: np.ndarray, *, of_rows: bool) -> np.ndarray:
        """Return the share of all features' lookups in each run of rows, ``[runs]``.

        ``sizes`` and ``of_rows`` are as for `Heat.shares`.
        """
        if len(sizes) == 1:
            return np.ones(1)
        weights = [f.heat.distinct(f.lookups) if of_rows else f.lookups for f in self.features]
        shares = [f.heat.shares(sizes, of_rows=of_rows) for f in self.features]
        if not sum(weights):
            return sizes / sizes.sum()
        return np.average(shares, axis=0, weights=weights)


def looked_up_bytes(row_format: RowFormat, width: int) -> int:
    """Return the bytes of ``width`` columns of a looked-up row; packed rows become float32."""
    return row_format.row_bytes(width) if isinstance(row_format, PlainRows) else 4 * width


def measure_workloads(
    model: ModelTables,
    *,
    batch_size: int,
    num_devices: int,
    constraints: Mapping[str, ParameterConstraints],
    statistics: Statistics | None,
) -> tuple[TableWorkload, ...]:
    """Return the workload of each table of a model, in the model's order.

    Without statistics, a sample has one id per feature. A ValueError names a table that constraints
    do not fit.
    """
    if unknown := set(constraints) - set(model.names):
        raise ValueError(
            f"there are constraints for table {sorted(unknown)[0]!r}, which the model lacks; its "
            f"tables are {', '.join(map(repr, model.names))}"
        )
    workloads = []
    for path, layout, is_weighted in model.collections:
        for group in layout.groups:
            for table in group.tables:
                constraint = constraints.get(table.name, ParameterConstraints())
                if constraint.dtype is not None and constraint.dtype != table.dtype:
                    if model.is_configured:
                        raise ValueError(
                            f"table {table.name!r} is {table.dtype} in the model and "
                            f"{constraint.dtype} in its constraints; make the model with the other "
                            "dtype, or plan from configurations"
                        )
                    table = dataclasses.replace(table, dtype=constraint.dtype)
                weighted = constraint.is_weighted
                weighted = is_weighted if weighted is None else weighted
                features = _features(table, constraint, batch_size, num_devices, statistics)
                workloads.append(TableWorkload(table, group.optimizer, path, weighted, features))
    order = {name: i for i, name in enumerate(model.names)}
    return join_tables(sorted(workloads, key=lambda workload: order[workload.name]))


def join_tables(workloads: Sequence[TableWorkload]) -> tuple[TableWorkload, ...]:
    """Return workloads that know which tables share features, directly or through other tables."""
    # Connected components: each table starts alone, and a feature that two tables read merges their
    # lists.
    parts: dict[str, list[TableWorkload]] = {each.name: [each] for each in workloads}
    readers: dict[str, TableWorkload] = {}
    for each in workloads:
        for feature in each.features:
            first = parts[readers.setdefault(feature.name, each).name]
            if parts[each.name] is not first:
                joined = first + parts[each.name]
                parts.update((other.name, joined) for other in joined)
    return tuple(
        each
        if len(parts[each.name]) == 1
        else dataclasses.replace(
            each,
            joined=tuple(
                other.name for other in workloads if parts[other.name] is parts[each.name]
            ),
            joined_features=tuple(
                {f.name: f for other in parts[each.name] for f in other.features}.values()
            ),
        )
        for each in workloads
    )


def _features(
    table: TableConfig,
    constraint: ParameterConstraints,
    batch_size: int,
    num_devices: int,
    statistics: Statistics | None,
) -> tuple[FeatureWorkload, ...]:
    poolings = _by_feature(table, "pooling_factors", constraint.pooling_factors)
    batches = _by_feature(table, "batch_sizes", constraint.batch_sizes)
    repeats = _by_feature(table, "num_poolings", constraint.num_poolings)
    workloads = []
    for name, pooling, batch, repeat in zip(
        table.feature_names, poolings, batches, repeats, strict=True
    ):
        feature = None if statistics is None else statistics.features.get(name)
        whole = (batch_size if batch is None else batch) * (repeat or 1)
        bags = math.ceil(whole / num_devices)
        mean, deviation = 1.0, 0.0
        if feature is not None:
            mean, deviation = feature.mean_length, feature.length_deviation
        if pooling is not None:
            # A mean given by hand keeps the relative spread of the sample.
            deviation *= pooling / mean if mean else 0
            mean = pooling
        # Three deviations hold all but one batch in a thousand. The sum of ``bags`` lengths
        # deviates by ``sqrt(bags)`` times as much as one.
        capacity = capacity_for(math.ceil(bags * mean + 3 * deviation * math.sqrt(bags) - 1e-9))
        rows = table.num_embeddings
        heat = EvenHeat(rows) if feature is None else feature.heat(rows)
        workloads.append(FeatureWorkload(name, bags * mean, capacity, bags, heat))
    return tuple(workloads)


def _by_feature(
    table: TableConfig, field: str, value: Sequence[float] | float | None
) -> Sequence[float | None]:
    """Return a value for each feature of the table."""
    if not isinstance(value, Sequence):
        return (value,) * len(table.feature_names)
    if len(value) != len(table.feature_names):
        raise ValueError(
            f"table {table.name!r} has {len(table.feature_names)} features and {len(value)} "
            f"{field}; give one for each or a single number"
        )
    return value
