"""Eviction policies: the order in which ids lose their rows when no row is free.

A policy orders the rows by a key, an unsigned 64-bit integer. The rows with the smallest keys are
evicted first; among equal keys, the lowest row index.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Records:
    """Use of each row that ids can have, as NumPy arrays of ``[rows]``.

    Attributes:
        ids: int64 id of the row; arbitrary where ``born`` is -1.
        last_use: int64 number of the last batch that used the row.
        count: uint32 number of lookups of the row since its id was admitted.
        born: int64 number of the batch in which the id was admitted; -1: the row is free.
        power: uint8 frequency class of `lfu_lru`, about the binary logarithm of the number of
            batches that used the row; 0 with other policies.
        last_seconds: int64 Unix time of the last use; 0 with policies that need none.
    """

    ids: np.ndarray
    last_use: np.ndarray
    count: np.ndarray
    born: np.ndarray
    power: np.ndarray
    last_seconds: np.ndarray

    @classmethod
    def empty(cls, rows: int) -> Records:
        """Make the records of free rows."""
        return cls(
            ids=np.zeros(rows, np.int64),
            last_use=np.zeros(rows, np.int64),
            count=np.zeros(rows, np.uint32),
            born=np.full(rows, -1, np.int64),
            power=np.zeros(rows, np.uint8),
            last_seconds=np.zeros(rows, np.int64),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def take(self, rows: np.ndarray) -> Records:
        """Return the records of some rows."""
        return Records(**{name: array[rows] for name, array in self.arrays().items()})


# Bits of a key that hold the number of a batch where frequency comes first.
_BATCH_BITS = 40
_MAX_COUNT = 2 ** (64 - _BATCH_BITS) - 1

# Frequency classes of `LfuLru`.
FIRST_POWER = 5
MAX_POWER = 31


class Eviction(abc.ABC):
    """Interface of an eviction policy.

    Derive a frozen dataclass from it, or use `by_score` for a policy of one formula.
    """

    @abc.abstractmethod
    def keys(self, records: Records, batch: int) -> np.ndarray:
        """Return the order of eviction, uint64 ``[rows]``: the smallest are evicted first.

        It must depend on the records and the batch alone.

        Args:
            records: Use of all rows; keys of free rows are not read.
            batch: Number of the present batch.
        """

    def expired(self, records: Records, batch: int) -> np.ndarray | None:
        """Return whether each row has outlived its time, bool ``[rows]``; None: no row ever does.

        The vocabulary calls it once every `expiry_interval` batches.
        """
        return None

    @property
    def expiry_interval(self) -> int:
        """Number of batches from one search for expired rows to the next."""
        return 100

    @property
    def foresight(self) -> int:
        """Number of batches after the present one whose rows are evicted last, the farthest first.

        `keys` orders the rows that none of them uses.
        """
        return 0

    @property
    def uses_power(self) -> bool:
        """Whether `Records.power` is kept."""
        return False

    @property
    def uses_seconds(self) -> bool:
        """Whether `Records.last_seconds` is kept."""
        return False

    def seconds(self) -> float:
        """Return the time that `Records.last_seconds` is set to."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class Lru(Eviction):
    """Least recently used."""

    def keys(self, records: Records, batch: int) -> np.ndarray:
        return records.last_use.view(np.uint64)


@dataclasses.dataclass(frozen=True)
class Lfu(Eviction):
    """Least frequently used."""

    def keys(self, records: Records, batch: int) -> np.ndarray:
        counts = np.minimum(records.count, _MAX_COUNT).astype(np.uint64)
        return (counts << np.uint64(_BATCH_BITS)) | records.last_use.astype(np.uint64)


@dataclasses.dataclass(frozen=True)
class LfuLru(Eviction):
    """Least frequency class, then least recently used."""

    def keys(self, records: Records, batch: int) -> np.ndarray:
        power = records.power.astype(np.uint64) << np.uint64(_BATCH_BITS)
        return power | records.last_use.astype(np.uint64)

    @property
    def uses_power(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class DistanceLfu(Eviction):
    """Smallest count divided by a power of the time since the last use."""

    decay: float

    def __post_init__(self) -> None:
        if not self.decay > 0:
            raise ValueError(f"distance_lfu: decay is above 0, got {self.decay}")

    def keys(self, records: Records, batch: int) -> np.ndarray:
        age = (batch - records.last_use + 1).astype(np.float64)
        return ordered(records.count / age**self.decay)


@dataclasses.dataclass(frozen=True)
class TimeToLive(Eviction):
    """Least recently used; rows unused for too long are evicted even if rows are free."""

    batches: int | None
    hours: float | None
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        given = [value for value in (self.batches, self.hours) if value is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ValueError(
                "ttl takes either batches= or hours=, above 0, got "
                f"batches={self.batches}, hours={self.hours}"
            )

    def keys(self, records: Records, batch: int) -> np.ndarray:
        return records.last_use.view(np.uint64)

    def expired(self, records: Records, batch: int) -> np.ndarray:
        if self.batches is not None:
            return batch - records.last_use > self.batches
        assert self.hours is not None
        return self.seconds() - records.last_seconds > 3600 * self.hours

    @property
    def expiry_interval(self) -> int:
        return 100 if self.batches is None else max(1, min(100, self.batches // 4))

    @property
    def uses_seconds(self) -> bool:
        return self.hours is not None

    def seconds(self) -> float:
        return self.clock()


@dataclasses.dataclass(frozen=True)
class ByScore(Eviction):
    """Smallest score of a user's function."""

    score: Callable[[Records, int], np.ndarray]

    def keys(self, records: Records, batch: int) -> np.ndarray:
        scores = np.asarray(self.score(records, batch), np.float64)
        if scores.shape != records.born.shape or np.isnan(scores).any():
            raise ValueError(
                f"by_score: the function returns a number for each of {records.born.size} rows, "
                f"got an array of shape {scores.shape}"
                + (" with NaN" if np.isnan(scores).any() else "")
            )
        return ordered(scores)


def lru() -> Eviction:
    """Evict the rows that were used least recently, by the number of the batch.

    Example:
        >>> import jaxrec
        >>> jaxrec.tier.Dynamic(eviction=jaxrec.tier.lru()).eviction
        Lru()
    """
    return Lru()


def lfu() -> Eviction:
    """Evict the rows with the fewest lookups since their ids were admitted.

    Among equally frequent rows, the least recently used are evicted first. Counts above 16 million
    are equal.
    """
    return Lfu()


def lfu_lru() -> Eviction:
    """Evict the rows of the lowest frequency class, the least recently used first.

    A new id has class 5. A batch that uses the row raises class ``p`` with probability ``2**-p``,
    up to 31, so that the class is about the binary logarithm of the number of batches. The draws
    depend on the id and the batch alone. Source: the mixed LFU/LRU record of Tencent's dynamic
    embedding (``torchrec/contrib/dynamic_embedding``), here without its overflows.
    """
    return LfuLru()


def distance_lfu(decay: float = 1.0) -> Eviction:
    """Evict the rows of smallest ``count / (batches since the last use + 1) ** decay``.

    Source: ``DistanceLFU_EvictionPolicy`` of TorchRec's ``mc_modules.py``.

    Args:
        decay: Above 0; larger values forget faster.
    """
    return DistanceLfu(decay)


def ttl(
    *,
    batches: int | None = None,
    hours: float | None = None,
    clock: Callable[[], float] = time.time,
) -> Eviction:
    """Evict rows that were unused for some time, and the least recently used when no row is free.

    Args:
        batches: Time to live in batches.
        hours: Time to live in hours; which rows are evicted then depends on the clock.
        clock: Returns the time in seconds.

    Raises:
        ValueError: Not exactly one of ``batches`` and ``hours`` is given, or it is not above 0.
    """
    return TimeToLive(batches, hours, clock)


def by_score(score: Callable[[Records, int], np.ndarray]) -> Eviction:
    """Evict the rows with the smallest score.

    Args:
        score: ``score(records, batch)`` returns a number for each row, ``[rows]``. The numbers of
            free rows (``records.born == -1``) are ignored, but must not be NaN.

    Example:
        >>> import jaxrec
        >>> rarely_per_batch = jaxrec.tier.by_score(
        ...     lambda records, batch: records.count / (batch - records.born + 1))
    """
    return ByScore(score)


def ordered(scores: np.ndarray) -> np.ndarray:
    """Return uint64 keys in the order of float64 scores, which must not be NaN."""
    bits = (scores + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    sign = np.uint64(1 << 63)
    return np.where(bits & sign, ~bits, bits | sign)
