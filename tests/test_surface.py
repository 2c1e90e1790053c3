"""What `dir` and `help` show of `jaxrec` and of its packages."""

from __future__ import annotations

import importlib
import pkgutil
import types

import pytest

import jaxrec


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["embed", "nn", "optim", "ragged"])
def test_packages_show_their_public_names(name):
    package = importlib.import_module(f"jaxrec.{name}")
    shown = {each: getattr(package, each) for each in dir(package)}
    assert sorted(shown) == sorted(package.__all__)
    modules = {each for each, value in shown.items() if isinstance(value, types.ModuleType)}
    assert modules == ({"fbgemm"} if name == "ragged" else set())
    assert not any(each.startswith("_") for each in shown)


def test_the_docstring_is_a_map_of_the_packages():
    for module in pkgutil.iter_modules(jaxrec.__path__):
        assert not module.ispkg or f"* `{module.name}`: " in jaxrec.__doc__
