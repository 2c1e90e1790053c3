"""Caches of tables: which are possible, and their URLs."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxrec import optim
from jaxrec.plan import ParameterConstraints, Rate, TableCache, Topology
from jaxrec.plan.caches import CACHE_RATIOS, TableStorage, cache_perf, only_cache, possible_caches
from jaxrec.plan.constraints import check_store
from tests.plan.costs.cases import topology, workload_of


@pytest.mark.parametrize(
    ("store", "storage"),
    [
        ("memory://", "host"),
        ("file:///data/{table}", "store"),
        ("redis://host:6379/0?prefix=users&timeout=5", "store"),
        ("memory+rocksdb:///data/users?memory=2GB", "store"),
    ],
)
def test_a_cache_goes_to_json_and_back(store: str, storage: str):
    cache = TableCache(100, store)
    assert cache.to_dict() == {"storage": storage, "rows": 100, "store": store}
    assert TableCache.from_dict(cache.to_dict()) == cache


SECRETS = {
    "user": "redis://me:hunter2@host/0?prefix=users",
    "password_alone": "rediss://:hunter2@host:6379/0",
    "cached": "memory+redis://me:hunter2@host/0",
    "option": "redis://host/0?prefix=users&password=hunter2",
}


@pytest.mark.parametrize("url", SECRETS.values(), ids=SECRETS)
def test_credentials_are_refused_and_not_shown(url: str):
    with pytest.raises(ValueError, match=r"has credentials.*REDIS_PASSWORD") as error:
        TableCache(100, url)
    assert "hunter2" not in str(error.value)
    assert url.partition("://")[0] in str(error.value)


def test_a_path_may_have_an_at_sign():
    check_store("file:///data/a@b/{table}")


@pytest.mark.parametrize(
    ("rows", "store", "kind", "message"),
    [
        (0, "memory://", ValueError, "a cache has 1 row or more, got 0"),
        (True, "memory://", TypeError, "a cache's rows are an integer, got True"),
        (5, "/data/users", ValueError, "named by a URL such as 'file:///data/{table}', got '/data"),
        (5, None, TypeError, "named by a URL such as 'file:///data/{table}', got None"),
    ],
    ids=["rows", "boolean", "path", "none"],
)
def test_caches_that_are_wrong(unchecked, rows, store, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        TableCache(rows, store)


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
