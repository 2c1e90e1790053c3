"""The type checker that the tests put on every annotated function of the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from beartype import BeartypeConf, beartype

# As for mypy, an int is a float.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_F = TypeVar("_F", bound=Callable)


def typechecked(function: _F) -> _F:
    """Checks a function's arguments and result on each call, constructors left out.

    JAX rebuilds a pytree through its constructor, with placeholders instead of arrays; those must
    pass. Configurations check their arguments themselves, and with better messages.
    """
    if function.__name__ == "__init__":
        return function
    checked = None

    # Making a check takes milliseconds, and most functions are never called in a session.
    @functools.wraps(function)
    def check_when_called(*args, **kwargs):
        nonlocal checked
        checked = checked or _check(function)
        return checked(*args, **kwargs)

    return check_when_called
