"""Checks of the types and ranges of the numbers that metrics get."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped

AnyArray: TypeAlias = Array | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
    """Range of the numbers that a prediction, label or weight may be, ends included.

    NaN is in no domain. ``whole`` allows only whole numbers; ``remedy`` is the error's advice.
    """

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    remedy: str = ""

    def excludes(self, x: Shaped[AnyArray, "*shape"]) -> Bool[AnyArray, "*shape"]:
        """Return ``[*shape]`` whether each number is outside of the domain."""
        # The negation of "inside", since every comparison with NaN is false.
        outside = ~((x >= self.low) & (x <= self.high))
        if self.whole:
            outside |= x != (np.floor(x) if isinstance(x, np.ndarray) else jnp.floor(x))
        return outside

    def __str__(self) -> str:
        if self.whole and (self.low, self.high) == (0, 1):
            return "0 or 1"
        kind = "whole numbers " if self.whole else ""
        if self.low == -math.inf:
            return "numbers"
        if self.high == math.inf:
            return f"{kind}{self.low:g} or above"
        return f"{kind}between {self.low:g} and {self.high:g}"


# Domains of predictions and of labels; None where a metric does not read them.
Domains: TypeAlias = tuple[Domain | None, Domain | None]

NUMBER = Domain()
AMOUNT = Domain(low=0)
PROBABILITY = Domain(low=0, high=1, remedy="turn logits into probabilities by jax.nn.sigmoid")
LABEL = Domain(
    low=0, high=1, remedy="turn labels of -1 and 1 into 0 and 1 by labels > 0, and so any others"
)
BINARY_LABEL = dataclasses.replace(LABEL, whole=True)
# Infinite weights, and those that float32 makes infinite, would make every value NaN.
WEIGHT = Domain(
    low=0, high=float(np.finfo(np.float32).max), remedy="a weight of 0 leaves a sample out"
)


def as_numbers(who: str, name: str, array: Any) -> Shaped[AnyArray, "..."]:
    """Return an array or a list as an array of real numbers; errors begin with ``who``."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{who}: {name} is a masked array, and its mask would be ignored; give it as weights "
            "of 0, with any numbers in place of the masked ones"
        )
    if not isinstance(array, jax.Array | np.ndarray):
        array = np.asarray(array)
    if not any(
        jnp.issubdtype(array.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)
    ):
        raise TypeError(f"{who}: {name} must be real numbers, got an array of {array.dtype}")
    return array


def check_domain(
    who: str,
    name: str,
    array: Shaped[AnyArray, "*shape"],
    domain: Domain,
    real: Shaped[AnyArray, "..."] | None = None,
    *,
    nan: bool = False,
) -> None:
    """Raise a ValueError if ``array`` has a number outside of ``domain``.

    Samples whose entry in ``real`` is 0 are not checked; the axes of ``real`` are the first ones of
    ``array``. Nothing is checked if an array is traced or partly in other processes. ``nan``
    allows NaN. The error begins with ``who`` and ``name``.
    """
    if not (_known(array) and (real is None or _known(real))):
        return
    values = np.asarray(array)
    if not isinstance(values.dtype.type(0), np.number | np.bool_):
        values = values.astype(np.float32)  # bfloat16 and the like
    outside = np.asarray(domain.excludes(values))
    if nan:
        outside &= ~np.isnan(values)
    if real is not None:
        counts = np.asarray(real) != 0
        outside &= counts.reshape(counts.shape + (1,) * (outside.ndim - counts.ndim))
    if outside.any():
        position = tuple(int(i) for i in np.argwhere(outside)[0])
        remedy = f"; {domain.remedy}" if domain.remedy else ""
        raise ValueError(
            f"{who}: {name} must be {domain}, got {values[position]} at {list(position)} "
            f"({outside.sum()} of {outside.size} are not){remedy}"
        )


def _known(array: Shaped[AnyArray, "..."]) -> bool:
    if isinstance(array, np.ndarray):
        return True
    return not isinstance(array, jax.core.Tracer) and array.is_fully_addressable
