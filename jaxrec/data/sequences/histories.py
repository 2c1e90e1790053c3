"""Logs with a row for each event, grouped into rows of users with lists of events."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jaxrec.data.column_types import is_list
from jaxrec.data.encode import Location, joined
from jaxrec.data.files import DataError
from jaxrec.data.groups import FileGroups, missing_column
from jaxrec.data.sequences.ranges import changes
from jaxrec.files.atomic import write_atomically
from jaxrec.ragged import hash_ids

# Events that are sorted at once, and events of a row group of users. With six columns of 4 bytes
# they take about 1 GB and 10 MB of memory.
_SORTED_EVENTS, _GROUP_EVENTS = 1 << 24, 1 << 18


@dataclasses.dataclass(frozen=True)
class HistoryCounts:
    """Result of `write_histories`.

    Attributes:
        events: Number of events.
        users: Number of users.
        longest: Number of events of the user with the most.
    """

    events: int
    users: int
    longest: int


def group_events(table: pa.Table, *, user: str = "uid", time: str = "timestamp") -> pa.Table:
    """Group a log with a row for each event into a row for each user, in memory.

    Args:
        table: The log. Its rows may be in any order.
        user: Column of the users: integers or strings.
        time: Column of the times.

    Returns:
        A row for each user, in ascending order, with the column ``user`` and a list of each other
        column. A user's events are in the order of time; events at one time keep the log's order.

    Raises:
        DataError: A column is missing, or a user or a time is null.

    Example:
        >>> log = pa.table({"uid": [7, 5, 7], "timestamp": [20, 15, 10], "item_id": [1, 2, 3]})
        >>> group_events(log).to_pylist()[1]
        {'uid': 7, 'timestamp': [10, 20], 'item_id': [3, 1]}
    """
    _check_keys(table, (user, time), "the table", 0)
    return _grouped(table, user, time)


def _grouped(table: pa.Table, user: str, time: str) -> pa.Table:
    if not _is_sorted(table, user, time):
        order = pc.sort_indices(table, [(user, "ascending"), (time, "ascending")])
        table = table.take(order)
    users = joined(table[user])
    starts = np.flatnonzero(changes(_codes(users)))
    offsets = pa.array(np.append(starts, len(users)).astype(np.int64))
    columns = {user: users.take(pa.array(starts))}
    for name in table.column_names:
        if name != user:
            columns[name] = pa.LargeListArray.from_arrays(offsets, joined(table[name]))
    return pa.table(columns)


def _check_keys(
    table: pa.Table, keys: Sequence[str], path: str | os.PathLike[str], first_row: int
) -> None:
    """Raise a DataError unless each row has a user and a time, the ``keys``."""
    for name in keys:
        if name not in table.column_names:
            raise missing_column(path, name, table.column_names)
        column = joined(table[name])
        if is_list(column.type):
            raise DataError(
                f"{path}, column {name!r} is of type {column.type}: the rows are users already, "
                "and jaxrec.data.EventGroups reads them"
            )
        if column.null_count:
            row = int(np.argmax(np.asarray(column.is_null())))
            problem = "it is null; an event has a user and a time"
            raise Location(path, first_row, name).error(row, problem)


def _codes(users: pa.Array) -> np.ndarray:
    """Return a number for each row, equal for rows of the same user."""
    if pa.types.is_integer(users.type):
        return users.to_numpy()
    return pc.dictionary_encode(users).indices.to_numpy()


def _is_sorted(table: pa.Table, user: str, time: str) -> bool:
    """Return whether rows are in the order of integer users and times, as Yambda's files are."""
    users, times = (joined(table[name]) for name in (user, time))
    if not (pa.types.is_integer(users.type) and pa.types.is_integer(times.type)):
        return False
    users, times = users.to_numpy(), times.to_numpy()
    same = users[1:] == users[:-1]
    return bool(((users[1:] > users[:-1]) | (same & (times[1:] >= times[:-1]))).all())


def write_histories(
    log: FileGroups,
    output: str | os.PathLike[str],
    *,
    user: str = "uid",
    time: str = "timestamp",
    sorted_events: int = _SORTED_EVENTS,
) -> HistoryCounts:
    """Group a log of files into Parquet files with a row for each user.

    A log that is larger than ``sorted_events`` is first split by users into temporary files beside
    the output, so that memory holds one of them at a time. Users are in no particular order then.

    Args:
        log: The log, such as ``ParquetGroups.of_directory(path)``, with the columns to keep.
        output: Directory of the Parquet files, which appears once all are complete.
        user: Column of the users.
        time: Column of the times.
        sorted_events: Number of events that are sorted in memory at once. A single user's events
            always are.

    Raises:
        OSError: A file cannot be read or written.
        DataError: A column is missing, a user or a time is null, there is no event, or ``output``
            has files.
    """
    output = pathlib.Path(output)
    # The directory is replaced at the end: a wrong name must not remove other files.
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output} is there already; give another output, or remove it")
    total = sum(log.sizes)
    if not total:
        raise DataError(f"{log.paths[0]} has no events")
    # Users differ in their numbers of events: parts of half the size seldom exceed it.
    parts = 1 if total <= sorted_events else -(-2 * total // sorted_events)
    users = longest = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(output) as unfinished:
        unfinished.mkdir()
        with _split(log, (user, time), parts, unfinished.parent) as tables:
            for number, table in enumerate(tables):
                if not len(table):
                    continue
                grouped = _grouped(table, user, time)
                lengths = np.diff(joined(grouped[time]).offsets.to_numpy())
                users, longest = users + len(grouped), max(longest, int(lengths.max()))
                pq.write_table(
                    grouped,
                    unfinished / f"part-{number:05}.parquet",
                    row_group_size=max(1, len(grouped) * _GROUP_EVENTS // len(table)),
                    write_page_checksum=True,
                )
    return HistoryCounts(total, users, longest)


@contextlib.contextmanager
def _split(
    log: FileGroups, keys: tuple[str, str], parts: int, beside: pathlib.Path
) -> Iterator[Iterator[pa.Table]]:
    """Yield tables, each with all events of some users; temporary files hold them if several."""
    groups = (_read_checked(log, group, keys) for group in range(len(log.sizes)))
    if parts == 1:
        # Files may write one column as int32 and int64.
        try:
            table = pa.concat_tables(groups, promote_options="permissive")
        except pa.ArrowException as error:
            raise _different_types(error) from None
        yield iter([table])
        return
    directory = pathlib.Path(tempfile.mkdtemp(prefix=".histories.", dir=beside))
    try:
        _write_parts(groups, keys[0], [directory / f"{part}.arrow" for part in range(parts)])

        def read() -> Iterator[pa.Table]:
            for part in range(parts):
                with pa.memory_map(str(directory / f"{part}.arrow")) as source:
                    yield pa.ipc.open_file(source).read_all()

        yield read()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write_parts(tables: Iterable[pa.Table], user: str, files: Sequence[pathlib.Path]) -> None:
    """Write each user's events to one of some Arrow files."""
    parts = len(files)
    with contextlib.ExitStack() as stack:
        writers: list[pa.RecordBatchFileWriter] = []
        for table in tables:
            if not writers:
                first = table.schema
                writers = [stack.enter_context(pa.ipc.new_file(str(x), first)) for x in files]
            try:
                table = table.cast(first)
            except (pa.ArrowException, ValueError) as error:
                raise _different_types(error) from None
            codes = np.asarray(hash_ids(joined(table[user]), parts))
            order = np.argsort(codes, kind="stable")
            table, ends = (
                table.take(pa.array(order)),
                np.searchsorted(codes[order], range(parts + 1)),
            )
            for writer, (start, stop) in zip(writers, itertools.pairwise(ends), strict=True):
                writer.write_table(table.slice(start, stop - start))


def _different_types(error: Exception) -> DataError:
    return DataError(
        f"the log's files have columns of different names or types ({error}); write them alike"
    )


def _read_checked(log: FileGroups, group: int, keys: tuple[str, str]) -> pa.Table:
    table = log.read(group)
    _check_keys(table, keys, *log.location(group))
    columns = [_plain(column) for column in table.columns]
    return pa.table(columns, table.column_names)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a dictionary column as plain values: each row group has a dictionary of its own."""
    kind = column.type
    return column.cast(kind.value_type) if isinstance(kind, pa.DictionaryType) else column
