"""The checks of annotations that the tests put on the functions of the package.

The types are checked by beartype, the shapes by jaxtyping.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

import jaxtyping
from beartype import BeartypeConf, beartype

# As for mypy, an int is a float.
typechecked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped
_F = TypeVar("_F", bound=Callable)

# So many calls of a function are checked in a session. To check all calls takes a quarter of the
# suite's time, most of it for functions that tests call in a loop.
_most_calls = 3
# Calls in this session by the function's code, which the closures of a function share.
_calls: dict[CodeType, int] = {}


def install(check_all_calls: bool) -> None:
    """Put the checks on whatever is imported from the package from now on."""
    global _most_calls
    if check_all_calls:
        _most_calls = sys.maxsize
    # The import hook decorates each function and class by it.
    jaxtyping.jaxtyped = lambda *, typechecker: _check_first_calls
    jaxtyping.install_import_hook("jaxrec", f"{__name__}.typechecked")


def _check_first_calls(function: _F) -> _F:
    """Checks a function's arguments and result, constructors left out.

    JAX rebuilds a pytree through its constructor, with placeholders instead of arrays; those must
    pass. Configurations check their arguments themselves, and with better messages.
    """
    if isinstance(function, type) or function.__name__ == "__init__":
        return function
    code, checked = function.__code__, None

    # Making a check takes milliseconds, and most functions are never called in a session.
    @functools.wraps(function)
    def check_first_calls(*args, **kwargs):
        nonlocal checked
        calls = _calls.get(code, 0)
        if calls >= _most_calls:
            return function(*args, **kwargs)
        _calls[code] = calls + 1
        checked = checked or _jaxtyped(function, typechecker=typechecked)
        return checked(*args, **kwargs)

    return check_first_calls
