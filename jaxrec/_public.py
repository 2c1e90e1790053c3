"""The public names of a package, which its ``__init__`` imports, and their earlier names."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def public_names(package: Mapping[str, Any], *modules: str) -> list[str]:
    """Return the names that a package imports by its ``globals()``, for ``__all__`` and ``dir``.

    Python sets each module of a package as an attribute of it when the module is first imported:
    these are left out, but for ``modules``.
    """
    return sorted(
        name
        for name, value in package.items()
        if name in modules or not (name.startswith("_") or isinstance(value, ModuleType))
    )


def moved_names(package: str, moved: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package for earlier names, which warn for one version.

    Args:
        package: Name of the package.
        moved: Full new name by earlier name.
    """

    def get(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(f"{package}.{name} is now {moved[name]}", DeprecationWarning, stacklevel=2)
        module, _, attribute = moved[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)

    return get
