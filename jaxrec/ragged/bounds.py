"""Ids against the number of rows of their table, on the host, before a device sees them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import numpy as np

from jaxrec.ragged.columns import Column, whole_number

BoundsMode: TypeAlias = Literal["raise", "clamp", "ignore"]

INT32_BOUND = 2**31


def check_ids(
    columns: Mapping[str, Column], bounds: Mapping[str, int], mode: str
) -> dict[str, Column]:
    """The columns with every id in ``[0, bound)``; TorchRec's bounds check.

    Args:
        columns: Features with their ids.
        bounds: Rows of the features' tables. A feature without one is held to int32.
        mode: A `BoundsMode`. ``"raise"``: an id outside is an error. ``"clamp"``: it becomes 0, and
            one warning says how many there were (FBGEMM's ``WARNING``). ``"ignore"``: it becomes 0
            silently. So does -1, which FBGEMM leaves alone: there it marks a row that was pruned
            for inference, and no table that trains has such rows.

    Returns:
        The columns; the given ones are not written to.

    Raises:
        ValueError: An id is outside (names the feature, the sample, the id and the bound), or a
            bound is not positive, exceeds int32 or belongs to no feature.
    """
    if mode not in get_args(BoundsMode):
        raise ValueError(f"bounds_mode is {mode!r}; expected one of {get_args(BoundsMode)}")
    for feature, bound in bounds.items():
        if feature not in columns:
            raise ValueError(f"bounds names {feature!r}, but the features are {list(columns)}")
        whole_number(f"the bound of feature {feature!r}", bound)
        if not 1 <= bound <= INT32_BOUND:
            raise ValueError(f"the bound of feature {feature!r} is {bound}; expected 1 to 2**31")
    checked = dict(columns)
    count, first = 0, ""
    for feature, column in columns.items():
        ids, rows = column.values, bounds.get(feature)
        outside = _outside(ids, INT32_BOUND if rows is None else rows)
        if outside.size == 0:
            continue
        first = first or _described(feature, column, int(outside[0]), rows)
        if mode == "raise":
            raise ValueError(first)
        count += outside.size
        ids = ids.copy()
        ids[outside] = 0
        checked[feature] = column._replace(values=ids)
    if mode == "clamp" and count:
        total = sum(column.values.size for column in columns.values())
        warnings.warn(f"{count} of {total} ids became 0; the first: {first}", stacklevel=4)
    return checked


def _outside(ids: np.ndarray, bound: int) -> np.ndarray:
    """Positions of the ids outside ``[0, bound)``."""
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < bound):
        return np.zeros(0, np.int64)
    return np.flatnonzero((ids < 0) | (ids >= bound))


def _described(feature: str, column: Column, position: int, rows: int | None) -> str:
    """Which feature and sample an id outside its bound belongs to, in words."""
    sample = np.searchsorted(np.cumsum(column.lengths), position, side="right")
    where = f"feature {feature!r}, sample {sample}: id {column.values[position]}"
    if rows is not None:
        return f"{where} is outside [0, {rows}), the rows of its table"
    if column.values[position] < 0:
        return f"{where} is negative; ids are at least 0"
    return (
        f"{where} does not fit int32 (below 2**31), the type of ids on a device; hash or remap "
        "such ids to rows of their table first"
    )
