"""The report of a plan."""

from __future__ import annotations

import re

import pytest

import jaxrec
from jaxrec.plan import Planner, Topology
from jaxrec.plan.report import render


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
