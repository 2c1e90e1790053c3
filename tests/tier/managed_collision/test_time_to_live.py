"""Hours that ids are kept, by feature."""

from __future__ import annotations

import pytest

from jaxrec.tier.managed_collision import LRUEviction, PerFeatureTTLEviction


def test_hours_of_features():
    eviction = PerFeatureTTLEviction({"a": 3, "b": 0})
    assert eviction.hours(["b", "a"]).tolist() == [0, 3]
    assert hash(eviction) == hash(PerFeatureTTLEviction({"a": 3, "b": 0}))
    with pytest.raises(KeyError, match="no hours for features"):
        eviction.hours(["c"])
    with pytest.raises(ValueError, match="0 or more"):
        LRUEviction(-1)
