"""Plans made by hand, and plans written to a file and read."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

import jaxrec
from jaxrec import optim
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    grid,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from jaxrec.plan import (
    Context,
    ParameterConstraints,
    PlanMismatchError,
    ShardingPlan,
    TableCache,
    Topology,
)
from tests.plan.models import TABLES


def test_a_plan_made_by_hand_prints_its_placements():
    placements = {"a": row_wise(exchange="pooled"), "b": table_wise(3)}
    text = str(ShardingPlan.from_dict(placements))
    assert text == "a: row_wise by pooled\nb: table_wise on 3"


def test_uneven_rows_are_printed_and_go_to_json_and_back():
    plan = ShardingPlan.from_dict({"a": row_wise((4, 2), shares=(3, 1.5), buckets=8)})
    assert str(plan) == "a: row_wise on 4, 2 in shares 3:1.5 in 8 buckets"
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_a_plan_of_an_earlier_version_is_read():
    text = """{"format": 1, "placements": {
      "a": {"kind": "data_parallel", "places": [], "exchange": "replicated"},
      "b": {"kind": "table_wise", "places": [3], "exchange": "pooled"},
      "c": {"kind": "row_wise", "places": [4, 2], "exchange": null, "shares": [3.0, 1.5],
            "buckets": 8},
      "d": {"kind": "column_wise", "places": [0, 1], "exchange": "rows"},
      "e": {"kind": "table_row_wise", "places": [1], "exchange": "pooled"},
      "f": {"kind": "table_column_wise", "places": [0], "exchange": "rows"},
      "g": {"kind": "grid", "places": [0, 1], "exchange": "rows"}},
     "caches": {"b": {"storage": "host", "rows": 5, "store": "memory://"}}}"""
    placements = {
        "a": data_parallel(),
        "b": table_wise(3, exchange="pooled"),
        "c": row_wise((4, 2), shares=(3, 1.5), buckets=8),
        "d": column_wise((0, 1), exchange="rows"),
        "e": table_row_wise(1, exchange="pooled"),
        "f": table_column_wise(0, exchange="rows"),
        "g": grid((0, 1), exchange="rows"),
    }
    plan = ShardingPlan.from_dict(placements, {"b": TableCache(5)})
    assert ShardingPlan.from_json(text) == plan
    written = json.loads(plan.to_json())
    assert written.pop("fingerprint")["tables"] == {}  # which earlier versions did not write
    assert written == json.loads(text)


def test_uneven_rows_are_estimated(planner):
    def held(placement):
        placements = {"item": placement, "user": table_wise(0), "day": table_wise(0)}
        plan = planner.evaluate(TABLES, ShardingPlan.from_dict(placements), batch_size=16 * 1024)
        (table,) = [each for each in plan.estimate.tables if each.name == "item"]
        return plan.estimate.seconds, table

    even, uneven = held(row_wise()), held(row_wise(shares=(9, *[1] * 15)))
    assert uneven[0] > even[0]


def test_a_plan_made_by_hand_is_evaluated(planner, plan):
    by_hand = ShardingPlan.from_dict(dict.fromkeys(("item", "user", "day"), table_wise(0)))
    found = planner.evaluate(TABLES, by_hand, batch_size=16 * 1024)
    assert found == by_hand
    assert found.estimate.seconds > plan.estimate.seconds
    # All tables on the first device: the other arrays are as large, and empty.
    first, second, *_ = found.estimate.devices
    assert first.bytes["tables"] == second.bytes["padding"]
    again = planner.evaluate(TABLES, plan, batch_size=16 * 1024)
    assert again.estimate.seconds == pytest.approx(plan.estimate.seconds)
    some = ShardingPlan.from_dict({"item": row_wise(), "user": row_wise()})
    with pytest.raises(ValueError, match="the plan has no placement for table 'day'"):
        planner.evaluate(TABLES, some, batch_size=16 * 1024)


def test_a_plan_goes_to_json_and_back(planner, plan):
    made_for = planner.context(TABLES, batch_size=16 * 1024)
    again = ShardingPlan.from_json(plan.to_json(), made_for)
    assert again == plan
    assert again.estimate == plan.estimate
    assert str(again) == str(plan)
    assert again.context.hash == plan.context.hash == made_for.hash


def other_batch(planner, tables):
    return planner.context(tables, batch_size=32 * 1024)


def other_devices(planner, tables):
    fewer = dataclasses.replace(planner, topology=Topology.named("h100", devices=8))
    return fewer.context(tables, batch_size=16 * 1024)


def other_rows(planner, tables):
    more = [dataclasses.replace(tables[0], num_embeddings=4_000_000), *tables[1:]]
    return planner.context(more, batch_size=16 * 1024)


def no_such_table(planner, tables):
    return planner.context(tables[:2], batch_size=16 * 1024)


def new_table(planner, tables):
    new = jaxrec.EmbeddingBagConfig("new", 10, 8)
    return planner.context([*tables, new], batch_size=16 * 1024)


def other_optimizer(planner, tables):
    adam = [dataclasses.replace(table, optimizer=optim.adam()) for table in tables]
    return planner.context(adam, batch_size=16 * 1024)


def other_constraints(planner, tables):
    constraints = {"item": ParameterConstraints(pooling_factors=30)}
    return dataclasses.replace(planner, constraints=constraints).context(
        tables, batch_size=16 * 1024
    )


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (other_batch, "batch_size: 16384, now 32768"),
        (other_devices, "topology.hosts: 2, now 1"),
        (other_rows, "tables.item.rows: 3000000, now 4000000"),
        (no_such_table, "tables.day is gone"),
        (new_table, "tables.new is new"),
        (other_optimizer, "tables.item.optimizer: rowwise_adagrad, now adam"),
        (other_constraints, "tables.item.features.item.lookups: 20480.0, now 30720.0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_plan_is_refused_for_something_else(planner, plan, changed, difference):
    with pytest.raises(PlanMismatchError, match=re.escape(difference)):
        ShardingPlan.from_json(plan.to_json(), changed(planner, TABLES))
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_a_context_cannot_be_changed_by_hand(plan):
    fields = json.loads(plan.to_json())
    fields["made_for"]["batch_size"] = 1
    with pytest.raises(ValueError, match="it was changed by hand"):
        ShardingPlan.from_json(json.dumps(fields))


def test_a_plan_made_by_hand_has_no_context(planner):
    text = ShardingPlan.from_dict({"a": row_wise()}).to_json()
    with pytest.raises(PlanMismatchError, match="made by hand"):
        ShardingPlan.from_json(text, planner.context(TABLES, batch_size=16))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"placements": {"a": 3}}', '{"placements": {"a": {"kind": "row_wise"}}}'],
)
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="this is not a plan that to_json wrote"):
        ShardingPlan.from_json(text)


CACHES = {"a": TableCache(5000), "b": TableCache(10, "file:///data/{table}")}


def test_caches_go_to_json_and_back():
    placements = {"a": row_wise(), "b": table_wise(1), "c": row_wise()}
    plan = ShardingPlan.from_dict(placements, CACHES)
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan
    assert again != ShardingPlan.from_dict(placements)
    assert dict(again.caches) == CACHES
    assert str(again).split("\n") == [
        "a: row_wise, 5,000 rows cached over memory://",
        "b: table_wise on 1, 10 rows cached over file:///data/{table}",
        "c: row_wise",
    ]


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_a_plan_of_storages_without_caches_is_refused(plan, storage):
    """As they were written before plans had caches."""
    fields = json.loads(plan.to_json())
    fields["estimate"]["tables"][0]["storage"] = storage
    with pytest.raises(ValueError, match=f"table 'item' in storage '{storage}'.*Plan anew"):
        ShardingPlan.from_json(json.dumps(fields))


def test_a_plan_for_older_rates_still_has_its_placements(plan):
    fields = json.loads(plan.to_json())
    rates = fields["made_for"]["topology"]
    rates["host_link"] = rates.pop("host_moves")
    fields["hash"] = Context(fields["made_for"]).hash
    again = ShardingPlan.from_json(json.dumps(fields))
    assert (again, again.num_devices) == (plan, 16)


def test_caches_are_checked(unchecked):
    with pytest.raises(TypeError, match=r"table 'a': a cache is a jaxrec.plan.TableCache\(rows\)"):
        ShardingPlan.from_dict({"a": row_wise()}, {"a": 100})
    with pytest.raises(ValueError, match="table 'b' has a cache, whose rows need a placement"):
        ShardingPlan.from_dict({"a": row_wise()}, {"b": TableCache(100)})
    with pytest.raises(ValueError, match="table 'a' has a cache, whose rows need a placement"):
        ShardingPlan.from_dict({"a": data_parallel()}, {"a": TableCache(100)})


def test_placements_are_checked(unchecked):
    with pytest.raises(TypeError, match="table 'a': a placement is made by"):
        ShardingPlan.from_dict({"a": "row_wise"})
