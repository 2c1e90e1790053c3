"""Hold-outs of the last row of each user: leave one out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.data.encode import Location, joined
from jaxrec.data.groups import ColumnGroups
from jaxrec.data.selection import RowMask
from jaxrec.data.split import Split, row_keys


@dataclasses.dataclass(frozen=True)
class LastOfEach(Split):
    """Holds out the last row of each value of a column, such as of each user.

    The only row of a value is trained on, and so are rows without a value.

    Attributes:
        name: The column.
        time: Column of the times that order the rows of a value; equal times keep the order of the
            files. None: all rows do.
    """

    name: str
    time: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,) if self.time is None else (self.name, self.time)

    def decide(self, total: int, source: str, groups: ColumnGroups | None) -> RowMask:
        assert groups is not None
        parts = []
        for group in range(len(groups.sizes)):
            table = groups.read(group, list(dict.fromkeys(self.columns)))
            path, first = groups.location(group)
            keys = row_keys(joined(table[self.name]), Location(path, first, self.name))
            times = keys if self.time is None else table[self.time]
            missing = np.asarray(joined(times).is_null(nan_is_null=True))
            if self.time is not None and missing.any():
                location = Location(path, first, self.time)
                problem = "the time is null; fill it, or leave the row out"
                raise location.error(int(np.argmax(missing)), problem)
            parts.append(pa.table({"key": keys, "time": times}))
        whole = pa.concat_tables(parts, promote_options="permissive")
        indices = joined(pc.dictionary_encode(whole["key"])).indices
        codes = indices.fill_null(-1).to_numpy()
        order = np.argsort(codes, kind="stable")
        if self.time is not None:
            rows = pa.table({"code": codes, "time": joined(whole["time"])})
            keys = [("code", "ascending"), ("time", "ascending")]
            order = pc.sort_indices(rows, sort_keys=keys).to_numpy()
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
