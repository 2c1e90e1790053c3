"""Caches of plans, and the URLs of their row stores."""

from __future__ import annotations

import re

import pytest

from jaxrec.plan import TableCache
from jaxrec.plan.table_cache import check_store


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
