"""What `dir` and `help` show of `jaxrec` and of its packages."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil

import pytest

import jaxrec

# Modules that are names of their packages.
MODULES = {"nn": {"semantic_ids"}, "ragged": {"fbgemm"}, "tier": {"managed_collision", "stores"}}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    ["data", "embed", "mesh", "metrics", "nn", "optim", "plan", "ragged", "serve", "tier", "train"],
)
def test_packages_show_their_public_names(name):
    package = importlib.import_module(f"jaxrec.{name}")
    imported = {
        node.asname
        for node in ast.walk(ast.parse(inspect.getsource(package)))
        if isinstance(node, ast.alias)
    }
    assert set(dir(package)) == {each for each in imported if not each.startswith("_")}
    modules = {each for each in dir(package) if inspect.ismodule(getattr(package, each))}
    assert modules == MODULES.get(name, set())


def test_the_docstring_is_a_map_of_the_packages():
    for module in pkgutil.iter_modules(jaxrec.__path__):
        assert not module.ispkg or f"* `{module.name}`: " in jaxrec.__doc__
