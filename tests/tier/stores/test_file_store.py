"""Rows in a sparse file: size, memory, full disks and damage."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from jaxrec.tier.stores import record_file
from jaxrec.tier.stores.file_store import FileStore
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.record_header import read_state, write_state
from tests.tier.disks import largest_file, small_disk
from tests.tier.kills import kill_repeatedly

WIDTH = 260
LARGE = RecordFormat(WIDTH, "user rows float32[64], user sum float32[1]", 4_000_000_000)
ANY_IDS = RecordFormat(WIDTH, "item rows uint8[260]")
RANGE = RecordFormat(WIDTH, "item rows uint8[260]", 100_000)
every_format = pytest.mark.parametrize("format", [ANY_IDS, RANGE], ids=["any-ids", "range"])


def opened(directory, format):
    store = FileStore(directory)
    store.open(format)
    return store


def random_records(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, WIDTH), np.uint8)


def on_disk(directory):
    return sum(512 * path.stat().st_blocks for path in directory.iterdir())


def mapped_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGESIZE")


def test_a_table_of_a_terabyte(tmp_path):
    """Only what was written takes room on the disk, in this process, and in a snapshot."""
    store = opened(tmp_path / "store", LARGE)
    assert store._path.stat().st_size > 10**12
    ids = np.unique(np.random.default_rng(0).integers(0, LARGE.num_ids, 3000))
    ids[-1] = LARGE.num_ids - 1
    store.put(ids, random_records(ids.size))
    absent = ids[:-1] + 1
    absent = absent[~np.isin(absent, ids)]
    before = on_disk(tmp_path / "store")
    assert not store.get(absent)[0].any()
    assert on_disk(tmp_path / "store") == before < 3 * 4096 * ids.size
    store.close()
    store = opened(tmp_path / "store", LARGE)
    found, records = store.get(ids)
    assert found.all()
    np.testing.assert_array_equal(records, random_records(ids.size))
    assert len(store) == ids.size
    store.snapshot(tmp_path / "snapshot")
    assert on_disk(tmp_path / "snapshot") < 2 * before
    store.clear()
    assert on_disk(tmp_path / "store") < 10**6
    store.load_snapshot(tmp_path / "snapshot")
    np.testing.assert_array_equal(store.get(ids)[1], random_records(ids.size))
    store.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_mapped_memory_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(record_file, "_MAPPED_BYTES", 8 << 20)
    store = opened(tmp_path, RANGE)
    before, most = mapped_bytes(), 0
    for start in range(0, RANGE.num_ids, 5000):  # 26 MB in all
        ids = np.arange(start, start + 5000)
        store.put(ids, random_records(5000))
        most = max(most, mapped_bytes() - before)
    for seed in range(20):
        ids = np.random.default_rng(seed).permutation(RANGE.num_ids)[:500]
        assert store.get(ids)[0].all()
        store.put(ids, random_records(500))
        most = max(most, mapped_bytes() - before)
    store.close()
    # At most the limit, and what one batch of 500 random records maps, 64 KB each.
    assert 0 < most < (8 << 20) + 500 * (64 << 10)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_pages_stay_while_a_file_maps_few(tmp_path, monkeypatch):
    """Other files may have mapped more than the limit: this one need not give its pages back."""
    monkeypatch.setattr(record_file, "_MAPPED_BYTES", 64 << 20)
    monkeypatch.setattr(record_file, "_mapped_bytes", lambda: 1 << 40)
    store = opened(tmp_path, RANGE)
    monkeypatch.setattr(store._file, "_resident", 0)
    given_back = []
    monkeypatch.setattr(store._file, "_mmap", Advised(store._file._mmap, given_back))
    for _ in range(8):
        store.put(np.arange(50), random_records(50))
        assert store.get(np.arange(50))[0].all()
    assert not given_back
    store.put(np.arange(5000), random_records(5000))
    store.close()
    assert given_back == [mmap.MADV_DONTNEED]


class Advised:
    """A map of a file that notes what it is advised."""

    def __init__(self, file: mmap.mmap, advice: list[int]) -> None:
        self._file, self.madvise = file, advice.append

    def close(self) -> None:
        self._file.close()


@every_format
@pytest.mark.parametrize("through_map", [True, False], ids=["map", "file"])
def test_both_ways_of_writing(format, through_map, tmp_path, monkeypatch):
    """On a disk with little room, and on some file systems, pages are not written by the map."""
    monkeypatch.setattr(record_file, "_SPARE_BYTES", 0 if through_map else 2**62)
    store, ids = opened(tmp_path, format), np.arange(3000)
    for seed in range(2):
        store.put(ids, random_records(3000, seed))
        np.testing.assert_array_equal(store.get(ids)[1], random_records(3000, seed))
    store.close()


@every_format
def test_a_full_disk(format, tmp_path):
    """The process lives, says so, and has lost no record that it had."""
    with small_disk(tmp_path / "disk", 4) as disk:
        store = opened(disk / "store", format)
        kept = np.arange(0, 2000, 2)
        store.put(kept, random_records(1000))
        with pytest.raises(OSError, match="records cannot be written: No space left") as raised:
            store.put(np.arange(10_000, 40_000), random_records(30_000))
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.filename == str(disk / "store" / "records")
        assert "free some of it and start again from the last checkpoint" in str(raised.value)
        for count in range(3):  # what exists can be read and written, and what does not exist read
            found, records = store.get(kept)
            assert found.all()
            np.testing.assert_array_equal(records, random_records(1000, count))
            assert not store.get(np.arange(90_000, 95_000))[0].any()
            store.put(kept, random_records(1000, count + 1))
        with pytest.raises(OSError, match="No space left"):
            store.snapshot(disk / "snapshot")
        assert not (disk / "snapshot").exists()
        store.close()
        store = opened(disk / "store", format)
        np.testing.assert_array_equal(store.get(kept)[1], random_records(1000, 3))
        store.close()


def test_a_file_system_without_large_files(tmp_path):
    wanted = "refuses a sparse file of 1,088.0 GB; choose a directory on one that has large sparse"
    with largest_file(10**9), pytest.raises(OSError, match=wanted) as raised:
        opened(tmp_path, LARGE)
    assert raised.value.errno == errno.EFBIG
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]
    opened(tmp_path, LARGE).close()


def test_growth_beyond_the_largest_file(tmp_path):
    """Records that have no room are refused, and the others stay."""
    store, ids = opened(tmp_path, ANY_IDS), np.arange(1000)
    store.put(ids, random_records(1000))
    with largest_file(10**6), pytest.raises(OSError, match="refuses a sparse file"):
        store.put(np.arange(1000, 9000), random_records(8000))
    assert len(store) == 1000
    assert not store.get(np.arange(1000, 9000))[0].any()
    store.put(np.arange(1000, 9000), random_records(8000))
    np.testing.assert_array_equal(store.get(ids)[1], random_records(1000))
    assert len(store) == 9000
    store.close()


@every_format
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-100_000], r"is truncated or damaged: it has [\d,]+ bytes and should"),
        (lambda text: text[:100], "is damaged: its header has another checksum"),
        (lambda text: b"", "is not a file of records of this version of jaxrec"),
        (lambda text: b"PK" + text[2:], "is not a file of records of this version of jaxrec"),
        (lambda text: text.replace(b"260", b"250"), "is damaged: its header has another checksum"),
        (lambda text: text + b"x", r"is truncated or damaged: it has [\d,]+ bytes and should have"),
    ],
    ids=["truncated", "header only", "empty", "another file", "header", "longer"],
)
def test_damaged_files(format, damage, message, tmp_path):
    store = opened(tmp_path, format)
    store.put(np.arange(500), random_records(500))
    store.close()
    whole = store._path.read_bytes()
    store._path.write_bytes(damage(whole))
    for _ in range(2):  # the lock is free again
        with pytest.raises(ValueError, match=re.escape(str(store._path)) + " " + message):
            opened(tmp_path, format)
    assert store._path.read_bytes() == damage(whole)
    store._path.write_bytes(whole)
    store = opened(tmp_path, format)
    assert len(store) == 500
    store.close()


def damage_record(path, number, offset=9, mask=0x10):
    """Change a byte of the record that `random_records` has at a number."""
    content = bytearray(path.read_bytes())
    content[content.index(bytes(random_records(500)[number])) + offset] ^= mask
    path.write_bytes(content)


def open_and_get(store, format, ids):
    store.open(format)
    return store.get(ids)[0]


@every_format
@pytest.mark.parametrize("offset", [0, 259, -3], ids=["first byte", "last byte", "before it"])
def test_a_flipped_byte_at_rest_is_an_error(format, offset, tmp_path):
    store, ids = opened(tmp_path, format), np.arange(500)
    store.put(ids, random_records(500))
    store.close()
    damage_record(store._path, 77, offset)
    damaged = rf"{re.escape(str(store._path))} is damaged: of [\d,]+ records .* 1 do not have the"
    if format is ANY_IDS:  # all records are read when the file is opened
        for _ in range(2):
            with pytest.raises(ValueError, match=damaged):
                opened(tmp_path, format)
        store._path.unlink()
        store = opened(tmp_path, format)
        assert len(store) == 0
        store.close()
        return
    store = opened(tmp_path, format)
    np.testing.assert_array_equal(store.get(ids[:77])[1], random_records(500)[:77])
    uses = (
        lambda: store.get(ids), lambda: len(store), lambda: list(store.scan(7)),
        lambda: store.snapshot(tmp_path / "snapshot"),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match=damaged):
            use()
    with pytest.raises(ValueError, match="the first of id 77 in place 77"):
        store.get(ids[70:80])
    store.delete(ids[77:78])
    assert np.flatnonzero(~store.get(ids)[0]).tolist() == [77]
    store.close()


@every_format
@pytest.mark.parametrize("state", ["written", "closed before the machine was started", ""])
def test_torn_records_of_a_crash_are_removed_and_counted(format, state, tmp_path):
    store, ids = opened(tmp_path, format), np.arange(500)
    store.put(ids, random_records(500))
    store.close()
    damage_record(store._path, 77)
    with store._path.open("r+b") as file:
        write_state(file.fileno(), state)
    store = FileStore(tmp_path)
    with pytest.warns(UserWarning, match="while it wrote, and 1 records are not whole"):
        found = open_and_get(store, format, ids)
    assert np.flatnonzero(~found).tolist() == [77]
    assert len(store) == 499
    assert sum(each.size for each, _ in store.scan(7)) == 499
    store.put(ids[77:78], random_records(1, 5))
    store.close()
    store = opened(tmp_path, format)
    np.testing.assert_array_equal(store.get(ids[77:78])[1], random_records(1, 5))
    assert len(store) == 500
    store.flush()
    assert read_state(store._file._descriptor) == "flushed"
    store.close()
    damage_record(store._path, 78)
    with pytest.raises(ValueError, match="is damaged"), contextlib.closing(store):
        open_and_get(store, format, ids)


def test_an_id_in_two_places(tmp_path):
    """A failure of the machine may keep the new place of an id and the old one."""
    store = opened(tmp_path, ANY_IDS)
    store.put(np.array([7, 8]), random_records(2))
    store._file.write(np.array([5]), np.array([7]), random_records(2)[:1])
    store.close()
    for _ in range(2):
        store = opened(tmp_path, ANY_IDS)
        assert len(store) == 2
        assert [ids.tolist() for ids, _ in store.scan()] == [[7, 8]]
        store.put(np.arange(100), random_records(100))
        store.delete(np.arange(9, 100))
        store.delete(np.arange(7))
        store.close()


def test_leftovers_of_a_run_that_was_killed(tmp_path):
    store = opened(tmp_path, RANGE)
    store.put(np.array([3]), random_records(1))
    store.close()
    for name in ("records.new", "records.unfinished", "records.new.unfinished"):
        (tmp_path / name).write_bytes(b"half")
    store = opened(tmp_path, RANGE)
    assert len(store) == 1
    store.clear()
    assert len(store) == 0
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "records"]


def test_another_run(tmp_path):
    code = """
import sys, numpy as np
from jaxrec.tier.stores.file_store import FileStore
from jaxrec.tier.stores.record_format import RecordFormat
store = FileStore(sys.argv[1])
store.open(RecordFormat(260, "item rows uint8[260]", 100_000))
store.put(np.arange(10), np.zeros((10, 260), np.uint8))
print("open", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(BlockingIOError, match=rf"process {other.pid} on .*; stop it, or choos"):
            opened(tmp_path, RANGE)
        other.kill()
    store = opened(tmp_path, RANGE)
    assert len(store) == 10
    store.close()


def test_a_store_that_is_forgotten_is_closed(tmp_path):
    opened(tmp_path, RANGE)
    store = opened(tmp_path, RANGE)
    store.close()
    with pytest.raises(ValueError, match=r"FileStore\('.*'\) is not open"):
        store.get(np.array([1]))


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file") as raised:
        opened(tmp_path / "file", RANGE)
    assert raised.value.errno in (errno.ENOTDIR, errno.EEXIST)


@pytest.mark.parametrize("is_range", [True, False], ids=["range", "any-ids"])
def test_kills(is_range, tmp_path):
    url = f"file://{tmp_path}/store"
    result = kill_repeatedly(url, tmp_path / "snapshots", is_range, kills=4, may_tear=True)
    assert result.kills == 4
    assert result.batches > 0
    shutil.rmtree(tmp_path / "store")
