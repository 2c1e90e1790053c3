"""Caches of tables over row stores: the possible ones, and their costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrec.plan.constraints import ParameterConstraints, check_store
from jaxrec.plan.quantities import Perf
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload

# The row store in the memory of the host.
HOST_STORE = "memory://"


@dataclasses.dataclass(frozen=True)
class TableCache:
    """A table with some rows on the devices and all rows in a row store.

    `jaxrec.shard` makes such a table by `jaxrec.tier.Cached`.

    Attributes:
        rows: Number of rows on the devices together.
        store: URL of the row store (`jaxrec.tier.stores.open_store`), without credentials;
            ``{table}`` stands for the table's name.

    Raises:
        TypeError: A field has another type.
        ValueError: A field does not fit its description.

    Example:
        >>> TableCache(rows=5000).storage, TableCache(5000, "file:///data/{table}").storage
        ('host', 'store')
    """

    rows: int
    store: str = HOST_STORE

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not isinstance(self.rows, int):
            raise TypeError(f"a cache's rows are an integer, got {self.rows!r}")
        if self.rows < 1:
            raise ValueError(f"a cache has 1 row or more, got {self.rows}")
        check_store(self.store)

    @property
    def storage(self) -> str:
        """Storage of the table: "host" for the memory of the host, else "store"."""
        return "host" if self.store == HOST_STORE else "store"

    def to_dict(self) -> dict[str, Any]:
        """Return the cache as a dictionary for JSON."""
        return {"storage": self.storage, "rows": self.rows, "store": self.store}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TableCache:
        """Make a cache from the dictionary of `to_dict`."""
        return cls(fields["rows"], fields["store"])


def cache_perf(workload: TableWorkload, cache: TableCache, topology: Topology) -> Perf:
    """Return the seconds that a cache adds to a step: to assign rows to ids, and to move rows."""
    # Every process gives rows to the ids of the whole batch. It fetches the rows that the cache
    # misses, with their optimizer state, and evicts as many. All of it is added to the step. The
    # tier does this work on threads beside the step, so that a step takes less where the host has
    # idle cores; whether it has, the planner cannot know.
    moves = topology.host_moves if cache.storage == "host" else topology.store_moves
    missed = workload.missed_rows(cache.rows, topology.num_devices)
    ids = topology.num_devices * workload.assigned_ids
    # Tables that share features have one map of ids, and one call moves the rows of all; each bears
    # its part.
    by_id = topology.assign.seconds(items=ids) + moves.seconds(calls=min(1, missed), items=missed)
    by_byte = moves.byte * missed * workload.table_bytes / workload.rows
    return Perf(prefetch=by_id / max(1, len(workload.joined)) + by_byte)


# Closer together where caches are small: the hottest rows come first, so a row more saves most
# there.
CACHE_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
# Batches whose rows a cache holds at once: `jaxrec.tier.ahead` plans four ahead, and rows of these,
# of two whose steps may be under way, and of the batch itself are not evicted.
HELD_BATCHES = 7


@dataclasses.dataclass(frozen=True)
class TableStorage:
    """Location of a table's rows: all on devices, or some in a cache over a row store."""

    cache: TableCache | None
    held_rows: int  # rows on the devices together
    perf: Perf  # seconds that the cache adds to a step
    stored_bytes: float  # of rows and optimizer state in each host's row store; 0 without a cache

    @classmethod
    def of(
        cls, workload: TableWorkload, cache: TableCache | None, topology: Topology
    ) -> TableStorage:
        if cache is None:
            return cls(None, workload.rows, Perf(), 0.0)
        perf = cache_perf(workload, cache, topology)
        held_rows = min(cache.rows, workload.rows)
        return cls(cache, held_rows, perf, float(workload.table_bytes))


def possible_caches(
    workload: TableWorkload,
    constraint: ParameterConstraints,
    storages: Sequence[str],
    store: str | None,
    num_devices: int,
) -> tuple[TableCache | None, ...]:
    """Return the caches that a table may have in the given storages; None stands for no cache.

    A cache has at least the rows of the batches under way.
    """
    if tuple(storages) == ("device",):
        return (None,)
    table = workload.table
    if table.inference_format is not None:
        if "device" in storages:
            return (None,)
        raise ValueError(
            f"table {table.name!r} is quantized ({table.row_format.name}), and quantized tables "
            f"lie on the devices; got storages={tuple(storages)!r}, without 'device'"
        )
    least = max(math.ceil(workload.used_rows(HELD_BATCHES, num_devices)), num_devices)
    ratios = CACHE_RATIOS if constraint.cache_ratio is None else (constraint.cache_ratio,)
    sizes = {min(max(math.ceil(workload.rows * r), least), workload.rows) for r in ratios}
    # A cache of all rows only adds work to a table on the devices.
    if "device" in storages:
        sizes.discard(workload.rows)
    caches: list[TableCache | None] = []
    for storage in storages:
        if storage == "device":
            caches.append(None)
        else:
            url = _url(workload.name, storage, constraint.store or store)
            caches += [TableCache(rows, url) for rows in sorted(sizes)]
    return tuple(caches)


def only_cache(
    workload: TableWorkload, constraint: ParameterConstraints, store: str | None, num_devices: int
) -> TableCache | None:
    """Return the cache of a table with a fixed placement; None if it is kept on devices."""
    storages = constraint.storages or ("device",)
    if len(storages) > 1 or (storages != ("device",) and constraint.cache_ratio is None):
        raise ValueError(
            f"table {workload.name!r} has a fixed placement, which takes one storage, and a "
            f"cache_ratio unless that is 'device'; got storages={storages!r} and "
            f"cache_ratio={constraint.cache_ratio}. Give sharding_types instead of placement to "
            "have them chosen"
        )
    (cache,) = possible_caches(workload, constraint, storages, store, num_devices)
    return cache


def _url(table: str, storage: str, store: str | None) -> str:
    if storage == "host":
        return HOST_STORE
    if store is None:
        raise ValueError(
            f"table {table!r} may be kept in storage 'store', and no URL says where that is; give "
            "Planner(..., store='file:///data/{table}')"
        )
    return store
