"""Rows of users become requests: histories before candidates, actions, conditions, windows."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data import (
    Action,
    CategoricalColumn,
    DataError,
    EventGroups,
    EventSchema,
    RequestLimits,
    SchemaError,
    TableGroups,
    TimeWindow,
    Where,
    movielens_schema,
    yambda_schema,
)
from tests.data.sequences.oracle import requests_of_user
from tests.data.sequences.test_requests import lists
from tests.fuzz import max_examples

TYPES = ["listen", "like", "dislike"]


def yambda_rows(**columns):
    """Two users in the columns of Yambda's files, with nulls where an event is no listen."""
    rows = {
        "uid": pa.array([5, 9], pa.uint32()),
        "timestamp": pa.array([[0, 5, 5, 60], [30]], pa.list_(pa.uint32())),
        "item_id": pa.array([[1, 1, 2, 3], [4]], pa.list_(pa.uint32())),
        "is_organic": pa.array([[0, 0, 1, 1], [0]], pa.list_(pa.uint8())),
        "played_ratio_pct": pa.array([[80, None, 10, 130], [50]], pa.list_(pa.uint16())),
        "track_length_seconds": pa.array([[200, None, 100, 60], [30]], pa.list_(pa.uint32())),
        "event_type": pa.array([["listen", "like", "listen", "listen"], ["listen"]]),
    }
    return pa.table(rows | columns)


def groups_of(rows, schema, **limits):
    return EventGroups(TableGroups(rows), schema, RequestLimits(**{"history": 10, **limits}))


def test_yambda_rows_with_a_candidate_each():
    schema = yambda_schema(100, num_users=50)
    groups = groups_of(yambda_rows(), schema, candidates=1)
    found = lists(groups.read(0))
    assert found == {
        "uid": [[5], [5], [5], [9]],
        "item_id": [[], [1], [1, 1, 2], []],
        "timestamp": [[], [0], [0, 5, 5], []],
        "action": [[], [1], [1, 2, 4], []],
        "candidate_item_id": [[1], [2], [3], [4]],
        "candidate_timestamp": [[0], [5], [60], [30]],
        "candidate_action": [[1], [4], [1], [1]],
    }
    assert tuple(found) == groups.sequences.columns
    assert groups.requests(0).counts.candidates == 4


def test_a_request_of_several_candidates_has_the_history_of_the_first():
    found = lists(groups_of(yambda_rows(), yambda_schema(100), candidates=2).read(0))
    assert found["candidate_item_id"] == [[1, 2], [3], [4]]
    assert found["item_id"] == [[], [1, 1, 2], []]
    assert found["candidate_timestamp"] == [[0, 0], [60], [30]]


def test_windows_keep_the_events_before_them():
    schema = yambda_schema(100)
    late = groups_of(yambda_rows(), schema, window=TimeWindow(start=60))
    found = lists(late.read(0))
    assert (found["item_id"], found["candidate_item_id"]) == ([[1, 1, 2]], [[3]])
    assert late.requests(0).counts.outside_window == 3
    # The times that windows are made of are those of all candidates.
    np.testing.assert_array_equal(late.times(0), [0, 5, 60, 30])


def test_candidates_after_few_events_are_counted():
    counts = groups_of(yambda_rows(), yambda_schema(100), min_history=2).requests(0).counts
    assert (counts.candidates, counts.short_history) == (1, 3)


def test_additional_columns_and_watch_times():
    schema = EventSchema(
        items=("item_id",),
        additional=("is_organic",),
        encodings=dict.fromkeys(("item_id", "is_organic"), CategoricalColumn("ids", 9)),
        actions=(Action("listen", 1, Where({"event_type": ["listen"]})),),
        watch_time=("played_ratio_pct", "track_length_seconds"),
    )
    found = lists(groups_of(yambda_rows(), schema).read(0))
    assert found["candidate_is_organic"] == [[0, 0, 1, 1], [0]]
    assert found["candidate_watch_time"] == [[160, 0, 10, 78], [15]]
    assert found["candidate_action"] == [[1, 0, 1, 1], [1]]


events = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from(TYPES), st.none() | st.integers(0, 120)),
    max_size=9,
)


@settings(max_examples=max_examples(100), deadline=None)
@given(
    users=st.lists(events, min_size=1, max_size=4),
    history=st.integers(1, 5),
    candidates=st.integers(1, 4),
    seconds=st.none() | st.integers(1, 5),
    min_history=st.integers(0, 2),
    window=st.sampled_from([TimeWindow(), TimeWindow(2, 8), TimeWindow(stop=5)]),
    kind=st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]),
)
def test_requests_are_those_of_plain_python(
    users, history, candidates, seconds, min_history, window, kind
):
    limits = RequestLimits(history, candidates, seconds, min_history, window)
    users = [sorted(rows, key=lambda row: row[0]) for rows in users]
    times, names, ratios = (
        [[row[column] for row in rows] for rows in users] for column in range(3)
    )
    rows = pa.table(
        {
            "timestamp": pa.array(times, pa.list_(pa.int64())),
            "item_id": pa.array([[*range(len(x))] for x in users], pa.large_list(pa.int32())),
            "event_type": pa.array(names, pa.list_(pa.string())).cast(pa.list_(kind)),
            "played_ratio_pct": pa.array(ratios, pa.list_(pa.uint16())),
        }
    )
    found = lists(groups_of(rows, yambda_schema(100), **vars(limits)).read(0))
    wanted = [
        (user, *request)
        for user, own in enumerate(users)
        for request in requests_of_user(
            times[user],
            [name == "listen" for _, name, _ in own],
            [name != "dislike" for _, name, _ in own],
            limits,
        )
    ]
    assert found["item_id"] == [before for _, before, _ in wanted]
    assert found["candidate_item_id"] == [chosen for _, _, chosen in wanted]
    assert found["candidate_timestamp"] == [
        [times[n][chosen[0]]] * len(chosen) for n, _, chosen in wanted
    ]
    assert found["action"] == [[action(*users[n][at]) for at in at_all] for n, at_all, _ in wanted]
    assert found["candidate_action"] == [
        [action(*users[n][at]) for at in chosen] for n, _, chosen in wanted
    ]


def action(time, name, ratio):
    if name == "like":
        return 2
    if name != "listen" or ratio is None:
        return 0
    return 1 if ratio >= 50 else 4


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param(
            {"timestamp": pa.array([[0, 5, 4, 60], [30]])},
            "row 0 (from 0), column 'timestamp': value 2 of the list: the time 4 is before",
            id="not in the order of time",
        ),
        pytest.param(
            {"item_id": pa.array([[1, 1, 2, 3], []], pa.list_(pa.int32()))},
            "row 1 (from 0), column 'item_id': its list has 0 values, but that of column 'times",
            id="lengths",
        ),
        pytest.param(
            {"event_type": pa.array([["listen"], ["like"]])},
            "row 0 (from 0), column 'event_type': its list has 1 values",
            id="lengths of a condition",
        ),
        pytest.param(
            {"item_id": pa.array([[1, 1, None, 3], [4]])},
            "row 0 (from 0), column 'item_id': a value of the list is null",
            id="null item",
        ),
        pytest.param(
            {"event_type": pa.array([[1, 2, 3, 4], [5]])},
            "the table, column 'event_type' is of type int64, which cannot be compared with",
            id="type of a condition",
        ),
        pytest.param(
            {"uid": pa.array([[5, 6], [9]])},
            "row 0 (from 0), column 'uid': it has 2 values",
            id="several users",
        ),
        pytest.param(
            {"timestamp": pa.array([10, 20])},
            "column 'timestamp' is of type int64, and not of lists: the file has a row for each",
            id="a row for each event",
        ),
    ],
)
def test_errors_name_row_and_column(columns, message):
    with pytest.raises(DataError) as error:
        groups_of(yambda_rows(**columns), yambda_schema(100, num_users=50)).read(0)
    assert message in str(error.value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Action("like", 3, Where()), "bit 3; bits are 1, 2, 4", id="bit"),
        pytest.param(lambda: Where({"event_type": "like"}), "list of one value", id="text"),
        pytest.param(lambda: Where({"event_type": []}), "list of one value", id="no value"),
        pytest.param(
            lambda: EventSchema(("item",), {"item": CategoricalColumn("ids", 9)}, ()),
            "actions are one or more",
            id="no action",
        ),
        pytest.param(
            lambda: EventSchema(
                ("item",),
                {"item": CategoricalColumn("ids", 9)},
                (Action("a", 1, Where()), Action("b", 1, Where())),
            ),
            "a bit of its own",
            id="one bit twice",
        ),
        pytest.param(
            lambda: EventSchema(("item",), {}, (Action("a", 1, Where()),)),
            "'item' is missing",
            id="no encoding",
        ),
    ],
)
def test_schemas_that_are_refused(make, message):
    with pytest.raises(SchemaError, match=message):
        make()


def test_movielens_likes():
    rows = pa.table(
        {"user_id": [1], "timestamp": [[3, 4]], "movie_id": [[5, 6]], "rating": [[4.0, 3.5]]}
    )
    found = lists(groups_of(rows, movielens_schema(10, num_users=2), candidates=1).read(0))
    assert found["candidate_action"] == [[1], [0]]
    assert found["user_id"] == [[1], [1]]
