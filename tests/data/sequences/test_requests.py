"""Rows of list columns become requests: lengths, cuts, encodings, and what is refused."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data import (
    CategoricalColumn,
    DataError,
    ParquetGroups,
    RequestGroups,
    RequestLimits,
    SchemaError,
    SequenceSchema,
    TableGroups,
    TimeWindow,
)
from jaxrec.data.sequences.rows import SequenceRows
from tests.data.sequences.oracle import requests_of_row
from tests.fuzz import max_examples

IDS = CategoricalColumn("ids", 100)
PLAIN = SequenceSchema({"history": "candidate"}, {"history": IDS})
FULL = SequenceSchema(
    items={"history": "candidate"},
    encodings={"history": IDS, "genre": CategoricalColumn("hash", 7), "user": IDS, "tags": IDS},
    additional={"genre": "candidate_genre"},
    context={"user": 1, "tags": 3},
    times=("time", "candidate_time"),
    actions=("action", "label"),
    watch_times=("watched", "candidate_watched"),
)


def table(**columns):
    """Two rows with all columns of `FULL`, some of them replaced."""
    rows = {
        "user": [3, 4],
        "tags": [[1, 2], []],
        "history": [[1, 2, 3], [4]],
        "genre": [["a", "b", "a"], ["c"]],
        "time": [[10, 20, 20], [5]],
        "action": [[1, 0, 3], [2]],
        "watched": [[9, 8, 7], [6]],
        "candidate": [[7], [8, 9]],
        "candidate_genre": [["a"], ["b", "c"]],
        "candidate_time": [[30], [5, 6]],
        "label": [[1], [0, 1]],
        "candidate_watched": [[1], [2, 3]],
    }
    return pa.table(rows | columns)


def groups_of(rows, schema=FULL, **limits):
    limits = RequestLimits(**{"history": 10, "candidates": 10, **limits})
    return RequestGroups(TableGroups(rows), schema, limits)


def lists(rows: SequenceRows):
    """All requests as lists by feature."""
    sides = (*rows.context, rows.history, rows.candidates)
    capacities = {name: 4096 for side in sides for name in side.values}
    return rows.batch(np.arange(len(rows)), capacities).to_lists()


def test_a_row_is_a_request():
    found = lists(groups_of(table()).read(0))
    given = table().to_pydict()
    encoded = ("user", "genre", "candidate_genre")
    assert [found[name] for name in found if name not in encoded] == [
        given[name] for name in found if name not in encoded
    ]
    assert found["user"] == [[3], [4]]
    # One encoding for both sides: "a" of a history is "a" of a candidate.
    assert found["genre"][0][0] == found["genre"][0][2] == found["candidate_genre"][0][0]
    assert tuple(found) == FULL.columns


def test_newest_events_and_pieces_of_candidates():
    groups = groups_of(table(), history=2, candidates=1)
    found = lists(groups.read(0))
    assert found["history"] == [[2, 3], [4], [4]]
    assert found["candidate"] == [[7], [8], [9]]
    assert found["user"] == [[3], [4], [4]]
    counts = groups.requests(0).counts
    assert (counts.rows, counts.requests, counts.candidates) == (2, 3, 3)
    assert (counts.events, counts.cut_events) == (4, 1)


rows_of_lists = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 30), max_size=7).map(sorted)), max_size=6
)


@settings(max_examples=max_examples(100), deadline=None)
@given(
    rows=rows_of_lists,
    history=st.integers(1, 5),
    candidates=st.integers(1, 4),
    seconds=st.none() | st.integers(1, 9),
    min_history=st.integers(0, 3),
    window=st.sampled_from([TimeWindow(), TimeWindow(5, 20), TimeWindow(stop=9)]),
)
def test_requests_are_those_of_plain_python(
    rows, history, candidates, seconds, min_history, window
):
    limits = RequestLimits(history, candidates, seconds, min_history, window)
    kind = pa.list_(pa.int32())
    columns = {
        "history": pa.array([[*range(n)] for n, _ in rows], kind),
        "time": pa.array([[0] * n for n, _ in rows], kind),
        "candidate": pa.array([[*range(50, 50 + len(x))] for _, x in rows], kind),
        "candidate_time": pa.array([x for _, x in rows], kind),
    }
    schema = SequenceSchema(
        {"history": "candidate"}, {"history": IDS}, times=("time", "candidate_time")
    )
    groups = RequestGroups(TableGroups(pa.table(columns)), schema, limits)
    wanted = [
        request
        for n, times in rows
        for request in requests_of_row([*range(n)], times, limits, times)
    ]
    read = groups.read(0) if rows else SequenceRows.empty(schema)
    found = lists(read)
    assert found["history"] == [events for events, _ in wanted]
    assert found["candidate"] == [[50 + at for at in chosen] for _, chosen in wanted]
    if rows:
        counts = groups.requests(0).counts
        everything = sum(len(times) for _, times in rows)
        assert counts.candidates + counts.outside_window + counts.short_history == everything


def test_parts_are_one_after_the_other():
    parts = [groups_of(table()).read(0), groups_of(table(user=[5, 6])).read(0)]
    together = lists(SequenceRows.concatenate(parts))
    apart = [lists(part) for part in parts]
    assert together == {name: apart[0][name] + apart[1][name] for name in together}


def test_padding_rows_are_empty():
    rows = groups_of(table()).read(0)
    found = rows.batch(np.array([-1, 1, -1]), dict.fromkeys(FULL.columns, 8)).to_lists()
    assert found["candidate"] == [[], [8, 9], []]
    assert found["user"] == [[], [4], []]


def test_more_values_than_a_capacity_are_refused():
    rows = groups_of(table()).read(0)
    capacities = dict.fromkeys(FULL.columns, 8) | {"history": 3}
    with pytest.raises(
        ValueError, match="'history': the rows have 4 values, but the capacity is 3"
    ):
        rows.batch(np.arange(2), capacities)


def test_types_that_files_have():
    moment = datetime.datetime(2024, 3, 1, tzinfo=datetime.UTC)
    seconds = int(moment.timestamp())
    rows = table(
        time=pa.array([[moment] * 3, [moment]], pa.list_(pa.timestamp("us", "UTC"))),
        candidate_time=pa.array([[moment], [moment] * 2], pa.large_list(pa.timestamp("ns", "UTC"))),
        action=[[True, False, True], [False]],
        history=pa.array([[1.0, 2.0, 3.0], [4.0]]),
        label=[[1.0], [0.0, 1.0]],
        candidate=pa.array([[7], [8, 9]], pa.list_(pa.uint64())),
    )
    found = lists(groups_of(rows).read(0))
    assert found["time"] == [[seconds] * 3, [seconds]]
    assert found["action"] == [[1, 0, 1], [0]]
    assert found["history"] == [[1, 2, 3], [4]]


def test_plain_columns_are_lists_of_one():
    rows = pa.table({"history": [[1, 2], None], "candidate": [7, 8]})
    assert lists(groups_of(rows, PLAIN).read(0)) == {
        "history": [[1, 2], []],
        "candidate": [[7], [8]],
    }


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param(
            {"time": [[10, 20, 20], [5, 6]]},
            "row 1 (from 0), column 'time': its list has 2 values, but that of column 'history'",
            id="lengths of one side",
        ),
        pytest.param(
            {"label": [[1, 1], [0, 1]]},
            "row 0 (from 0), column 'label': its list has 2 values, but that of column 'candidate'",
            id="lengths of candidates",
        ),
        pytest.param(
            {"time": [[10, 30, 20], [5]]},
            "row 0 (from 0), column 'time': value 2 of the list: the time 20 is before the time 30",
            id="not in the order of time",
        ),
        pytest.param(
            {"candidate_time": [[30], [5, 4]]},
            "row 1 (from 0), column 'candidate_time': value 1 of the list: the time 4 is before "
            "the newest event of the history, at 5",
            id="candidate before its history",
        ),
        pytest.param(
            {"history": [[1, 2, 100], [4]]},
            "row 0 (from 0), column 'history': id 100 is outside of its table of 100 rows",
            id="id outside of its table",
        ),
        pytest.param(
            {"candidate": [[7], [8, None]]},
            "row 1 (from 0), column 'candidate': a value of the list is null",
            id="null in a list",
        ),
        pytest.param(
            {"time": [[10, 20, 2**31], [5]], "candidate_time": [[2**31 - 1], [5, 6]]},
            "row 0 (from 0), column 'time': the number 2147483648 is not from 0 to 2**31 - 1",
            id="time beyond int32",
        ),
        pytest.param(
            {"action": [[1, 0, -1], [2]]}, "column 'action': the number -1 is not", id="negative"
        ),
        pytest.param(
            {"action": [["a", "b", "c"], ["d"]]}, "expected whole numbers", id="text as a number"
        ),
        pytest.param(
            {"watched": [[1.5, 2, 3], [4]]}, "column 'watched': 1.5 is not a whole", id="fraction"
        ),
        pytest.param(
            {"tags": [[1, 2, 3, 4], []]},
            "row 0 (from 0), column 'tags': it has 4 values; the schema's context says 3",
            id="too much context",
        ),
    ],
)
def test_errors_name_row_and_column(columns, message):
    with pytest.raises(DataError) as error:
        groups_of(table(**columns)).read(0)
    assert message in str(error.value)
    assert str(error.value).startswith("the table")


def test_errors_name_the_file_and_its_row(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(table(label=[[1], [0, -1]]), path, row_group_size=1)
    groups = RequestGroups(ParquetGroups((path,)), FULL, RequestLimits(10))
    assert len(groups.read(0)) == 1
    with pytest.raises(DataError, match=r"a.parquet, row 1 \(from 0\), column 'label': the number"):
        groups.read(1)
    other = SequenceSchema({"past": "candidate"}, {"past": IDS})
    with pytest.raises(DataError, match=r"a.parquet has no column 'past'; its columns are user, "):
        RequestGroups(ParquetGroups((path,)), other, RequestLimits(10)).requests(0)
    with pytest.raises(DataError, match="the table has no column 'past'; its columns are user, "):
        groups_of(table(), other).requests(0)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"items": {}, "encodings": {}}, "items name a history column", id="no items"),
        pytest.param({"encodings": {}}, "'history' is missing", id="no encoding"),
        pytest.param(
            {"encodings": {"history": IDS, "x": IDS}}, "'x' is none", id="encoding too many"
        ),
        pytest.param({"times": ("history", "t")}, "'history' has two roles", id="two roles"),
        pytest.param({"times": "time"}, "times are two columns, of history", id="a single name"),
        pytest.param(
            {"encodings": {"history": CategoricalColumn()}}, "got vocabulary", id="vocabulary"
        ),
        pytest.param(
            {"context": {"user": 0}, "encodings": {"history": IDS, "user": IDS}},
            "context 'user' has 0 values",
            id="empty context",
        ),
    ],
)
def test_schemas_that_are_refused(options, message):
    with pytest.raises(SchemaError, match=message):
        SequenceSchema(
            **{"items": {"history": "candidate"}, "encodings": {"history": IDS}} | options
        )


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: RequestLimits(0), "history is 1 or more, got 0", id="history"),
        pytest.param(lambda: RequestLimits(1, 0), "candidates is 1 or more", id="candidates"),
        pytest.param(lambda: RequestLimits(1, seconds=0), "seconds is 1 or more", id="seconds"),
        pytest.param(lambda: TimeWindow(3, 3), "a window starts before it stops", id="window"),
        pytest.param(lambda: TimeWindow.split(5, 6, 3), "do not make 3 windows", id="windows"),
        pytest.param(
            lambda: groups_of(table(), PLAIN, seconds=5), "need a schema with times", id="no times"
        ),
        pytest.param(
            lambda: groups_of(table(), PLAIN).times(0), "names no times", id="no times read"
        ),
        pytest.param(lambda: TableGroups(table(), 0), "rows is 1 or more", id="groups"),
    ],
)
def test_limits_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_have_equal_lengths():
    windows = TimeWindow.split(10, 109, 3)
    assert [window.start for window in windows] == [10, 44, 77]
    assert windows[-1].stop == 110
    times = np.arange(10, 110)
    assert sum(window.contains(times).astype(int) for window in windows).tolist() == [1] * 100
