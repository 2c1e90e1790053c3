"""Checks of ids on the host: row indices against their table's bound, raw ids by their bits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from jaxrec.ragged.columns import WIDE_IDS, Column, is_integer, sample_of, whole_number
from jaxrec.ragged.hashing import hash_ids
from jaxrec.ragged.raw_ids import RESERVED

BoundsMode: TypeAlias = Literal["raise", "clamp", "ignore"]
"""Treatment of an id outside of its table: an error, 0 with a warning, or 0 without one."""

INT32_BOUND = 2**31
BAD_ID = -1  # an id of no table: its embedding is NaN


class BadIds(NamedTuple):
    """Ids of one feature outside their table.

    Attributes:
        positions: Their positions in the column, ascending.
        message: Error message for the first of them.
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
    """Return the ids outside ``[0, bound)``; None if all are inside.

    ``ids`` have no padding. Without a ``bound`` they must fit signed integers of ``id_bits``. The
    error counts samples from ``first_sample``.
    """
    limit = 2 ** (id_bits - 1) if bound is None else bound
    # Two reductions are enough for a good batch. Positions are computed for a bad one only.
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < limit):
        return None
    positions = np.flatnonzero((ids < 0) | (ids >= limit))
    bad = ids[positions[0]]
    sample = first_sample + sample_of(lengths, int(positions[0]))
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

    Modes and bounds are those of `PackOptions`. Features without a bound must fit int32, or become
    raw ids with 64 bits. The given columns stay unchanged.
    """
    # "clamp" is FBGEMM's WARNING. FBGEMM keeps -1, which marks a row that was pruned for inference.
    # Here -1 becomes 0 like any other bad id: a table in training has no pruned rows.
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
        # The array belongs to the caller, who may still use it.
        ids = column.values.copy()
        ids[bad.positions] = 0
        checked[feature] = column._replace(values=ids)
    if mode == "clamp" and count:
        total = sum(column.values.size for column in columns.values())
        warnings.warn(f"{count} of {total} ids became 0; the first: {first}", stacklevel=4)
    return checked


def raw_column(feature: str, column: Column, *, is_bounded: bool = False) -> Column:
    """Return a column with int64 ids: integers by their bits, strings by their hash.

    Integers of a feature with a bound (``is_bounded``) are returned as they are.
    """
    values: Any = column.values
    strings = _strings(feature, values, column.lengths)
    if strings is not None:
        if is_bounded:
            raise ValueError(
                f"bounds names {feature!r}, whose ids are strings: their 64-bit hashes have no "
                "bound; make row indices of them with jaxrec.ragged.hash_ids(ids, num_embeddings)"
            )
        hashes = np.asarray(hash_ids(strings, None)).view(np.int64)
        # A user can renumber a reserved integer but not a hash, so that one hash moves.
        return column._replace(values=np.where(hashes == RESERVED, RESERVED - 1, hashes))
    if is_bounded:
        return column
    ids = _by_bits(feature, values, column.lengths)
    if (reserved := ids == RESERVED).any():
        position = int(np.argmax(reserved))
        raise ValueError(
            f"{_where(feature, column.lengths, position)}: id {values[position]} is reserved, "
            "since many pipelines pad with -1 (2**64 - 1 unsigned); leave padding out, or give "
            "such an id another number"
        )
    return column if ids is values else column._replace(values=ids)


def _strings(feature: str, values: Any, lengths: np.ndarray) -> Any:
    """Return strings or bytes in a form that `hash_ids` takes; None if the ids are integers."""
    if not isinstance(values, np.ndarray):  # Arrow's
        return values
    if values.dtype.kind in "iu":
        return None
    objects = values.tolist()
    kinds = set(map(type, objects))
    if all(map(is_integer, kinds)):
        return None
    if not any(all(issubclass(kind, of) for kind in kinds) for of in (str, bytes)):
        raise _unfit(feature, objects, lengths)
    return objects


def _by_bits(feature: str, integers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return integers as int64; those from 2**63 keep their bits."""
    if integers.dtype.kind == "i":
        return integers.astype(np.int64, copy=False)
    if integers.dtype.kind == "u":
        return integers.astype(np.uint64).view(np.int64)
    # Python integers, of which NumPy refuses the negative ones here; they take the slow way below.
    objects = integers.tolist()
    try:
        return np.fromiter(objects, np.uint64, len(objects)).view(np.int64)
    except OverflowError:
        pass
    for position, value in enumerate(objects):
        if not -(2**63) <= value < 2**64:
            raise ValueError(
                f"{_where(feature, lengths, position)}: id {value} does not fit 64 bits, signed or "
                "not; give such ids as strings, which are hashed"
            )
    words = (int(value) & (2**64 - 1) for value in objects)
    return np.fromiter(words, np.uint64, len(objects)).view(np.int64)


def _unfit(feature: str, values: list[Any], lengths: np.ndarray) -> Exception:
    """Return the error for the first value that is null or of another kind than the first."""
    kinds = [_kind(value) for value in values]
    position = next(i for i, kind in enumerate(kinds) if kind in (None, "null") or kind != kinds[0])
    value, kind = values[position], kinds[position]
    where = f"{_where(feature, lengths, position)}: id {value!r:.60} ({type(value).__name__})"
    if kind == "null":
        return ValueError(f"{where} is null; drop nulls or fill them with a value")
    if kind is None:
        return TypeError(f"{where} is neither an integer nor a string")
    return TypeError(
        f"{where} is among {kinds[0]}; the ids of a feature are all integers, all strings or all "
        "bytes"
    )


def _kind(value: Any) -> str | None:
    """Return the kind of an id in the plural, "null", or None for anything else."""
    if value is None or (isinstance(value, float) and value != value):
        return "null"
    if is_integer(type(value)):
        return "integers"
    return "strings" if isinstance(value, str) else "bytes" if isinstance(value, bytes) else None


def _where(feature: str, lengths: np.ndarray, position: int) -> str:
    return f"feature {feature!r}, sample {sample_of(lengths, position)}"
