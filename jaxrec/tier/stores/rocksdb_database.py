"""Records in a RocksDB database, and its snapshots."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import rocksdict

from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.record_format import KEY_BYTES, RecordFormat, ids_of, keys_of
from jaxrec.tier.stores.snapshots import Manifest

# The key of the format; records have keys of 8 bytes.
_FORMAT_KEY = b"format"


class Database:
    """Records by id in a RocksDB database, which also stores the format of the records.

    With a ``format``, a missing database is made. Without one, the database must exist.
    """

    def __init__(
        self, path: pathlib.Path, format: RecordFormat | None = None, *, is_writable: bool = True
    ) -> None:
        self.path = path
        access = rocksdict.AccessType
        with self._clear_errors():
            self._db: Any = rocksdict.Rdict(
                str(path),
                options(may_create=format is not None),
                access_type=access.read_write() if is_writable else access.read_only(),
            )
            text = self._db.get(_FORMAT_KEY)
        if text is None and format is not None:
            text = format.to_json().encode()
            self._db[_FORMAT_KEY] = text
            self.flush()
        if text is None:
            self.close()
            raise ValueError(f"{path} is not a database of a row store")
        self.format = RecordFormat.from_json(text.decode())

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each id has a record, bool ``[n]``, and the records, uint8 ``[n, width]``.

        An id without a record has zeros.
        """
        with self._clear_errors():
            values = self._db.get(keys_of(ids))
        found = np.array([value is not None for value in values], bool)
        if not found.all():
            zeros = bytes(self.format.width)
            values = [zeros if value is None else value for value in values]
        records = np.frombuffer(bytearray().join(values), np.uint8)
        return found, records.reshape(-1, self.format.width)

    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Write the records, uint8 ``[n, width]``, of distinct ids ``[n]``, all or none."""
        # One batch is one entry of RocksDB's log, which is applied whole or not at all.
        batch, width = rocksdict.WriteBatch(raw_mode=True), self.format.width
        values = records.tobytes()
        for start, key in zip(range(0, len(values), width), keys_of(ids), strict=True):
            batch.put(key, values[start : start + width])
        with self._clear_errors():
            self._db.write(batch)

    def delete(self, ids: np.ndarray) -> None:
        """Remove the records of ids, int64 ``[n]``; an id without a record is skipped."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key in keys_of(ids):
            batch.delete(key)
        with self._clear_errors():
            self._db.write(batch)

    def scan(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield ids and records, ``size`` at a time, as they were when the scan began."""
        keys: list[bytes] = []
        values: list[bytes] = []
        last = b""
        with self._clear_errors():
            items = self._db.items()
        while True:
            item = next(items, None)
            last = last if item is None else item[0]
            if item is not None and len(item[0]) == KEY_BYTES:
                keys.append(item[0])
                values.append(item[1])
            if keys and (item is None or len(keys) == size):
                ids = ids_of(keys)
                records = np.frombuffer(bytearray().join(values), np.uint8)
                yield ids, records.reshape(-1, self.format.width)
                keys, values = [], []
            if item is None:
                self._check_end(last)
                return

    def count(self) -> int:
        """Return the number of records, by reading all keys."""
        count, key = 0, b""
        for key in self._db.keys():  # noqa: SIM118
            count += len(key) == KEY_BYTES
        self._check_end(key)
        return count

    def has_records(self) -> bool:
        """Return whether the database has a record."""
        return next(self.scan(1), None) is not None

    def checkpoint(self, path: pathlib.Path) -> None:
        """Make a copy on the same file system that shares the database's immutable files."""
        with self._clear_errors():
            rocksdict.Checkpoint(self._db).create_checkpoint(str(path))

    def flush(self) -> None:
        """Wait until all writes are durable."""
        with self._clear_errors():
            self._db.flush_wal(True)

    def close(self) -> None:
        """Close the database."""
        # RocksDB repeats an earlier error here, such as that of a full disk. What `flush` promised
        # is safe.
        with contextlib.suppress(Exception):
            self._db.close()
        self._db = None

    def _check_end(self, last: bytes) -> None:
        """Raise an error if the database has a key after ``last``, or cannot tell."""
        with self._clear_errors():
            # The iterators of rocksdict end at a damaged block without an error; this one has a
            # status.
            rest = self._db.iter()
            rest.seek(last)
            while rest.valid() and rest.key() <= last:
                rest.next()
            rest.status()
            if rest.valid():
                raise ValueError(f"{self.path} could not be read to its end")

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn RocksDB's errors, all of type Exception, into clear ones."""
        try:
            yield
        except (OSError, MemoryError, ValueError):
            raise
        except Exception as error:
            text = str(error)
            if "Corruption" in text or "checksum mismatch" in text:
                raise ValueError(
                    f"{self.path} is damaged ({text}); restore it from a checkpoint, or remove it "
                    "to begin anew"
                ) from None
            if "No space left" in text or "File too large" in text:
                number = errno.ENOSPC if "No space left" in text else errno.EFBIG
                raise OSError(
                    number,
                    f"records cannot be written ({text}); free some of the disk and start again "
                    "from the last checkpoint",
                    str(self.path),
                ) from None
            raise OSError(errno.EIO, f"RocksDB: {text}", str(self.path)) from None


def options(may_create: bool) -> rocksdict.Options:
    """Return RocksDB's options for a database of records; ``may_create`` a missing one."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(may_create)
    options.set_keep_log_file_num(2)
    # Trained numbers do not compress.
    options.set_compression_type(rocksdict.DBCompressionType.none())
    table = rocksdict.BlockBasedOptions()
    # Most ids of a young run have no record: in 99 of 100 cases 10 bits a key tell so without a
    # read of the disk.
    table.set_bloom_filter(10, False)
    table.set_block_cache(rocksdict.Cache(64 << 20))
    options.set_block_based_table_factory(table)
    return options


_DATABASE = "database"
_TABLE = ".sst"  # a file of RocksDB that never changes, with a checksum of each block
_PART = 1 << 16  # records


def write_snapshot(directory: pathlib.Path, database: Database) -> None:
    """Write a snapshot of the kind "rocksdb", which shares the database's immutable files."""
    with snapshots.writing(
        directory, "rocksdb", database.format, {}, lambda path: path.suffix == _TABLE
    ) as unfinished:
        database.checkpoint(unfinished / _DATABASE)


def check_snapshot(directory: pathlib.Path, manifest: Manifest) -> None:
    """Raise a ValueError if a record of a snapshot is missing or damaged, by reading all."""
    try:
        with contextlib.closing(_open_snapshot(directory)) as database:
            manifest.format.check_same(database.format, str(database.path))
            database.count()
    except OSError as error:
        raise ValueError(f"the snapshot {directory} is damaged: {error}") from None


def read_snapshot(
    directory: pathlib.Path, manifest: Manifest
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids, int64 ``[n]``, and records, uint8 ``[n, width]``, of a snapshot."""
    with contextlib.closing(_open_snapshot(directory)) as database:
        yield from database.scan(_PART)


def copy_database(directory: pathlib.Path, path: pathlib.Path) -> None:
    """Copy a snapshot's database, with hard links to the files that never change."""
    path.mkdir()
    for source in sorted((directory / _DATABASE).iterdir()):
        target = path / source.name
        if source.suffix == _TABLE:
            with contextlib.suppress(OSError):  # another file system
                os.link(source, target)
                continue
        shutil.copyfile(source, target)
        snapshots.sync(target)
    snapshots.sync(path)


def _open_snapshot(directory: pathlib.Path) -> Database:
    return Database(directory / _DATABASE, is_writable=False)
