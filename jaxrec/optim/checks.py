"""Checks of hyperparameters, made when an optimizer or a schedule is constructed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any

import numpy as np

# Smaller numbers are zero in float32 on most devices.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def non_negative(owner: Any, *names: str) -> None:
    """Requires each of these fields of ``owner`` to be a number in [0, inf)."""
    for name in names:
        value = getattr(owner, name)
        _require(owner, name, _is_number(value) and value >= 0, "a number >= 0")


def positive(owner: Any, *names: str) -> None:
    """Requires each of these fields to be a number in (0, inf), also after rounding to float32."""
    for name in names:
        value = getattr(owner, name)
        _require(owner, name, _is_number(value) and value >= _SMALLEST, "a number > 0")


def fraction(owner: Any, *names: str) -> None:
    """Requires each of these fields to be a number in [0, 1)."""
    for name in names:
        value = getattr(owner, name)
        _require(owner, name, _is_number(value) and 0 <= value < 1, "a number in [0, 1)")


def share(owner: Any, *names: str) -> None:
    """Requires each of these fields to be a number in [0, 1]."""
    for name in names:
        value = getattr(owner, name)
        _require(owner, name, _is_number(value) and 0 <= value <= 1, "a number in [0, 1]")


def non_positive(owner: Any, *names: str) -> None:
    """Requires each of these fields to be a number in (-inf, 0]."""
    for name in names:
        value = getattr(owner, name)
        _require(owner, name, _is_number(value) and value <= 0, "a number <= 0")


def finite(owner: Any, *names: str) -> None:
    """Requires each of these fields to be a finite number."""
    for name in names:
        _require(owner, name, _is_number(getattr(owner, name)), "a finite number")


def counts(owner: Any, *names: str) -> None:
    """Requires each of these fields to be an integer >= 1 that an int32 holds."""
    for name in names:
        value = getattr(owner, name)
        is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        _require(owner, name, is_int and 1 <= value < 2**31, "an integer in [1, 2**31)")


def one_of(owner: Any, name: str, allowed: Collection[str]) -> None:
    """Requires a field to be one of some words."""
    value = getattr(owner, name)
    wanted = "one of " + ", ".join(repr(word) for word in allowed)
    _require(owner, name, isinstance(value, str) and value in allowed, wanted)


def boolean(owner: Any, *names: str) -> None:
    """Requires each of these fields to be True or False."""
    for name in names:
        _require(owner, name, isinstance(getattr(owner, name), bool), "True or False")


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and abs(value) <= _LARGEST


def _require(owner: Any, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        value = getattr(owner, name)
        raise ValueError(
            f"{type(owner).__name__}: {name} must be {wanted}, "
            f"got {value!r} of type {type(value).__name__}"
        )
