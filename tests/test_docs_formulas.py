"""The formulas of docstrings in TeX, which docs/_ext/formulas.py shows as mathematics."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "docs/_ext/tex.py"


@pytest.fixture(scope="module")
def tex():
    spec = importlib.util.spec_from_file_location("tex", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        (
            "w <- w - lr g / (sqrt(v) + eps)",
            r"w \leftarrow  w - \mathit{lr}\,g / (\sqrt{v} + \epsilon )",
        ),
        ("x_{l+1} = x_l * m^", r"x_{l+1} = x_{l} \ast  \hat{m}"),
        ("s = q . k^T / 2^(n + 1)", r"s = q \cdot  k^{T} / 2^{n + 1}"),
        ("b1 <= softmax(x)", r"{b_1} \le  \operatorname{softmax}(x)"),
    ],
)
def test_tex_of_formulas(tex, formula, wanted):
    assert tex.tex_of(formula) == wanted


@pytest.mark.every_case
@pytest.mark.parametrize("formula", ["^ = x", "x^- = 1", "sqrt(x = 1", "x = 1 ?"])
def test_the_error_shows_a_formula_that_cannot_be_read(tex, formula):
    with pytest.raises(ValueError, match="has") as error:
        tex.tex_of(formula)
    assert repr(formula)[1:-1] in str(error.value)
