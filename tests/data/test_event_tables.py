from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import GeneratedEvents, write_events
from jaxrec.data.event_tables import flat_events, request_rows
from jaxrec.data.generated_events import CHUNK_USERS

LOG = GeneratedEvents(num_users=CHUNK_USERS + 100, seed=1, num_candidates=3)

# Names and types of Yambda's flat/50m/multi_event.parquet.
YAMBDA = {
    "uid": "uint32",
    "timestamp": "uint32",
    "item_id": "uint32",
    "is_organic": "uint8",
    "event_type": "dictionary<values=string, indices=int8, ordered=0>",
    "played_ratio_pct": "uint16",
    "track_length_seconds": "uint32",
}


def listens_of(requests, side, row):
    """The listens of a row, as tuples of item, time, percent, seconds and whether it was liked."""
    listens = getattr(requests, side)
    lengths = requests.lengths if side == "history" else np.full(len(requests), 3)
    stop = int(lengths[: row + 1].sum())
    of = slice(stop - int(lengths[row]), stop)
    names = ("items", "times", "played_percent", "track_seconds", "liked")
    return list(zip(*(getattr(listens, name)[of].tolist() for name in names), strict=True))


def test_flat_events_are_those_of_the_users_in_time():
    requests = LOG.requests(4, 9)
    table = flat_events(requests)
    assert {field.name: str(field.type) for field in table.schema} == YAMBDA
    expected = []
    for row, user in enumerate(requests.users.tolist()):
        for side, is_organic in (("history", 1), ("candidates", 0)):
            events = []
            for item, time, percent, seconds, liked in listens_of(requests, side, row):
                events.append((user, time, item, is_organic, "listen", percent, seconds))
                if liked:
                    events.append((user, time, item, is_organic, "like", None, None))
            # Events of one time: listens first.
            expected += sorted(events, key=lambda event: (event[1], event[4] == "like"))
    assert [tuple(row.values()) for row in table.to_pylist()] == expected
    assert 0 < table["played_ratio_pct"].null_count < len(expected) / 3


def test_request_rows_are_lists_of_both_sides():
    requests = LOG.requests(4, 9)
    table = request_rows(requests)
    assert table["uid"].to_pylist() == [4, 5, 6, 7, 8]
    for row, found in enumerate(table.to_pylist()):
        for prefix, side in (("", "history"), ("candidate_", "candidates")):
            names = ("item_id", "timestamp", "played_ratio_pct", "track_length_seconds", "action")
            columns = zip(*(found[prefix + name] for name in names), strict=True)
            assert [
                (item, time, percent, seconds, action == 3)
                for item, time, percent, seconds, action in columns
            ] == listens_of(requests, side, row)
            assert set(found[prefix + "is_organic"]) == {1 if side == "history" else 0}
            assert [x >= 50 for x in found[prefix + "played_ratio_pct"]] == [
                x > 0 for x in found[prefix + "action"]
            ]


@pytest.mark.parametrize(("form", "of"), [("flat", flat_events), ("rows", request_rows)])
def test_files_have_all_users_in_several_groups(tmp_path, form, of):
    path = tmp_path / "log.parquet"
    write_events(LOG, path, form=form)
    assert pq.ParquetFile(path).metadata.num_row_groups == 2
    parts = [of(LOG.requests(0, CHUNK_USERS)), of(LOG.requests(CHUNK_USERS, LOG.num_users))]
    assert pq.read_table(path).equals(pa.concat_tables(parts))
    write_events(LOG, path, form=form, start=7, stop=9)
    assert pq.read_table(path).equals(of(LOG.requests(7, 9)))
    assert [file.name for file in tmp_path.iterdir()] == ["log.parquet"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "wide"}, "form is 'flat' or 'rows', got 'wide'"),
        ({"start": 5, "stop": 5}, "the log has the users 0 to 4196; got start=5, stop=5"),
        ({"stop": 5000}, "got start=0, stop=5000"),
        ({"start": -1}, "got start=-1"),
    ],
    ids=["form", "none", "beyond", "before"],
)
def test_wrong_options(tmp_path, options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        write_events(LOG, tmp_path / "log.parquet", **options)
    assert not list(tmp_path.iterdir())
