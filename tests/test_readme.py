"""The README's code runs."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of a language, in order."""
    readme = (ROOT / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)


def test_python_blocks_run_and_learn():
    namespace: dict = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["losses"][-1] < namespace["losses"][0]
