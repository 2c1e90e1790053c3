"""Recommender models with very large embedding tables, in JAX."""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrec import data as data
    from jaxrec import embed as embed
    from jaxrec import mesh as mesh
    from jaxrec import metrics as metrics
    from jaxrec import nn as nn
    from jaxrec import optim as optim
    from jaxrec import plan as plan
    from jaxrec import ragged as ragged
    from jaxrec import serve as serve
    from jaxrec import train as train
    from jaxrec._names import *  # noqa: F403
    from jaxrec.memory import keep_freed_memory as keep_freed_memory
    from jaxrec.mesh.sharding import shard as shard

    __version__: str

# Names apart from those of `jaxrec._names`: this one loads meshes, which those do not,
_APART = {
    "shard": "jaxrec.mesh.sharding",
    # and this one nothing, since it must come first.
    "keep_freed_memory": "jaxrec.memory",
}


def __getattr__(name: str) -> Any:
    """Load a package or a name on first use, so that ``jaxrec --help`` does not wait for JAX."""
    if name == "__version__":
        return importlib.metadata.version("jaxrec")
    if name in _APART:
        module = importlib.import_module(_APART[name])
        return globals().setdefault(name, getattr(module, name))
    if not name.startswith("_"):
        if importlib.util.find_spec(f"jaxrec.{name}") is not None:
            return importlib.import_module(f"jaxrec.{name}")
        names = importlib.import_module("jaxrec._names")
        if hasattr(names, name):
            return globals().setdefault(name, getattr(names, name))
    raise AttributeError(f"module 'jaxrec' has no attribute {name!r}")


def __dir__() -> list[str]:
    modules = pkgutil.iter_modules(__spec__.submodule_search_locations)
    names = vars(importlib.import_module("jaxrec._names"))
    packages = {module.name for module in modules if module.ispkg}
    return sorted(
        packages | {name for name in names if not name.startswith("_")} | {*_APART, "__version__"}
    )
