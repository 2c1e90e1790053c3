"""Snapshots of the kind "rocksdb": databases that share files with the one they are of."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np

from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.rocksdb_database import Database
from jaxrec.tier.stores.snapshots import Manifest

_DATABASE = "database"
_TABLE = ".sst"  # a file of RocksDB that never changes, with a checksum of each block
_PART = 1 << 16  # records


def write(directory: pathlib.Path, database: Database) -> None:
    """Write a snapshot of a database.

    Raises:
        FileExistsError: The directory exists.
        OSError: It cannot be written.
    """
    with snapshots.writing(
        directory, "rocksdb", database.format, {}, lambda path: path.suffix == _TABLE
    ) as unfinished:
        database.checkpoint(unfinished / _DATABASE)


def check_snapshot(directory: pathlib.Path, manifest: Manifest) -> None:
    """Check the records of a snapshot by reading them.

    Raises:
        ValueError: Records are missing or damaged.
    """
    try:
        with contextlib.closing(_open(directory)) as database:
            manifest.format.check_same(database.format, str(database.path))
            database.count()
    except OSError as error:
        raise ValueError(f"the snapshot {directory} is damaged: {error}") from None


def read_snapshot(
    directory: pathlib.Path, manifest: Manifest
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Iterate over the records of a snapshot."""
    with contextlib.closing(_open(directory)) as database:
        yield from database.scan(_PART)


def copy_database(directory: pathlib.Path, path: pathlib.Path) -> None:
    """Copy the database of a snapshot, by hard links of the files that never change."""
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


def _open(directory: pathlib.Path) -> Database:
    return Database(directory / _DATABASE, is_writable=False)
