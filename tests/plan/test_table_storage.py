"""Caches that a table may have."""

from __future__ import annotations

import pytest

from jaxrec.plan import ParameterConstraints, TableCache, Topology
from jaxrec.plan.table_storage import CACHE_RATIOS, TableStorage, only_cache, possible_caches
from tests.plan.costs.cases import topology, workload_of

FILES = "file:///data/{table}"


def caches_of(storages, constraint=None, *, rows=10_000, devices=1, store=FILES, **workload):
    work = workload_of(topology(each=devices), rows=rows, **workload)
    constraint = constraint or ParameterConstraints()
    return possible_caches(work, constraint, storages, store, devices)


def test_sizes_are_ratios_of_the_rows():
    rows = [round(10_000 * ratio) for ratio in CACHE_RATIOS]
    assert caches_of(["device"]) == (None,)
    assert caches_of(["device", "host", "store"]) == (
        None,
        *(TableCache(each) for each in rows),
        *(TableCache(each, FILES) for each in rows),
    )
    assert caches_of(["host"], ParameterConstraints(cache_ratio=0.3)) == (TableCache(3000),)


def test_a_cache_has_the_rows_of_the_batches_under_way():
    # Seven batches of 4 samples with 100 ids each on 2 devices: 5,600 draws of 10,000 rows.
    least = 10_000 * (1 - (1 - 1e-4) ** 5600)
    rows = [cache.rows for cache in caches_of(["host"], pooling=100, devices=2)]
    assert rows == [pytest.approx(least, abs=1), 5000, 7500]
    assert caches_of(["host"], pooling=10_000) == (TableCache(10_000),)
    assert caches_of(["device", "host"], pooling=10_000) == (None,)
    (cache,) = caches_of(["host"], ParameterConstraints(cache_ratio=1e-4), devices=8, batch=1)
    assert cache.rows == pytest.approx(7 * 8, abs=1)


def test_a_store_has_a_url():
    with pytest.raises(ValueError, match=r"table 'a' may be kept in storage 'store', and no URL"):
        caches_of(["store"], store=None)
    own = ParameterConstraints(store="file:///other", cache_ratio=0.5)
    assert caches_of(["store"], own) == (TableCache(5000, "file:///other"),)


def test_a_fixed_placement_takes_one_cache():
    work = workload_of(topology(), rows=1000)
    fixed = ParameterConstraints(storages=["host"], cache_ratio=0.5)
    assert only_cache(work, fixed, None, 4) == TableCache(500)
    assert only_cache(work, ParameterConstraints(), None, 4) is None
    for several in ({"storages": ["device", "host"]}, {"storages": ["host"]}):
        with pytest.raises(ValueError, match="table 'a' has a fixed placement, which takes one"):
            only_cache(work, ParameterConstraints(**several), None, 4)


def test_every_host_keeps_all_rows():
    work = workload_of(topology(), rows=1000)
    machine = Topology.named("h100", devices=16)
    storage = TableStorage.of(work, TableCache(100), machine)
    assert (storage.held_rows, storage.stored_bytes) == (100, 1000 * 8 * 4)
    assert storage.perf.prefetch > 0
    assert TableStorage.of(work, None, machine).held_rows == 1000
