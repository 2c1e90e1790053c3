"""Hold-outs of the last row of each user: leave one out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.data.column_types import is_dense, is_string, is_time
from jaxrec.data.encode import Location, decoded, joined
from jaxrec.data.files import DataError
from jaxrec.data.groups import ColumnGroups
from jaxrec.data.selection import RowMask
from jaxrec.data.split import Split, row_keys
from jaxrec.data.times import instants


@dataclasses.dataclass(frozen=True)
class LastOfEach(Split):
    """Holds out the last row of each value of a column, such as of each user.

    The only row of a value is trained on, and so are rows without a value.

    Attributes:
        name: The column.
        time: Column of the times that order the rows of a value; equal times keep the order of the
            files. None: the order of the files.
    """

    name: str
    time: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,) if self.time is None else (self.name, self.time)

    def decide(self, total: int, source: str, groups: ColumnGroups | None) -> RowMask:
        assert groups is not None
        keys: list[pa.Array] = []
        times: list[tuple[pa.Array, Location]] = []
        for group in range(len(groups.sizes)):
            table = groups.read(group, list(dict.fromkeys(self.columns)))
            path, first = groups.location(group)
            keys.append(row_keys(joined(table[self.name]), Location(path, first, self.name)))
            if self.time is not None:
                location = Location(path, first, self.time)
                times.append((_present(decoded(table[self.time]), location), location))
        indices = _whole(keys, source, self.name).dictionary_encode().indices
        codes = indices.fill_null(-1).to_numpy()
        if self.time is None:
            order = np.argsort(codes, kind="stable")
        else:
            time = _whole(_comparable(times), source, self.time)
            rows = pa.table({"code": codes, "time": time})
            by = [("code", "ascending"), ("time", "ascending")]
            order = pc.sort_indices(rows, sort_keys=by).to_numpy()
        ends = codes[order[1:]] != codes[order[:-1]]
        is_first, is_last = np.append(True, ends), np.append(ends, True)
        held_out = np.zeros(total, bool)
        held_out[order[is_last & ~is_first & (codes[order] >= 0)]] = True
        mask = RowMask.empty(total)
        mask.add(0, held_out)
        return mask

    def advice(self, total: int, held_out: int, groups: ColumnGroups | None) -> str:
        return (
            f"no value of column {self.name!r} has two rows, of which the last could be held out; "
            "give --user another column, or another --hold-out"
        )

    def __str__(self) -> str:
        return f"the last row of each {self.name}"


def _present(times: pa.Array, location: Location) -> pa.Array:
    """Return the times, and refuse a null, which has no place among them."""
    missing = np.asarray(times.is_null(nan_is_null=True))
    if missing.any():
        problem = "the time is null; fill it, or leave the row out"
        raise location.error(int(np.argmax(missing)), problem)
    if not (is_dense(times.type) or pa.types.is_temporal(times.type) or is_string(times.type)):
        raise DataError(
            f"{location.path}, column {location.column!r} is of type {times.type}; --time takes a "
            "column of numbers, dates or times"
        )
    return times


def _comparable(times: list[tuple[pa.Array, Location]]) -> list[pa.Array]:
    """Return the times of all groups in one type, if they are dates, times or text."""
    kinds = {each.type for each, _ in times}
    are_moments = all(is_time(x) or is_string(x) or pa.types.is_null(x) for x in kinds)
    # Text is not in the order of its times: 12:00+02:00 is before 11:00Z.
    if are_moments and (len(kinds) > 1 or any(map(is_string, kinds))):
        return [instants(each, location) for each, location in times]
    return [each for each, _ in times]


def _whole(parts: list[pa.Array], source: str, name: str) -> pa.Array:
    """Join the columns of all groups, whose types may differ in width."""
    try:
        whole = pa.concat_tables(
            [pa.table({"": part}) for part in parts], promote_options="permissive"
        )
    except pa.ArrowTypeError:
        kinds = ", ".join(sorted({str(part.type) for part in parts}))
        raise DataError(
            f"{source}: the files have column {name!r} in types that cannot be compared ({kinds}); "
            "write all files with one type"
        ) from None
    return joined(whole[0])
