"""Threshold filters of sorted maps; `test_sorted_map` tests the policies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.ragged import split_int64
from jaxrec.tier.managed_collision import (
    AverageThreshold,
    DynamicThreshold,
    LFUEvictionPolicy,
    ProbabilisticThreshold,
    SortedMapConfig,
)


def words(ids):
    return jnp.asarray(split_int64(np.asarray(ids, np.int64)))


@pytest.mark.parametrize(
    ("admits", "expected"),
    [
        (DynamicThreshold(1.5), [2]),  # 6 / 3 ids * 1.5 = 3 < 4
        (AverageThreshold(), [2]),
        (ProbabilisticThreshold(1.0), [0, 1, 2]),
        (ProbabilisticThreshold(0.0), []),
    ],
)
def test_filters(admits, expected):
    ids = [2, 0, 2, 1, 2, 2]
    config = SortedMapConfig(8, LFUEvictionPolicy(admits))
    ids_map, _ = config.init(9).update(words(ids), jnp.ones(6, bool), jax.random.key(0))
    known = [id for id in range(3) if int(ids_map.remap(words([id]))[0]) < 8]
    assert known == expected


def test_a_probability_follows_the_count():
    ids = np.repeat(np.arange(2000), 2)
    config = SortedMapConfig(4000, LFUEvictionPolicy(ProbabilisticThreshold(0.3)))
    ids_map, _ = config.init(3000).update(words(ids), jnp.ones(4000, bool), jax.random.key(1))
    admitted = 2999 - int(ids_map.open_slots)
    assert admitted == pytest.approx(2000 * (1 - 0.7**2), rel=0.1)
    with pytest.raises(ValueError, match="needs a random key"):
        config.init(9).update(words([1]), jnp.ones(1, bool))
    with pytest.raises(ValueError, match="within 0 and 1"):
        ProbabilisticThreshold(1.5)
