"""Where the rows of a table may be kept: on the devices, or in a row store with a cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.costs.cache import cache_perf
from jaxrec.plan.perf import Perf
from jaxrec.plan.table_cache import HOST_STORE, TableCache
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload

CACHE_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
# Batches whose rows a cache holds at once: `jaxrec.tier.ahead` plans four ahead of the step, and
# keeps the rows of those whose steps may be under way.
HELD_BATCHES = 7


@dataclasses.dataclass(frozen=True)
class TableStorage:
    """The storage of one table's rows, with its costs.

    Attributes:
        cache: The cache; None where devices hold all rows.
        held_rows: Rows on the devices together.
        perf: Seconds that the cache adds to a step.
        stored_bytes: Bytes of rows and optimizer state that each host keeps in the row store.
    """

    cache: TableCache | None
    held_rows: int
    perf: Perf
    stored_bytes: float

    @classmethod
    def of(
        cls, workload: TableWorkload, cache: TableCache | None, topology: Topology
    ) -> TableStorage:
        """Return the storage of a table with a cache, or without one."""
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
    """Return the caches that a table may have in some storages; None is a table without one.

    A cache has at least the rows of the batches under way. Where these may be all rows and the
    table may lie on the devices, there is no cache.

    Args:
        workload: The table and its lookups.
        constraint: The table's constraints.
        storages: Where the rows may be kept.
        store: URL of the row store of "store", unless the constraints say it.
        num_devices: Number of devices.

    Raises:
        ValueError: The rows may be in a row store, and no URL says where that is; or a quantized
            table may not lie on the devices.
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
    """Return the cache of a table with a fixed placement; None if it is kept on devices.

    Args:
        workload, constraint, store, num_devices: As for `possible_caches`.

    Raises:
        ValueError: The constraints have several storages, or a cache and no ``cache_ratio``.
    """
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
