"""The tables of the performance pages are those of the committed results."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # benchmarks is not installed

from benchmarks import report

pytestmark = pytest.mark.every_case


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.stem)
def test_tables_are_made_from_results(page):
    text = page.read_text()
    assert report.filled(text) == text, "run python -m benchmarks.report"


def test_each_result_is_shown_once_and_no_table_is_typed():
    text = "\n".join(page.read_text() for page in report.PAGES)
    names = re.findall(r"<!-- table: (\w+) -->", text)
    assert sorted(names) == sorted(["summary", *(path.stem for path in report.RESULTS.iterdir())])
    made = re.sub(r"<!-- table: \w+ -->\n.*?<!-- end of table -->", "", text, flags=re.DOTALL)
    assert re.findall(r"^\|.*", made, re.MULTILINE) == []


def test_the_picture_shows_the_ratios_of_the_summary():
    picture = (report.ROOT / "docs/pictures/performance.svg").read_text()
    shown = re.findall(r">(\d\.\d\d)</text>", picture)
    _, _, *lines = report.summary()
    medians = [line.split(" | ")[2] for line in lines]
    assert sorted(shown) == sorted(medians), "run python docs/pictures/performance.py"


def test_cells_have_the_decimals_of_their_column(tmp_path, monkeypatch):
    rows = [{"batch": 2048, "ms": 0.5, "peer": "a"}, {"batch": 8192, "ms": 12.25, "peer": "b"}]
    result = {"machine": "one core", "recorded": "2026-01-02", "commit": "abc", "command": None}
    (tmp_path / "x.json").write_text(json.dumps(result | {"rows": rows}))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    page = "above\n<!-- table: x -->\n\nold\n\n<!-- end of table -->\nbelow"
    assert report.filled(page) == (
        "above\n<!-- table: x -->\n\n| batch | ms | peer |\n|---|---|---|\n| 2,048 | 0.50 | a |\n"
        "| 8,192 | 12.25 | b |\n\nOne core; recorded on 2026-01-02 in commit abc.\n\n"
        "<!-- end of table -->\nbelow"
    )
