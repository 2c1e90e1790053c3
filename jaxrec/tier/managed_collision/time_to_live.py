"""Eviction policies of a multi-probe map: the hours for which ids keep their slots."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TTLEviction(abc.ABC):
    """Base of the policies: an id expires some hours after its last batch.

    Attributes:
        is_lru: Whether a new id takes the slot that expired first among the probed ones, and only
            if no probed slot is empty. False: it takes the first slot that is empty or expired.
    """

    is_lru = False

    @abc.abstractmethod
    def hours(self, features: Sequence[str]) -> np.ndarray:
        """Return the hours that ids of each feature are kept, int32 ``[features]``."""


@dataclasses.dataclass(frozen=True)
class SingleTTLEviction(TTLEviction):
    """Evicts ids that did not occur for some hours; TorchRec's ``SINGLE_TTL_EVICTION``.

    Attributes:
        ttl: Hours, 0 or more.

    Example:
        >>> SingleTTLEviction(24).hours(["a", "b"])
        array([24, 24], dtype=int32)
    """

    ttl: int

    def __post_init__(self) -> None:
        _check_hours("ttl", self.ttl)

    def hours(self, features):
        return np.full(len(features), self.ttl, np.int32)


@dataclasses.dataclass(frozen=True)
class LRUEviction(SingleTTLEviction):
    """Evicts the id that did not occur for longest; TorchRec's ``LRU_EVICTION``.

    Only ids that did not occur for ``ttl`` hours are evicted, and only where a new id finds no
    empty slot.

    Attributes:
        ttl: Hours, 0 or more.
    """

    is_lru = True


@dataclasses.dataclass(frozen=True)
class PerFeatureTTLEviction(TTLEviction):
    """Evicts ids after hours that differ by feature; TorchRec's ``PER_FEATURE_TTL_EVICTION``.

    Attributes:
        ttls: Hours by feature, 0 or more.

    Raises:
        KeyError: ``hours`` is asked for a feature without a number of hours.

    Example:
        >>> PerFeatureTTLEviction({"clicks": 24, "views": 2}).hours(["views"])
        array([2], dtype=int32)
    """

    ttls: Mapping[str, int] | tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        ttls = dict(self.ttls)
        for feature, hours in ttls.items():
            _check_hours(f"ttls[{feature!r}]", hours)
        # A tuple, so that the policy can be hashed.
        object.__setattr__(self, "ttls", tuple(ttls.items()))

    def hours(self, features):
        ttls = dict(self.ttls)
        if missing := [feature for feature in features if feature not in ttls]:
            raise KeyError(f"PerFeatureTTLEviction has no hours for features {missing}")
        return np.array([ttls[feature] for feature in features], np.int32)


def _check_hours(name: str, hours: int) -> None:
    if isinstance(hours, bool) or not isinstance(hours, int | np.integer) or hours < 0:
        raise ValueError(f"{name} must be a number of hours, 0 or more, got {hours!r}")
