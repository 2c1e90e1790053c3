"""Snapshots of the records of a row store that changed since an earlier snapshot.

The kind ``"changes"``: the records that were written, in ``records.arrow``, and the ids whose
records were removed, in ``removed.npy``.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.row_store import RowStore
from jaxrec.tier.stores.snapshots import Manifest

_KIND = "changes"
_RECORDS, _REMOVED = "records.arrow", "removed.npy"
_PART = 1 << 16


def is_changes(directory: pathlib.Path) -> bool:
    """Return whether a snapshot has the changes since another one alone."""
    return snapshots.read_manifest(directory).kind == _KIND


def write_changes(directory: pathlib.Path, store: RowStore, ids: np.ndarray) -> None:
    """Write the records that some ids have now, and which of them have none.

    Args:
        directory: The new directory.
        store: The store.
        ids: Distinct ids, int64 ``[n]``.

    Raises:
        FileExistsError: The directory exists.
        OSError: A record cannot be read, or the directory cannot be written.
    """
    removed: list[np.ndarray] = [ids[:0]]

    def written() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, ids.size, _PART):
            part = ids[start : start + _PART]
            found, records = store.get(part)
            removed.append(part[~found])
            yield part[found], records[found]

    with snapshots.writing(directory, _KIND, store.format, {}) as unfinished:
        snapshots.write_records(unfinished / _RECORDS, store.format, written())
        np.save(unfinished / _REMOVED, np.concatenate(removed))


def apply_changes(
    directory: pathlib.Path,
    store: RowStore,
    is_own: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Bring a store that has the records of the snapshot before to those of this one.

    Args:
        directory: The snapshot.
        store: The store.
        is_own: Returns whether the store has the records of some ids, bool; None: of all.

    Raises:
        ValueError: The snapshot is damaged.
        OSError: A record cannot be read or written.
    """
    manifest = snapshots.read_manifest(directory)
    removed = np.load(directory / _REMOVED)
    if is_own is not None:
        removed = removed[is_own(removed)]
    if removed.size:
        store.delete(removed)
    for ids, records in snapshots.read_records(directory / _RECORDS, manifest.format):
        if is_own is not None:
            mine = is_own(ids)
            ids, records = ids[mine], records[mine]
        if ids.size:
            store.put(ids, records)
    store.flush()


def read_snapshot(directory: pathlib.Path, manifest: Manifest) -> NoReturn:
    """Refuse to be read as all records of a store."""
    raise ValueError(
        f"the snapshot {directory} has changes since an earlier snapshot, not all records; load "
        "the checkpoint that it belongs to"
    )


def check_snapshot(directory: pathlib.Path, manifest: Manifest) -> None:
    """Check nothing: all files have checksums."""
