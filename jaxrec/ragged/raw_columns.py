"""Columns of any ids made columns of raw ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrec.ragged.columns import Column, is_integer
from jaxrec.ragged.hashing import hash_ids
from jaxrec.ragged.raw_ids import RESERVED


def raw_column(feature: str, column: Column, *, is_bounded: bool = False) -> Column:
    """Return a column with int64 ids: integers by their bits, strings by their hash.

    Args:
        feature: Its name, for errors.
        column: Its ids: integers, strings or bytes in a NumPy array, or strings in an Arrow array.
        is_bounded: Whether the feature has a bound, which hashes cannot have. Its integers are
            returned as they are.

    Raises:
        TypeError: An id is neither an integer nor a string, or they are mixed.
        ValueError: An id is null, does not fit 64 bits or is -1, or strings have a bound.
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
    """Return strings or bytes as `hash_ids` takes them, None if the ids are integers."""
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
    """Return integers as int64, those from 2**63 up by their bits.

    Raises:
        ValueError: One does not fit 64 bits.
    """
    if integers.dtype.kind == "i":
        return integers.astype(np.int64, copy=False)
    if integers.dtype.kind == "u":
        return integers.astype(np.uint64).view(np.int64)
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
    """Return the error for the first value that is null, or not of the kind of those before it."""
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
    """Return the plural of a value's kind; None if ids are not of it."""
    if value is None or (isinstance(value, float) and value != value):
        return "null"
    if is_integer(type(value)):
        return "integers"
    return "strings" if isinstance(value, str) else "bytes" if isinstance(value, bytes) else None


def _where(feature: str, lengths: np.ndarray, position: int) -> str:
    sample = np.searchsorted(np.cumsum(lengths), position, side="right")
    return f"feature {feature!r}, sample {sample}"
