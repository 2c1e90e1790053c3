"""Tables with a row for each user: requests are made of the user's events, in windows of time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int, Int32

from jaxrec.data.column_types import is_list
from jaxrec.data.encode import Location, joined, numbers
from jaxrec.data.files import DataError
from jaxrec.data.groups import ColumnGroups
from jaxrec.data.sequences.events import ACTION, CANDIDATE, WATCH_TIME, EventSchema
from jaxrec.data.sequences.lists import (
    FlatColumn,
    check_ascending,
    check_one_length,
    id_column,
    integer_column,
)
from jaxrec.data.sequences.ranges import Ranges, changes
from jaxrec.data.sequences.requests import RequestLimits, Requests, TimeWindow, cut_requests
from jaxrec.data.sequences.rows import Features, SequenceRows, context_features
from jaxrec.data.sequences.schema import SequenceSchema


@dataclasses.dataclass(frozen=True, eq=False)
class EventGroups:
    """Requests from tables whose rows have all events of a user in list columns.

    Each event that is a candidate becomes one of a request. The request's history are the events
    before the time of its first candidate, whatever the window; events at the same time are not in
    it. So with ``limits.candidates=1`` a candidate sees all earlier events, as in MLPerf's DLRMv4.
    With more, the events among a request's candidates stay unseen, at much less work, and the time
    of all candidates is that of the first.

    Attributes:
        groups: The rows, such as `jaxrec.data.ParquetGroups` or `jaxrec.data.TableGroups`.
        events: Names of the list columns, and what they hold.
        limits: How events become requests.

    Raises:
        DataError: Reading a group raises it for lists of a row that differ in length, times that do
            not ascend, and invalid values. It names the file, the row and the column.

    Example:
        >>> from jaxrec.data import TableGroups, movielens_schema
        >>> table = pa.table({"user_id": [5], "timestamp": [[10, 20, 20, 30]],
        ...                   "movie_id": [[1, 2, 3, 4]], "rating": [[5, 2, 4, 3]]})
        >>> limits = RequestLimits(history=10, candidates=1)
        >>> rows = EventGroups(TableGroups(table), movielens_schema(9), limits).read(0)
        >>> capacities = dict.fromkeys(movielens_schema(9).sequences.columns, 8)
        >>> batch = rows.batch(np.arange(4), capacities)
        >>> batch["movie_id"].to_lists(), batch["candidate_action"].to_lists()
        ([[], [1], [1], [1, 2, 3]], [[1], [0], [1], [0]])
    """

    groups: ColumnGroups
    events: EventSchema
    limits: RequestLimits

    @property
    def sequences(self) -> SequenceSchema:
        """The features of batches."""
        return self.events.sequences

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows, and so of users, of each group."""
        return self.groups.sizes

    def within(self, window: TimeWindow) -> EventGroups:
        """Return the requests of the candidates in a window of time."""
        limits = dataclasses.replace(self.limits, window=window)
        return dataclasses.replace(self, limits=limits)

    def times(self, group: int) -> Int[np.ndarray, " candidates"]:
        """Return the times of a group's candidates."""
        decisive = self._decisive(group)
        return decisive.times.values[decisive.is_candidate]

    def requests(self, group: int) -> Requests:
        """Read a group's requests, from times and the columns of conditions alone."""
        return self._cut(self._decisive(group))[0]

    def read(self, group: int) -> SequenceRows:
        """Read a group's requests with all features."""
        schema = self.sequences
        table = self._table(group, [*self.events.context, *self._lists])
        decisive = self._conditions(table, group)
        names = (*self.events.items, *self.events.additional)
        columns = {name: self._ids(table, name, group) for name in names}
        check_one_length([decisive.times, *columns.values()])
        requests, kept = self._cut(decisive)
        flat = {name: column.values for name, column in columns.items()}
        flat |= {self.events.time: decisive.times.values, ACTION: self._actions(decisive)}
        if self.events.watch_time is not None:
            flat[WATCH_TIME] = _watch_times(*(decisive.columns[n] for n in self.events.watch_time))
        context = tuple(
            context_features(self._ids(table, name, group), 1, requests.sources)
            for name in self.events.context
        )
        history = {name: flat[name][decisive.is_history] for name in schema.history}
        candidates = {name: flat[name.removeprefix(CANDIDATE)][kept] for name in schema.candidates}
        # The times of later candidates would tell the first ones how the session went on.
        times, ranges = CANDIDATE + self.events.time, requests.candidates
        candidates[times] = np.repeat(candidates[times][ranges.starts], ranges.lengths)
        return SequenceRows(
            context,
            Features(history, requests.history),
            Features(candidates, requests.candidates),
        )

    @property
    def _decisive_columns(self) -> list[str]:
        return list(dict.fromkeys((self.events.time, *self.events.conditions)))

    @property
    def _lists(self) -> list[str]:
        events = self.events
        names = (*self._decisive_columns, *events.items, *events.additional)
        return list(dict.fromkeys((*names, *(events.watch_time or ()))))

    def _location(self, group: int, name: str) -> Location:
        return Location(*self.groups.location(group), name)

    def _ids(self, table: pa.Table, name: str, group: int) -> FlatColumn:
        return id_column(table[name], self.events.encodings[name], self._location(group, name))

    def _table(self, group: int, names: list[str]) -> pa.Table:
        table = self.groups.read(group, list(dict.fromkeys(names)))
        for name in self._lists:
            if name in table.column_names and not is_list(table.schema.field(name).type):
                path, _ = self.groups.location(group)
                raise DataError(
                    f"{path}, column {name!r} is of type {table.schema.field(name).type}, and not "
                    "of lists: the file has a row for each event; jaxrec.data.write_histories and "
                    "jaxrec.data.group_events make rows of users"
                )
        return table

    def _decisive(self, group: int) -> _Decisive:
        return self._conditions(self._table(group, self._decisive_columns), group)

    def _conditions(self, table: pa.Table, group: int) -> _Decisive:
        """Return a group's times, and which of its events are candidates and part of histories."""
        times = integer_column(table[self.events.time], self._location(group, self.events.time))
        check_ascending(times)
        columns = {}
        for name in (*self.events.conditions, *(self.events.watch_time or ())):
            if name not in table.column_names:
                continue
            column = joined(table[name])
            lengths = np.asarray(pc.list_value_length(column).fill_null(0))
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            empty = np.zeros(0, np.int32)
            check_one_length([times, FlatColumn(empty, offsets, self._location(group, name))])
            columns[name] = column.flatten()
        count = len(times.values)
        try:
            is_candidate = self.events.candidates.mask(columns, count)
            is_history = self.events.history.mask(columns, count)
        except DataError as error:
            raise DataError(f"{self.groups.location(group)[0]}, {error}") from None
        return _Decisive(times, columns, is_candidate, is_history)

    def _cut(self, decisive: _Decisive) -> tuple[Requests, Int[np.ndarray, " kept"]]:
        """Cut the candidates into requests, with positions of the kept ones among all events."""
        offsets, times = decisive.times.offsets, decisive.times.values
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        place = np.arange(len(times))
        # A binned time may have the event and what followed from it, in any order.
        is_new = changes(rows) | changes(times)
        before = np.maximum.accumulate(np.where(is_new, place, 0))
        # Events that are not part of histories have no place among those that are.
        among = np.concatenate([[0], np.cumsum(decisive.is_history)])
        candidates = np.flatnonzero(decisive.is_candidate)
        starts = among[offsets[:-1]][rows[candidates]]
        history = Ranges(starts, among[before[candidates]] - starts)
        requests, kept = cut_requests(self.limits, rows[candidates], history, times[candidates])
        counts = dataclasses.replace(requests.counts, rows=len(offsets) - 1)
        return dataclasses.replace(requests, counts=counts), candidates[kept]

    def _actions(self, decisive: _Decisive) -> Int32[np.ndarray, " events"]:
        actions = np.zeros(len(decisive.times.values), np.int32)
        for action in self.events.actions:
            actions |= action.bit * action.where.mask(decisive.columns, len(actions)).astype(
                np.int32
            )
        return actions


@dataclasses.dataclass(frozen=True, eq=False)
class _Decisive:
    """Columns of a group that decide about its requests.

    ``columns`` are the columns of conditions by name. They and the two masks are ``[events]``.
    """

    times: FlatColumn
    columns: dict[str, pa.Array]
    is_candidate: Bool[np.ndarray, " events"]
    is_history: Bool[np.ndarray, " events"]


def _watch_times(percent: pa.Array, seconds: pa.Array) -> Int32[np.ndarray, " events"]:
    """Return watch times in whole seconds; 0 where the percentage or the length is null."""
    watched = numbers(percent)[0] / 100 * numbers(seconds)[0]
    return np.clip(np.nan_to_num(np.rint(watched)), 0, 2**31 - 1).astype(np.int32)
