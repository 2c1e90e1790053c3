"""Who may import whom: the contracts of ``pyproject.toml``, and what lower layers may ask for."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import sysconfig

import grimp
import pytest

import jaxrec

ROOT = pathlib.Path(__file__).parents[1]

# These run wherever JAX does, so they ask for nothing that JAX's users do not have.
LOWER_LAYERS = ("jaxrec.ragged", "jaxrec.optim", "jaxrec.embed")
ALLOWED = ("jax", "flax", "optax", "numpy", "jaxtyping")


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("jaxrec", cache_dir=None)


def test_contracts_hold():
    lint_imports = pathlib.Path(sysconfig.get_path("scripts"), "lint-imports")
    _run(lint_imports, "--no-cache")


def test_nothing_imports_the_top_of_the_package(graph: grimp.ImportGraph):
    # A name of ``jaxrec`` imports most packages, so that a module that needs one would be imported
    # in a circle.
    assert graph.find_modules_that_directly_import("jaxrec") == set()


def test_names_are_there_when_they_are_used():
    names = dir(jaxrec)
    assert {"EmbeddingBagConfig", "KeyedJaggedArray", "shard", "optim", "train"} <= set(names)
    assert all(hasattr(jaxrec, name) for name in names)
    with pytest.raises(AttributeError, match="module 'jaxrec' has no attribute 'bogus'"):
        jaxrec.bogus  # noqa: B018


_IMPORT_WITH_ALLOWED_ALONE = """
import builtins, importlib, sys

allowed = set(sys.argv[1].split(","))
original = builtins.__import__

def checked(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    top = name.partition(".")[0]
    if importer.startswith("jaxrec") and level == 0:
        if top not in allowed and top != "jaxrec" and top not in sys.stdlib_module_names:
            raise ImportError(f"{importer} imports {name}")
    return original(name, globals, locals, fromlist, level)

builtins.__import__ = checked
for module in sys.argv[2:]:
    importlib.import_module(module)
"""


def test_lower_layers_import_with_jax_alone():
    _run(sys.executable, "-P", "-c", _IMPORT_WITH_ALLOWED_ALONE, ",".join(ALLOWED), *LOWER_LAYERS)


def _run(*command: str | pathlib.Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
