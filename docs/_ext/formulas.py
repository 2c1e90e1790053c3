"""Sphinx extension that shows the formulas of docstrings as mathematics, in MathML.

A docstring writes a formula as ``w <- w - lr g / (sqrt(v) + eps)``, which `help` shows as it is.
The site shows it as mathematics; `tex` says what it translates.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator
from tex import CODE, is_formula, tex_of

LITERAL = re.compile(r"``([^`]+)``")
SYMBOL = re.compile(r"[a-zA-Z](?:_[a-z0-9])?'?")

logger = logging.getLogger(__name__)


def role(text: str, name: str) -> str:
    """Return mathematics, or the literal with a warning if the docstring of ``name`` errs."""
    try:
        return f":math:`{tex_of(text.replace(chr(10), ' '))}`"
    except ValueError as error:
        logger.warning("a formula in the docstring of %s: %s", name, error)
        return f"``{text}``"


def show_formulas(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Make the formulas of a docstring mathematics, and with them the symbols that they use."""
    # Every second part is what is indented behind a paragraph that ends with two colons.
    parts = re.split(r"(?<=::\n\n)((?: .*\n|\n(?= ))+)", "\n".join(lines))
    has_formulas = any(map(is_formula, LITERAL.findall("".join(parts[::2]))))
    for index in range(1, len(parts), 2):
        if shown := formula_lines(parts[index], name):
            parts[index - 1] = re.sub(r" ::\n\n$|:\n\n$", "\n\n", parts[index - 1])
            parts[index] = shown
            has_formulas = True
    if has_formulas:
        text = LITERAL.sub(lambda literal: shown_literal(literal, name), "".join(parts))
        lines[:] = text.split("\n")


def shown_literal(literal: re.Match[str], name: str) -> str:
    text = literal[1]
    return role(text, name) if is_formula(text) or SYMBOL.fullmatch(text) else literal[0]


def formula_lines(block: str, name: str) -> str:
    """Return the lines of a block of formulas, with the words beside them; else an empty text."""
    shown = []
    for line in filter(str.strip, block.split("\n")):
        # Several formulas of a line, or a formula and words, have two spaces between them.
        for part in re.split(r"\s{2,}(?=\S+ (?:=|<-) )", line.strip()):
            formula, *words = re.split(r"\s{2,}", part, maxsplit=1)
            if not re.search(r" (?:=|<-) ", formula) or CODE.search(formula):
                return ""
            shown.append(" ".join(["|", role(formula, name), *words]))
    return "\n".join(shown) + "\n"


def visit_math(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    # Browsers show MathML by themselves: no script, and none from another server.
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("autodoc-process-docstring", show_formulas, priority=700)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
