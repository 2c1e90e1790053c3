"""Costs of caches beside counts by hand."""

from __future__ import annotations

import dataclasses

import pytest

from jaxrec import optim
from jaxrec.plan import Rate, TableCache
from jaxrec.plan.costs.cache import cache_perf
from tests.plan.costs.cases import topology, workload_of

RATES = {
    "assign": Rate(call=1.0, item=2.0),
    "host_moves": Rate(call=10.0, item=20.0, byte=30.0),
    "store_moves": Rate(call=100.0, item=200.0, byte=300.0),
}


@pytest.mark.parametrize(("store", "factor"), [("memory://", 1), ("file:///x", 10)])
def test_ids_are_assigned_and_missed_rows_moved(store: str, factor: int):
    """A batch that reads all 1000 rows, 250 of which are not in the cache."""
    devices = topology(**RATES)
    workload = workload_of(devices, pooling=5000, optimizer=optim.rowwise_adagrad())
    perf = cache_perf(workload, TableCache(750, store), devices)
    ids = 4 * 4 * 5000
    moved = 10 + 250 * (20 + 30 * (8 * 4 + 4))
    assert perf.prefetch == pytest.approx(1 + 2 * ids + factor * moved, rel=1e-3)
    assert perf.total == perf.prefetch


def test_tables_that_share_features_share_the_work_but_for_bytes():
    devices = topology(**RATES)
    workload = workload_of(devices, pooling=5000)
    joined = dataclasses.replace(workload, joined=("a", "b"), joined_features=workload.features)
    cache = TableCache(750)
    alone, shared = (cache_perf(each, cache, devices).prefetch for each in (workload, joined))
    bytes = 30 * 250 * 8 * 4
    assert shared - bytes == pytest.approx((alone - bytes) / 2, rel=1e-3)


def test_a_cache_of_all_rows_moves_none():
    devices = topology(**RATES)
    perf = cache_perf(workload_of(devices, pooling=2), TableCache(1000), devices)
    assert perf.prefetch == 1 + 2 * 32
