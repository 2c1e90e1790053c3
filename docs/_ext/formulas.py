"""Sphinx extension that shows the formulas of docstrings as mathematics, in MathML.

A docstring writes a formula as ``w <- w - lr g / (sqrt(v) + eps)``, which `help` shows as it is.
The site shows it as mathematics. What it translates:

=======================  ==============================================
``<-``, ``<=``           an arrow, a relation
``x_l``, ``x_{l+1}``     subscripts
``g^2``, ``x^T``         superscripts; ``m^`` is an m with a hat
``sqrt(v)``              a root
``sum``, ``eps``         signs; other words stay words
``a * b``, ``a . b``     products of elements, and of vectors
=======================  ==============================================
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

FUNCTIONS = {
    *("attention", "ceil", "clip", "dropout", "exp", "flatten", "gelu", "layer_norm", "linear"),
    *("log", "log2", "max", "mean", "min", "mix", "norm", "relu", "reshape", "rms_norm", "sg"),
    *("sigmoid", "sign", "softmax", "split", "stop"),
}
WORDS = {"if", "else", "mod"}
SIGNS_BY_NAME = {
    **{name: rf"\{name} " for name in ("alpha", "beta", "eta", "prod", "sum")},
    "eps": r"\epsilon ",
}
# A literal with one of these is a formula, unless something in it is code.
SIGNS = re.compile(
    r"<-|[\w)|]\^|_\{|\bsqrt\(|\bsum(?:_\w+)? (?!of)|\b[a-zA-Z](?:_\w)?'? = |\|\w+\|"
)
CODE = re.compile(
    r"[\":]|\w\[|==|\*\*|\w=\w|\w\(\)|\.\w|->| of |\b(?!(?:layer|rms)_norm)\w{2,}_\w{2,}\("
)
LITERAL = re.compile(r"``([^`]+)``")
SYMBOL = re.compile(r"[a-zA-Z](?:_[a-z0-9])?'?")
TOKEN = re.compile(
    r"""(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)
    |(?P<name>[A-Za-z]+(?:_[A-Za-z]{3,})+|[A-Za-z]{2,}\d?(?:_[A-Za-z]{2,})*|[A-Za-z]\d?)
    |(?P<sub>_\{[^}]*\}|_[a-z]{1,2}(?![a-z])|_[\w+])
    |(?P<hat>\^(?=[\s,)]|$))
    |(?P<power>\^(?:\{[^}]*\}|\w+)?)
    |(?P<sign><-|<=|>=|\|\||\.\.\.|[-+*/=<>|()\[\]{},;.'±])
    |(?P<space>\s+)""",
    re.VERBOSE,
)
OPERATORS = {
    "<-": r"\leftarrow ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "*": r"\ast ",
    "...": r"\ldots ",
    ".": r"\cdot ",
    "||": r"\| ",
    "{": r"\{",
    "}": r"\}",
    "±": r"\pm ",
}


def is_formula(text: str) -> bool:
    return bool(SIGNS.search(text)) and not CODE.search(text)


def tex_of(formula: str) -> str:
    """Translate a formula of a docstring; ValueError where it has a sign that none has."""
    parts: list[str] = []
    position = 0
    while position < len(formula):
        token = TOKEN.match(formula, position)
        if token is None:
            raise ValueError(f"{formula!r} has {formula[position]!r}")
        position = token.end()
        kind, text = token.lastgroup, token.group()
        if text == "sqrt" and formula[position : position + 1] == "(":
            end = closing(formula, position)
            parts.append(rf"\sqrt{{{tex_of(formula[position + 1 : end])}}}")
            position = end + 1
        elif kind == "name":
            parts.append(word(text))
        elif kind == "hat":
            parts[-1] = rf"\hat{{{parts[-1]}}}"
        elif kind in ("sub", "power"):
            inner = text[1:].strip("{}")
            if inner:
                parts.append(f"{text[0]}{{{tex_of(inner)}}}")
            else:  # ^ (...): the exponent follows
                start = formula.index("(", position)
                end = closing(formula, start)
                parts.append(f"^{{{tex_of(formula[start + 1 : end])}}}")
                position = end + 1
        elif kind == "space":
            parts.append(r"\," if is_product(formula, token) else " ")
        else:
            parts.append(OPERATORS.get(text, text))
    return "".join(parts)


def word(text: str) -> str:
    if len(text) == 1 or text in SIGNS_BY_NAME:
        return SIGNS_BY_NAME.get(text, text)
    if len(text) == 2 and text[1].isdigit():
        return f"{{{text[0]}_{text[1]}}}"
    if text in WORDS:
        return rf"\;\text{{{text}}}\;"
    if text in FUNCTIONS or text[:2].isupper():
        return rf"\operatorname{{{text}}}"
    return rf"\text{{{text}}}" if "_" in text else rf"\mathit{{{text}}}"


def is_product(formula: str, space: re.Match[str]) -> bool:
    """Say whether a space stands between two factors."""
    before, after = formula[: space.start()][-1:], formula[space.end() :][:1]
    return bool(re.match(r"[\w)}|']", before) and re.match(r"[\w(|{]", after))


def closing(formula: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for index in range(start, len(formula)):
        depth += {"(": 1, ")": -1}.get(formula[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"{formula!r} has a parenthesis that is not closed")


def role(text: str) -> str:
    return f":math:`{tex_of(text.replace(chr(10), ' '))}`"


def show_formulas(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Make the formulas of a docstring mathematics, and with them the symbols that they use."""
    # Every second part is what is indented behind a paragraph that ends with two colons.
    parts = re.split(r"(?<=::\n\n)((?: .*\n|\n(?= ))+)", "\n".join(lines))
    has_formulas = any(map(is_formula, LITERAL.findall("".join(parts[::2]))))
    for index in range(1, len(parts), 2):
        if shown := formula_lines(parts[index]):
            parts[index - 1] = re.sub(r" ::\n\n$|:\n\n$", "\n\n", parts[index - 1])
            parts[index] = shown
            has_formulas = True
    if has_formulas:
        lines[:] = LITERAL.sub(shown_literal, "".join(parts)).split("\n")


def shown_literal(literal: re.Match[str]) -> str:
    text = literal[1]
    return role(text) if is_formula(text) or SYMBOL.fullmatch(text) else literal[0]


def formula_lines(block: str) -> str:
    """Return the lines of a block of formulas, with the words beside them; else an empty text."""
    shown = []
    for line in filter(str.strip, block.split("\n")):
        # Several formulas of a line, or a formula and words, have two spaces between them.
        for part in re.split(r"\s{2,}(?=\S+ (?:=|<-) )", line.strip()):
            formula, *words = re.split(r"\s{2,}", part, maxsplit=1)
            if not re.search(r" (?:=|<-) ", formula) or CODE.search(formula):
                return ""
            shown.append(" ".join(["|", role(formula), *words]))
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
