"""Sphinx extension that shows pages of the repository that lie outside of ``docs``.

A link of a page to ``../benchmarks/results/NAME.md`` leads to a copy of that file, which is a page
of the site. Links to other files of the repository are downloads.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from sphinx.application import Sphinx

LINK = re.compile(r"\]\(\.\./((?:\.\./)*)benchmarks/results/([\w.-]+\.md)")
COPIES = "results"


def copy_results(app: Sphinx) -> None:
    folder = pathlib.Path(app.srcdir)
    (folder / COPIES).mkdir(exist_ok=True)
    for path in (folder.parent / "benchmarks/results").glob("*.md"):
        copy = folder / COPIES / path.name
        text = "---\norphan: true\n---\n\n" + path.read_text()
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)


def lead_to_copies(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = LINK.sub(rf"](\1{COPIES}/\2", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", copy_results)
    app.connect("source-read", lead_to_copies)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
