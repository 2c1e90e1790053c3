"""Policies of a sorted map: the ids that may enter it, and the ids that it keeps."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Num

COUNTS, LAST_ACCESS = "counts", "last_access_iter"


class ThresholdFilter(abc.ABC):
    """Admits ids by how often they occur in a history; others are ignored in its update.

    Derive a frozen dataclass to write one.
    """

    @abc.abstractmethod
    def admit(
        self, counts: Int32[Array, " ids"], num_ids: Int32[Array, ""], key: Array | None
    ) -> Bool[Array, " ids"]:
        """Return which ids may enter the map.

        Args:
            counts: Number of occurrences of each distinct id; 0 from ``num_ids`` on.
            num_ids: Number of distinct ids.
            key: Random key of this update; None where the caller has none.
        """


@dataclasses.dataclass(frozen=True)
class DynamicThreshold(ThresholdFilter):
    """Admits ids that occur more often than ``multiplier`` times the average id.

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
    """Admits ids that occur more often than the average id.

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
    """Admits each occurrence of an id with some probability.

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


class EvictionPolicy(abc.ABC):
    """Scores the ids that compete for the slots of a sorted map; the highest scores stay.

    Derive a frozen dataclass to write one. Between equal scores, the id of the map stays and the
    new id does not enter.

    Attributes:
        metadata: Names of the numbers that the map keeps for each slot: ``"counts"``, the
            occurrences since the id entered, and ``"last_access_iter"``, the update in which the
            id occurred last.
        threshold_filter: Which ids of a history may enter; None: all.
    """

    metadata: tuple[str, ...]
    threshold_filter: ThresholdFilter | None

    @abc.abstractmethod
    def scores(
        self, metadata: Mapping[str, Int32[Array, " ids"]], iteration: Int32[Array, ""]
    ) -> Num[Array, " ids"]:
        """Return the score of each id.

        Args:
            metadata: The numbers of each id, by name. An empty slot has zeros.
            iteration: Number of batches so far, this one included.

        Returns:
            int32 of 0 or more, or float32.
        """


@dataclasses.dataclass(frozen=True)
class LFUEvictionPolicy(EvictionPolicy):
    """Keeps the ids that occurred most often: TorchRec's ``LFU_EvictionPolicy``.

    Attributes:
        threshold_filter: Which ids may enter; None: all.
    """

    metadata = (COUNTS,)
    threshold_filter: ThresholdFilter | None = None

    def scores(self, metadata, iteration):
        return metadata[COUNTS]


@dataclasses.dataclass(frozen=True)
class LRUEvictionPolicy(EvictionPolicy):
    """Keeps the ids that occurred last: TorchRec's ``LRU_EvictionPolicy``.

    The score is ``-(iteration - last_access_iter + 1) ** decay_exponent`` in float32.

    Attributes:
        decay_exponent: The exponent.
        threshold_filter: Which ids may enter; None: all.
    """

    metadata = (LAST_ACCESS,)
    decay_exponent: float = 1.0
    threshold_filter: ThresholdFilter | None = None

    def scores(self, metadata, iteration):
        return -_decay(iteration - metadata[LAST_ACCESS] + 1, self.decay_exponent)


@dataclasses.dataclass(frozen=True)
class DistanceLFUEvictionPolicy(EvictionPolicy):
    """Keeps the ids that occurred often and lately: TorchRec's ``DistanceLFU_EvictionPolicy``.

    The score is ``counts / (iteration - last_access_iter + 1) ** decay_exponent`` in float32.

    Attributes:
        decay_exponent: The exponent.
        threshold_filter: Which ids may enter; None: all.
    """

    metadata = (COUNTS, LAST_ACCESS)
    decay_exponent: float = 1.0
    threshold_filter: ThresholdFilter | None = None

    def scores(self, metadata, iteration):
        distance = iteration - metadata[LAST_ACCESS] + 1
        return metadata[COUNTS].astype(jnp.float32) / _decay(distance, self.decay_exponent)


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
