"""A folder that is written to: each complete file once, in order, from where a run ended."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from jaxrec.data import DataError, FolderSource, Shard, StreamBatches


def read(source, batch_size=3, state=None, **options):
    """Return the ids of the batches until the source is caught up, and the batches."""
    batches = StreamBatches(source=source, batch_size=batch_size, until="caught_up", **options)
    if state is not None:
        batches.restore([state])
    found = [batch["id"].to_pylist() for batch in batches]
    return [i for batch in found for i in batch], batches


def write_csv(path, first, count=5):
    path.write_text("id\n" + "".join(f"{i}\n" for i in range(first, first + count)))


def test_formats(tmp_path):
    """Each format is read, in the order of names, with the columns of directories."""
    pq.write_table(pa.table({"id": np.arange(5)}), tmp_path / "part-2.parquet", row_group_size=2)
    write_csv(tmp_path / "part-10.csv", 5)
    (tmp_path / "part-11.jsonl").write_text("".join(f'{{"id": {i}}}\n' for i in range(10, 15)))
    pa.feather.write_feather(pa.table({"id": np.arange(15, 20)}), tmp_path / "part-12.feather")
    (tmp_path / "day=3").mkdir()
    write_csv(tmp_path / "day=3" / "a.csv", 20)
    # Unfinished files and others.
    for name in (".part-1.csv", "_SUCCESS", "part-3.parquet.tmp", "notes.txt"):
        (tmp_path / name).write_text("id\nnonsense\n")
    found, _ = read(FolderSource(directory=tmp_path))
    assert found == [*range(20, 25), *range(20)]
    days = StreamBatches(source=FolderSource(directory=tmp_path), batch_size=5, until="caught_up")
    assert [batch.to_pydict().get("day") for batch in days] == [[3] * 5, *[None] * 4]


def test_goes_on_within_a_file(tmp_path):
    pq.write_table(pa.table({"id": np.arange(8)}), tmp_path / "a.parquet", row_group_size=3)
    write_csv(tmp_path / "b.csv", 8)
    (tmp_path / "c.jsonl").write_text("".join(f'{{"id": {i}}}\n' for i in range(13, 20)))
    source = FolderSource(directory=tmp_path)
    found, batches = read(source)
    assert found == list(range(20))
    for used in range(1, 7):
        again = StreamBatches(source=source, batch_size=3)
        iterator = iter(again)
        for _ in range(used):
            next(iterator)
        again.advance(used)
        iterator.close()
        assert read(source, batch_size=4, state=again.state())[0] == list(range(3 * used, 20))
    batches.advance(7)
    write_csv(tmp_path / "aa.csv", 20)  # late, with a name before others
    assert batches.lag() == {"files": 0}
    assert read(source, state=batches.state())[0] == list(range(20, 25))
    # Names of files that are gone are not saved for ever.
    (tmp_path / "b.csv").unlink()
    _, last = read(source, state=batches.state())
    assert json.loads(last.state())["positions"].keys() == {"a.parquet", "c.jsonl"}


def test_follows_new_files(tmp_path):
    source = FolderSource(directory=tmp_path, poll_seconds=0.01)
    batches = StreamBatches(source=source, batch_size=5)
    iterator = iter(batches)
    for number in range(3):
        write_csv(tmp_path / ".unfinished", 5 * number)
        (tmp_path / ".unfinished").rename(tmp_path / f"{number}.csv")
        assert next(iterator)["id"].to_pylist() == list(range(5 * number, 5 * number + 5))
    assert batches.scalars() == {"stream/lag": 3, "stream/lag/files": 3}
    batches.advance(2)
    assert batches.lag() == {"files": 1}
    batches.interrupt()
    assert next(iterator, None) is None


def test_order_by_time(tmp_path):
    for number, name in enumerate(["b", "a", "c"]):
        write_csv(tmp_path / f"{name}.csv", 5 * number)
        os.utime(tmp_path / f"{name}.csv", (0, 1000 + number))
    assert read(FolderSource(directory=tmp_path, order="time"))[0] == list(range(15))
    assert read(FolderSource(directory=tmp_path))[0][:5] == list(range(5, 10))


def test_files_that_are_not_renamed(tmp_path):
    for name, age in (("old", 100), ("new", 0)):
        write_csv(tmp_path / f"{name}.csv", age)
        os.utime(tmp_path / f"{name}.csv", (0, time.time() - age))
    assert read(FolderSource(directory=tmp_path, settle_seconds=50))[0] == list(range(100, 105))


def test_processes_share_the_files(tmp_path):
    for number in range(12):
        write_csv(tmp_path / f"{number}.csv", 5 * number)
    source = FolderSource(directory=tmp_path)
    shares = [read(source, shard=Shard(index, 3)) for index in range(3)]
    assert sorted(i for found, _ in shares for i in found) == list(range(60))
    assert all(found for found, _ in shares)
    for _, batches in shares:
        batches.advance(2)  # within a file
    used = sorted(i for found, _ in shares for i in found[:6])
    rest = []
    for index in range(2):
        again = StreamBatches(source=source, batch_size=3, until="caught_up", shard=Shard(index, 2))
        again.restore([batches.state() for _, batches in shares])
        rest += [i for batch in again for i in batch["id"].to_pylist()]
    assert sorted([*used, *rest]) == list(range(60))


def test_empty_batches_of_processes(tmp_path):
    """A process whose files have no rows yet takes part with empty batches."""
    schema = pa.schema([("id", pa.int64())])
    options = {"shard": Shard(0, 2), "max_wait": 0.0}
    batches = StreamBatches(
        source=FolderSource(directory=tmp_path, schema=schema), batch_size=3, **options
    )
    iterator = iter(batches)
    assert next(iterator).schema == schema
    assert len(next(iterator)) == 0
    batches.advance(2)
    assert batches.state() == '{"positions": {}, "seconds": null}'
    with pytest.raises(ValueError, match="give the source a schema"):
        StreamBatches(source=FolderSource(directory=tmp_path), batch_size=3, **options)


def test_a_process_without_rows_has_a_batch(tmp_path):
    """It makes the empty batches that stand beside those of others, also at the end."""
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    source = FolderSource(directory=tmp_path, schema=pa.schema([("id", pa.int64())]))
    options = {"source": source, "batch_size": 1, "max_wait": 9.0, "until": "caught_up"}
    of_both = [[*StreamBatches(shard=Shard(i, 2), **options)] for i in range(2)]
    assert sorted([len(batch) for batch in each] for each in of_both) == [[0], [1, 1]]
    assert [*StreamBatches(**options | {"source": FolderSource(directory=_empty(tmp_path))})] == []


def _empty(directory):
    (directory / "empty").mkdir()
    return directory / "empty"


def test_whole_numbers_beside_fractions(tmp_path):
    (tmp_path / "a.csv").write_text("price\n1\n2\n")
    (tmp_path / "b.csv").write_text("price\n3.5\n")
    batches = StreamBatches(
        source=FolderSource(directory=tmp_path), batch_size=3, until="caught_up"
    )
    (batch,) = batches
    assert batch["price"].to_pylist() == [1.0, 2.0, 3.5]


def test_columns_of_a_schema(tmp_path):
    """Other columns are left out: their types may change from file to file."""
    (tmp_path / "a.csv").write_text("note,id\n1,1\n")
    (tmp_path / "b.csv").write_text("id,note\n2,x\n")
    source = FolderSource(directory=tmp_path, schema=pa.schema([("id", pa.string())]))
    (batch,) = StreamBatches(source=source, batch_size=3, until="caught_up")
    assert batch.to_pydict() == {"id": ["1", "2"]}


def test_wider_types(tmp_path, monkeypatch):
    """A file whose values need a wider type than its first part is read once all the same."""
    monkeypatch.setattr("jaxrec.data.formats.delimited.PART_BYTES", 4096)
    monkeypatch.setattr("jaxrec.data.streams.folder.PART_BYTES", 4096)
    values = [*range(5000), 0.5]
    (tmp_path / "a.csv").write_text("id\n" + "".join(f"{x}\n" for x in values))
    found, _ = read(FolderSource(directory=tmp_path), batch_size=10_000)
    assert found == values


def test_errors(tmp_path):
    with pytest.raises(DataError, match="is no folder"):
        read(FolderSource(directory=tmp_path / "missing"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(DataError, match=r"a\.parquet.*write it as \.NAME and rename it"):
        read(FolderSource(directory=tmp_path))
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.csv").write_text("id\n1\n2,3\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3"):
        read(FolderSource(directory=tmp_path))

    def refuse(table):
        if 4 in table["id"].to_pylist():
            raise DataError("4 is refused")
        return table

    write_csv(tmp_path / "a.csv", 0)
    with pytest.raises(DataError, match=r"a\.csv, row 4: 4 is refused"):
        read(FolderSource(directory=tmp_path), transform=refuse)


def test_removed_files(tmp_path):
    write_csv(tmp_path / "a.csv", 0)
    write_csv(tmp_path / "b.csv", 5)
    fails = FolderSource(directory=tmp_path)
    skips = FolderSource(directory=tmp_path, deleted="skip")
    state = '{"positions": {"a.csv": [0, 2]}, "seconds": null}'
    reader = fails.open({}, Shard(), has_end=False)
    skipping = skips.open({}, Shard(), has_end=True)
    (tmp_path / "a.csv").unlink()
    with pytest.raises(DataError, match=r"a\.csv was removed before all of its rows were used"):
        reader.read(10)
    with pytest.warns(UserWarning, match=r"a\.csv was removed.*left out"):
        assert len(skipping.read(10).join(skipping.read(10))) == 5
    with pytest.raises(DataError, match=r"a\.csv was removed"):
        read(fails, state=state)
    with pytest.warns(UserWarning, match=r"a\.csv was removed"):
        assert read(skips, state=state)[0] == list(range(5, 10))
    (tmp_path / "b.csv").write_text("id\n1\n")
    with pytest.raises(DataError, match=r"b\.csv has 1 rows, of which 4 were used.*was changed"):
        read(fails, state='{"positions": {"b.csv": [0, 4]}, "seconds": null}')


@pytest.mark.parametrize(
    "options",
    [{"order": "size"}, {"deleted": "keep"}, {"poll_seconds": -1}, {"settle_seconds": -1}],
)
def test_options(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FolderSource(directory=tmp_path, **options)
