"""Times of columns: Arrow's timestamps and dates, and ISO 8601 text; their parts as numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.data.column_types import is_string
from jaxrec.data.encode import Location, decoded

_INSTANT = pa.timestamp("us", "UTC")

# Microseconds of a day, and of the first and last year that text can name, 1 and 9999.
_DAY = 86_400_000_000
_FIRST, _LAST = -719_162 * _DAY, 2_932_896 * _DAY + _DAY - 1

# Text of a date or time: "2024-03-01", "2024-03-01 10:00:00.5", "2024-03-01T10:00+02:00". The C++
# runtime reads the same forms; Arrow alone would read some more.
_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)"
_FORM = rf"^\d{{4}}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?{_ZONE}?)?$"
_HAS_ZONE = rf":\d\d(\.\d+)?{_ZONE}$"
# Digits beyond microseconds, which Arrow refuses.
_DIGITS = r"(\.\d{6})\d+"

_PARTS = {"hour": pc.hour, "weekday": pc.day_of_week, "month": pc.month}


def instants(column: Any, location: Location) -> pa.Array:
    """Return a column's times in microseconds, as ``timestamp[us, UTC]``; nulls stay null.

    A time without a zone is one in UTC, and a date is its first moment. Digits beyond microseconds
    are dropped. The column must have times, text or nulls.

    Raises:
        DataError: A text is no time, or a time lies outside of the years 1 to 9999.
    """
    array = decoded(column)
    if is_string(array.type):
        array = _of_text(array.cast(pa.string()), location)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), _INSTANT)
    if pa.types.is_date32(array.type):
        array = array.cast(pa.timestamp("s"))
    elif pa.types.is_date64(array.type):
        array = array.cast(pa.timestamp("ms"))
    counts = array.cast(pa.int64()).fill_null(0).to_numpy()
    # Arrow computes nonsense for times beyond these, and does not say so.
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[array.type.unit]
    scale = 10**6 // per_second
    if scale:
        bad = (counts < -(-_FIRST // scale)) | (counts > _LAST // scale)
        counts = np.where(bad, 0, counts) * scale
    else:
        bad = np.zeros(len(counts), bool)  # 64 bits of nanoseconds end in 2262
        counts = counts // (per_second // 10**6)
    if bad.any():
        raise location.error(
            int(np.argmax(bad)), "the time is outside of the years 1 to 9999; make it null"
        )
    return pa.array(counts, mask=np.asarray(array.is_null())).cast(_INSTANT)


def _of_text(texts: pa.Array, location: Location) -> pa.Array:
    """Parse ISO 8601 text; an error names the first row with other text."""
    try:
        return _parsed(texts)
    except pa.ArrowInvalid:
        # Arrow's error does not name the row: look for it, slowly, only when there is one.
        for row in range(len(texts)):
            try:
                _parsed(texts[row : row + 1])
            except pa.ArrowInvalid:
                text = json.dumps(texts[row].as_py())
                text = text if len(text) <= 40 else f"{text[:40]}..."
                raise location.error(
                    row,
                    f"{text} is no time; write it as 2024-03-01T10:00:00Z, 2024-03-01 10:00:00 or "
                    "2024-03-01",
                ) from None
        raise


def _parsed(texts: pa.Array) -> pa.Array:
    if not pc.all(pc.match_substring_regex(texts, _FORM)).as_py() and texts.null_count < len(texts):
        raise pa.ArrowInvalid("text of another form")
    texts = pc.replace_substring_regex(texts, _DIGITS, r"\1")
    has_zone = pc.match_substring_regex(texts, _HAS_ZONE).fill_null(False)
    nothing = pa.scalar(None, pa.string())
    with_zone = pc.if_else(has_zone, texts, nothing).cast(_INSTANT)
    without = pc.if_else(has_zone, nothing, texts).cast(pa.timestamp("us"))
    return pc.coalesce(with_zone, without.cast(_INSTANT))


def part_of(times: pa.Array, part: str, zone: str | None) -> pa.Array:
    """Return the int64 hours, weekdays or months of `instants`, in a time zone; None: UTC.

    They are those of pandas' ``dt.hour``, ``dt.day_of_week`` and ``dt.month``. Arrow knows changes
    to summer time up to 2037; later times of a zone have its standard time.
    """
    if zone is not None:
        times = pc.local_timestamp(times.cast(pa.timestamp("us", zone)))
    return _PARTS[part](times)


def days(times: pa.Array) -> pa.Array:
    """Return `instants` as float64 days since the beginning of 1970; nulls stay null."""
    # float64 has a microsecond in 2,000 years of days.
    return pc.divide(times.cast(pa.int64()).cast(pa.float64(), safe=False), float(_DAY))


def microseconds(age: float) -> int:
    """Return the microseconds of a number of `days`."""
    return round(age * _DAY)


def unknown_zone(zone: str) -> str | None:
    """Return why Arrow cannot use a time zone; None: it can."""
    try:
        part_of(pa.array([0], _INSTANT), "hour", zone)
    except (pa.ArrowInvalid, ValueError) as error:
        return " ".join(str(error).split())
    return None
