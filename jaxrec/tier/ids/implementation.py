"""Choice of the code for id maps and batch operations: C++, or NumPy without the library."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

from jaxrec.tier.ids import library, reference


def current() -> ModuleType:
    """Return the module that computes them: `library`, or `reference` where there is none."""
    reason = library.missing()
    if reason is None:
        return library
    _warn(reason)
    return reference


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"id maps run in NumPy, up to fifty times slower: {reason}", RuntimeWarning, stacklevel=4
    )
