"""Sphinx extension for the built site: its internal links are checked, and ``llms.txt`` lists it.

``llms.txt`` (https://llmstxt.org) names each page with its first paragraph, for programs that read
documentation.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any
from urllib.parse import unquote, urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

IDS = re.compile(r'\s(?:id|name)="([^"]+)"')
LINKS = re.compile(r'\s(?:href|src)="([^"]+)"')


def finish(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    broken = broken_links(pathlib.Path(app.outdir))
    if broken:
        raise SphinxError("broken links:\n" + "\n".join(broken))
    (pathlib.Path(app.outdir) / "llms.txt").write_text(llms_text(app))


def broken_links(site: pathlib.Path) -> list[str]:
    """Return the links of a site's pages to files and places of it that are not there."""
    # Copies of the code and of the theme's files are not ours to mend.
    site = site.resolve()
    pages = [path for path in site.rglob("*.html") if path.relative_to(site).parts[0][0] != "_"]
    texts = {path: path.read_text() for path in pages}
    ids = {path: {unquote(name) for name in IDS.findall(text)} for path, text in texts.items()}
    broken = []
    for path, text in texts.items():
        for link in sorted(set(LINKS.findall(text))):
            parts = urlsplit(link.replace("&amp;", "&"))
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.exists() or (place and target in ids and place not in ids[target]):
                broken.append(f"{path.relative_to(site)}: {link}")
    return broken


def llms_text(app: Sphinx) -> str:
    """Return a list of the pages: titles, addresses and first paragraphs."""
    lines = [f"# {app.config.project}\n"]
    for page in sorted(app.env.found_docs):
        document = app.env.get_doctree(page)
        first = next(document.findall(nodes.paragraph), None)
        text = first.astext().replace("\n", " ") if first is not None else ""
        title = app.env.titles[page].astext()
        lines.append(f"- [{title}]({app.builder.get_target_uri(page)}): {text}")
    return "\n".join(lines) + "\n"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
