from __future__ import annotations

import pickle
import sys
import threading

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import BatchSource, DataError, NpyGroups, ParquetGroups, Shard
from jaxrec.data.arrays import to_numpy
from jaxrec.data.criteo.parts import parquet_writer
from jaxrec.data.groups import GroupRange

pytestmark = pytest.mark.every_case


def files(directory, sizes=(30, 7, 25), group=10):
    """Files of rows ``0, 1, 2, ...``; the bag of row ``i`` holds ``i % 3`` times ``i``."""
    start = 0
    for number, rows in enumerate(sizes):
        x = np.arange(start, start + rows)
        table = pa.table({"x": x, "bag": [[i] * (i % 3) for i in x.tolist()]})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=group)
        start += rows
    return ParquetGroups.of_directory(directory)


def xs(rows):
    assert [bag for bag in rows["bag"].to_pylist()] == [
        [i] * (i % 3) for i in rows["x"].to_pylist()
    ]
    return to_numpy(rows["x"])


def every(source, start=0):
    return [source[i].tolist() for i in range(start, len(source))]


@pytest.mark.parametrize("batch_size", [1, 7, 16, 62, 100])
@pytest.mark.parametrize("seed", [None, 0])
def test_each_row_once_an_epoch(tmp_path, batch_size, seed):
    source = BatchSource(files(tmp_path), batch_size, xs, seed=seed, epochs=2, window=3)
    batches = every(source)
    half = len(batches) // 2
    for epoch in (batches[:half], batches[half:]):
        rows = [row for batch in epoch for row in batch]
        assert sorted(rows) == list(range(62))
        assert (rows == list(range(62))) == (seed is None)
        assert {len(batch) for batch in epoch[:-1]} <= {batch_size}
    assert (batches[:half] == batches[half:]) == (seed is None)


def test_rows_mix_over_files_and_groups(tmp_path):
    source = BatchSource(files(tmp_path, (1000,) * 4, 50), 100, xs, seed=1, window=8)
    batch = np.array(source[0])
    assert len(set((batch // 50).tolist())) == 8
    assert len({tuple(np.unique(b // 50)) for b in map(np.array, every(source))}) > 5


def test_the_last_batch_may_be_left_out(tmp_path):
    source = BatchSource(files(tmp_path), 20, xs, drop_remainder=True)
    assert [len(batch) for batch in every(source)] == [20, 20, 20]


@pytest.mark.parametrize("count", [2, 3])
def test_processes_share_the_rows(tmp_path, count):
    groups = files(tmp_path)
    shards = [
        BatchSource(groups, 5, xs, seed=3, epochs=2, shard=Shard(i, count)) for i in range(count)
    ]
    assert len({len(shard) for shard in shards}) == 1
    together = [
        row for shard in shards for batch in every(shard)[: len(shard) // 2] for row in batch
    ]
    assert len(set(together)) == len(together)
    assert len(together) >= 62 - count * (5 + 10)


@pytest.mark.parametrize(("batch_size", "count"), [(5, 3), (7, 3), (100, 2), (1, 1)])
def test_processes_have_every_row_between_them(tmp_path, batch_size, count):
    """Smaller batches at the end, on all processes equally many and none without a row."""
    groups = files(tmp_path)
    found = [
        every(
            BatchSource(groups, batch_size, xs, seed=3, shard=Shard(i, count), drop_remainder=False)
        )
        for i in range(count)
    ]
    assert len({len(batches) for batches in found}) == 1
    sizes = [len(batch) for batches in found for batch in batches]
    assert 1 <= min(sizes) <= max(sizes) <= batch_size
    assert sorted(row for batches in found for batch in batches for row in batch) == list(range(62))


def test_goes_on_at_any_batch(tmp_path):
    source = BatchSource(files(tmp_path), 9, xs, seed=0, epochs=3, window=2)
    whole = [batch.tolist() for batch in source.from_batch()]
    assert whole == every(source)
    for start in (1, 7, len(source) - 1):
        again = BatchSource(files(tmp_path), 9, xs, seed=0, epochs=3, window=2)
        assert [batch.tolist() for batch in again.from_batch(start)] == whole[start:]
    iterator = iter(source.dataset())
    head = [next(iterator).tolist() for _ in range(5)]
    state = iterator.get_state()
    rest = [batch.tolist() for batch in iterator]
    other = iter(source.dataset())
    other.set_state(state)
    assert head + [batch.tolist() for batch in other] == head + rest == whole


def test_reading_needs_no_grain(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)  # an import of it fails
    source = BatchSource(files(tmp_path), 9, xs, seed=0)
    assert [batch.tolist() for batch in source.from_batch(2)] == every(source, 2)
    with pytest.raises(ImportError, match=r"pip install 'jaxrec\[data\]'"):
        source.dataset()


def test_threads_end_with_the_stream(tmp_path):
    stream = BatchSource(files(tmp_path), 9, xs, seed=0).from_batch()
    next(stream)
    assert any(thread.name.startswith("batches") for thread in threading.enumerate())
    stream.close()
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


def test_each_window_is_read_once(tmp_path):
    groups, reads, lock = files(tmp_path), [], threading.Lock()

    class Counted:
        sizes = groups.sizes

        def read(self, group):
            with lock:
                reads.append(group)
            return groups.read(group)

    source = BatchSource(Counted(), 3, xs, seed=0, window=2)
    assert sum(len(batch) for batch in source.from_batch(threads=4, prefetch=4)) == 62
    assert sorted(reads) == list(range(len(groups.sizes)))


def test_errors_of_the_reader_come_through(tmp_path):
    groups = files(tmp_path)
    damaged = tmp_path / "1.parquet"
    groups.sizes  # noqa: B018 - known before the file is damaged
    content = bytearray(damaged.read_bytes())
    content[4:40] = b"\xff" * 36
    damaged.write_bytes(content)
    stream = BatchSource(groups, 5, xs).from_batch()
    with pytest.raises((DataError, OSError)):
        list(stream)


def test_a_flipped_byte_is_named(tmp_path):
    path = tmp_path / "part.parquet"
    table = pa.table({"x": np.arange(10_000, dtype=np.int32)})
    with parquet_writer(path, table.schema, "none") as writer:
        writer.write_table(table)
    groups = ParquetGroups.of_directory(tmp_path)
    assert groups.read(0).equals(table)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"part\.parquet, row group 0: .*checksum"):
        groups.read(0)


def test_another_process_can_have_it(tmp_path):
    source = BatchSource(files(tmp_path), 9, xs, seed=0)
    assert every(pickle.loads(pickle.dumps(source))) == every(source)


def test_npy(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"dense": rng.random((50, 3), np.float32), "label": np.arange(50)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    groups = NpyGroups({name: tmp_path / f"{name}.npy" for name in arrays}, group_rows=8)
    assert groups.sizes == (8,) * 6 + (2,)
    source = BatchSource(groups, 12, seed=0, window=3)
    for rows in source.from_batch():
        labels = to_numpy(rows["label"])
        np.testing.assert_array_equal(to_numpy(rows["dense"]), arrays["dense"][labels])


@pytest.mark.parametrize(("start", "stop"), [(0, 62), (3, 8), (9, 41), (10, 30), (61, 62)])
def test_some_of_the_rows(tmp_path, start, stop):
    rows = GroupRange(files(tmp_path), start, stop)
    got = [row for batch in every(BatchSource(rows, 7, xs)) for row in batch]
    assert got == list(range(start, stop))
    assert sum(rows.sizes) == stop - start


def test_rows_that_are_not_there(tmp_path):
    for start, stop in ((5, 5), (0, 63), (-1, 3)):
        with pytest.raises(ValueError, match="not among 62 rows"):
            GroupRange(files(tmp_path), start, stop)


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="no Parquet files"):
        ParquetGroups.of_directory(tmp_path)
    with pytest.raises(DataError, match="no Parquet files"):
        ParquetGroups(())
    groups = files(tmp_path)
    with pytest.raises(DataError, match=r"0.parquet has no column 'y'; its columns are x, bag"):
        _ = ParquetGroups(groups.paths, ("y",)).sizes
    (tmp_path / "no.parquet").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="is not a Parquet file"):
        _ = ParquetGroups.of_directory(tmp_path).sizes
    np.save(tmp_path / "a.npy", np.zeros(3))
    np.save(tmp_path / "b.npy", np.zeros(4))
    with pytest.raises(DataError, match="with equal rows"):
        _ = NpyGroups({"a": tmp_path / "a.npy", "b": tmp_path / "b.npy"}).sizes
    for content in (b"x" * 100, b"", b"PK\3\4" * 9):
        (tmp_path / "no.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"no\.npy is not an npy file"):
            _ = NpyGroups({"a": tmp_path / "no.npy"}).sizes
    # NumPy's format has no name for bfloat16, which it writes as bytes.
    for array in (np.ones(3, ml_dtypes.bfloat16), np.ones(3, [("x", "f4")])):
        np.save(tmp_path / "no.npy", array)
        with pytest.raises(DataError, match=r"no\.npy holds .*, expected numbers"):
            _ = NpyGroups({"a": tmp_path / "no.npy"}).sizes
    with pytest.raises(DataError, match="make no batch of 40: a process of 2 has 3"):
        len(BatchSource(groups, 40, shard=Shard(0, 2)))
    with pytest.raises(DataError, match=r"of 2 has 3. rows, too few for the 3. batches"):
        len(BatchSource(groups, 1, shard=Shard(0, 2), drop_remainder=False))
    for options in ({"batch_size": 0}, {"batch_size": 1, "window": 0}):
        with pytest.raises(ValueError, match="is 1 or more"):
            BatchSource(groups, **options)
    with pytest.raises(ValueError, match="a shard is one of"):
        Shard(2, 2)
    with pytest.raises(IndexError, match="no batch 7"):
        BatchSource(groups, 10)[7]


def test_columns_as_arrays():
    np.testing.assert_array_equal(
        to_numpy(pa.chunked_array([[[1, 2]], [[3, 4]]])), [[1, 2], [3, 4]]
    )
    with pytest.raises(DataError, match="different lengths"):
        to_numpy(pa.chunked_array([[[1, 2], [3]]]))
    with pytest.raises(DataError, match="1 missing values"):
        to_numpy(pa.chunked_array([[1, None]]))


def test_a_window_that_could_not_be_read_is_read_again(tmp_path):
    groups = files(tmp_path)

    class Busy:
        sizes, is_busy = groups.sizes, True

        def read(self, group):
            if self.is_busy:
                raise OSError("the disk is busy")
            return groups.read(group)

    busy = Busy()
    source = BatchSource(busy, 5, xs)
    with pytest.raises(OSError, match="busy"):
        source[0]
    busy.is_busy = False
    assert source[0].tolist() == [0, 1, 2, 3, 4]
