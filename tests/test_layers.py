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

# These run wherever JAX does, so they ask for nothing that JAX's users do not have. Of scipy, which
# JAX brings, they use the planner's solver.
LOWER_LAYERS = ("jaxrec.ragged", "jaxrec.optim", "jaxrec.embed", "jaxrec.mesh", "jaxrec.plan")
ALLOWED = ("jax", "flax", "optax", "numpy", "jaxtyping", "scipy")
# Most modules that `jaxrec.shard` loads besides those of a model with tables.
MAX_SHARD_MODULES = 60


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
import builtins, importlib, importlib.metadata, re, sys

allowed = set(sys.argv[1].split(","))

# Packages that are there where the allowed ones are: their dependencies, and theirs.
distributions, waiting = set(), list(allowed)
while waiting:
    name = re.sub("[-_.]+", "-", waiting.pop()).lower()
    if name in distributions:
        continue
    distributions.add(name)
    try:
        needed = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        continue
    waiting += [re.match("[A-Za-z0-9._-]+", each)[0] for each in needed if "extra ==" not in each]
missing = {
    package
    for package, names in importlib.metadata.packages_distributions().items()
    if not distributions & {re.sub("[-_.]+", "-", name).lower() for name in names}
}

class Present:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        is_missing = path is None and name in missing - {"jaxrec"}
        return None if is_missing else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Present, sys.meta_path)
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


def test_sharding_loads_little_beyond_the_model():
    program = (
        "import sys, jaxrec; jaxrec.EmbeddingBagCollection, jaxrec.Optimizer\n"
        "before = set(sys.modules); jaxrec.shard\n"
        "loaded = [name for name in set(sys.modules) - before if name.startswith('jaxrec')]\n"
        f"assert len(loaded) <= {MAX_SHARD_MODULES}, sorted(loaded)\n"
        "assert not {'jaxrec.plan', 'jaxrec.tier', 'pyarrow'} & set(sys.modules)"
    )
    _run(sys.executable, "-P", "-c", program)


def _run(*command: str | pathlib.Path) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
