"""Processes that write to a row store and are killed at random moments.

`kill_repeatedly` starts writers, kills each by SIGKILL, opens the store and compares it with what
the writer had said that it did. Used by tests and by ``python -m benchmarks.tier kills``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zlib

import numpy as np

from jaxrec.tier.stores import open_store
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.row_store import RowStore

NUM_IDS = 4000
WIDTH = 300
BATCH = 1500
ABSENT = 0
_CHECKSUM = 4
_SNAPSHOT_EVERY = 8
_HASH = 0x9E3779B97F4A7C15

# Imports once, then makes a writer for each line of its input: arguments of `write`.
_SERVER = """
import os, sys
sys.path.append(sys.argv[1])
from tests.tier import kills
import pyarrow
for line in sys.stdin:
    child = os.fork()
    if not child:
        kills.write(*line.split())
    os.waitpid(child, 0)
    kills.say("dead")
"""


@dataclasses.dataclass
class Kills:
    """What happened to a store.

    Attributes:
        kills: Number of writers that were killed.
        batches: Batches that they wrote.
        torn: Records that were absent, since a batch was being written.
        newer: Records of the batch that was being written.
        snapshots: Snapshots that were loaded.
        open_seconds: Longest time in which the store opened, with the wait for a lock.
    """

    kills: int = 0
    batches: int = 0
    torn: int = 0
    newer: int = 0
    snapshots: int = 0
    open_seconds: float = 0.0


def keys_of(ids: np.ndarray, is_range: bool) -> np.ndarray:
    """Return the ids in the store, of numbers from 0 on."""
    return ids if is_range else (ids.astype(np.uint64) * np.uint64(_HASH)).view(np.int64)


def batch_of(version: int) -> np.ndarray:
    """Return the numbers of the records that a version writes; every fifth deletes them."""
    return np.random.default_rng(version).permutation(NUM_IDS)[:BATCH]


def records_of(ids: np.ndarray, version: int) -> np.ndarray:
    """Return records that begin with their number and version and end with a checksum."""
    records = np.random.default_rng([version, 1]).integers(0, 256, (ids.size, WIDTH), np.uint8)
    records[:, :8] = ids[:, None].view(np.uint8)
    records[:, 8:16] = np.full((ids.size, 1), version).view(np.uint8)
    checksums = np.array([zlib.crc32(row[:-_CHECKSUM]) for row in records], np.uint32)
    records[:, -_CHECKSUM:] = checksums[:, None].view(np.uint8)
    return records


def versions_of(store: RowStore, is_range: bool) -> np.ndarray:
    """Return the version of each record, and fail if one is not whole."""
    found, records = store.get(keys_of(np.arange(NUM_IDS), is_range))
    versions = np.where(found, records[:, 8:16].copy().view(np.int64)[:, 0], ABSENT)
    for number in np.flatnonzero(found):
        assert records[number, :8].view(np.int64)[0] == number
        checksum = records[number, -_CHECKSUM:].copy().view(np.uint32)[0]
        assert checksum == zlib.crc32(records[number, :-_CHECKSUM]), f"record {number} is mixed"
    count = 0
    for keys, _ in store.scan(1000):
        count += keys.size
    assert count == len(store) == found.sum()
    return versions


def write(url: str, directory: str, is_range: str, first: str, snapshot: str) -> None:
    """Write versions from one on, and say each that is written, until killed."""
    say("writer", os.getpid())
    store = _open(url, is_range == "range")
    if snapshot != "-":
        store.load_snapshot(pathlib.Path(snapshot))
    say("open")
    for version in itertools.count(int(first)):
        ids = batch_of(version)
        if version % 5:
            store.put(keys_of(ids, is_range == "range"), records_of(ids, version))
        else:
            store.delete(keys_of(ids, is_range == "range"))
        say("wrote", version)
        if version % _SNAPSHOT_EVERY == 0:
            store.snapshot(pathlib.Path(directory, str(version)))
            say("snapshot", version)


def say(*words: object) -> None:
    """Write a line in one piece, whenever this process is killed."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def kill_repeatedly(
    url: str, directory: pathlib.Path, is_range: bool, kills: int, may_tear: bool, seed: int = 0
) -> Kills:
    """Kill writers of a store, and check the store after each.

    Args:
        url: The store.
        directory: Where snapshots are written.
        is_range: Whether ids are a range.
        kills: Number of writers.
        may_tear: Whether records of the batch that was being written may be absent.
        seed: Seed of the moments.

    Raises:
        AssertionError: A record is not whole, or of another version than it should be.
    """
    rng, result = np.random.default_rng(seed), Kills()
    directory.mkdir(parents=True, exist_ok=True)
    versions, first = np.full(NUM_IDS, ABSENT), 1
    saved: dict[int, np.ndarray] = {}
    snapshot = "-"
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-P", "-W", "ignore", "-c", _SERVER, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        for number in range(kills):
            kind = "range" if is_range else "any"
            print(url, directory, kind, first, snapshot, file=server.stdin, flush=True)
            lines, last = [], first - 1
            # Most are killed while they write, and some while they open the store.
            event, seconds = ("open", 0.1) if rng.random() < 0.8 else ("writer", 0.4)
            pid = 0
            while (line := server.stdout.readline().split()) and line[0] != "dead":
                lines.append(line)
                pid = int(line[1]) if line[0] == "writer" else pid
                if line[0] == event:
                    time.sleep(rng.uniform(0, seconds))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            assert line, f"the writers' server ended: {lines}"
            is_open = ["open"] in lines
            start = time.monotonic()
            store = _open(url, is_range)
            result.open_seconds = max(result.open_seconds, time.monotonic() - start)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torn records, which `_compare` counts
                found: np.ndarray | None = versions_of(store, is_range)
            if snapshot != "-" and is_open:
                versions = saved[int(pathlib.Path(snapshot).name)].copy()
            for line in lines:
                if line[0] == "wrote":
                    last = int(line[1])
                    versions[batch_of(last)] = last if last % 5 else ABSENT
                    if last % _SNAPSHOT_EVERY == 0:
                        saved[last] = versions.copy()
            if snapshot != "-" and not is_open:
                # It was killed while it loaded a snapshot, or before.
                store.load_snapshot(pathlib.Path(snapshot))
                versions, found = saved[int(pathlib.Path(snapshot).name)].copy(), None
                np.testing.assert_array_equal(versions_of(store, is_range), versions)
            if found is not None:
                _compare(found, versions, last + 1, may_tear, result)
                versions = found
            result.kills, result.batches = number + 1, result.batches + last - first + 1
            first = last + 2
            snapshot = "-"
            complete = sorted(int(path.name) for path in directory.iterdir() if path.name[0] != ".")
            if complete and number % 3 == 2:
                newest = directory / str(complete[-1])
                store.load_snapshot(newest)
                np.testing.assert_array_equal(versions_of(store, is_range), saved[complete[-1]])
                versions = saved[complete[-1]].copy()
                result.snapshots += 1
            elif complete and number % 3 == 0:
                snapshot = str(directory / str(complete[-1]))
            for old in complete[:-1]:
                shutil.rmtree(directory / str(old))
            store.close()
        server.stdin.close()
    return result


def _compare(
    found: np.ndarray, versions: np.ndarray, next_version: int, may_tear: bool, result: Kills
) -> None:
    """Compare a store with the versions that were written, and the one that was begun."""
    is_begun = np.zeros(NUM_IDS, bool)
    is_begun[batch_of(next_version)] = True
    np.testing.assert_array_equal(found[~is_begun], versions[~is_begun])
    after = next_version if next_version % 5 else ABSENT
    is_torn = is_begun & (found == ABSENT) & (versions != ABSENT) & (after != ABSENT)
    assert may_tear or not is_torn.any()
    is_known = (found == versions) | (found == after)
    assert (is_known | is_torn)[is_begun].all()
    result.torn += int(is_torn.sum())
    result.newer += int((is_begun & (found == after) & (found != versions)).sum())


def _open(url: str, is_range: bool) -> RowStore:
    store = open_store(url)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the wait for the lock of a writer that was killed
        store.open(RecordFormat(WIDTH, "test rows uint8[300]", NUM_IDS if is_range else None))
    return store
