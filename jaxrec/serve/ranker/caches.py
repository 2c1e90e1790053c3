"""Caches of histories by key: of bounded bytes, those that were used last."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any, TypeAlias

import jax
import numpy as np

# Usually a user's id.
Key: TypeAlias = int | str

# Types of a row's key. Not of subclasses: True is not the key 1.
KEY_TYPES = (int, str, type(None))


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """Inputs from which a row's history was encoded; equal inputs have equal caches.

    Attributes:
        context: Ids of each context feature.
        events: int32 ``[features, events]``, the value of each feature of each event, oldest first.
        request_time: Time that the history is encoded for; 0 if the model needs none.
    """

    context: tuple[np.ndarray, ...]
    events: np.ndarray
    request_time: int = 0

    @property
    def num_events(self) -> int:
        """Number of events."""
        return self.events.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.events.nbytes + sum(ids.nbytes for ids in self.context)

    def begins(self, other: History) -> bool:
        """Return whether another history has this context and these events, and maybe more."""
        return (
            self.request_time == other.request_time
            and self.num_events <= other.num_events
            and len(self.context) == len(other.context)
            and all(map(np.array_equal, self.context, other.context))
            and np.array_equal(self.events, other.events[:, : self.num_events])
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """An encoded history.

    Attributes:
        history: The history that it was encoded from.
        events: History size of the arrays, the most events that fit.
        arrays: Keys, values, lengths, newest and request, as a ranker's programs take them.
    """

    history: History
    events: int
    arrays: tuple[jax.Array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays and of the history."""
        return self.history.nbytes + sum(array.nbytes for array in self.arrays)


def _bytes_of(key: Key, cache: Cache) -> int:
    """Return the bytes of a cache and of its key."""
    # Clients choose the keys: without their bytes, keys of megabytes would exceed every bound.
    if isinstance(key, str):
        return cache.nbytes + len(key.encode("utf-8", "surrogatepass"))
    return cache.nbytes + (key.bit_length() + 7) // 8


@dataclasses.dataclass(frozen=True)
class CacheCounts:
    """Counts of a ranker's lookups in its caches, and the size of the caches.

    Attributes:
        hits: Rows whose history was cached.
        appends: Rows whose first events were cached, and to which the newest ones were appended.
        misses: Rows whose history was encoded.
        evictions: Caches that were dropped for others.
        caches: Number of caches.
        bytes: Bytes of the caches and their keys.
    """

    hits: int = 0
    appends: int = 0
    misses: int = 0
    evictions: int = 0
    caches: int = 0
    bytes: int = 0


class HistoryCaches:
    """Caches by key, of at most ``max_bytes`` together; several threads may call it.

    Caches are of one version of a model's variables, the ``owner``. A cache of another one is
    neither returned nor kept.

    Args:
        max_bytes: Largest number of bytes, with those of the keys. A cache that is larger by itself
            is not kept.
        owner: Variables of the model.
    """

    def __init__(self, max_bytes: int, owner: Any) -> None:
        self.max_bytes = max_bytes
        self._owner = owner
        # In the order of their last use, the oldest first.
        self._caches: collections.OrderedDict[Key, Cache] = collections.OrderedDict()
        self._counts: collections.Counter[str] = collections.Counter()
        self._bytes = 0
        self._lock = threading.Lock()

    def find(self, key: Key, owner: Any) -> Cache | None:
        """Return the cache of a key, which then counts as used."""
        with self._lock:
            if owner is not self._owner or key not in self._caches:
                return None
            self._caches.move_to_end(key)
            return self._caches[key]

    def keep(self, key: Key, cache: Cache, owner: Any) -> None:
        """Keep a cache in place of the key's old one, and drop the least recently used ones."""
        size = _bytes_of(key, cache)
        with self._lock:
            if owner is not self._owner:
                return
            # The old one first, which is worth nothing any more, also if the new one is too large.
            if (old := self._caches.pop(key, None)) is not None:
                self._bytes -= _bytes_of(key, old)
            if size > self.max_bytes:
                return
            while self._bytes + size > self.max_bytes:
                self._bytes -= _bytes_of(*self._caches.popitem(last=False))
                self._counts["evictions"] += 1
            self._caches[key] = cache
            self._bytes += size

    def drop(self, owner: Any) -> None:
        """Drop all caches; later ones are of another owner."""
        with self._lock:
            self._owner = owner
            self._caches.clear()
            self._bytes = 0

    def count(self, name: str) -> None:
        """Count a row: "hits", "appends" or "misses"."""
        with self._lock:
            self._counts[name] += 1

    def counts(self) -> CacheCounts:
        """Return the counts and the size at this moment."""
        with self._lock:
            return CacheCounts(**self._counts, caches=len(self._caches), bytes=self._bytes)
