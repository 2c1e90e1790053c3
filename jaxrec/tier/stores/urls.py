"""Row stores by URL, and their division among processes."""

from __future__ import annotations

import dataclasses
import importlib
import urllib.parse
from typing import Any

import numpy as np

from jaxrec.tier.ids.batch_ops import mix
from jaxrec.tier.stores.row_store import RowStore


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """Class ``name`` of ``module`` for stores of a URL scheme, and the extra that it needs."""

    module: str
    name: str
    example: str
    extra: str | None = None


_SCHEMES = {
    "memory": _Scheme("memory_store", "MemoryStore", "memory://"),
    "file": _Scheme("file_store", "FileStore", "file:///data/users"),
    "rocksdb": _Scheme("rocksdb_store", "RocksDBStore", "rocksdb:///data/users", "rocksdb"),
    "redis": _Scheme("redis_store", "RedisStore", "redis://host:6379/0?prefix=users", "redis"),
    "rediss": _Scheme("redis_store", "RedisStore", "rediss://host:6379/0?prefix=users", "redis"),
}
_CACHE = "memory+"


def url_for(url: str, table: str, process: int = 0, num_processes: int = 1) -> str:
    """Return the URL of the store of one table in one process.

    Args:
        url: A URL; ``{table}`` in it is replaced by the table's name.
        table: The name.
        process: Index of the process. Each of several processes has a store of its own.
        num_processes: Number of processes.

    Example:
        >>> url_for("file:///data/{table}", "users")
        'file:///data/users'
        >>> url_for("redis://host/0?prefix=users&lock=5", "users", 1, 2)
        'redis://host/0?prefix=users%2Fprocess-1-of-2&lock=5'
    """
    url = url.replace("{table}", urllib.parse.quote(table, safe=""))
    scheme = url.removeprefix(_CACHE).partition("://")[0]
    if num_processes == 1 or scheme == "memory":
        return url
    part = f"process-{process}-of-{num_processes}"
    place, mark, query = url.partition("?")
    if scheme not in ("redis", "rediss"):
        return f"{place.rstrip('/')}/{part}{mark}{query}"
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    options["prefix"] = "/".join(filter(None, (options.get("prefix"), part)))
    return f"{place}?{urllib.parse.urlencode(options)}"


def open_store(url: str | RowStore) -> RowStore:
    """Return the store of a URL; a store itself is returned as it is.

    Nothing is read or written before `RowStore.open`.

    Args:
        url: A URL such as ``"memory://"``, ``"file:///data/users"``, ``"rocksdb:///data/users"`` or
            ``"redis://host:6379/0?prefix=users"``. ``"memory+rocksdb:///data/users?memory=2GB"``
            keeps 2 GB of records in memory over the store ``"rocksdb:///data/users"``.

    Raises:
        ValueError: No store has that scheme, or its store refuses the URL.
        ImportError: The store needs a package that is not installed.

    Example:
        >>> open_store("file:///data/users")
        FileStore('/data/users')
    """
    if isinstance(url, RowStore):
        return url
    if url.startswith(_CACHE):
        return _cached(url)
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        examples = ", ".join(repr(each.example) for each in _SCHEMES.values())
        raise ValueError(
            f"no row store has the URL {_without_user(url)!r}; use one like {examples}, "
            "'memory+rocksdb:///data/users?memory=2GB', or a jaxrec.tier.RowStore"
        )
    return _class(scheme).from_url(url)


def _class(scheme: str) -> Any:
    of = _SCHEMES[scheme]
    try:
        module = importlib.import_module(f"jaxrec.tier.stores.{of.module}")
    except ModuleNotFoundError as error:
        if of.extra is None:
            raise
        raise ImportError(
            f"a store {scheme}:// needs the package {error.name}; install it by "
            f"pip install 'jaxrec[{of.extra}]'"
        ) from None
    return getattr(module, of.name)


def _cached(url: str) -> RowStore:
    from jaxrec.tier.stores.cached_store import DEFAULT_BYTES, CachedStore, parse_bytes

    parts = urllib.parse.urlsplit(url.removeprefix(_CACHE))
    options = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
    sizes = [value for name, value in options if name == "memory"]
    others = urllib.parse.urlencode([each for each in options if each[0] != "memory"])
    # urlunsplit drops the empty host of schemes that it does not know.
    backing = f"{parts.scheme}://{parts.netloc}{parts.path}{'?' if others else ''}{others}"
    if parts.scheme == "memory" or len(sizes) > 1:
        raise ValueError(
            f"{_without_user(url)!r}: write a cache as 'memory+rocksdb:///data/users?memory=2GB', "
            "over a store other than memory"
        )
    return CachedStore(open_store(backing), parse_bytes(sizes[0]) if sizes else DEFAULT_BYTES)


def _without_user(url: str) -> str:
    """Return a URL without its user and password."""
    scheme, separator, rest = url.partition("://")
    _, at, rest = rest.rpartition("@")
    return f"{scheme}{separator}{'...@' if at else ''}{rest}"


# Number of buckets of ids. A process has a run of consecutive buckets.
NUM_BUCKETS = 1024

# Seed of the hash, above the seeds of admission and of the counters of sightings.
_SEED = 1 << 40

# Number of consecutive ids of a large range in one bucket. They are neighbours in a file, where a
# page should have records of one process.
_RUN = 1024


@dataclasses.dataclass(frozen=True)
class Division:
    """Division of a table's records among processes, each of which has a store of its own.

    ``process`` is this process's index. Ids are 0 to ``num_ids`` - 1; None: any 64-bit ids.
    """

    process: int
    num_processes: int
    num_ids: int | None = None

    def __post_init__(self) -> None:
        if self.num_processes > NUM_BUCKETS:
            raise ValueError(
                f"row stores are divided among {NUM_BUCKETS:,} processes or fewer, got "
                f"{self.num_processes:,}"
            )

    def owners(self, ids: np.ndarray) -> np.ndarray:
        """Return the process whose store has each id's record, int64 ``[n]``.

        It depends only on the id and the number of processes.
        """
        if self.num_ids is not None:
            # Small ranges have shorter runs, so that every process has its share.
            ids = ids // min(_RUN, 1 + self.num_ids // (64 * NUM_BUCKETS))
        buckets = (mix(ids, _SEED) % np.uint64(NUM_BUCKETS)).astype(np.int64)
        return buckets * self.num_processes // NUM_BUCKETS

    def is_own(self, ids: np.ndarray) -> np.ndarray:
        """Return whether each id's record belongs in this process's store, bool ``[n]``."""
        return self.owners(ids) == self.process
