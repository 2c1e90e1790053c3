"""Tables that share features have equal caches."""

from __future__ import annotations

import dataclasses

import pytest

import jaxrec
from jaxrec.plan import ParameterConstraints, PlanError, Planner, TableCache, Topology

MB = 10**6


def table(name: str, rows: int, dim: int, *features: str):
    return jaxrec.EmbeddingBagConfig(name, rows, dim, feature_names=features)


# 26 MB, 10 MB and 0.8 MB with row-wise Adagrad's state.
DEEP, WIDE = table("deep", 100_000, 64, "item"), table("wide", 100_000, 1, "item")
OTHER = table("other", 100_000, 24, "user")


def plan(tables, memory: int, constraints=None, **settings):
    topology = dataclasses.replace(Topology.named("cpu", devices=1), memory=memory)
    planner = Planner(topology, constraints or {}, storages=("device", "host"), **settings)
    return planner.plan(tables, batch_size=64)


def test_both_tables_get_the_cache_of_one():
    found = plan([DEEP, WIDE, OTHER], 20 * MB)
    caches = dict(found.caches)
    assert caches["deep"] == caches["wide"]
    assert caches["deep"].rows < 100_000
    by_name = {table.name: table for table in found.estimate.tables}
    assert by_name["wide"].storage == by_name["deep"].storage == "host"
    assert by_name["wide"].cache_ratio == by_name["deep"].cache_ratio


def test_a_constraint_of_one_holds_for_both():
    constraints = {"wide": ParameterConstraints(storages=["host"], cache_ratio=0.25)}
    found = plan([DEEP, WIDE, OTHER], 200 * MB, constraints)
    assert dict(found.caches) == dict.fromkeys(("deep", "wide"), TableCache(25_000))
    # The context has the constraints that the user gave.
    assert found.context.fields["constraints"] == {
        "wide": {"storages": ["host"], "cache_ratio": 0.25}
    }


def test_tables_of_other_sizes_stay_on_the_devices():
    larger = table("wide", 200_000, 1, "item")
    with pytest.raises(PlanError, match="no plan fits"):
        plan([DEEP, larger, OTHER], 20 * MB, time_limit=2)
    constraints = {"wide": ParameterConstraints(storages=["host"])}
    message = (
        "tables that share features .* got 'deep' with 100,000 rows in device or host; 'wide' with "
        "200,000 rows in host"
    )
    with pytest.raises(ValueError, match=message):
        plan([DEEP, larger], 200 * MB, constraints)


def test_constraints_that_contradict_each_other_are_refused():
    constraints = {
        "wide": ParameterConstraints(storages=["host"]),
        "deep": ParameterConstraints(storages=["device"]),
    }
    with pytest.raises(ValueError, match="'deep' with 100,000 rows in device; 'wide' with"):
        plan([DEEP, WIDE], 200 * MB, constraints)


def test_tables_have_row_stores_of_their_own():
    def plan_in(store, *tables):
        constraint = ParameterConstraints(storages=["store"], store=store)
        return plan(tables, 200 * MB, {table.name: constraint for table in tables})

    with pytest.raises(ValueError, match="'deep' and 'other' may both be kept in the row store 'f"):
        plan_in("file:///data", DEEP, WIDE, OTHER)
    for store, tables in {
        "file:///data": (DEEP, WIDE),
        "file:///data/{table}": (DEEP, WIDE, OTHER),
    }.items():
        caches = dict(plan_in(store, *tables).caches)
        assert {name: cache.store for name, cache in caches.items()} == {
            table.name: store for table in tables
        }
