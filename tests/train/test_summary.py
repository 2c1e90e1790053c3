"""The picture of a run: its panels, for each kind of results."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jaxrec.train.models.kind import LOSS, Measure
from jaxrec.train.models.labels import ClickTask
from jaxrec.train.summary import draw_summary

pytest.importorskip("matplotlib")

FACTS = {"model": "dlrm", "data": "a/$b.parquet", "rows": 90, "held_out_rows": 10, "steps": 30}
RANKS = (Measure("ndcg@10", "NDCG@10", "max"), Measure("mrr", "MRR", "max"))
DECILES = [{"rows": 1, "predicted": x / 9, "observed": x / 8} for x in range(9)]


def labels(*names):
    """Measures of several labels of clicks."""
    return [
        dataclasses.replace(x, name=f"{name}/{x.name}", title=f"{name} {x.title}")
        for name in names
        for x in ClickTask.measures
    ]


def importance(value, count):
    columns = {f"c{n}": {value: (count - n) / count - 0.1} for n in range(count)}
    return {"value": value, "columns": columns}


CLICKS = {"auc": 0.7, "normalized_entropy": 0.9, "log_loss": 0.6, "calibration": math.nan}
CASES = {
    "one label": (
        [*ClickTask.measures, LOSS],
        {**CLICKS, "best_step": 20, "importance": importance("log_loss", 30),
         "calibration_deciles": {"click": DECILES}},
        ["AUC", "NE", "log loss", "calibration", "calibration by decile",
         "importance of columns, 12 of 30"],
    ),
    "two labels": (
        [LOSS, *labels("buy", "click")],
        {"loss": 1.3, "best_step": None, "importance": importance("loss", 2),
         **{f"{label}/{name}": x for label in ("buy", "click") for name, x in CLICKS.items()},
         "calibration_deciles": {"buy": DECILES, "click": DECILES}},
        ["loss", "AUC", "NE", "log loss", "calibration by decile", "importance of columns"],
    ),
    "ranks": ([*RANKS, LOSS], {"ndcg@10": 0.1, "mrr": 0.2}, ["NDCG@10", "MRR", "loss"]),
    "nothing": ([], {}, []),
}  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(("measures", "results", "titles"), CASES.values(), ids=CASES)
def test_panels(measures, results, titles, tmp_path, monkeypatch):
    figures = []

    class Figure:
        """Notes the figure, and does not draw it."""

        def __new__(cls, **options):
            import matplotlib.figure

            figures.append(matplotlib.figure.Figure(**options))
            monkeypatch.setattr(figures[0], "savefig", lambda path: None)
            return figures[0]

    monkeypatch.setattr("jaxrec.train.summary.require_matplotlib", lambda: Figure)
    names = [measure.name for measure in measures]
    history = {
        step: {name: 1 / step for name in names} | {f"held_out_{name}": 2 / step for name in names}
        for step in (10, 20, 30)
    }
    draw_summary(history, FACTS | results, measures, tmp_path / "summary.png")
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == titles
    assert figure.get_suptitle().startswith(r"dlrm on \$b.parquet: 90 rows, 10 held out")
    if results.get("best_step"):
        marked = [line for line in figure.axes[0].lines if line.get_label() == "best step: 20"]
        assert [*marked[0].get_xdata()] == [20, 20]
        assert "best step 20" in figure.get_suptitle()
    if "click/auc" in results:
        shown = figure.axes[1].get_legend_handles_labels()[1]
        assert shown == [
            f"{label}, {what}"
            for label in ("buy", "click")
            for what in ("training", "held out: 0.7000")
        ]
