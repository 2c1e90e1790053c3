"""The type checker that the tests put on every annotated function of the package."""

from __future__ import annotations

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
    return function if function.__name__ == "__init__" else _check(function)
