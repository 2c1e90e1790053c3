"""Click logs as npy, npz and record files: TorchRec's recorded arrays, and readers of our own."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.commands import main
from jaxrec.data import (
    BatchSource,
    DataError,
    MultiHot,
    NpyGroups,
    ParquetGroups,
    RecordGroups,
    npz_members,
    write_multi_hot,
    write_npy,
    write_records,
)
from jaxrec.data.arrays import NpzMember, NpzWriter, to_numpy
from jaxrec.data.criteo import conversion, parts
from jaxrec.data.criteo.conversion import convert
from jaxrec.data.criteo.exports import RECORD_NAMES
from jaxrec.data.criteo.parts import Conversion
from jaxrec.data.transforms import CATEGORICAL_NAMES
from tests import golden
from tests.data.criteo.test_conversion import two_files

ROWS = tuple(50 + 7 * i for i in range(26))
SIZES = tuple(1 + i % 4 for i in range(26))
MULTI_HOT = MultiHot(CATEGORICAL_NAMES, SIZES, ROWS)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A directory of Parquet files in many small row groups, for each kind of ids."""
    directory = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "BLOCK_BYTES", 1000)
        patch.setattr(conversion, "PART_BLOCKS", 3)
        patch.setattr(parts, "GROUP_BLOCKS", 2)
        text = two_files(directory / "text")
        for ids in ("raw", "hash", "contiguous"):
            options = Conversion(ids=ids, table_rows=ROWS, threshold=2)
            convert(text, directory / ids, options)
    return directory


def test_npy_files_are_torchrecs(logs, tmp_path):
    expected = golden.load("criteo", "tsv_to_npys_two_files")
    made = write_npy(logs / "raw", tmp_path, counts="log_above_smallest")
    assert [files.labels.name for files in made] == ["day_0_labels.npy", "day_1_labels.npy"]
    for day, files in enumerate(made):
        labels, dense, sparse = map(np.load, (files.labels, files.dense, files.sparse))
        np.testing.assert_array_equal(labels, expected[f"labels_{day}"])
        np.testing.assert_array_equal(sparse, expected[f"sparse_{day}"])
        np.testing.assert_allclose(dense, expected[f"dense_{day}"], rtol=1e-6, atol=1e-6)
        assert (labels.dtype, dense.dtype, sparse.dtype) == (np.int32, np.float32, np.int64)


def test_contiguous_ids(logs, tmp_path):
    expected = golden.load("criteo", "sparse_to_contiguous_threshold2")
    for day, files in enumerate(write_npy(logs / "contiguous", tmp_path)):
        sparse = np.load(files.sparse)
        assert sparse.dtype == np.int32
        np.testing.assert_array_equal(sparse, expected[f"sparse_contig_{day}"])


@pytest.mark.parametrize("counts", ["log", "raw"])
def test_counts(logs, tmp_path, counts):
    table = pq.read_table(sorted((logs / "hash").glob("*.parquet")))
    numbers = np.stack([table[name].to_numpy() for name in RECORD_NAMES[1:14]], axis=1)
    expected = np.log(numbers.astype(np.float64) + 3) if counts == "log" else numbers
    made = write_npy(logs / "hash", tmp_path, counts=counts)
    dense = np.concatenate([np.load(files.dense) for files in made])
    np.testing.assert_allclose(dense, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ids", ["raw", "hash"])
def test_multi_hot_files(logs, tmp_path, ids):
    """The reference's loop over a whole file, one feature after another."""
    table = pq.read_table(sorted((logs / ids).glob("000-*.parquet")))
    files = write_multi_hot(logs / ids, tmp_path, MULTI_HOT)[0]
    assert files.sparse.name == "day_0_sparse_multi_hot.npz"
    whole = {
        str(j): MULTI_HOT.tables[j][table[name].to_numpy().astype(np.int64) % ROWS[j]]
        for j, name in enumerate(CATEGORICAL_NAMES)
    }
    with np.load(files.sparse) as found:
        assert list(found) == list(whole)
        for name, array in whole.items():
            assert found[name].dtype == np.int32
            np.testing.assert_array_equal(found[name], array)
    again = write_multi_hot(logs / ids, tmp_path / "again", MULTI_HOT)[0]
    assert again.sparse.read_bytes() == files.sparse.read_bytes()


def test_batches_of_multi_hot_files(logs, tmp_path):
    files = write_multi_hot(logs / "hash", tmp_path, MULTI_HOT)[0]
    columns = {"label": files.labels, "dense": files.dense, **npz_members(files.sparse)}
    source = BatchSource(NpyGroups(columns, group_rows=7), 10, lambda rows: rows, seed=0)
    batches = [source[index] for index in range(len(source))]
    ids = np.concatenate([to_numpy(batch["20"]) for batch in batches])
    assert ids.shape == (30, SIZES[20])
    assert sorted(ids[:, 0]) == sorted(np.load(files.sparse)["20"][:, 0])


def test_records_there_and_back(logs, tmp_path):
    path = tmp_path / "new" / "train_data.bin"
    assert write_records(logs / "hash", path) == 50
    groups = RecordGroups(path, group_rows=16)
    assert groups.sizes == (16, 16, 16, 2)
    found = pa.concat_tables(map(groups.read, range(4)))
    expected = pq.read_table(sorted((logs / "hash").glob("*.parquet")))
    for name in RECORD_NAMES:
        column = expected[name].to_numpy()
        column = np.maximum(column, 0) if name.startswith("int") else column
        np.testing.assert_array_equal(found[name].to_numpy(), column, err_msg=name)
    assert groups.location(2) == (path, 32)
    # The reference's reader: a flat file of int32, 40 a row.
    raw = np.fromfile(path, np.int32).reshape(-1, 40)
    np.testing.assert_array_equal(raw[:, 14], expected["cat_0"].to_numpy())


def test_memory_does_not_hold_the_log(logs, tmp_path, monkeypatch):
    """Row groups are read one at a time."""
    sizes = []
    read = ParquetGroups.read
    monkeypatch.setattr(
        ParquetGroups, "read", lambda self, g: sizes.append(len(read(self, g))) or read(self, g)
    )
    write_npy(logs / "hash", tmp_path)
    assert max(sizes) < 12
    assert sum(sizes) == 50


def test_what_cannot_be_written(logs, tmp_path):
    with pytest.raises(DataError, match="has raw ids, which records of 32-bit integers"):
        write_records(logs / "raw", tmp_path / "x.bin")
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"summary\.json is missing"):
        write_npy(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="counts is 'ln'; expected one of log, "):
        write_npy(logs / "raw", tmp_path, counts="ln")
    with pytest.raises(ValueError, match="has 26 features, multi_hot has 1"):
        write_multi_hot(logs / "raw", tmp_path, MultiHot(("a",), (2,), (3,)))


def test_commands(logs, tmp_path, capsys):
    source = str(logs / "hash")
    assert main(["data", "npy", source, str(tmp_path / "npy"), "--counts", "raw"]) == 0
    assert "day_1_sparse.npy" in capsys.readouterr().out
    sizes, rows = map(str, SIZES), map(str, ROWS)
    options = ["--sizes", *sizes, "--table-rows", *rows]
    assert main(["data", "multi-hot", source, str(tmp_path / "multi"), *options]) == 0
    with np.load(tmp_path / "multi" / "day_0_sparse_multi_hot.npz") as found:
        assert found["3"].shape == (30, 4)
    assert main(["data", "records", source, str(tmp_path / "train.bin")]) == 0
    assert "50 rows in" in capsys.readouterr().out
    assert main(["data", "records", source]) == 2
    assert "give the Parquet files of `jaxrec data criteo` and an output" in _errors(capsys)
    assert main(["data", "multi-hot", source, "x", "--sizes", "3"]) == 2
    assert "sizes is 26 numbers of 1 or more" in _errors(capsys)
    assert main(["data", "records", str(logs / "raw"), str(tmp_path / "raw.bin")]) == 1
    assert "convert the log by jaxrec data criteo" in _errors(capsys)


def _errors(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


# npz files.


@pytest.mark.parametrize("fortran", [False, True], ids=["c", "fortran"])
def test_members_are_mapped(tmp_path, fortran):
    path = tmp_path / "x.npz"
    arrays = {"a": np.arange(5), "b_c": np.random.default_rng(0).normal(size=(3, 4))}
    if fortran:
        arrays["b_c"] = np.asfortranarray(arrays["b_c"])
    np.savez(path, **arrays)
    assert list(npz_members(path)) == ["a", "b_c"]
    for name, member in npz_members(path).items():
        array = member.open()
        assert isinstance(array, np.memmap)
        np.testing.assert_array_equal(array, arrays[name])


def test_bad_npz_files(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.zeros(9))
    with pytest.raises(DataError, match="array 'a' is compressed and cannot be mapped"):
        NpzMember(path, "a").open()
    with pytest.raises(DataError, match="has no array 'b'; it has a"):
        NpzMember(path, "b").open()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="is not an npz file, or is cut short"):
        npz_members(path)
    with pytest.raises(FileNotFoundError):
        npz_members(tmp_path / "none.npz")
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    content = buffer.getvalue()
    for damage in (content.replace(b"\x93NUMPY", b"\x93NOMPY"), content.replace(b"(3,)", b"(4,)")):
        path.write_bytes(damage)
        with pytest.raises(DataError, match=r"x\.npz is damaged: 'a\.npy' \(Bad CRC-32"):
            NpzMember(path, "a").open()
    for header in (b"\x93NOMPY" + bytes(99), array_header((4,)), array_header((-1,)), b""):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", header + bytes(24) if header else b"")
        with pytest.raises(DataError, match=r"x\.npz: 'a' is not an npy array"):
            NpzMember(path, "a").open()


def array_header(shape):
    """The header of an array of float64."""
    buffer = io.BytesIO()
    described = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def test_parts_that_do_not_fill_the_shape(tmp_path):
    with (
        NpzWriter(tmp_path / "x.npz") as writer,
        pytest.raises(ValueError, match=r"array 'a' of shape \(3,\) got 2 elements"),
    ):
        writer.write("a", (3,), np.int32, [np.arange(2)])


@pytest.mark.parametrize("size", [0, 100, 161], ids=str)
def test_bad_record_files(tmp_path, size):
    (tmp_path / "x.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=f"has {size} bytes; records of 40 32-bit integers"):
        _ = RecordGroups(tmp_path / "x.bin").sizes
