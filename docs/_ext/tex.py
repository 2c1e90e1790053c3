"""TeX of the formulas that docstrings write as ``w <- w - lr g / (sqrt(v) + eps)``.

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
    """Translate a formula of a docstring to TeX. Raises ValueError if it cannot be read."""
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
            if not parts:
                raise ValueError(f"{formula!r} has a hat on nothing")
            parts[-1] = rf"\hat{{{parts[-1]}}}"
        elif kind in ("sub", "power"):
            inner = text[1:].strip("{}")
            if inner:
                parts.append(f"{text[0]}{{{tex_of(inner)}}}")
            else:  # ^ (...): the exponent follows
                end = closing(formula, position)
                parts.append(f"^{{{tex_of(formula[position + 1 : end])}}}")
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
    if formula[start : start + 1] != "(":
        raise ValueError(f"{formula!r} has no parenthesis after {formula[:start]!r}")
    depth = 0
    for index in range(start, len(formula)):
        depth += {"(": 1, ")": -1}.get(formula[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"{formula!r} has a parenthesis that is not closed")
