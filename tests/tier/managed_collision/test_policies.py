"""Threshold filters of sorted maps and hours of ids; `test_sorted_map` tests the policies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrec
from jaxrec.ragged import split_int64
from jaxrec.tier import Dynamic, distance_lfu, lfu, lfu_lru, lru, ttl
from jaxrec.tier.managed_collision import (
    AverageThreshold,
    DistanceLFUEvictionPolicy,
    DynamicThreshold,
    LFUEvictionPolicy,
    LRUEviction,
    LRUEvictionPolicy,
    MultiProbeConfig,
    PerFeatureTTLEviction,
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


def test_hours_of_features():
    eviction = PerFeatureTTLEviction({"a": 3, "b": 0})
    assert eviction.hours_to_live(["b", "a"]).tolist() == [0, 3]
    assert hash(eviction) == hash(PerFeatureTTLEviction({"a": 3, "b": 0}))
    with pytest.raises(KeyError, match="no hours for features"):
        eviction.hours_to_live(["c"])
    with pytest.raises(ValueError, match="0 or more"):
        LRUEviction(-1)


def test_policies_of_the_host_serve_in_the_step():
    ids, all_valid = words([5, 5, 6, 7, 8, 9]), jnp.ones(6, bool)
    for policy, by_torchrec in [
        (lfu(), LFUEvictionPolicy()),
        (lru(), LRUEvictionPolicy()),
        (distance_lfu(2.0), DistanceLFUEvictionPolicy(2.0)),
    ]:
        assert isinstance(by_torchrec, type(policy))
        maps = [SortedMapConfig(8, each).init(4) for each in (policy, by_torchrec)]
        one, other = (each.update(ids, all_valid)[0].remap(ids).tolist() for each in maps)
        assert one == other
    assert MultiProbeConfig(eviction=ttl(hours=3)).eviction.hours_to_live(["a"]).tolist() == [3]


def test_policies_are_refused_where_they_say_nothing():
    with pytest.raises(TypeError, match=r"policy is one with scores, .*, got LfuLru"):
        SortedMapConfig(8, lfu_lru())
    with pytest.raises(TypeError, match=r"Lru\(\) does not say for how many hours"):
        MultiProbeConfig(eviction=lru())
    with pytest.raises(ValueError, match="after whole hours"):
        MultiProbeConfig(eviction=ttl(hours=0.5))
    with pytest.raises(TypeError, match="is for maps of managed collisions alone"):
        Dynamic(eviction=LRUEviction(3))


def test_former_names():
    with pytest.warns(DeprecationWarning, match=r"is now jaxrec\.tier\.managed_collision"):
        assert jaxrec.tier.LRUEviction is LRUEviction
    assert "LRUEviction" not in dir(jaxrec.tier)
    assert {"lru", "managed_collision"} < set(dir(jaxrec.tier))
