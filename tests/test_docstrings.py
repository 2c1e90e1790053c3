"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import jaxrec

pytestmark = [pytest.mark.every_case, pytest.mark.slow]

MODULES = [
    module.name
    for module in pkgutil.walk_packages(jaxrec.__path__, "jaxrec.")
    if not module.name.endswith("__main__")
]


def with_examples() -> list[str]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [
        name
        for name in MODULES
        if any(test.examples for test in finder.find(importlib.import_module(name)))
    ]


@pytest.mark.parametrize("name", with_examples())
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
