"""Logs with a row for each event become rows of users, in memory and beyond it."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from jaxrec.commands import main
from jaxrec.data import (
    DataError,
    EventGroups,
    ParquetGroups,
    RequestLimits,
    group_events,
    write_histories,
    yambda_schema,
)

INTEGERS = pa.uint32()


def log(events, users, seed=0, kind=INTEGERS):
    rng = np.random.default_rng(seed)
    names = rng.integers(0, users, events)
    return pa.table(
        {
            "uid": pa.array(names if kind == INTEGERS else [f"user {n}" for n in names], kind),
            "timestamp": pa.array(rng.integers(0, 50, events) * 5, pa.uint32()),
            "item_id": pa.array(np.arange(events), pa.uint32()),
            "played_ratio_pct": pa.array(
                rng.integers(0, 120, events), mask=rng.random(events) < 0.2
            ),
            "event_type": pa.array(rng.choice(["listen", "like"], events)).dictionary_encode(),
        }
    )


def oracle(rows):
    """The events of each user in the order of time, then of the log, as dicts of lists."""
    users = {}
    for row in rows.to_pylist():
        users.setdefault(row["uid"], []).append(row)
    return {
        user: {
            name: [row[name] for row in sorted(own, key=lambda row: row["timestamp"])]
            for name in rows.column_names
            if name != "uid"
        }
        for user, own in users.items()
    }


def as_dict(table):
    return {row.pop("uid"): row for row in table.to_pylist()}


@pytest.mark.parametrize("kind", [INTEGERS, pa.string()], ids=["integers", "strings"])
def test_events_are_grouped_by_user(kind):
    rows = log(300, 20, kind=kind)
    grouped = group_events(rows)
    assert as_dict(grouped) == oracle(rows)
    assert grouped["uid"].to_pylist() == sorted(grouped["uid"].to_pylist())


def test_a_sorted_log_keeps_its_order():
    rows = log(100, 5).sort_by([("uid", "ascending"), ("timestamp", "ascending")])
    assert group_events(rows).equals(group_events(rows.take(np.arange(100))))
    assert as_dict(group_events(rows)) == oracle(rows)


@pytest.mark.parametrize("at_once", [10**6, 64], ids=["in memory", "in parts"])
def test_files_are_grouped_into_files(tmp_path, at_once):
    rows = log(500, 40)
    for number in range(2):
        part = rows.slice(250 * number, 250)
        pq.write_table(part, tmp_path / f"log.{number}.parquet", row_group_size=100)
    output = tmp_path / "deep" / "histories"
    counts = write_histories(ParquetGroups.of_directory(tmp_path), output, sorted_events=at_once)
    wanted = oracle(rows)
    assert (counts.events, counts.users) == (500, len(wanted))
    assert counts.longest == max(len(own["item_id"]) for own in wanted.values())
    groups = ParquetGroups.of_directory(output)
    read = [groups.read(group) for group in range(len(groups.sizes))]
    assert as_dict(pa.concat_tables(read)) == wanted
    assert [path.name for path in output.parent.iterdir()] == ["histories"]
    requests = EventGroups(groups, yambda_schema(1000), RequestLimits(20))
    listens = rows["event_type"].to_pylist().count("listen")
    found = sum(requests.requests(g).counts.candidates for g in range(len(requests.sizes)))
    assert found == listens


def test_a_user_is_in_one_row_though_files_are_split(tmp_path):
    rows = log(400, 7)
    pq.write_table(rows, tmp_path / "log.parquet", row_group_size=50)
    write_histories(ParquetGroups((tmp_path / "log.parquet",)), tmp_path / "out", sorted_events=50)
    table = pq.read_table(tmp_path / "out")
    assert sorted(table["uid"].to_pylist()) == sorted(set(rows["uid"].to_pylist()))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param(
            pa.table({"uid": [1, None], "timestamp": [1, 2]}),
            r"row 1 \(from 0\), column 'uid': it is null; an event has a user and a time",
            id="null user",
        ),
        pytest.param(
            pa.table({"uid": [1, 2], "timestamp": [None, 2]}),
            r"row 0 \(from 0\), column 'timestamp': it is null",
            id="null time",
        ),
        pytest.param(pa.table({"uid": [1]}), "has no column 'timestamp'", id="no time"),
        pytest.param(
            pa.table({"uid": [1], "timestamp": [[1]]}), "the rows are users already", id="users"
        ),
    ],
)
def test_logs_that_are_refused(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        group_events(rows)
    path = tmp_path / "log.parquet"
    pq.write_table(rows, path)
    with pytest.raises(DataError, match=f"log.parquet.*{message}"):
        write_histories(ParquetGroups((path,)), tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["log.parquet"]


@pytest.mark.parametrize("at_once", [10**6, 1], ids=["in memory", "in parts"])
def test_files_of_different_types_are_refused(tmp_path, at_once):
    for number, items in enumerate(([None, None], [7, 8], ["a", "b"])):
        part = pa.table({"uid": [1, 2], "timestamp": [1, 2], "item_id": items})
        pq.write_table(part, tmp_path / f"log.{number}.parquet")
    with pytest.raises(DataError, match="files have columns of different names or types"):
        write_histories(
            ParquetGroups.of_directory(tmp_path), tmp_path / "out", sorted_events=at_once
        )


def test_an_empty_log_is_refused(tmp_path):
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"uid": pa.array([], pa.int32())}), path)
    with pytest.raises(DataError, match=r"log\.parquet has no events"):
        write_histories(ParquetGroups((path,)), tmp_path / "out")


def test_other_files_are_not_replaced(tmp_path):
    pq.write_table(log(5, 2), tmp_path / "log.parquet")
    groups = ParquetGroups((tmp_path / "log.parquet",))
    for output in (tmp_path, tmp_path / "log.parquet"):
        with pytest.raises(DataError, match="is there already; give another output"):
            write_histories(groups, output)
    write_histories(groups, tmp_path / "out")
    assert groups.sizes == (5,)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path / "cache"))
    pq.write_table(log(50, 3), tmp_path / "log.parquet")
    files = [str(tmp_path / name) for name in ("log.parquet", "out")]
    assert main(["data", "histories", *files, "--columns", "item_id"]) == 0
    assert "50 events of 3 users in" in capsys.readouterr().out
    names = pq.read_table(tmp_path / "out").column_names
    assert names == ["uid", "timestamp", "item_id"]
    pyarrow.csv.write_csv(log(50, 3).select(names), tmp_path / "log.csv")
    text = [str(tmp_path / name) for name in ("log.csv", "of_text")]
    assert main(["data", "histories", *text]) == 0
    assert "50 events of 3 users in" in capsys.readouterr().out
    assert main(["data", "histories", *files]) == 1
    assert "is there already" in capsys.readouterr().err
    assert main(["data", "histories", files[0]]) == 2
    assert "INPUT OUTPUT" in capsys.readouterr().err
