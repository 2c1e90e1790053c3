"""The report of a plan and its picture."""

from __future__ import annotations

import re

import pytest
from matplotlib.figure import Figure

import jaxrec
from jaxrec.mesh import row_wise
from jaxrec.plan import Planner, ShardingPlan, Topology
from jaxrec.plan.report import format_bytes, format_numbers, format_seconds, render


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


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (123_456, "123 kB"),
        (2.5e6, "2.50 MB"),
        (80e9, "80.00 GB"),
        (1.25e12, "1.25 TB"),
    ],
)
def test_bytes(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (2e-6, "2 us"), (0.0125, "12.5 ms"), (3.5, "3.5 s"), (12_345, "12,345 s")],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "total", "text"),
    [
        ([], 4, ""),
        ([3], 4, "3"),
        ([0], 1, "0"),
        ([0, 1, 2, 3], 4, "all"),
        ([0, 2, 3, 5], 8, "0, 2-3, 5"),
    ],
)
def test_numbers(numbers, total, text):
    assert format_numbers(numbers, total) == text


def test_a_table_has_one_look_in_both_panels(plan, tmp_path, monkeypatch):
    """Two tables differ, and no table looks like the parts that belong to no table."""
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
