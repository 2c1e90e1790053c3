"""Stores by URL, and their division among processes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from jaxrec.tier import RowStore
from jaxrec.tier.stores import open_store, url_for
from jaxrec.tier.stores.cached_store import CachedStore
from jaxrec.tier.stores.memory_store import MemoryStore
from jaxrec.tier.stores.urls import NUM_BUCKETS, Division

REPRS = {
    "file:///data/users": "FileStore('/data/users')",
    "file:///data/my%20users": "FileStore('/data/my users')",
    "rocksdb:///data/users": "RocksDBStore('/data/users')",
    "redis://host/2?prefix=users": "RedisStore('redis://host:6379/2?prefix=users')",
    "rediss://[::1]:7000": "RedisStore('rediss://[::1]:7000/0?prefix=jaxrec')",
    "memory+file:///data/users": "CachedStore(FileStore('/data/users'), memory=1000000000)",
    "memory+redis://host?prefix=a&memory=2MB": (
        "CachedStore(RedisStore('redis://host:6379/0?prefix=a'), memory=2000000)"
    ),
}
BAD = {
    "redis://user:secret@host": "must not have credentials, since it is shown in logs; set the",
    "memory+redis://:secret@host": "must not have credentials",
    "redis://host?password=secret": "unknown option 'password'",
    "redis://host:many": "write a URL like 'redis://host:6379/0",
    "redis://host/users": "write a URL like 'redis://host:6379/0",
    "redis://": "write a URL like 'redis://host:6379/0",
    "redis://host?timeout=0": "write a URL like 'redis://host:6379/0",
    "redis://host?prefix=": "write a URL like 'redis://host:6379/0",
    "file://data/users": "has an absolute path, such as file:///data/users with three slashes",
    "file://": "has an absolute path",
    "file:///": "has an absolute path",
    "rocksdb:///data?x=1": "has an absolute path, such as rocksdb:///data/users",
    "memory://users": "a store in memory has the URL 'memory://'",
    "memory+memory://": "over a store other than memory",
    "memory+file:///data?memory=much": "a size of memory is a number and KB, MB, GB or TB",
    "memory+file:///data?memory=1GB&memory=2GB": "write a cache as",
}
UNKNOWN = ["memory:", "http://host", "", "/data/users", "rocks://user:secret@host/x"]


def test_a_url_makes_a_store_each_time():
    first, second = open_store("memory://"), open_store("memory://")
    assert isinstance(first, MemoryStore)
    assert first is not second


def test_a_store_is_itself():
    store = CachedStore(MemoryStore())
    assert open_store(store) is store


@pytest.mark.parametrize("url", REPRS)
def test_urls(url):
    """Nothing is opened: these directories and servers do not exist."""
    store = open_store(url)
    assert isinstance(store, RowStore)
    assert repr(store) == REPRS[url]


@pytest.mark.parametrize("url", BAD)
def test_bad_urls(url):
    with pytest.raises(ValueError, match=BAD[url].replace("?", r"\?")) as raised:
        open_store(url)
    if "@" in url:
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", UNKNOWN)
def test_unknown_schemes(url):
    with pytest.raises(ValueError, match="no row store has the URL") as raised:
        open_store(url)
    message = str(raised.value)
    for scheme in ("memory://", "file:///", "rocksdb:///", "redis://", "rediss://", "memory+"):
        assert scheme in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("rocksdb:///data", "rocksdict", "rocksdb"),
        ("redis://host", "redis", "redis"),
        ("memory+rediss://host", "redis", "redis"),
    ],
    ids=["rocksdb", "redis", "cache"],
)
def test_missing_packages(url, package, extra, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name.startswith(f"jaxrec.tier.stores.{extra}"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    message = rf"needs the package {package}; install it by pip install 'jaxrec\[{extra}\]'"
    with pytest.raises(ImportError, match=message):
        open_store(url)


URLS_OF_PROCESSES = {
    "memory": ("memory://", "memory://"),
    "file": ("file:///data/{table}", "file:///data/a%2Bb%2F/process-1-of-2"),
    "rocksdb": ("rocksdb:///data/x/", "rocksdb:///data/x/process-1-of-2"),
    "redis": ("redis://host/0", "redis://host/0?prefix=process-1-of-2"),
    "redis_with_a_prefix": (
        "rediss://host/0?prefix={table}&lock=5",
        "rediss://host/0?prefix=a%2Bb%2F%2Fprocess-1-of-2&lock=5",
    ),
    "cache": (
        "memory+file:///data/{table}?memory=2GB",
        "memory+file:///data/a%2Bb%2F/process-1-of-2?memory=2GB",
    ),
}


@pytest.mark.parametrize(("url", "of_second"), URLS_OF_PROCESSES.values(), ids=URLS_OF_PROCESSES)
def test_each_process_has_a_store(url: str, of_second: str):
    assert url_for(url, "a+b/", 1, 2) == of_second
    first, second = (url_for(url, "a+b/", process, 2) for process in (0, 1))
    assert (first == second) == (url == "memory://")
    assert "process" not in url_for(url, "a+b/")


@pytest.mark.parametrize("num_ids", [None, 10**5, 4 * 10**9])
@pytest.mark.parametrize("num_processes", [1, 2, 16])
def test_each_id_has_one_owner_and_processes_have_equal_shares(num_ids, num_processes):
    rng = np.random.default_rng(0)
    low, high = (-(2**63), 2**63) if num_ids is None else (0, num_ids)
    ids = np.unique(rng.integers(low, high, 50_000))
    divisions = [Division(process, num_processes, num_ids) for process in range(num_processes)]
    owned = np.stack([division.is_own(ids) for division in divisions])
    np.testing.assert_array_equal(owned.sum(axis=0), 1)
    np.testing.assert_array_equal(owned.argmax(axis=0), divisions[0].owners(ids))
    share = ids.size / num_processes
    assert np.all(np.abs(owned.sum(axis=1) - share) < 0.15 * share)


def test_twice_the_processes_halve_the_parts():
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, 1000)
    np.testing.assert_array_equal(Division(0, 8).owners(ids) // 2, Division(0, 4).owners(ids))


def test_neighbours_in_a_file_have_one_owner():
    """A page of a file of 4 KB has records of one process, but for few pages."""
    ids = np.arange(10**9, 10**9 + 2**20)
    owners = Division(0, 16, num_ids=4 * 10**9).owners(ids)
    assert np.count_nonzero(np.diff(owners)) <= ids.size / 1024


def test_more_processes_than_buckets_are_refused():
    with pytest.raises(ValueError, match="1,024 processes or fewer, got 1,025"):
        Division(0, NUM_BUCKETS + 1)
