"""Eviction policies: which ids lose their rows when no row is free.

A vocabulary on the host orders its rows by a key, an unsigned 64-bit integer. The rows with the
smallest keys are evicted first; among equal keys, the lowest row index. Maps in the compiled step,
where there are no 64-bit integers, keep the ids of highest score, in float32, or evict ids after
some hours. A policy answers what it can.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Num


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


# Numbers that maps in the compiled step keep for `Eviction.scores`.
COUNTS, LAST_ACCESS = "counts", "last_access_iter"

# Bits of a key that hold the number of a batch where frequency comes first.
_BATCH_BITS = 40
_MAX_COUNT = 2 ** (64 - _BATCH_BITS) - 1

# Frequency classes of `LfuLru`.
FIRST_POWER = 5
MAX_POWER = 31


@dataclasses.dataclass(frozen=True, eq=False)
class Eviction:
    """Interface of an eviction policy.

    Derive a frozen dataclass from it, or use `by_score` for a policy of one formula. Vocabularies
    (`Dynamic`, `Cached`) ask for `keys`. Of the maps of `jaxrec.tier.managed_collision`, a
    ``SortedMap`` asks for `scores`, and a ``MultiProbeMap`` for `hours_to_live`.

    Attributes:
        foresight: Number of batches after the present one whose rows are evicted last, the farthest
            first (`farthest`). `keys` orders the rows that none of them uses.
        uses_power, uses_seconds: Whether `Records.power` and `Records.last_seconds` are kept.
        expiry_interval: Number of batches from one search for expired rows to the next.
        metadata: Names of the numbers that a sorted map keeps of each slot: ``"counts"``, the
            occurrences since the id entered, and ``"last_access_iter"``, the batch in which the id
            occurred last. Empty: the policy has no `scores`.
        is_lru: Whether a new id takes the slot that expired first among those that a multi-probe
            map probes, and only if none of them is empty. False: it takes the first slot that is
            empty or expired.
    """

    uses_power: ClassVar[bool] = False
    metadata: ClassVar[tuple[str, ...]] = ()
    is_lru: ClassVar[bool] = False

    foresight: int = dataclasses.field(default=0, kw_only=True, repr=False)

    def keys(self, records: Records, batch: int) -> np.ndarray:
        """Return the order of eviction, uint64 ``[rows]``: the smallest are evicted first.

        It must depend on the records and the batch alone.

        Args:
            records: Use of all rows; keys of free rows are not read.
            batch: Number of the present batch.
        """
        raise TypeError(f"{self!r} is for maps of managed collisions, not for rows on the host")

    @property
    def orders_rows(self) -> bool:
        """Whether the policy has `keys`."""
        return type(self).keys is not Eviction.keys

    def scores(
        self, metadata: Mapping[str, Int32[Array, " ids"]], iteration: Int32[Array, ""]
    ) -> Num[Array, " ids"]:
        """Return the score of each id in a sorted map, of which the highest stay; traced.

        Between equal scores, the id of the map stays and the new id does not enter.

        Args:
            metadata: The numbers of each id, by name. An empty slot has zeros.
            iteration: Number of batches so far, this one included.

        Returns:
            int32 of 0 or more, or float32.
        """
        raise TypeError(f"{self!r} does not score ids in the compiled step")

    def hours_to_live(self, features: Sequence[str]) -> np.ndarray:
        """Return for how many hours a multi-probe map keeps ids of features, int32 ``[features]``.

        Args:
            features: Names of the features whose ids the map has.
        """
        raise TypeError(f"{self!r} does not say for how many hours ids are kept")

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
    def uses_seconds(self) -> bool:
        """Whether `Records.last_seconds` is kept."""
        return False

    def seconds(self) -> float:
        """Return the time that `Records.last_seconds` is set to."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class Lru(Eviction):
    """Least recently used."""

    metadata = (LAST_ACCESS,)
    decay_exponent = 1.0

    def keys(self, records: Records, batch: int) -> np.ndarray:
        return records.last_use.view(np.uint64)

    def scores(self, metadata, iteration):
        return -_decay(iteration - metadata[LAST_ACCESS] + 1, self.decay_exponent)


@dataclasses.dataclass(frozen=True)
class Lfu(Eviction):
    """Least frequently used."""

    metadata = (COUNTS,)

    def keys(self, records: Records, batch: int) -> np.ndarray:
        counts = np.minimum(records.count, _MAX_COUNT).astype(np.uint64)
        return (counts << np.uint64(_BATCH_BITS)) | records.last_use.astype(np.uint64)

    def scores(self, metadata, iteration):
        return metadata[COUNTS]


@dataclasses.dataclass(frozen=True)
class LfuLru(Eviction):
    """Least frequency class, then least recently used."""

    uses_power = True

    def keys(self, records: Records, batch: int) -> np.ndarray:
        power = records.power.astype(np.uint64) << np.uint64(_BATCH_BITS)
        return power | records.last_use.astype(np.uint64)


@dataclasses.dataclass(frozen=True)
class DistanceLfu(Eviction):
    """Smallest count divided by a power of the time since the last use."""

    metadata = (COUNTS, LAST_ACCESS)
    decay_exponent: float = 1.0

    def keys(self, records: Records, batch: int) -> np.ndarray:
        age = (batch - records.last_use + 1).astype(np.float64)
        return ordered(records.count / age**self.decay_exponent)

    def scores(self, metadata, iteration):
        distance = iteration - metadata[LAST_ACCESS] + 1
        return metadata[COUNTS].astype(jnp.float32) / _decay(distance, self.decay_exponent)


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

    def hours_to_live(self, features: Sequence[str]) -> np.ndarray:
        if self.hours is None or self.hours != int(self.hours):
            raise ValueError(f"a multi-probe map evicts after whole hours, got {self!r}")
        return np.full(len(features), self.hours, np.int32)

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
    if not decay > 0:
        raise ValueError(f"distance_lfu: decay is above 0, got {decay}")
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


def _decay(distance: Int32[Array, " ids"], exponent: float) -> Float32[Array, " ids"]:
    """Return ``distance ** exponent``, for common exponents with one rounding as in PyTorch."""
    base = distance.astype(jnp.float32)
    match exponent:
        case 1.0:
            return base
        case 2.0:
            return base * base
        case 0.5:
            return jnp.sqrt(base)
    return base ** np.float32(exponent)
