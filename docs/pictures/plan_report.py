"""Draws plan_report.svg by `ShardingPlan.plot`: python docs/pictures/plan_report.py"""

from __future__ import annotations

import os
import pathlib

import matplotlib

import jaxrec

os.environ["SOURCE_DATE_EPOCH"] = "0"  # the same file each time
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "0"

ROWS = {"user": 40_000_000, "item": 10_000_000, "query": 4_000_000, "city": 50_000, "day": 7}


def main() -> None:
    tables = [jaxrec.EmbeddingBagConfig(name, rows, 64) for name, rows in ROWS.items()]
    topology = jaxrec.plan.Topology.named("h100", devices=8)
    constraints = {"query": jaxrec.plan.ParameterConstraints(pooling_factors=20)}
    plan = jaxrec.plan.Planner(topology, constraints).plan(tables, batch_size=65536)
    print(plan)
    plan.plot(pathlib.Path(__file__).with_suffix(".svg"))


if __name__ == "__main__":
    main()
