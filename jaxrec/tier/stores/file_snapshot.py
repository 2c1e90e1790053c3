"""Snapshots of the kind "file": copies of a sparse file of records."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from jaxrec.tier.ids.reference import record_tags
from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.record_file import RECORDS, RecordFile
from jaxrec.tier.stores.snapshots import Manifest

_PART = 1 << 16  # records


def write(directory: pathlib.Path, file: RecordFile) -> None:
    """Write a snapshot of a file, which does not change meanwhile.

    The file is copied in the kernel. Its records have checksums of their own, so the snapshot
    only has their number and the sum of their checksums besides.

    Raises:
        FileExistsError: The directory exists.
        OSError: It cannot be written.
        ValueError: A record is damaged.
    """
    details = _sums(file, are_whole=True)
    with snapshots.writing(
        directory, "file", file.format, details, lambda path: path.name == RECORDS
    ) as unfinished:
        file.copy_to(unfinished / RECORDS)


def check_snapshot(directory: pathlib.Path, manifest: Manifest) -> None:
    """Check the records of a snapshot.

    Raises:
        ValueError: Records are missing or damaged.
    """
    file = _open(directory, manifest)
    try:
        sums = _sums(file)
    finally:
        file.close()
    if sums != manifest.details:
        raise ValueError(
            f"the snapshot is damaged: {file.path} has {sums['count']:,} whole records with the "
            f"sum {sums['sum']:x}; {manifest.details['count']:,} with the sum "
            f"{manifest.details['sum']:x} were saved"
        )


def read_snapshot(
    directory: pathlib.Path, manifest: Manifest
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Iterate over the records of a snapshot."""
    file = _open(directory, manifest)
    try:
        yield from _records(file)
    finally:
        file.close()


def copy_records(directory: pathlib.Path, manifest: Manifest, path: pathlib.Path) -> None:
    """Copy the file of a snapshot to a path."""
    file = _open(directory, manifest)
    try:
        file.copy_to(path)
    finally:
        file.close()


def _open(directory: pathlib.Path, manifest: Manifest) -> RecordFile:
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
    """Return the number of a file's records and the sum of their checksums.

    Args:
        file: The file.
        are_whole: Whether a damaged record is an error; otherwise it counts as absent.
    """
    count, total = 0, 0
    for ids, records in _records(file, are_whole=are_whole):
        count += ids.size
        total += int(record_tags(ids, records).sum(dtype=np.uint64))
    return {"count": count, "sum": total % 2**64}
