"""Costs of a table with a cache over a row store."""

from __future__ import annotations

from jaxrec.plan.perf import Perf
from jaxrec.plan.table_cache import TableCache
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload


def cache_perf(workload: TableWorkload, cache: TableCache, topology: Topology) -> Perf:
    """Return the seconds that a cache adds to a step, ``assign(D n) + moves(M, M v)``.

    Every process gives rows to the ``D n`` ids of the whole batch. It fetches the ``M`` rows of
    ``v`` bytes that the cache misses (`TableWorkload.missed_rows`), with their optimizer state, and
    evicts as many. Tables that share features share the work by id and by row.

    The tier does this work beside the device's step where a processor is free, so a step may be
    shorter by up to the shorter of the two.

    Args:
        workload: The table.
        cache: Its cache.
        topology: The devices.
    """
    moves = topology.host_moves if cache.storage == "host" else topology.store_moves
    missed = workload.missed_rows(cache.rows, topology.num_devices)
    ids = topology.num_devices * workload.assigned_ids
    by_id = topology.assign.seconds(items=ids) + moves.seconds(calls=min(1, missed), items=missed)
    by_byte = moves.byte * missed * workload.table_bytes / workload.rows
    return Perf(prefetch=by_id / max(1, len(workload.joined)) + by_byte)
