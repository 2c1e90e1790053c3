"""Eviction by the next use of rows within the coming batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from jaxrec.tier.ids.batch_ops import smallest
from jaxrec.tier.ids.id_map import IdMap
from jaxrec.tier.vocabulary.eviction import Eviction, lru


def farthest(batches: int = 16, otherwise: Eviction | None = None) -> Eviction:
    """Keep the rows that the coming batches use; evict other rows by another policy.

    If there are too few other rows, rows of the coming batches are evicted, those with the farthest
    next use first: Belady's rule (1966) within a window. For this policy `jaxrec.tier.ahead` reads
    ``batches`` more batches and keeps them in host memory. The last batches of a loop have fewer
    batches to look at, and evaluations have none. So the evicted rows depend on the coming batches,
    too, not on the past alone.

    Args:
        batches: Number of batches to look at beyond those that already have rows.
        otherwise: Policy for the rows that these batches do not use; None: `lru`.

    Raises:
        TypeError: ``batches`` is not an integer; ``otherwise`` is not a policy, or looks ahead
            itself.
        ValueError: ``batches`` is below 1.

    Example:
        >>> import jaxrec
        >>> users = jaxrec.tier.Cached(rows=1000, eviction=jaxrec.tier.farthest(batches=32))
    """
    if isinstance(batches, bool) or not isinstance(batches, int):
        raise TypeError(f"farthest: batches is an integer, got {batches!r}")
    if batches < 1:
        raise ValueError(f"farthest: batches is 1 or more, got {batches}")
    # A copy, since the caller may use `otherwise` for another table, without foresight.
    policy = lru() if otherwise is None else copy.copy(otherwise)
    if not isinstance(policy, Eviction) or not policy.orders_rows or policy.foresight:
        raise TypeError(
            "farthest: otherwise is a policy that looks at the past, such as "
            f"jaxrec.tier.lfu(), got {otherwise!r}"
        )
    # `dataclasses.replace` would call the constructor, and a user's policy may be no dataclass.
    object.__setattr__(policy, "foresight", batches)
    return policy


def spare_coming(
    keys: np.ndarray,
    eligible: np.ndarray,
    least: int,
    most: int,
    ids: IdMap,
    coming: Sequence[np.ndarray],
) -> np.ndarray:
    """Return rows to evict: rows that no coming batch uses, then those of farthest next use.

    There are ``least`` to ``most`` of them, all set in ``eligible``, bool ``[rows]``. Unused rows
    come in the order of ``keys``, uint64 ``[rows]``. Used rows come only where there are fewer than
    ``least`` unused ones. ``coming`` has the ids of each coming batch.
    """
    # From the farthest batch to the nearest, so that the nearest use of a row is written last.
    next_use = np.full(keys.size, len(coming))
    for number, of_batch in reversed(list(enumerate(coming))):
        rows = ids.find(of_batch)
        next_use[rows[rows >= 0]] = number
    is_unused = next_use == len(coming)
    unused = smallest(keys, eligible & is_unused, most)
    if unused.size >= least:
        return unused
    nearness = (len(coming) - next_use).astype(np.uint64)
    return np.concatenate([unused, smallest(nearness, eligible & ~is_unused, least - unused.size)])
