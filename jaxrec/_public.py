"""The public names of a package, which its ``__init__`` imports."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def public_names(package: Mapping[str, Any]) -> list[str]:
    """Return the names that a package imports by its ``globals()``, for ``__all__`` and ``dir``.

    Python sets each module of a package as an attribute of it when the module is first imported:
    these are left out.
    """
    return sorted(
        name
        for name, value in package.items()
        if not (name.startswith("_") or isinstance(value, ModuleType))
    )
