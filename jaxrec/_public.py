"""Helpers for public names: their list by package, names that have moved, and earlier arguments."""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def public_names(package: Mapping[str, Any], *modules: str) -> list[str]:
    """Return the public names of a package from its ``globals()``, for ``__all__`` and ``dir``.

    Modules are left out, except ``modules``.
    """
    # Python sets a module as an attribute of its package when the module is first imported. With
    # these, `dir` would depend on what has been imported before.
    return sorted(
        name
        for name, value in package.items()
        if name in modules or not (name.startswith("_") or isinstance(value, ModuleType))
    )


def moved_names(package: str, moved: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that finds moved names, with a warning.

    ``moved`` has the full new name of each earlier name. Earlier names stay for one version.
    """

    def get(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(f"{package}.{name} is now {moved[name]}", DeprecationWarning, stacklevel=2)
        module, _, attribute = moved[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)

    return get


def directory_second(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function ``f(model, directory)`` be called as ``f(directory, model)``, with a warning.

    That was the order of an earlier version, and works for one more.
    """

    restore: Any = function

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], str | os.PathLike):
            name = function.__name__
            warnings.warn(
                f"{name} now takes the directory second, behind what it restores: {name}(..., "
                f"{os.fspath(args[0])!r})",
                DeprecationWarning,
                stacklevel=2,
            )
            directory, *rest = args
            if not rest:
                return restore(directory=directory, **options)
            args = (rest[0], directory, *rest[1:])
        return restore(*args, **options)

    return call
