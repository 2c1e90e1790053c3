"""Rows in RocksDB: files, full disks and damage."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.rocksdb_store import RocksDBStore
from tests.tier.disks import small_disk
from tests.tier.kills import kill_repeatedly

WIDTH = 260
FORMAT = RecordFormat(WIDTH, "item rows uint8[260]")


def opened(directory, format=FORMAT):
    store = RocksDBStore(directory)
    store.open(format)
    return store


def random_records(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, WIDTH), np.uint8)


def tables(directory):
    return sorted(directory.rglob("*.sst"))


def test_snapshots_share_files(tmp_path):
    store, ids = opened(tmp_path / "store"), np.arange(2000)
    store.put(ids, random_records(2000))
    store.snapshot(tmp_path / "snapshot")
    (table,) = tables(tmp_path / "snapshot")
    assert os.stat(table).st_nlink == 2
    store.clear()
    assert os.stat(table).st_nlink == 1
    store.load_snapshot(tmp_path / "snapshot")
    assert os.stat(table).st_nlink == 2
    store.delete(ids[:1000])
    store.put(ids[1000:], random_records(1000, 1))
    store.load_snapshot(tmp_path / "snapshot")
    np.testing.assert_array_equal(store.get(ids)[1], random_records(2000))
    assert len(list((tmp_path / "store").glob("records-*"))) == 1
    store.close()


def test_snapshots_on_another_disk(tmp_path):
    with small_disk(tmp_path / "disk", 64) as disk:
        store, ids = opened(tmp_path / "store"), np.arange(100)
        store.put(ids, random_records(100))
        store.snapshot(disk / "snapshot")
        store.clear()
        store.load_snapshot(disk / "snapshot")
        np.testing.assert_array_equal(store.get(ids)[1], random_records(100))
        store.close()


def test_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", 16) as disk:
        store, kept = opened(disk / "store"), np.arange(2000)
        store.put(kept, random_records(2000))
        with pytest.raises(OSError, match=r"records cannot be written.*No space left") as raised:
            fill(store)
        assert raised.value.errno == errno.ENOSPC
        assert "free some of the disk and start again from the last checkpoint" in str(raised.value)
        np.testing.assert_array_equal(store.get(kept)[1], random_records(2000))
        store.close()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        store = opened(disk / "store")
        np.testing.assert_array_equal(store.get(kept)[1], random_records(2000))
        store.close()


def fill(store):
    for start in range(10_000, 200_000, 10_000):
        store.put(np.arange(start, start + 10_000), random_records(10_000))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damaged_tables(damage, tmp_path):
    """An error says so, when the store is opened or read; no record is missed in silence."""
    store, ids = opened(tmp_path / "store"), np.arange(2000)
    store.put(ids, random_records(2000))
    store.snapshot(tmp_path / "snapshot")  # writes the table
    store.close()
    (table,) = tables(tmp_path / "store")
    content = table.read_bytes()
    place = content.index(bytes(random_records(2000)[1000]))
    table.unlink()
    if damage == "flipped":
        table.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    elif damage == "truncated":
        table.write_bytes(content[: len(content) // 2])
    reads = [
        lambda store: store.get(ids),
        len,
        lambda store: list(store.scan()),
        lambda store: store.snapshot(tmp_path / "other") or store.load_snapshot(tmp_path / "other"),
    ]
    for read in reads:
        with pytest.raises((ValueError, OSError), match=r"damaged|RocksDB: .*No such file"):
            open_and(read, tmp_path / "store")


def open_and(read, directory):
    with contextlib.closing(RocksDBStore(directory)) as store:
        store.open(FORMAT)
        read(store)


def test_a_database_that_is_missing(tmp_path):
    store = opened(tmp_path)
    store.put(np.array([3]), random_records(1))
    store.close()
    (tmp_path / "current").write_text("records-9")
    with pytest.raises(ValueError, match="names the database 'records-9', which is missing"):
        opened(tmp_path)
    assert (tmp_path / "records-1").exists()  # nothing was lost
    (tmp_path / "current").write_text("records-1")
    store = opened(tmp_path)
    assert len(store) == 1
    store.close()


def test_a_database_of_another_program(tmp_path):
    import rocksdict

    rocksdict.Rdict(str(tmp_path / "records-1")).close()
    (tmp_path / "current").write_text("records-1")
    with pytest.raises((ValueError, OSError), match=r"is not a database of a row store|RocksDB:"):
        opened(tmp_path)


def test_leftovers_of_a_run_that_was_killed(tmp_path):
    opened(tmp_path).close()
    (tmp_path / "records-2").mkdir()
    (tmp_path / ".current.unfinished").write_text("records-2")
    store = opened(tmp_path)
    assert not (tmp_path / "records-2").exists()
    store.clear()
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "current", "records-2"]


def test_another_run(tmp_path):
    code = """
import sys, numpy as np
from jaxrec.tier.stores.rocksdb_store import RocksDBStore
from jaxrec.tier.stores.record_format import RecordFormat
store = RocksDBStore(sys.argv[1])
store.open(RecordFormat(260, "item rows uint8[260]"))
store.put(np.arange(10), np.zeros((10, 260), np.uint8))
print("open", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(BlockingIOError, match=rf"process {other.pid} on .*; stop it, or choos"):
            opened(tmp_path)
        other.kill()
    store = opened(tmp_path)
    assert len(store) == 10
    store.close()


def test_kills(tmp_path):
    url = f"rocksdb://{tmp_path}/store"
    result = kill_repeatedly(url, tmp_path / "snapshots", False, kills=3, may_tear=False)
    assert result.kills == 3
    assert result.batches > 0
