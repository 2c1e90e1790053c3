"""The results of a run in a file."""

from __future__ import annotations

import json
import math

from jaxrec.train import results


def test_values_that_are_no_numbers_are_null(tmp_path, monkeypatch):
    """Strict readers of JSON refuse NaN; also in the list of windows."""
    monkeypatch.setattr(results, "draw_summary", lambda *_: None)
    values = {"auc": math.nan, "rows": 3, "windows": [{"auc": math.inf, "step": 5}]}
    results.write_results(values, (), tmp_path)
    text = (tmp_path / results.RESULTS_FILE).read_text()
    assert json.loads(text) == {"auc": None, "rows": 3, "windows": [{"auc": None, "step": 5}]}
    assert [path.name for path in tmp_path.iterdir()] == [results.RESULTS_FILE]
