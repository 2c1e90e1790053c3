from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from jaxrec.commands import main
from jaxrec.data import DataError
from jaxrec.data.contiguous import Appearances, ContiguousMap
from jaxrec.data.criteo import conversion, parts
from jaxrec.data.criteo.conversion import convert as to_parquet
from jaxrec.data.criteo.conversion import source_files
from jaxrec.data.criteo.parts import Conversion
from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES, log_counts_above
from tests import golden
from tests.data.criteo.test_log import GOOD, KAGGLE, ROWS, changed, write

pytestmark = pytest.mark.every_case

RAW = Conversion(ids="raw")


def columns(directory, names):
    table = pq.read_table(sorted(directory.glob("*.parquet")))
    return np.stack([table[name].to_numpy() for name in names], axis=-1)


def two_files(directory):
    directory.mkdir()
    lines = KAGGLE.read_bytes().splitlines(keepends=True)
    (directory / "day_0").write_bytes(b"".join(lines[:30]))
    (directory / "day_1.gz").write_bytes(gzip.compress(b"".join(lines[30:])))
    return directory


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(conversion, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(conversion, "PART_BLOCKS", 3)
    monkeypatch.setattr(parts, "GROUP_BLOCKS", 2)


def same_as_torchrec(output, summary):
    """TorchRec's arrays of two files: the smallest count is each file's own."""
    expected = golden.load("criteo", "tsv_to_npys_two_files")
    dense, sparse = columns(output, DENSE_NAMES), columns(output, CATEGORICAL_NAMES)
    labels = columns(output, ["label"])
    for file, name, rows in ((0, "day_0", slice(0, 30)), (1, "day_1.gz", slice(30, 50))):
        got = log_counts_above(dense[rows], summary.smallest[name])
        np.testing.assert_allclose(got, expected[f"dense_{file}"], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(sparse[rows], expected[f"sparse_{file}"])
        np.testing.assert_array_equal(labels[rows], expected[f"labels_{file}"])


@pytest.mark.parametrize("threads", [1, 3])
def test_golden_of_two_files(tmp_path, small_blocks, threads):
    source, output = two_files(tmp_path / "log"), tmp_path / "out"
    summary = to_parquet(source, output, RAW, threads=threads)
    assert (summary.rows, summary.bad_lines) == (50, 0)
    same_as_torchrec(output, summary)
    assert len(list(output.glob("*.parquet"))) > 4
    assert to_parquet(source, output, RAW) == summary  # nothing is left to do


def test_hashed(tmp_path):
    summary = to_parquet(KAGGLE, tmp_path, Conversion(table_rows=ROWS))
    expected = golden.load("criteo", "tsv_to_npys")["sparse"] % np.array(ROWS)
    got = columns(tmp_path, CATEGORICAL_NAMES)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, expected)
    assert summary.table_rows == ROWS


@pytest.mark.parametrize("compression", ["lz4", "zstd", "none"])
def test_compressions(tmp_path, compression):
    to_parquet(KAGGLE, tmp_path, Conversion(table_rows=ROWS, compression=compression))
    expected = golden.load("criteo", "tsv_to_npys")["sparse"] % np.array(ROWS)
    np.testing.assert_array_equal(columns(tmp_path, CATEGORICAL_NAMES), expected)
    (path,) = tmp_path.glob("*.parquet")
    column = pq.read_metadata(path).row_group(0).column(20)
    assert column.compression == {"lz4": "LZ4", "zstd": "ZSTD", "none": "UNCOMPRESSED"}[compression]
    # Any reader of Parquet files reads those of "none"; the others' must know a newer encoding.
    assert ("BYTE_STREAM_SPLIT" in column.encodings) == (compression != "none")
    assert not pq.read_schema(path).field("cat_7").nullable


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_golden_contiguous(tmp_path, small_blocks, threshold):
    source, output = two_files(tmp_path / "log"), tmp_path / "out"
    summary = to_parquet(source, output, Conversion(ids="contiguous", threshold=threshold))
    expected = golden.load("criteo", f"sparse_to_contiguous_threshold{threshold}")
    got = columns(output, CATEGORICAL_NAMES)
    np.testing.assert_array_equal(got[:30], expected["sparse_contig_0"])
    np.testing.assert_array_equal(got[30:], expected["sparse_contig_1"])
    assert all(summary.table_rows >= got.max(axis=0) + 1)
    numbers = ContiguousMap.load(output / "maps/cat_0.parquet")
    raw = golden.load("criteo", "tsv_to_npys")["sparse"].astype(np.uint32)
    np.testing.assert_array_equal(numbers(raw[:, 0]), got[:, 0])
    assert not (output / "raw").exists()


def test_appearances_over_pieces():
    column = np.random.default_rng(0).integers(0, 50, 1000).astype(np.uint32)
    whole = ContiguousMap.of(Appearances.count([column]), 18)
    pieces = ContiguousMap.of(Appearances.count(np.split(column, [1, 10, 500])), 18)
    np.testing.assert_array_equal(pieces.ids, whole.ids)
    np.testing.assert_array_equal(pieces.numbers, whole.numbers)
    counts = np.bincount(column)
    order = [i for i in dict.fromkeys(column.tolist()) if counts[i] >= 18]
    expected = {identifier: 2 + place for place, identifier in enumerate(order)}
    got = whole(np.arange(60, dtype=np.uint32))
    np.testing.assert_array_equal(got, [expected.get(i, 1) for i in range(60)])


def test_bad_lines_are_left_out_and_reported(tmp_path, small_blocks):
    path = write(
        tmp_path / "log", [GOOD] * 7 + [changed(0, "2"), GOOD[:-1]] + [GOOD] * 6 + [[], GOOD]
    )
    bad = []
    summary = to_parquet(path, tmp_path / "out", Conversion(bad_rows="skip"), report=bad.append)
    assert [line.number for line in bad] == [8, 9, 16]
    assert (summary.rows, summary.bad_lines) == (14, 3)
    assert columns(tmp_path / "out", ["label"]).shape == (14, 1)
    remembered = [
        line for p in (tmp_path / "out").glob("*.parquet") for line in parts.read_part(p).bad
    ]
    assert sorted(remembered) == sorted(map(str, bad))


def test_a_bad_line_is_fatal_by_default(tmp_path):
    path = write(tmp_path / "log", [GOOD] * 7 + [changed(0, "2")])
    with pytest.raises(DataError, match=r"log, line 8, column 1 \(label\): a label is 0 or 1"):
        to_parquet(path, tmp_path / "out", RAW)
    assert list((tmp_path / "out").iterdir()) == []


def test_files_that_are_none(tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(KAGGLE.read_bytes())[:-200])
    with pytest.raises(DataError, match=r"log\.gz: the gzip file is cut short or damaged"):
        to_parquet(path, tmp_path / "a", RAW)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="the file is empty"):
        to_parquet(path, tmp_path / "b", RAW)
    write(path, [["1"]])
    with pytest.raises(DataError, match="it has no rows"):
        to_parquet(path, tmp_path / "c", Conversion(bad_rows="skip"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError):
        to_parquet(tmp_path / "nothing", tmp_path / "d", RAW)


def test_stopped_and_gone_on_with(tmp_path, small_blocks):
    """What was complete stays as it is, and the rest is made."""
    source, output = two_files(tmp_path / "log"), tmp_path / "out"
    reads = []

    def stop_in_the_middle(done, total):
        reads.append(done)
        if len(reads) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_parquet(source, output, RAW, progress=stop_in_the_middle)
    made = {p.name: p.stat().st_mtime_ns for p in output.iterdir()}
    assert made
    assert all(not name.startswith(".") for name in made)
    summary = to_parquet(source, output, RAW)
    same_as_torchrec(output, summary)
    assert all((output / name).stat().st_mtime_ns == t for name, t in made.items())


@pytest.mark.slow
def test_killed_and_gone_on_with(tmp_path):
    """A real SIGKILL, and the same bytes as without."""
    source = tmp_path / "log"
    source.write_bytes(KAGGLE.read_bytes() * 400)
    program = (
        "import sys, pathlib; from jaxrec.data.criteo import conversion;"
        "conversion.BLOCK_BYTES = 100_000;"
        "conversion.PART_BLOCKS = 4; conversion.convert(*map(pathlib.Path, sys.argv[1:]),"
        "conversion.Conversion())"
    )
    command = [sys.executable, "-P", "-c", program, str(source)]
    subprocess.run([*command, tmp_path / "whole"], check=True, timeout=120)
    output = tmp_path / "out"
    with subprocess.Popen([*command, output]) as process:
        while process.poll() is None and len(list(output.glob("*.parquet"))) < 3:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert not (output / "summary.json").exists()
    subprocess.run([*command, output], check=True, timeout=120)
    names = {p.name for p in (tmp_path / "whole").iterdir()}
    assert {p.name for p in output.iterdir() if p.suffix != ".unfinished"} == names
    for name in names:
        assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_full_disk_leaves_nothing_unfinished(tmp_path, small_blocks, monkeypatch):
    def write_table(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq.ParquetWriter, "write_table", write_table)
    with pytest.raises(OSError, match="No space left on device"):
        to_parquet(KAGGLE, tmp_path, RAW)
    assert list(tmp_path.iterdir()) == []


def test_another_conversion_is_refused(tmp_path, small_blocks):
    to_parquet(KAGGLE, tmp_path, RAW)
    with pytest.raises(DataError, match=r"another conversion \(ids differs\)"):
        to_parquet(KAGGLE, tmp_path, Conversion())
    os.remove(tmp_path / "summary.json")
    with pytest.raises(DataError, match=r"another conversion \(ids differs\)"):
        to_parquet(KAGGLE, tmp_path, Conversion())
    (tmp_path / "x").mkdir()
    pq.write_table(pq.read_table(sorted(tmp_path.glob("*.parquet"))[0]).replace_schema_metadata(),
                   tmp_path / "x/000-kaggle.tsv-00000.parquet")  # fmt: skip
    with pytest.raises(DataError, match="was not written by"):
        to_parquet(KAGGLE, tmp_path / "x", RAW)


OTHER_SOURCES = {
    "name": lambda log: log.rename(log.with_name("other.tsv")),
    "size": lambda log: write(log, [GOOD] * 3),
}


@pytest.mark.parametrize("change", OTHER_SOURCES.values(), ids=OTHER_SOURCES)
@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "unfinished"])
def test_another_log_is_refused(tmp_path, change, is_finished):
    """Not taken for the first, and not mixed with its rows."""
    log, output = write(tmp_path / "log.tsv", [GOOD] * 5), tmp_path / "out"
    to_parquet(log, output, RAW)
    if not is_finished:
        os.remove(output / "summary.json")
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    other = change(log)
    with pytest.raises(DataError, match=r"rows of another log.*log\.tsv.*give another output"):
        to_parquet(other, output, RAW)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_a_file_that_comes_in_between_is_refused(tmp_path):
    """It would be number 0, and the rows of day_1 would be written again as number 1."""
    source, output = tmp_path / "log", tmp_path / "out"
    source.mkdir()
    write(source / "day_1", [GOOD] * 5)
    to_parquet(source, output, RAW)
    os.remove(output / "summary.json")
    write(source / "day_0", [GOOD] * 5)
    with pytest.raises(DataError, match=r"rows of another log \(day_1 \([\d,]+ bytes\)\)"):
        to_parquet(source, output, RAW)


def test_summaries_of_earlier_versions_are_read(tmp_path):
    """They name the files, and not their sizes."""
    summary = to_parquet(KAGGLE, tmp_path, RAW)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content.pop("sources") == {KAGGLE.name: KAGGLE.stat().st_size}
    (tmp_path / "summary.json").write_text(json.dumps(content))
    assert to_parquet(KAGGLE, tmp_path, RAW).rows == summary.rows
    with pytest.raises(DataError, match="rows of another log"):
        to_parquet(write(tmp_path / "log", [GOOD]), tmp_path, RAW)


def test_days_go_by_their_numbers(tmp_path):
    for name in ("day_10", "day_2.gz", "day_1", ".hidden"):
        (tmp_path / name).touch()
    assert [p.name for p in source_files(tmp_path)] == ["day_1", "day_2.gz", "day_10"]


@pytest.mark.parametrize(
    "options", [{"table_rows": (1, 2)}, {"table_rows": (0,)}, {"threshold": 0}], ids=str
)
def test_conversions_that_are_none(options):
    with pytest.raises(ValueError, match="got"):
        Conversion(**options)


def test_command(tmp_path, capsys):
    path = write(tmp_path / "log", [GOOD] * 3 + [changed(0, "2")] * 30)
    output = str(tmp_path / "out")
    assert main(["data", "criteo", str(path), output, "--bad-rows=skip"]) == 0
    said = capsys.readouterr().out
    assert "3 rows in " in said
    assert "30 bad lines left out" in said
    assert said.count("left out: ") == 20
    assert "made before" not in said
    assert json.loads((tmp_path / "out/summary.json").read_text())["rows"] == 3
    assert main(["data", "criteo", str(path), output, "--bad-rows=skip"]) == 0
    assert "3 rows in " in (said := capsys.readouterr().out)
    assert "they were made before, nothing is left to do" in said


def test_help_names_the_arguments(capsys):
    assert main(["data", "--help"]) == 0
    text = capsys.readouterr().out
    assert "criteo " in text
    assert "INPUT OUTPUT" in text
    with pytest.raises(SystemExit):
        main(["data", "criteo", "--help"])
    text = capsys.readouterr().out
    assert "INPUT OUTPUT" in text
    assert "(default: .)" not in text


def test_a_path_in_brackets_is_no_markup(tmp_path, capsys):
    log = write(tmp_path / "log", [GOOD])
    assert main(["data", "criteo", str(log), str(tmp_path / "[red]x[/b]")]) == 0
    assert f"1 rows in {tmp_path}/[red]x[/b]" in capsys.readouterr().out


WRONG = {
    "nothing": (["criteo"], 2, "INPUT OUTPUT"),
    "format": (["avazu"], 2, "unknown format 'avazu'"),
    "threads": (["criteo", "log", "out", "--threads=0"], 2, "threads must be 1 or more"),
    "rows": (["criteo", "log", "out", "--table-rows", "1", "2"], 2, "table-rows is one number"),
    "missing": (["criteo", "missing", "out"], 1, "missing: No such file"),
    "bad": (["criteo", "log", "out"], 1, "line 1: 1 columns"),
}


@pytest.mark.parametrize(("options", "code", "message"), WRONG.values(), ids=WRONG)
def test_what_goes_wrong_is_one_sentence(tmp_path, monkeypatch, capsys, options, code, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "log", [["1"]])
    assert main(["data", *options]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
