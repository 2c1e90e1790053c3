"""Checks of fields that optimizers and schedules call when they are constructed."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The largest float32, and the smallest normal one: many devices flush smaller numbers to zero.
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


def non_negative(owner: Any, *names: str) -> None:
    """Require numbers in [0, inf) in these fields of ``owner``."""
    _check(owner, names, lambda value: value >= 0, "a number >= 0")


def schedule(owner: Any, name: str) -> None:
    """Require the schedule in field ``name`` of ``owner`` to depend on its argument, the step.

    Objects of jaxrec's classes and functions of optax are always accepted.
    """
    function = getattr(owner, name)
    if function.__class__.__module__.startswith("jaxrec."):
        return
    # A function that ignores its argument is usually a closure over a number that the user will
    # change between steps. The compiled step would silently keep the first number.
    depends = True

    def evaluate(step: jax.Array) -> jax.Array:
        nonlocal depends
        value = function(step)
        depends = isinstance(value, jax.core.Tracer)
        return jnp.asarray(value)

    jax.eval_shape(evaluate, jax.ShapeDtypeStruct((), jnp.int32))
    # `optax.constant_schedule` is such a function too, and means it.
    if not depends and not getattr(function, "__module__", "").startswith("optax."):
        raise ValueError(
            f"{type(owner).__name__}: {name} is a function whose value does not depend on the step "
            "that it is given, so a compiled step would keep its first value for good. Give a "
            "number; a function of the step, such as an optax schedule; or, to set it between "
            f"steps, jaxrec.optim.hyperparameter({name!r}, value)"
        )


def non_positive(owner: Any, *names: str) -> None:
    """Require numbers in (-inf, 0] in these fields of ``owner``."""
    _check(owner, names, lambda value: value <= 0, "a number <= 0")


def positive(owner: Any, *names: str) -> None:
    """Require positive, normal float32 numbers in these fields of ``owner``."""
    _check(owner, names, lambda value: value >= _SMALLEST, "a number > 0")


def fraction(owner: Any, *names: str) -> None:
    """Require numbers in [0, 1) in these fields of ``owner``."""
    _check(owner, names, lambda value: 0 <= value < 1, "a number in [0, 1)")


def share(owner: Any, *names: str) -> None:
    """Require numbers in [0, 1] in these fields of ``owner``."""
    _check(owner, names, lambda value: 0 <= value <= 1, "a number in [0, 1]")


def count(owner: Any, *names: str) -> None:
    """Require integers in [1, 2**31) in these fields of ``owner``."""
    wanted = "an integer in [1, 2**31)"
    _check(owner, names, lambda value: 1 <= value < 2**31, wanted, numbers.Integral)


def whole(owner: Any, *names: str) -> None:
    """Require integers in [0, 2**31) in these fields of ``owner``."""
    wanted = "an integer in [0, 2**31)"
    _check(owner, names, lambda value: 0 <= value < 2**31, wanted, numbers.Integral)


def one_of(owner: Any, name: str, allowed: Collection[str]) -> None:
    """Require one of the strings ``allowed`` in this field of ``owner``."""
    value = getattr(owner, name)
    if not (isinstance(value, str) and value in allowed):
        raise _error(owner, name, "one of " + ", ".join(repr(word) for word in allowed))


def boolean(owner: Any, *names: str) -> None:
    """Require True or False in these fields of ``owner``."""
    for name in names:
        if not isinstance(getattr(owner, name), bool):
            raise _error(owner, name, "True or False")


def _check(
    owner: Any,
    names: tuple[str, ...],
    holds: Callable[[Any], Any],
    wanted: str,
    kind: type = numbers.Real,
) -> None:
    """Raise a ValueError if a field is not a number of this kind for which ``holds`` is true."""
    for name in names:
        value = getattr(owner, name)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not (is_number and abs(value) <= _LARGEST and holds(value)):
            raise _error(owner, name, wanted)


def _error(owner: Any, name: str, wanted: str) -> ValueError:
    value = getattr(owner, name)
    return ValueError(
        f"{type(owner).__name__}: {name} must be {wanted}, "
        f"got {value!r} of type {type(value).__name__}"
    )
