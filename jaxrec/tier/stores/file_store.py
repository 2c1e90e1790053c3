"""Rows in a sparse file, and its snapshots."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import urllib.parse
import warnings
from collections.abc import Iterator

import numpy as np

from jaxrec.files.lock import lock, unlock
from jaxrec.tier.ids.id_map import Places
from jaxrec.tier.ids.reference import record_tags
from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.record_file import RECORDS, RecordFile
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.record_header import (
    FIRST_ROOM,
    FLUSHED,
    create,
    read_format,
    write_state,
)
from jaxrec.tier.stores.row_store import RowStore
from jaxrec.tier.stores.snapshots import Manifest

_NEW = f"{RECORDS}.new"


class DirectoryStore(RowStore):
    """Base of a row store in a directory of its own, which only one run may have open."""

    def __init__(self, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self._lock = threading.RLock()

    @classmethod
    def from_url(cls, url: str) -> DirectoryStore:
        """Make the store of a URL such as ``"file:///data/users"``."""
        return cls(url_path(url))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory)!r})"

    def _not_open(self) -> ValueError:
        return ValueError(f"{self!r} is not open")


class FileStore(DirectoryStore):
    """Records in a memory-mapped, sparse file of a directory: the store ``"file:///directory"``.

    Each record has a checksum. If the process is killed, records that it was writing may be absent,
    and all others are as they were put. The next run reads the whole file, removes torn records and
    warns of their number. `flush` also makes records safe against a failure of the machine. At any
    other time a damaged record is an error.

    If ids are a range (`RecordFormat.num_ids`), `len` and `scan` take the time of reading the file.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        super().__init__(directory)
        self._path = self.directory / RECORDS
        self._file: RecordFile | None = None
        self._places: Places | None = None

    def open(self, format: RecordFormat) -> None:
        with self._lock:
            lock(self.directory)
            try:
                for name in (_NEW, f"{RECORDS}.unfinished"):  # of a run that was killed
                    (self.directory / name).unlink(missing_ok=True)
                if self._path.exists() and read_format(self._path) != format:
                    self._check_empty(format)
                    self._path.unlink()
                if not self._path.exists():
                    create(self._path, format)
                self.format = format
                self._open_file()
            except BaseException:
                self._file = None
                unlock(self.directory)
                raise

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.format.check_ids(ids)
        with self._lock:
            # In a range, an id is its own slot: the file is as large as all records, and the disk
            # has only the pages that were written. Other ids get slots in the order of their
            # arrival, and the map of ids to slots is built from the file when it is opened.
            slots = ids if self._places is None else self._places.find(ids).astype(np.int64)
            found, _, records = self._opened.read_whole(slots, ids)
        return found, records

    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.format.check_ids(ids)
        with self._lock:
            file = self._opened
            if self._places is None:
                file.write(ids, ids, records)
                return
            places = self._places.find(ids)
            # Slots of new ids are given back if the write fails: `len` counts the ids in the map.
            is_new = places < 0
            if is_new.any():
                places = self._places.assign(ids)
            slots = places.astype(np.int64)
            try:
                if self._places.room > file.room:
                    file.grow(self._places.room)
                file.write(slots, ids, records)
            except BaseException:
                self._places.remove(ids[is_new])
                raise

    def delete(self, ids: np.ndarray) -> None:
        self.format.check_ids(ids)
        with self._lock:
            file = self._opened
            if self._places is None:
                found, _, _ = file.read(ids, ids)
                slots = ids[found | file.is_used(ids)]
            else:
                slots = self._places.remove(ids).astype(np.int64)
            file.erase(slots)

    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        file = self._opened
        all_slots = file.slots(size)
        while True:
            with self._lock:
                if self._file is not file or (slots := next(all_slots, None)) is None:
                    return
                found, ids, records = file.read_whole(slots)
                if self._places is not None:
                    # The map decides: a write that failed may have left a record in a slot that was
                    # given back.
                    found &= self._places.find(ids) == slots
            if found.any():
                yield ids[found], records[found]

    def __len__(self) -> int:
        with self._lock:
            if self._places is not None:
                return len(self._places)
            return sum(ids.size for ids, _ in self.scan())

    def clear(self) -> None:
        with self._lock:
            if self._file is None:
                raise self._not_open()
            # A new file takes the old one's place: erasing would write every page, and a kill would
            # leave some records.
            create(self.directory / _NEW, self.format)
            self._replace_file(self._file)

    def snapshot(self, directory: pathlib.Path) -> None:
        with self._lock:
            write_snapshot(directory, self._opened)

    def load_snapshot(self, directory: pathlib.Path) -> None:
        with self._lock:
            if self._file is None:
                raise self._not_open()
            manifest = snapshots.check(directory, self.format)
            if manifest.kind != "file":
                self.replace(snapshots.read(directory))
                return
            new = self.directory / _NEW
            try:
                with contextlib.closing(_open_snapshot(directory, manifest)) as file:
                    file.copy_to(new)
            except BaseException:
                new.unlink(missing_ok=True)
                raise
            self._replace_file(self._file)

    def flush(self) -> None:
        with self._lock:
            self._opened.flush()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
                unlock(self.directory)

    @property
    def _opened(self) -> RecordFile:
        """The open file; records that a killed process wrote in part are removed from it first."""
        if self._file is None:
            raise self._not_open()
        if self._file.may_be_torn and (count := self._file.remove_torn()):
            warnings.warn(
                f"{self._path}: an earlier run ended while it wrote, and {count:,} records are not "
                "whole; they were removed, and their rows begin anew unless a checkpoint is "
                "restored",
                stacklevel=4,
            )
        return self._file

    def _replace_file(self, old: RecordFile) -> None:
        """Replace the file of records, open as ``old``, by the file ``records.new``; open that."""
        new = self.directory / _NEW
        with new.open("r+b") as file:
            write_state(file.fileno(), FLUSHED)
        # Durable before it gets the name: after a failure of the machine the old file or the new
        # one is there, whole.
        snapshots.sync(new)
        old.close()
        new.replace(self._path)
        snapshots.sync(self.directory)
        self._open_file()

    def _open_file(self) -> None:
        self._file = file = RecordFile(self._path)
        self._places = None
        if self.format.num_ids is None:
            file = self._opened
            parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
            for slots in file.slots(1 << 16):
                found, ids, _ = file.read_whole(slots)
                parts.append((ids[found], slots[found]))
            ids, slots = (np.concatenate(each) for each in zip(*parts, strict=True))
            # A failure of the machine may leave an id in two slots: a deletion whose page was lost,
            # and the later record.
            ids, first = np.unique(ids, return_index=True)
            file.erase(np.delete(slots, first))
            self._places = Places(FIRST_ROOM)
            self._places.load(ids, slots[first].astype(np.int32), file.room)

    def _check_empty(self, format: RecordFormat) -> None:
        """Raise a ValueError if the file, which has another format than ``format``, has records."""
        with contextlib.closing(RecordFile(self._path)) as file:
            for slots in file.slots(1 << 16):
                if file.read(slots)[0].any():
                    format.check_same(file.format, str(self.directory))


def url_path(url: str) -> pathlib.Path:
    """Return the absolute path of a URL without a host."""
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path == "/" or parts.query or parts.fragment:
        raise ValueError(
            f"a store {parts.scheme}:// has an absolute path, such as {parts.scheme}:///data/users "
            f"with three slashes, got {url!r}"
        )
    return pathlib.Path(path)


_PART = 1 << 16  # records


def write_snapshot(directory: pathlib.Path, file: RecordFile) -> None:
    """Write a snapshot of the kind "file": a copy of the record file, which must not change."""
    # The kernel copies the file. Its records have checksums of their own, so that their number and
    # the sum of these checksums show whether all are there.
    details = _sums(file, are_whole=True)
    with snapshots.writing(
        directory, "file", file.format, details, lambda path: path.name == RECORDS
    ) as unfinished:
        file.copy_to(unfinished / RECORDS)


def check_snapshot(directory: pathlib.Path, manifest: Manifest) -> None:
    """Raise a ValueError if a record of a snapshot is missing or damaged."""
    with contextlib.closing(_open_snapshot(directory, manifest)) as file:
        sums = _sums(file)
    if sums != manifest.details:
        raise ValueError(
            f"the snapshot is damaged: {file.path} has {sums['count']:,} whole records with the "
            f"sum {sums['sum']:x}; {manifest.details['count']:,} with the sum "
            f"{manifest.details['sum']:x} were saved"
        )


def read_snapshot(
    directory: pathlib.Path, manifest: Manifest
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids, int64 ``[n]``, and records, uint8 ``[n, width]``, of a snapshot."""
    with contextlib.closing(_open_snapshot(directory, manifest)) as file:
        yield from _records(file)


def _open_snapshot(directory: pathlib.Path, manifest: Manifest) -> RecordFile:
    path = directory / RECORDS
    if not path.is_file():
        raise ValueError(f"the snapshot is damaged: {path} is missing")
    file = RecordFile(path, is_writable=False)
    manifest.format.check_same(file.format, str(path))
    return file


def _records(
    file: RecordFile, *, are_whole: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for slots in file.slots(_PART):
        found, ids, records = file.read_whole(slots) if are_whole else file.read(slots)
        yield ids[found], records[found]


def _sums(file: RecordFile, *, are_whole: bool = False) -> dict[str, int]:
    """Return the number of a file's records, and the sum of their checksums modulo 2**64.

    A damaged record raises a ValueError with ``are_whole``; otherwise it counts as absent.
    """
    count, total = 0, 0
    for ids, records in _records(file, are_whole=are_whole):
        count += ids.size
        total += int(record_tags(ids, records).sum(dtype=np.uint64))
    return {"count": count, "sum": total % 2**64}
