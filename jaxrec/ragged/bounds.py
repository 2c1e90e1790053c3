"""Checks of ids against the number of ids of their table, on the host."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from jaxrec.ragged.columns import WIDE_IDS, Column, whole_number
from jaxrec.ragged.raw_columns import raw_column

BoundsMode: TypeAlias = Literal["raise", "clamp", "ignore"]

INT32_BOUND = 2**31
BAD_ID = -1  # an id of no table: its embedding is NaN


class BadIds(NamedTuple):
    """The ids of one feature that are outside their table.

    Attributes:
        positions: Their positions among the feature's ids, ascending.
        message: A sentence about the first of them.
    """

    positions: np.ndarray
    message: str


def find_bad_ids(
    feature: str,
    ids: np.ndarray,
    lengths: np.ndarray,
    bound: int | None,
    *,
    first_sample: int = 0,
    id_bits: int = 32,
) -> BadIds | None:
    """Return the ids outside ``[0, bound)``; None if there are none.

    Args:
        feature: Name of the feature.
        ids: ``[ids]`` its ids, without padding.
        lengths: ``[samples]`` their number for each sample.
        bound: Number of ids of its table; None: ids must fit integers of ``id_bits``.
        first_sample: Number of the first of these samples, for the message.
        id_bits: 32, or 64 for tables of more rows than int32 can number.
    """
    limit = 2 ** (id_bits - 1) if bound is None else bound
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < limit):
        return None
    positions = np.flatnonzero((ids < 0) | (ids >= limit))
    bad = ids[positions[0]]
    sample = first_sample + np.searchsorted(np.cumsum(lengths), positions[0], side="right")
    message = f"feature {feature!r}, sample {sample}: id {bad} "
    if bound is not None:
        message += f"is outside [0, {bound}), the ids of its table"
    elif bad < 0:
        message += "is negative; ids are at least 0"
        message += f"; {WIDE_IDS}" if bad < -INT32_BOUND and id_bits == 32 else ""
    else:
        message += (
            f"does not fit int32 (below 2**31), the type of row indices on a device; {WIDE_IDS}"
        )
    return BadIds(positions, message)


def check_columns(
    columns: Mapping[str, Column], bounds: Mapping[str, int], mode: str, id_bits: int = 32
) -> dict[str, Column]:
    """Return the columns with every id in ``[0, bound)``; TorchRec's bounds check.

    Args:
        columns: Features with their ids.
        bounds: Number of ids of the features' tables. The ids of a feature without a bound must fit
            int32.
        mode: A `BoundsMode`. ``"raise"``: an id outside is an error. ``"clamp"``: it becomes 0, and
            one warning counts such ids (FBGEMM's ``WARNING``). ``"ignore"``: it becomes 0 without a
            warning. -1 becomes 0 too. FBGEMM leaves it alone, since it marks a row that was pruned
            for inference; a table in training has no such rows.
        id_bits: 64: features without a bound have raw ids, `raw_column`'s.

    Returns:
        The columns; the given ones are not written to.

    Raises:
        ValueError: An id is outside (names the feature, the sample, the id and the bound), or a
            bound is not positive, exceeds integers of these bits or belongs to no feature, or an
            error of `raw_column`.
    """
    if mode not in get_args(BoundsMode):
        raise ValueError(f"bounds_mode is {mode!r}; expected one of {get_args(BoundsMode)}")
    for feature, bound in bounds.items():
        if feature not in columns:
            raise ValueError(f"bounds names {feature!r}, but the features are {list(columns)}")
        whole_number(f"the bound of feature {feature!r}", bound)
        if not 1 <= bound <= 2 ** (id_bits - 1):
            hint = "; give id_bits=64 for tables of more rows" if id_bits == 32 else ""
            raise ValueError(
                f"the bound of feature {feature!r} is {bound}; expected 1 to 2**{id_bits - 1}{hint}"
            )
    checked = dict(columns)
    count, first = 0, ""
    for feature, column in columns.items():
        if id_bits == 64:
            column = raw_column(feature, column, is_bounded=feature in bounds)
            checked[feature] = column
            if feature not in bounds:
                continue
        bad = find_bad_ids(feature, column.values, column.lengths, bounds.get(feature))
        if bad is None:
            continue
        if mode == "raise":
            raise ValueError(bad.message)
        first = first or bad.message
        count += bad.positions.size
        ids = column.values.copy()
        ids[bad.positions] = 0
        checked[feature] = column._replace(values=ids)
    if mode == "clamp" and count:
        total = sum(column.values.size for column in columns.values())
        warnings.warn(f"{count} of {total} ids became 0; the first: {first}", stacklevel=4)
    return checked
