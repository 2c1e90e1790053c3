"""Eviction policies: which ids lose their rows when no row is free.

A vocabulary on the host gives each row a key, an unsigned 64-bit integer, and evicts the rows with
the smallest keys; among equal keys, the lowest row index. Maps in the compiled step, which has no
64-bit integers, keep the ids with the highest scores, or evict ids after a number of hours. A
policy implements those of `keys`, `scores` and `hours_to_live` that make sense for it.
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
    """Use of each row of a table, as NumPy arrays of shape ``[rows]``.

    Attributes:
        ids: int64 id of the row; arbitrary where ``born`` is -1.
        last_use: int64 number of the last batch that used the row.
        count: uint32 number of lookups of the row since its id was admitted.
        born: int64 number of the batch that admitted the id; -1 for a free row.
        power: uint8 frequency class of `lfu_lru`, about the binary logarithm of the number of
            batches that used the row. It stays 5 with other policies.
        last_seconds: int64 Unix time of the last use; 0 with policies that do not use it.
    """

    # One array for each field, not one array of structures: most policies read one or two fields
    # of all rows, and the native code changes fields in place.

    ids: np.ndarray
    last_use: np.ndarray
    count: np.ndarray
    born: np.ndarray
    power: np.ndarray
    last_seconds: np.ndarray

    @classmethod
    def empty(cls, rows: int) -> Records:
        """Make the records of a table without ids."""
        return cls(
            ids=np.zeros(rows, np.int64),
            last_use=np.zeros(rows, np.int64),
            count=np.zeros(rows, np.uint32),
            born=np.full(rows, -1, np.int64),
            power=np.zeros(rows, np.uint8),
            last_seconds=np.zeros(rows, np.int64),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays, ``[rows]`` each, by the names of the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def take(self, rows: np.ndarray) -> Records:
        """Return the records of the rows at some indices, ``[n]``."""
        return Records(**{name: array[rows] for name, array in self.arrays().items()})


# Names of the numbers that maps in the compiled step keep for `Eviction.scores`; TorchRec's names.
COUNTS, LAST_ACCESS = "counts", "last_access_iter"

# A key with frequency first and the last batch second: 24 bits of frequency, which are 16 million
# lookups, above 40 bits of batch number, which are 30,000 years at one batch a second.
_BATCH_BITS = 40
_MAX_COUNT = 2 ** (64 - _BATCH_BITS) - 1

# First and last frequency class of `LfuLru`.
FIRST_POWER = 5
MAX_POWER = 31


@dataclasses.dataclass(frozen=True, eq=False)
class Eviction:
    """Interface of an eviction policy.

    Derive a frozen dataclass from it, or use `by_score` for a policy of one formula. Vocabularies
    (`Dynamic`, `Cached`) call `keys`. Among the maps of `jaxrec.tier.managed_collision`, a
    ``SortedMap`` calls `scores` and a ``MultiProbeMap`` calls `hours_to_live`.

    Attributes:
        foresight: Number of coming batches whose rows are evicted last, those of the farthest next
            use first (`farthest`). `keys` orders the rows that these batches do not use.
        uses_power, uses_seconds: Whether `Records.power` and `Records.last_seconds` are kept up to
            date.
        expiry_interval: Number of batches from one search for expired rows to the next.
        metadata: Names of the numbers that a sorted map keeps for each slot: ``"counts"``, the
            occurrences since the id entered, and ``"last_access_iter"``, the batch in which the id
            occurred last. Empty if the policy has no `scores`.
        is_lru: Which of the slots that a multi-probe map probes a new id takes. True: an empty one,
            or, without any, the one that expired first. False: the first one that is empty or
            expired.
    """

    uses_power: ClassVar[bool] = False
    metadata: ClassVar[tuple[str, ...]] = ()
    is_lru: ClassVar[bool] = False

    foresight: int = dataclasses.field(default=0, kw_only=True, repr=False)

    def keys(self, records: Records, batch: int) -> np.ndarray:
        """Return a key for each row, uint64 ``[rows]``; rows with the smallest are evicted first.

        Keys must depend on the records and the batch alone.

        Args:
            records: Use of all rows. Keys of free rows are not read.
            batch: Number of the present batch.
        """
        raise TypeError(f"{self!r} is for maps of managed collisions, not for rows on the host")

    @property
    def orders_rows(self) -> bool:
        """Whether the policy implements `keys`, as a vocabulary on the host needs."""
        return type(self).keys is not Eviction.keys

    @property
    def orders_by_last_use(self) -> bool:
        """Whether `keys` returns `Records.last_use`, which then need not be up to date for it."""
        return type(self).keys is _last_use

    def scores(
        self, metadata: Mapping[str, Int32[Array, " ids"]], iteration: Int32[Array, ""]
    ) -> Num[Array, " ids"]:
        """Return the score of each id; a sorted map keeps the ids with the highest. Traced.

        If the scores of an id in the map and of a new id are equal, the id in the map stays.

        Args:
            metadata: The numbers of each id, by name. An empty slot has zeros.
            iteration: Number of batches so far, this one included.

        Returns:
            int32 of 0 or more, or float32.
        """
        raise TypeError(f"{self!r} does not score ids in the compiled step")

    def hours_to_live(self, features: Sequence[str]) -> np.ndarray:
        """Return the hours that a multi-probe map keeps an unused id, int32 ``[features]``.

        Args:
            features: Names of the features whose ids the map has.
        """
        raise TypeError(f"{self!r} does not say for how many hours ids are kept")

    def expired(self, records: Records, batch: int) -> np.ndarray | None:
        """Return whether each row has expired, bool ``[rows]``; None if rows never expire.

        The vocabulary calls it once every `expiry_interval` batches. Expired rows are evicted even
        if rows are free.
        """
        return None

    @property
    def expiry_interval(self) -> int:
        """Number of batches from one search for expired rows to the next."""
        return 100

    @property
    def uses_seconds(self) -> bool:
        """Whether the policy reads `Records.last_seconds`, which is then kept up to date."""
        return False

    def seconds(self) -> float:
        """Return the present time, to which `Records.last_seconds` of used rows is set."""
        return 0.0


def _last_use(policy: Eviction, records: Records, batch: int) -> np.ndarray:
    """Return the keys of policies that evict the least recently used rows."""
    return records.last_use.view(np.uint64)


@dataclasses.dataclass(frozen=True)
class Lru(Eviction):
    """Policy that evicts the least recently used rows; `lru` makes it."""

    metadata = (LAST_ACCESS,)
    decay_exponent = 1.0
    keys = _last_use

    def scores(self, metadata, iteration):
        return -_decay(iteration - metadata[LAST_ACCESS] + 1, self.decay_exponent)


@dataclasses.dataclass(frozen=True)
class Lfu(Eviction):
    """Policy that evicts the rows with the fewest lookups; `lfu` makes it."""

    metadata = (COUNTS,)

    def keys(self, records: Records, batch: int) -> np.ndarray:
        counts = np.minimum(records.count, _MAX_COUNT).astype(np.uint64)
        return (counts << np.uint64(_BATCH_BITS)) | records.last_use.astype(np.uint64)

    def scores(self, metadata, iteration):
        return metadata[COUNTS]


@dataclasses.dataclass(frozen=True)
class LfuLru(Eviction):
    """Policy that evicts the rows of the lowest frequency class; `lfu_lru` makes it."""

    uses_power = True

    def keys(self, records: Records, batch: int) -> np.ndarray:
        power = records.power.astype(np.uint64) << np.uint64(_BATCH_BITS)
        return power | records.last_use.astype(np.uint64)


@dataclasses.dataclass(frozen=True)
class DistanceLfu(Eviction):
    """Policy that evicts the rows with the smallest count over age; `distance_lfu` makes it."""

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
    """Policy that evicts rows unused for some batches or hours; `ttl` makes it."""

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

    keys = _last_use

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
        # A search reads the records of all rows. Four searches within a lifetime let a row live at
        # most a quarter longer than it should.
        return 100 if self.batches is None else max(1, min(100, self.batches // 4))

    @property
    def uses_seconds(self) -> bool:
        return self.hours is not None

    def seconds(self) -> float:
        return self.clock()


@dataclasses.dataclass(frozen=True)
class ByScore(Eviction):
    """Policy that evicts the rows to which a user's function gives the smallest scores."""

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
    """Evict the least recently used rows, by the number of the last batch that used them.

    Example:
        >>> import jaxrec
        >>> jaxrec.tier.Dynamic(eviction=jaxrec.tier.lru()).eviction
        Lru()
    """
    return Lru()


def lfu() -> Eviction:
    """Evict the rows with the fewest lookups since their ids were admitted.

    Among rows with equally many lookups, the least recently used are evicted first. Counts above 16
    million are taken for equal.
    """
    return Lfu()


def lfu_lru() -> Eviction:
    """Evict the rows of the lowest frequency class, the least recently used first.

    A new id has class 5. Each later batch that uses the row raises class ``p`` by one with
    probability ``2**-p``, up to 31. So the class is about the binary logarithm of the number of
    batches that used the row. The draws depend on the id and the batch's number alone. Source: the
    mixed LFU/LRU record of Tencent's dynamic embedding (``torchrec/contrib/dynamic_embedding``),
    here without its overflows.
    """
    return LfuLru()


def distance_lfu(decay: float = 1.0) -> Eviction:
    """Evict the rows with the smallest ``count / (batches since the last use + 1) ** decay``.

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
    """Evict rows that were unused for some time, and the least recently used if no row is free.

    Args:
        batches: Time to live in batches.
        hours: Time to live in hours. The evicted rows then depend on the clock.
        clock: Function that returns the time in seconds.

    Raises:
        ValueError: Both or neither of ``batches`` and ``hours`` are given, or the one given is not
            above 0.
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
    """Return uint64 keys that sort as float64 scores do; scores must not be NaN."""
    # The bits of floats from 0 up sort as integers do. Those of negative floats sort in reverse:
    # flip all their bits, and set the sign bit of the others, so that they come after.
    bits = (scores + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    sign = np.uint64(1 << 63)
    return np.where(bits & sign, ~bits, bits | sign)


def _decay(distance: Int32[Array, " ids"], exponent: float) -> Float32[Array, " ids"]:
    """Return ``distance ** exponent`` in float32."""
    # For common exponents with one rounding, as in PyTorch: the last bit may decide which of two
    # ids is evicted.
    base = distance.astype(jnp.float32)
    match exponent:
        case 1.0:
            return base
        case 2.0:
            return base * base
        case 0.5:
            return jnp.sqrt(base)
    return base ** np.float32(exponent)
