"""Eviction in maps of managed collisions: filters of new ids, and policies by TorchRec's names.

Policies for sorted maps are those of `jaxrec.tier.vocabulary.eviction`, with a filter.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxrec.tier.vocabulary.eviction import DistanceLfu, Eviction, Lfu, Lru


class ThresholdFilter(abc.ABC):
    """Interface of a filter that admits new ids by their number of occurrences in a history.

    Derive a frozen dataclass from it. An update ignores ids that the filter does not admit.
    """

    @abc.abstractmethod
    def admit(
        self, counts: Int32[Array, " ids"], num_ids: Int32[Array, ""], key: Array | None
    ) -> Bool[Array, " ids"]:
        """Return which new ids may enter the map, bool ``[ids]``. Traced.

        Args:
            counts: Number of occurrences of each distinct id; 0 from index ``num_ids`` on.
            num_ids: Number of distinct ids.
            key: Random key of this update; None if the caller of the map gave none.
        """


@dataclasses.dataclass(frozen=True)
class DynamicThreshold(ThresholdFilter):
    """Filter that admits ids which occur more often than ``multiplier`` times the average id.

    ``count > multiplier / num_ids * sum(counts)`` in float32: TorchRec's
    ``dynamic_threshold_filter`` (``mc_modules.py``).

    Attributes:
        multiplier: TorchRec's ``threshold_skew_multiplier``.

    Example:
        >>> import jax.numpy as jnp
        >>> DynamicThreshold(1.5).admit(jnp.array([1, 5, 0]), jnp.int32(2), None).tolist()
        [False, True, False]
    """

    multiplier: float = 10.0

    def admit(self, counts, num_ids, key):
        share = jnp.float32(self.multiplier) / jnp.maximum(num_ids, 1).astype(jnp.float32)
        threshold = share * jnp.sum(counts, dtype=jnp.int32).astype(jnp.float32)
        return (counts > 0) & (counts.astype(jnp.float32) > threshold)


@dataclasses.dataclass(frozen=True)
class AverageThreshold(ThresholdFilter):
    """Filter that admits ids which occur more often than the average id.

    TorchRec's ``average_threshold_filter`` (``mc_modules.py``).

    Example:
        >>> import jax.numpy as jnp
        >>> AverageThreshold().admit(jnp.array([1, 3, 2, 0]), jnp.int32(3), None).tolist()
        [False, True, False, False]
    """

    def admit(self, counts, num_ids, key):
        total = jnp.sum(counts, dtype=jnp.int32).astype(jnp.float32)
        mean = total / jnp.maximum(num_ids, 1).astype(jnp.float32)
        return (counts > 0) & (counts.astype(jnp.float32) > mean)


@dataclasses.dataclass(frozen=True)
class ProbabilisticThreshold(ThresholdFilter):
    """Filter that admits each occurrence of an id with some probability.

    An id with ``c`` occurrences enters with probability ``1 - (1 - p)**c``: TorchRec's
    ``probabilistic_threshold_filter`` (``mc_modules.py``), with JAX's random numbers.

    Attributes:
        probability: TorchRec's ``per_id_probability``.

    Raises:
        ValueError: The probability is not within 0 and 1, or an update has no random key.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> counts, key = jnp.array([100_000, 0]), jax.random.key(0)
        >>> ProbabilisticThreshold(0.01).admit(counts, jnp.int32(1), key).tolist()
        [True, False]
    """

    probability: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must be within 0 and 1, got {self.probability}")

    def admit(self, counts, num_ids, key):
        if key is None:
            raise ValueError("ProbabilisticThreshold needs a random key: update(..., key=key)")
        scores = 1 - jnp.float32(1 - self.probability) ** counts.astype(jnp.float32)
        return (counts > 0) & (scores > jax.random.uniform(key, counts.shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class LFUEvictionPolicy(Lfu):
    """`jaxrec.tier.lfu` by TorchRec's name, ``LFU_EvictionPolicy``: keeps the most frequent ids.

    Attributes:
        threshold_filter: Filter of the ids that may enter; None: all may.
    """

    threshold_filter: ThresholdFilter | None = None


@dataclasses.dataclass(frozen=True)
class LRUEvictionPolicy(Lru):
    """`jaxrec.tier.lru` by TorchRec's name, ``LRU_EvictionPolicy``: keeps the most recent ids.

    The score is ``-(iteration - last_access_iter + 1) ** decay_exponent`` in float32.

    Attributes:
        decay_exponent: Exponent of the score.
        threshold_filter: Filter of the ids that may enter; None: all may.
    """

    decay_exponent: float = 1.0
    threshold_filter: ThresholdFilter | None = None


@dataclasses.dataclass(frozen=True)
class DistanceLFUEvictionPolicy(DistanceLfu):
    """`jaxrec.tier.distance_lfu` by TorchRec's name, ``DistanceLFU_EvictionPolicy``.

    The score is ``counts / (iteration - last_access_iter + 1) ** decay_exponent`` in float32.

    Attributes:
        decay_exponent: Exponent of the score.
        threshold_filter: Filter of the ids that may enter; None: all may.
    """

    threshold_filter: ThresholdFilter | None = None


@dataclasses.dataclass(frozen=True)
class SingleTTLEviction(Eviction):
    """Policy that evicts ids absent for ``ttl`` hours; TorchRec's ``SINGLE_TTL_EVICTION``.

    Attributes:
        ttl: Hours, 0 or more.

    Example:
        >>> SingleTTLEviction(24).hours_to_live(["a", "b"])
        array([24, 24], dtype=int32)
    """

    ttl: int

    def __post_init__(self) -> None:
        _check_hours("ttl", self.ttl)

    def hours_to_live(self, features):
        return np.full(len(features), self.ttl, np.int32)


@dataclasses.dataclass(frozen=True)
class LRUEviction(SingleTTLEviction):
    """Policy that evicts the id that has been absent for longest; TorchRec's ``LRU_EVICTION``.

    Only ids that did not occur for ``ttl`` hours are evicted, and only if a new id finds no empty
    slot.

    Attributes:
        ttl: Hours, 0 or more.
    """

    is_lru = True


@dataclasses.dataclass(frozen=True)
class PerFeatureTTLEviction(Eviction):
    """Policy that evicts ids after a time by feature; TorchRec's ``PER_FEATURE_TTL_EVICTION``.

    Attributes:
        ttls: Hours by feature, 0 or more.

    Raises:
        KeyError: A feature of the map has no hours (raised by ``hours_to_live``).

    Example:
        >>> PerFeatureTTLEviction({"clicks": 24, "views": 2}).hours_to_live(["views"])
        array([2], dtype=int32)
    """

    ttls: Mapping[str, int] | tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        ttls = dict(self.ttls)
        for feature, hours in ttls.items():
            _check_hours(f"ttls[{feature!r}]", hours)
        # A tuple, so that the policy can be hashed.
        object.__setattr__(self, "ttls", tuple(ttls.items()))

    def hours_to_live(self, features):
        ttls = dict(self.ttls)
        if missing := [feature for feature in features if feature not in ttls]:
            raise KeyError(f"PerFeatureTTLEviction has no hours for features {missing}")
        return np.array([ttls[feature] for feature in features], np.int32)


def _check_hours(name: str, hours: int) -> None:
    if isinstance(hours, bool) or not isinstance(hours, int | np.integer) or hours < 0:
        raise ValueError(f"{name} must be a number of hours, 0 or more, got {hours!r}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvictedSlots:
    """Slots that got another id in an update, and whose rows must be reset.

    Attributes:
        slots: Slot of each eviction, int32 ``[evicted]``. From index ``count`` on, padding: the
            number of slots of the map.
        ids: The id that each slot got, as two words, ``[evicted, 2]``; zeros at padding.
        count: Number of evicted slots.
    """

    slots: Int32[Array, " evicted"]
    ids: UInt32[Array, "evicted 2"]
    count: Int32[Array, ""]

    @classmethod
    def none(cls, capacity: int, num_slots: int) -> EvictedSlots:
        """Return no evictions: ``capacity`` items of padding for a map of ``num_slots`` slots."""
        ids = jnp.zeros((capacity, 2), jnp.uint32)
        return cls(jnp.full(capacity, num_slots, jnp.int32), ids, jnp.int32(0))
