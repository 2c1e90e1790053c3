"""Rows in RocksDB."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterator

import numpy as np

from jaxrec.files.atomic import write_atomically
from jaxrec.files.lock import lock, unlock
from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.file_store import DirectoryStore
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.rocksdb_database import Database, copy_database, write_snapshot

_CURRENT = "current"
_NAME = "records-{}"


class RocksDBStore(DirectoryStore):
    """Records in a RocksDB database of a directory: the store ``"rocksdb:///directory"``.

    A `put` is written whole or not at all; when it returns, its records survive the process.
    `flush` makes them safe against a failure of the machine. Snapshots share the database's
    immutable files. Needs the extra ``jaxrec[rocksdb]``.

    `len` takes the time of reading all keys.
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        super().__init__(directory)
        self._database: Database | None = None

    def open(self, format: RecordFormat) -> None:
        with self._lock:
            lock(self.directory)
            try:
                self.format = format
                current = self._current()
                for path in self.directory.glob(_NAME.format("*")):  # of a run that was killed
                    if path.name != current:
                        shutil.rmtree(path)
                if current is None:
                    self._use(Database(self._new_path(), format))
                    return
                database = Database(self.directory / current)
                self._database = database
                if database.format != format:
                    if database.has_records():
                        format.check_same(database.format, str(self.directory))
                    self.clear()
            except BaseException:
                self._close_database()
                unlock(self.directory)
                raise

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.format.check_ids(ids)
        with self._lock:
            return self._opened.get(ids)

    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.format.check_ids(ids)
        with self._lock:
            self._opened.put(ids, records)

    def delete(self, ids: np.ndarray) -> None:
        self.format.check_ids(ids)
        with self._lock:
            self._opened.delete(ids)

    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return self._opened.scan(size)

    def __len__(self) -> int:
        with self._lock:
            return self._opened.count()

    def clear(self) -> None:
        with self._lock:
            self._use(Database(self._new_path(), self.format))

    def snapshot(self, directory: pathlib.Path) -> None:
        with self._lock:
            write_snapshot(directory, self._opened)

    def load_snapshot(self, directory: pathlib.Path) -> None:
        with self._lock:
            manifest = snapshots.check(directory, self.format)
            if manifest.kind != "rocksdb":
                self.replace(snapshots.read(directory))
                return
            path = self._new_path()
            try:
                copy_database(directory, path)
                database = Database(path)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
            self._use(database)

    def flush(self) -> None:
        with self._lock:
            self._opened.flush()

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._close_database()
                unlock(self.directory)

    @property
    def _opened(self) -> Database:
        if self._database is None:
            raise self._not_open()
        return self._database

    def _current(self) -> str | None:
        """Return the name of the database in the directory; None if there is none."""
        path = self.directory / _CURRENT
        if not path.exists():
            return None
        name = path.read_text().strip()
        if not name or not (self.directory / name).is_dir():
            raise ValueError(
                f"{self.directory} is damaged: {path} names the database {name!r}, which is "
                "missing; restore the directory, or remove it to begin anew"
            )
        return name

    def _new_path(self) -> pathlib.Path:
        numbers = [
            int(path.name.rpartition("-")[2]) for path in self.directory.glob(_NAME.format("*"))
        ]
        return self.directory / _NAME.format(max(numbers, default=0) + 1)

    # The file `current` names the database. Replacing this file replaces all records at once, which
    # no number of deletions would.
    def _use(self, database: Database) -> None:
        """Make a database the current one, and remove the database that was current."""
        old = self._database
        with write_atomically(self.directory / _CURRENT) as unfinished:
            unfinished.write_text(database.path.name)
            snapshots.sync(unfinished)
        snapshots.sync(self.directory)
        self._database = database
        if old is not None:
            old.close()
            shutil.rmtree(old.path, ignore_errors=True)

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
