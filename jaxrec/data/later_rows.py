"""Hold-outs by time: the rows from a number, a date or a time on."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool

from jaxrec.data.column_types import is_string
from jaxrec.data.encode import Location, decoded
from jaxrec.data.files import DataError
from jaxrec.data.groups import ColumnGroups
from jaxrec.data.split import RowSplit


@dataclasses.dataclass(frozen=True)
class LaterRows(RowSplit):
    """Holds out the rows whose number, date or time in a column is at least a given one.

    Attributes:
        name: The column.
        start: The first value that is held out: a number, or a date or time in ISO 8601. A time
            without a zone is in the zone of the column.
    """

    name: str
    start: str

    @property
    def column(self) -> str:
        return self.name

    def is_held_out(
        self, rows: range, total: int, values: pa.ChunkedArray | None, location: Location
    ) -> Bool[np.ndarray, " rows"]:
        assert values is not None
        array = decoded(values)
        missing = np.asarray(array.is_null(nan_is_null=True))
        if missing.any():
            problem = "the value is null; --hold-out-from compares all values, so fill it"
            raise location.error(int(np.argmax(missing)), problem)
        kind = array.type
        if pa.types.is_integer(kind):
            # NumPy compares with Python integers of any size.
            return array.to_numpy() >= math.ceil(self._number(kind, location))
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return array.cast(pa.float64()).to_numpy() >= float(self._number(kind, location))
        if is_string(kind):
            array = _times_of_text(array, location)
            kind = array.type
        if pa.types.is_date(kind):
            array = array.cast(pa.timestamp("us"))
        elif not pa.types.is_timestamp(kind):
            raise DataError(
                f"{location.path}, column {self.name!r} is of type {kind}; --hold-out-from takes a "
                "column of numbers, dates or times"
            )
        # Rounding down to microseconds does not move a time past a whole microsecond.
        times = array.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
        return times.cast(pa.int64()).to_numpy() >= self._microseconds(kind, location)

    def _number(self, kind: pa.DataType, location: Location) -> float:
        try:
            return int(self.start)
        except ValueError:
            pass
        try:
            number = float(self.start)
        except ValueError:
            hint = ""
            if (time := _iso_time(self.start)) is not None:
                time = time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
                hint = f"; in seconds since 1970 that is {time.timestamp():.0f}, in UTC"
            raise self._unfit(kind, location, f"{self.start!r} is not a number{hint}") from None
        if not math.isfinite(number):
            raise self._unfit(kind, location, f"{self.start} is not a number to compare with")
        return number

    def _microseconds(self, kind: pa.DataType, location: Location) -> int:
        """Return the start in microseconds since 1970, of UTC if the column has a zone."""
        time = _iso_time(self.start)
        if time is None:
            wanted = "expected a date or time such as 2024-03-01 or 2024-03-01T12:30:00"
            raise self._unfit(kind, location, f"{wanted}, got {self.start!r}")
        zone = getattr(kind, "tz", None)
        if time.tzinfo is None:
            scalar = pa.scalar(time, pa.timestamp("us"))
            if zone is not None:
                either: Any = "earliest"
                scalar = pc.assume_timezone(scalar, zone, ambiguous=either, nonexistent=either)
        elif zone is None:
            problem = f"its times have no zone; leave that of {self.start} out"
            raise self._unfit(kind, location, problem)
        else:
            scalar = pa.scalar(time.astimezone(datetime.UTC), pa.timestamp("us", "UTC"))
        return int(scalar.value)

    def _unfit(self, kind: pa.DataType, location: Location, problem: str) -> DataError:
        return DataError(f"{location.path}, column {self.name!r} is of type {kind}: {problem}")

    def advice(self, total: int, held_out: int, groups: ColumnGroups | None) -> str:
        assert groups is not None
        parts = (groups.read(group, [self.name])[self.name] for group in range(len(groups.sizes)))
        ends = [pc.min_max(_printable(decoded(values))) for values in parts if len(values)]
        low = min((each["min"].as_py() for each in ends), key=_in_order)
        high = max((each["max"].as_py() for each in ends), key=_in_order)
        return (
            f"--hold-out-from {self.name}={self.start} holds out {'all' if held_out else 'no'} "
            f"rows; column {self.name!r} has values from {low} to {high}"
        )

    def __str__(self) -> str:
        return f"rows from {self.name}={self.start} on"


def _printable(array: pa.Array) -> pa.Array:
    """Return times in microseconds: Python has no nanoseconds."""
    if not pa.types.is_timestamp(array.type):
        return array
    return array.cast(pa.timestamp("us", array.type.tz), safe=False)


def _in_order(value: Any) -> Any:
    """Return a key to compare a value by: files may mix dates, times and text of times."""
    if isinstance(value, str):
        value = _iso_time(value)
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
    if isinstance(value, datetime.date):
        return datetime.datetime.combine(value, datetime.time(), datetime.UTC)
    return value


def _iso_time(text: str) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        return None


def _times_of_text(array: pa.Array, location: Location) -> pa.Array:
    """Parse text in ISO 8601, all of it with a zone or all of it without."""
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            return array.cast(kind)
        except pa.ArrowInvalid:
            continue
    position = next((n for n, x in enumerate(array.to_pylist()) if _iso_time(x) is None), 0)
    problem = f"{array[position].as_py()!r} is not a date or time such as 2024-03-01T12:30:00"
    raise location.error(
        position, f"{problem}; --hold-out-from takes text of dates, all with a zone or all without"
    )
