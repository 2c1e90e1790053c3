"""The table of a plan under each policy for the data of lookups."""

from __future__ import annotations

import jaxrec
from jaxrec.plan import ParameterConstraints, Planner, Topology
from jaxrec.plan.report import format_bytes, format_seconds
from jaxrec.plan.stashes import render_stashes

BATCH = 8192


def test_each_policy_has_its_step_and_what_it_saves():
    tables = [jaxrec.EmbeddingBagConfig(f"t{dim}", 1000, dim) for dim in (8, 16)]
    constraints = {
        table.name: ParameterConstraints(pooling_factors=100, sharding_types=["row_wise"])
        for table in tables
    }
    planner = Planner(
        Topology.named("h100", devices=8), constraints, stashes=("recompute",), dense_bytes=0
    )
    plan = planner.plan(tables, batch_size=BATCH)
    lines = [
        line.split()
        for line in render_stashes(planner, tables, plan, batch_size=BATCH).splitlines()
    ]
    header, rows = lines[1], {line[0]: line for line in lines[3:]}
    assert header == ["stash", "step", "memory", "of", "saved", "fits", "plan"]
    assert {name: row[-1] for name, row in rows.items()} == {
        "none": "-",
        "host": "-",
        "recompute": "this",
    }
    seconds = format_seconds(plan.estimate.seconds)
    assert " ".join(rows["recompute"][1:3]) == seconds
    saved = {name: " ".join(row[-4:-2]) for name, row in rows.items()}
    without = Planner(planner.topology, constraints, dense_bytes=0).plan(tables, batch_size=BATCH)
    most, least = (
        max(sum(device.bytes.values()) for device in each.estimate.devices)
        for each in (without, plan)
    )
    assert saved["recompute"] == format_bytes(most - least)
