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


def warn_of_earlier_form(message: str) -> None:
    """Warn, where the function that calls this was called, that it goes after one version.

    ``message`` names the form of today.
    """
    # 1 is this line, 2 the function that has an earlier form, 3 the user's.
    warnings.warn(
        f"{message}; the earlier form goes with the next minor version",
        DeprecationWarning,
        stacklevel=3,
    )


def moved_names(package: str, moved: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that finds moved names, with a warning.

    ``moved`` has the full new name of each earlier name. Earlier names stay for one version.
    """

    def get(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warn_of_earlier_form(f"{package}.{name} is now {moved[name]}")
        module, _, attribute = moved[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)

    return get


def directory_second(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a function ``f(model, directory)`` be called as ``f(directory, model)``, too.

    That was the order of an earlier version. A directory is a path, which no model is, so that the
    first argument tells the two orders apart.
    """
    restore: Any = function

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not args or not isinstance(args[0], str | os.PathLike):
            return restore(*args, **options)
        directory, *rest = args
        if not rest:  # the model is named
            return restore(directory=directory, **options)
        return restore(rest[0], directory, *rest[1:], **options)

    return call
