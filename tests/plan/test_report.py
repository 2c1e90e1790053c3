"""What a plan says of itself, and its way to a file and back."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from matplotlib.figure import Figure

import jaxrec
from jaxrec import optim
from jaxrec.mesh import row_wise, table_wise
from jaxrec.plan import (
    ParameterConstraints,
    PlanMismatchError,
    Planner,
    ShardingPlan,
    Topology,
)
from jaxrec.plan.estimate import imbalance
from jaxrec.plan.report import render

TABLES = [
    jaxrec.EmbeddingBagConfig("item", 3_000_000, 64),
    jaxrec.EmbeddingBagConfig("user", 500_000, 64, dtype="bfloat16"),
    jaxrec.EmbeddingBagConfig("day", 7, 32),
]
SAID = {"item": ParameterConstraints(pooling_factors=20)}


@pytest.fixture(scope="module")
def planner():
    return Planner(Topology.named("h100", devices=16), SAID)


@pytest.fixture(scope="module")
def plan(planner):
    return planner.plan(TABLES, batch_size=16 * 1024)


def test_the_report_has_what_an_engineer_wants(plan):
    text = str(plan)
    found = plan.estimate
    assert "no plan takes less than" in text
    assert "above it at most" in text
    for heading in ("Step", "Path", "Memory", "Balance", "Types", "Search", "Devices", "Tables"):
        assert re.search(rf"(?m)^{heading}\b", text)
    lines = text.split("\n")
    devices = [line for line in lines if re.match(r"\d+ ", line)]
    assert len(devices) == 16
    for name, size in (("item", "3,000,000 x 64 f32"), ("user", "500,000 x 64 bf16")):
        (line,) = (line for line in lines if re.match(rf"{name} ", line))
        assert size in line
    assert sum(found.phases.values()) == pytest.approx(found.seconds)


def test_the_slowest_device_and_its_waits_make_the_step(plan):
    found = plan.estimate
    for device in found.devices:
        busy = sum(device.seconds.values())
        assert busy <= found.seconds * (1 + 1e-9)
        assert busy + device.waits == pytest.approx(found.seconds)
    assert sum(table.bytes for table in found.tables) == pytest.approx(
        sum(device.bytes["tables"] for device in found.devices)
    )


def test_colour_comes_when_asked_for_and_changes_no_letter(plan):
    plain, coloured = render(plan.estimate, color=False), render(plan.estimate, color=True)
    assert "\x1b[" not in plain
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == plain.split()


def test_many_devices_and_tables_are_summed_up():
    tables = [jaxrec.EmbeddingBagConfig(f"t{i}", 1000, 32) for i in range(120)]
    planner = Planner(Topology.named("h100", devices=64), is_exact=False, time_limit=1.0)
    text = str(planner.plan(tables, batch_size=6400))
    assert "and 32 more" in text
    assert "and 20 more" in text


def test_a_plan_made_by_hand_says_where_tables_go():
    placements = {"a": row_wise(exchange="sums"), "b": table_wise(3)}
    text = str(ShardingPlan.from_dict(placements))
    assert text == "a: row_wise by sums\nb: table_wise on 3"


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
    said = {"item": ParameterConstraints(pooling_factors=30)}
    return dataclasses.replace(planner, constraints=said).context(tables, batch_size=16 * 1024)


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


def test_what_a_plan_was_made_for_cannot_be_changed_by_hand(plan):
    fields = json.loads(plan.to_json())
    fields["made_for"]["batch_size"] = 1
    with pytest.raises(ValueError, match="it was changed by hand"):
        ShardingPlan.from_json(json.dumps(fields))


def test_a_plan_made_by_hand_does_not_say_what_for(planner):
    text = ShardingPlan.from_dict({"a": row_wise()}).to_json()
    with pytest.raises(PlanMismatchError, match="made by hand"):
        ShardingPlan.from_json(text, planner.context(TABLES, batch_size=16))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"placements": {"a": 3}}', '{"placements": {"a": {"kind": "row_wise"}}}'],
)
def test_what_is_no_plan_is_said_so(text):
    with pytest.raises(ValueError, match="this is no plan that to_json wrote"):
        ShardingPlan.from_json(text)


def test_a_table_has_one_look_in_both_panels(plan, tmp_path, monkeypatch):
    """And no two tables, nor what is no table's own, share one."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plan.plot(tmp_path / "plan.png")
    memory, time = (
        {
            bars.get_label(): (bars[0].get_facecolor(), bars[0].get_hatch())
            for bars in axes.containers
        }
        for axes in drawn[0].axes
    )
    tables = [table.name for table in plan.estimate.tables]
    assert len(tables) > 1
    assert {name: memory[name] for name in tables} == {name: time[name] for name in tables}
    assert len(set(memory.values())) == len(memory)


def test_plots_are_pictures(plan, tmp_path):
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    plan.plot(tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert "<svg" in drawn
    with pytest.raises(ValueError, match="has no estimate to draw"):
        ShardingPlan.from_dict({"a": row_wise()}).plot(tmp_path / "b.png")


@pytest.mark.parametrize(
    ("loads", "expected"),
    [([1.0, 1.0], (1, 0, 0)), ([2.0, 0.0], (2, 0.5, 0.6931)), ([0.0, 0.0], (1, 0, 0))],
)
def test_imbalance(loads, expected):
    assert tuple(imbalance(loads).values()) == pytest.approx(expected, abs=1e-4)


def test_placements_are_checked(unchecked):
    with pytest.raises(TypeError, match="table 'a': a placement is made by"):
        ShardingPlan.from_dict({"a": "row_wise"})
