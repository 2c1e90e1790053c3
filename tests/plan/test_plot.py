"""Drawn plans."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from jaxrec.mesh import row_wise
from jaxrec.plan import ShardingPlan


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
