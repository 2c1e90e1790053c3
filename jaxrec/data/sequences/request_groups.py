"""Tables with a row for each request: list columns of a history and of its candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxrec.data.encode import Location
from jaxrec.data.groups import ColumnGroups
from jaxrec.data.sequences.lists import (
    FlatColumn,
    check_ascending,
    check_one_length,
    id_column,
    integer_column,
)
from jaxrec.data.sequences.ranges import Ranges
from jaxrec.data.sequences.requests import RequestLimits, Requests, TimeWindow, cut_requests
from jaxrec.data.sequences.rows import Features, SequenceRows, context_features
from jaxrec.data.sequences.schema import SequenceSchema


@dataclasses.dataclass(frozen=True, eq=False)
class RequestGroups:
    """Requests from tables whose rows have a history and candidates in list columns.

    Attributes:
        groups: The rows, such as `jaxrec.data.ParquetGroups` or `jaxrec.data.TableGroups`.
        sequences: Names of the list columns, and what they hold.
        limits: How a row becomes requests.

    Raises:
        DataError: Reading a group raises it for lists of one side that differ in length, times that
            do not ascend, candidates before the newest event, and invalid values. It names the
            file, the row and the column.

    Example:
        >>> import pyarrow as pa
        >>> from jaxrec.data import CategoricalColumn, TableGroups
        >>> table = pa.table({"history": [[1, 2, 3]], "candidate": [[7, 8, 9]]})
        >>> ids = {"history": CategoricalColumn("ids", 10)}
        >>> schema = SequenceSchema({"history": "candidate"}, ids)
        >>> limits = RequestLimits(history=2, candidates=2)
        >>> rows = RequestGroups(TableGroups(table), schema, limits).read(0)
        >>> batch = rows.batch(np.arange(2), {"history": 8, "candidate": 8})
        >>> batch.to_lists()
        {'history': [[2, 3], [2, 3]], 'candidate': [[7, 8], [9]]}
    """

    groups: ColumnGroups
    sequences: SequenceSchema
    limits: RequestLimits

    def __post_init__(self) -> None:
        if self.limits.needs_times and self.sequences.times is None:
            raise ValueError("limits by time need a schema with times")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each group."""
        return self.groups.sizes

    def within(self, window: TimeWindow) -> RequestGroups:
        """Return the requests of the candidates in a window of time."""
        limits = dataclasses.replace(self.limits, window=window)
        return dataclasses.replace(self, limits=limits)

    def times(self, group: int) -> Int[np.ndarray, " candidates"]:
        """Return the times of a group's candidates.

        Raises:
            ValueError: The schema has no times.
        """
        if self.sequences.times is None:
            raise ValueError("the schema names no times of candidates")
        name = self.sequences.times[1]
        return self._columns(group, [name])[name].values

    def requests(self, group: int) -> Requests:
        """Read a group's requests, from lengths and times of candidates alone."""
        times = self.sequences.times
        first = (self.sequences.history[0], self.sequences.candidates[0])
        history, candidates = times if times is not None and self.limits.needs_times else first
        columns = self._columns(group, [history, candidates])
        return self._cut(columns[history], columns[candidates])[0]

    def read(self, group: int) -> SequenceRows:
        """Read a group's requests with all features."""
        schema = self.sequences
        columns = self._columns(group, schema.columns)
        history = {name: columns[name] for name in schema.history}
        candidates = {name: columns[name] for name in schema.candidates}
        for side in (history, candidates):
            check_one_length([*side.values()])
        if schema.times is not None:
            check_ascending(columns[schema.times[0]])
            _check_future(*(columns[name] for name in schema.times))
        timed = schema.candidates[0] if schema.times is None else schema.times[1]
        requests, kept = self._cut(history[schema.history[0]], columns[timed])
        context = tuple(
            context_features(columns[name], most, requests.sources)
            for name, most in schema.context.items()
        )
        return SequenceRows(
            context,
            Features({name: x.values for name, x in history.items()}, requests.history),
            Features({name: x.values[kept] for name, x in candidates.items()}, requests.candidates),
        )

    def _columns(self, group: int, names: Sequence[str]) -> dict[str, FlatColumn]:
        table = self.groups.read(group, names)
        path, first = self.groups.location(group)
        columns = {}
        for name in names:
            location, options = Location(path, first, name), self.sequences.encoding(name)
            columns[name] = (
                integer_column(table[name], location)
                if options is None
                else id_column(table[name], options, location)
            )
        return columns

    def _cut(
        self, history: FlatColumn, candidates: FlatColumn
    ) -> tuple[Requests, Int[np.ndarray, " kept"]]:
        """Cut the candidates into requests; their column has times if the limits need them."""
        lengths = np.diff(candidates.offsets)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        if self.limits.seconds is not None:
            check_ascending(candidates)
        times = candidates.values if self.limits.needs_times else None
        before = Ranges.between(history.offsets)[rows]
        requests, kept = cut_requests(self.limits, rows, before, times)
        counts = dataclasses.replace(requests.counts, rows=len(lengths))
        return dataclasses.replace(requests, counts=counts), kept


def _check_future(history: FlatColumn, candidates: FlatColumn) -> None:
    """Raise an error if a candidate is earlier than the newest event of its history."""
    events = np.diff(history.offsets)
    newest = np.zeros(len(events), np.int32)
    newest[events > 0] = history.values[history.offsets[1:][events > 0] - 1]
    of_candidates = np.repeat(newest, np.diff(candidates.offsets))
    is_early = candidates.values < of_candidates
    if is_early.any():
        at = int(np.argmax(is_early))
        raise candidates.error(
            at,
            f"the time {candidates.values[at]} is before the newest event of the history, at "
            f"{of_candidates[at]}, so the model would see the future; cut the history",
        )
