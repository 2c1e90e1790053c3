"""Workloads of tables, from constraints and configurations."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import jaxrec
from jaxrec.plan import ParameterConstraints, Statistics, sample_statistics
from jaxrec.plan.model_tables import read_model
from jaxrec.plan.workload import measure_workloads
from tests.plan.models import batch_of, log_uniform, plan_on_h100


def test_pooling_factors_and_batch_sizes_are_by_feature():
    constraints = {"a": ParameterConstraints(pooling_factors=[2, 5], batch_sizes=[400, 40])}
    a, b = plan_on_h100(constraints).estimate.tables
    assert a.lookups == 2 * 100 + 5 * 10
    assert b.lookups == 100


@pytest.mark.parametrize("field", ["pooling_factors", "batch_sizes"])
def test_as_many_values_as_features(field):
    constraints = {"a": ParameterConstraints(**{field: [1, 2, 3]})}
    with pytest.raises(ValueError, match=f"table 'a' has 2 features and 3 {field}"):
        plan_on_h100(constraints)


def test_constraints_are_for_tables_that_there_are():
    with pytest.raises(ValueError, match="constraints for table 'c', which the model lacks"):
        plan_on_h100({"c": ParameterConstraints()})


def test_poolings_are_bags_of_each_sample():
    table = jaxrec.EmbeddingBagConfig("a", 1000, 8, feature_names=("f", "g"))

    def bags(**numbers):
        (workload,) = measure_workloads(
            read_model([table]),
            batch_size=64,
            num_devices=4,
            constraints={"a": ParameterConstraints(pooling_factors=3, **numbers)},
            statistics=None,
        )
        return [(f.bags, f.lookups) for f in workload.features]

    assert bags(num_poolings=2) == [(32, 96)] * 2
    assert bags(num_poolings=[1, 0.5]) == [(16, 48), (8, 24)]
    assert bags(num_poolings=2, batch_sizes=[32, 8]) == [(16, 48), (4, 12)]
    with pytest.raises(ValueError, match="2 features and 3 num_poolings"):
        bags(num_poolings=[1, 2, 3])


def test_a_dtype_is_planned_for_configurations():
    constraints = {"a": ParameterConstraints(dtype="bfloat16")}
    a, _ = plan_on_h100(constraints).estimate.tables
    assert (a.dtype, a.bytes % (1000 * 64 * 2)) == ("bfloat16", 0)


def workloads_of(tables, lookups: int, sample: Statistics | None = None):
    return measure_workloads(
        read_model(tables), batch_size=lookups, num_devices=1, constraints={}, statistics=sample
    )


def misses_of_lru(batches, cache_rows: int) -> float:
    """Mean number of rows that the second half of batches miss in a cache of the last used rows."""
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    misses = []
    for batch in batches:
        rows = np.unique(batch).tolist()
        misses.append(sum(row not in cache for row in rows))
        for row in rows:
            cache.pop(row, None)
            cache[row] = None
        while len(cache) > cache_rows:
            cache.popitem(last=False)
    return float(np.mean(misses[len(misses) // 2 :]))


@pytest.mark.parametrize("cache_rows", [300, 1000, 3000])
@pytest.mark.parametrize("kind", ["even", "log_uniform"])
def test_missed_rows_beside_a_cache_of_the_last_used_rows(kind: str, cache_rows: int):
    random, rows, lookups = np.random.default_rng(0), 5000, 100
    draw = {
        "even": lambda: random.integers(0, rows, lookups),
        "log_uniform": lambda: log_uniform(random, rows, lookups),
    }[kind]
    batches = [draw() for _ in range(400)]
    sample = sample_statistics([batch_of(np.concatenate(batches), [1] * (400 * lookups), "a")])
    table = jaxrec.EmbeddingBagConfig("a", rows, 8)
    (workload,) = workloads_of([table], lookups, None if kind == "even" else sample)
    expected = misses_of_lru(batches, cache_rows)
    assert expected > 1
    assert workload.missed_rows(cache_rows, 1) == pytest.approx(expected, rel=0.1)
    assert workload.missed_rows(rows, 1) == 0


def test_used_rows_of_several_steps_and_devices():
    table = jaxrec.EmbeddingBagConfig("a", 1000, 8)
    (workload,) = workloads_of([table], 50)
    random = np.random.default_rng(0)
    drawn = [np.unique(random.integers(0, 1000, 7 * 2 * 50)).size for _ in range(50)]
    assert workload.used_rows(7, 2) == pytest.approx(np.mean(drawn), rel=0.01)
    assert workload.used_rows(1e9, 2) == 1000


def test_tables_that_share_features_are_joined():
    def table(name, *features):
        return jaxrec.EmbeddingBagConfig(name, 1000, 8, feature_names=features)

    tables = [table("a", "f"), table("b", "g"), table("c", "h"), table("d", "f", "g")]
    a, b, c, d = workloads_of(tables, 50)
    assert a.joined == b.joined == d.joined == ("a", "b", "d")
    assert (c.joined, c.assigned_ids) == ((), 50)
    assert a.assigned_ids == b.assigned_ids == d.assigned_ids == 100
