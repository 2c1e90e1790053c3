from __future__ import annotations

import gzip
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data import Clicks, CriteoFile, DataError
from jaxrec.data.criteo import log as criteo_log
from tests import golden

pytestmark = pytest.mark.every_case

KAGGLE = pathlib.Path(golden.__file__).parent / "golden/criteo/kaggle.tsv"
ROWS = tuple(range(100, 126))
GOOD = ["1", *["7"] * 13, *["0a"] * 26]


def read(path, start=0, stop=None, rows=ROWS):
    log = CriteoFile(pathlib.Path(path), rows)
    stop = log.num_rows if stop is None else stop
    return Clicks.concatenate(list(log.chunks(start, stop)))


def write(path, lines):
    path.write_text("".join("\t".join(fields) + "\n" for fields in lines))
    return path


def parse_line(line):
    """The plain way: split, int, log."""
    label, *fields = line.rstrip("\n").split("\t")
    dense = [np.log(np.float32(max(int(x or "0"), -2) + 3)) for x in fields[:13]]
    ids = [int(x or "0", 16) % rows for x, rows in zip(fields[13:], ROWS, strict=True)]
    return float(label), dense, ids


def test_golden():
    arrays = golden.load("criteo", "tsv_to_npys")
    clicks = read(KAGGLE)
    np.testing.assert_array_equal(clicks.labels, arrays["labels"][:, 0])
    np.testing.assert_array_equal(clicks.ids, arrays["sparse"] % np.array(ROWS))
    # TorchRec shifts by the smallest number of the file, this reader by Criteo's, -2.
    smallest = min(
        int(x or 0) for line in KAGGLE.read_text().splitlines() for x in line.split("\t")[1:14]
    )
    shifted = np.exp(arrays["dense"].astype(np.float64)) - 2 + smallest + 3
    np.testing.assert_allclose(clicks.dense, np.log(shifted), rtol=1e-5)


def test_against_the_plain_way():
    clicks = read(KAGGLE)
    for row, line in enumerate(KAGGLE.read_text().splitlines()):
        label, dense, ids = parse_line(line)
        assert clicks.labels[row] == label
        np.testing.assert_allclose(clicks.dense[row], dense, rtol=1e-6)
        np.testing.assert_array_equal(clicks.ids[row], ids)


@pytest.mark.parametrize("block_bytes", [1, 300, 5000])
def test_blocks_do_not_show(monkeypatch, block_bytes):
    whole = read(KAGGLE)
    monkeypatch.setattr(criteo_log, "BLOCK_BYTES", block_bytes)
    for start, stop in ((0, 50), (7, 31), (49, 50)):
        part = read(KAGGLE, start, stop)
        np.testing.assert_array_equal(part.ids, whole.ids[start:stop])
        np.testing.assert_array_equal(part.dense, whole.dense[start:stop])


def test_compressed(tmp_path):
    path = tmp_path / "log"  # told by its first bytes, not by its name
    path.write_bytes(gzip.compress(KAGGLE.read_bytes()))
    np.testing.assert_array_equal(read(path).ids, read(KAGGLE).ids)


@pytest.mark.parametrize("change", [b"\r\n", b""], ids=["windows", "no-newline-at-the-end"])
def test_ends_of_lines(tmp_path, change):
    path, content = tmp_path / "log", KAGGLE.read_bytes()
    path.write_bytes(content.replace(b"\n", change) if change else content.rstrip(b"\n"))
    assert CriteoFile(path, ROWS).num_rows == 50
    np.testing.assert_array_equal(read(path).ids, read(KAGGLE).ids)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("block_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_blank_lines_at_the_end_are_none(tmp_path, monkeypatch, end, block_bytes, count):
    monkeypatch.setattr(criteo_log, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "log"
    path.write_bytes(KAGGLE.read_bytes().replace(b"\n", end) + end * count)
    assert CriteoFile(path, ROWS).num_rows == 50
    np.testing.assert_array_equal(read(path).ids, read(KAGGLE).ids)


def test_blank_lines_elsewhere_are_bad(tmp_path):
    path = write(tmp_path / "log", [GOOD, [], [], GOOD])
    with pytest.raises(DataError, match="line 2: 1 columns"):
        read(path)
    with pytest.raises(DataError, match="the file is empty"):
        CriteoFile(write(path, [[], []]), ROWS).num_rows  # noqa: B018


@pytest.mark.parametrize("block_bytes", [1, 300, 1 << 20])
def test_bad_lines_are_skipped(tmp_path, monkeypatch, block_bytes):
    """Rows are numbered as if they were not there."""
    monkeypatch.setattr(criteo_log, "BLOCK_BYTES", block_bytes)
    good = [line.split("\t") for line in KAGGLE.read_text().splitlines()]
    lines = [GOOD[:-1], *good[:20], changed(0, "2"), [], *good[20:], changed(3, "x")]
    log = CriteoFile(write(tmp_path / "log", lines), ROWS, bad_rows="skip")
    assert (log.num_rows, log.bad_lines) == (50, 4)
    expected = read(KAGGLE)
    for start, stop in ((0, 50), (19, 22), (49, 50)):
        part = Clicks.concatenate(list(log.chunks(start, stop)))
        np.testing.assert_array_equal(part.ids, expected.ids[start:stop])
    with pytest.raises(DataError, match="none of its 1 lines is a row"):
        CriteoFile(write(tmp_path / "bad", [["1"]]), ROWS, bad_rows="skip").num_rows  # noqa: B018


_COUNTS = st.one_of(st.just(""), st.integers(-(2**31), 2**31 - 1).map(str), st.just("12.0"))
_HASHES = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map("{:x}".format))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("01"),
            st.lists(_COUNTS, min_size=13, max_size=13),
            st.lists(_HASHES, min_size=26, max_size=26),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_good_line(tmp_path_factory, lines):
    lines = [[label, *counts, *hashes] for label, counts, hashes in lines]
    clicks = read(write(tmp_path_factory.mktemp("criteo") / "log", lines))
    for row, fields in enumerate(lines):
        label, dense, ids = parse_line("\t".join(fields).replace(".0", ""))
        assert clicks.labels[row] == label
        np.testing.assert_allclose(clicks.dense[row], dense, rtol=1e-5)
        np.testing.assert_array_equal(clicks.ids[row], ids)


def changed(column, field):
    return [*GOOD[:column], field, *GOOD[column + 1 :]]


MALFORMED = {
    "too-few-columns": (GOOD[:-1], "line 3: 39 columns.*has 40"),
    "too-many-columns": ([*GOOD, ""], "line 3: 41 columns.*has 40"),
    "empty-line": ([], "line 3: 1 columns"),
    "label-2": (changed(0, "2"), r"line 3, column 1 \(label\): a label is 0 or 1, got '2'"),
    "label-missing": (changed(0, ""), r"column 1 \(label\).*got ''"),
    "label-10": (changed(0, "10"), "got '10'"),
    "no-integer": (changed(5, "x"), r"line 3, column 6 \(I5\): expected an integer.*got 'x'"),
    "fraction": (changed(5, "1.5"), r"\(I5\).*got '1.5'"),
    "minus": (changed(5, "-"), r"\(I5\).*got '-'"),
    "minus-inside": (changed(5, "1-2"), r"\(I5\).*got '1-2'"),
    "only-fraction": (changed(5, ".0"), r"\(I5\).*got '.0'"),
    "hex-integer": (changed(13, "1f"), r"column 14 \(I13\).*got '1f'"),
    "long-integer": (changed(1, "9" * 5000), r"\(I1\): expected an integer of 32 bits"),
    "underscore": (changed(1, "1_0"), r"\(I1\).*got '1_0'"),
    "other-digit": (changed(1, "٣"), r"\(I1\).*got '٣'"),
    "quoted": (changed(1, '"1"'), r"\(I1\).*got '\"1\"'"),
    "huge-integer": (changed(1, str(2**31)), r"\(I1\): expected an integer of 32 bits"),
    "prefixed": (changed(2, "0x1f"), r"\(I2\).*got '0x1f'"),
    "plus": (changed(2, "+1"), r"\(I2\).*got '\+1'"),
    "space": (changed(1, " 1"), r"\(I1\).*got ' 1'"),
    "no-hex": (changed(14, "0g"), r"column 15 \(C1\): expected a hexadecimal id.*got '0g'"),
    "long-hex": (changed(39, "123456789"), r"column 40 \(C26\).*up to 8 digits.*'123456789'"),
    "not-ascii": (changed(20, "é"), r"\(C7\)"),
}


@pytest.mark.parametrize(("line", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_lines_are_named(tmp_path, line, message):
    path = write(tmp_path / "log", [GOOD, GOOD, line, GOOD])
    with pytest.raises(DataError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("zeros", [11, 5000])
def test_leading_zeros(tmp_path, zeros):
    lines = [GOOD, changed(3, "0" * zeros + "17"), changed(4, "-" + "0" * zeros + "1.0")]
    clicks = read(write(tmp_path / "log", lines))
    expected = [[7, 7], [17, 7], [7, -1]]
    np.testing.assert_array_equal(np.exp(clicks.dense[:, 2:4]).round() - 3, expected)


def test_lines_count_over_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(criteo_log, "BLOCK_BYTES", 100)
    with pytest.raises(DataError, match="line 9, column 1 "):
        read(write(tmp_path / "log", [GOOD] * 8 + [changed(0, "?")]))


def test_damaged_files(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="the file is empty"):
        read(path)
    path.write_bytes(gzip.compress(KAGGLE.read_bytes())[:-200])
    with pytest.raises(DataError, match="cut short or damaged"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing")


def test_tables_must_be_26():
    with pytest.raises(ValueError, match="26 categorical features"):
        CriteoFile(KAGGLE, (10,) * 25)
