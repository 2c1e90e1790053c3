"""The page on training runs: its example of batches that are not full."""

from __future__ import annotations

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "training.md"


def test_batches_that_are_not_full(capsys):
    section = PAGE.read_text().partition("### Batches that are not full")[2].partition("\n### ")[0]
    namespace: dict = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), namespace)
    assert "'click/window_auc': 1.0" in capsys.readouterr().out
    assert namespace["logits"].shape == (1,)
    assert namespace["logits"][0] > 0
