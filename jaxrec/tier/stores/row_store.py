"""Row stores, which keep the rows that are not on the devices."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrec.tier.stores import snapshots
from jaxrec.tier.stores.record_format import RecordFormat

_REMOVED = "removed.npy"
_PART = 1 << 16  # records


class RowStore(abc.ABC):
    """Records of equal width, in bytes, by 64-bit id.

    A record is a row of each table of a vocabulary, with its optimizer state. Implementors do the
    following:

    1. All methods may be called from several threads at once. A `get` that begins after a `put` or
       `delete` has returned sees its changes.
    2. Making the object reads and writes nothing. `open` is called once, before any other method,
       and sets `format`. A store that holds records of another format raises the ValueError of
       `RecordFormat.check_same`.
    3. `open` refuses a store that another run has open, with a BlockingIOError that names the run.
       The store of a killed run opens.
    4. A record is read whole, as one `put` wrote it, or it is absent.
    5. Ids are in the range of the format.
    6. Errors are an OSError or a ValueError of one clear sentence, without credentials.

    Attributes:
        format: The format of the records, set by `open`.
        in_memory: Whether the records are in the process's memory, so that `get` and `put` never
            wait for a disk or a server. Such stores share threads; every other store gets two of
            its own.
    """

    format: RecordFormat
    in_memory: bool = False

    @abc.abstractmethod
    def open(self, format: RecordFormat) -> None:
        """Prepare the store for records of a format.

        Raises:
            ValueError: The store holds records of another format.
            BlockingIOError: Another run has the store open.
            OSError: The store cannot be reached, read or written.
        """

    @abc.abstractmethod
    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read records.

        Args:
            ids: int64 ``[n]``.

        Returns:
            Whether each id has a record, bool ``[n]``, and the records, uint8 ``[n, width]``, with
            zeros for an id that has none. The arrays are the caller's.
        """

    @abc.abstractmethod
    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Write records.

        Args:
            ids: Distinct ids, int64 ``[n]``.
            records: uint8 ``[n, width]``.

        Raises:
            OSError: A record could not be written. Each record is then the old or the new one, or
                absent if it was new.
        """

    @classmethod
    def get_all(
        cls, stores: Sequence[Any], ids: Sequence[np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Read records of several stores of this class, as `get` of each with its ids.

        A class whose stores are `in_memory` may read all of them at once.
        """
        return [store.get(of_store) for store, of_store in zip(stores, ids, strict=True)]

    @classmethod
    def put_all(
        cls,
        stores: Sequence[Any],
        ids: Sequence[np.ndarray],
        parts: Sequence[Sequence[np.ndarray]],
    ) -> None:
        """Write records of several stores of this class, as `put` of each with its ids.

        The records of a store come in parts, uint8 ``[n, _]``, contiguous: side by side they are
        the records. A class whose stores are `in_memory` may write all of them at once.
        """
        for store, of_store, of_records in zip(stores, ids, parts, strict=True):
            store.put(of_store, np.concatenate(of_records, axis=1))

    @abc.abstractmethod
    def delete(self, ids: np.ndarray) -> None:
        """Remove the records of ids; an id without a record is skipped."""

    @abc.abstractmethod
    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over all records as ``(ids, records)`` of at most ``size`` records each."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of records."""

    def clear(self) -> None:
        """Remove all records."""
        for ids, _ in list(self.scan()):
            self.delete(ids)

    def snapshot(self, directory: pathlib.Path) -> None:
        """Write all records to a new directory; when this returns, they are durable there.

        Callers put and delete nothing meanwhile. By default the snapshot is an Arrow file with
        checksums (`jaxrec.tier.stores.snapshots`), which `load_snapshot` of any store reads.

        Raises:
            FileExistsError: The directory exists.
            OSError: It cannot be written.
        """
        snapshots.write(directory, self.format, self.scan())

    def load_snapshot(self, directory: pathlib.Path) -> None:
        """Replace all records by the records of a snapshot of any store.

        The snapshot is checked before a record changes. If the process is killed while records
        are replaced, load the snapshot again.

        Raises:
            ValueError: The snapshot is damaged, or of another format.
            OSError: It cannot be read.
        """
        snapshots.check(directory, self.format)
        self.replace(snapshots.read(directory))

    def replace(self, parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Replace all records by ``parts``, which come as `scan` yields them."""
        self.clear()
        for ids, records in parts:
            self.put(ids, records)
        self.flush()

    def flush(self) -> None:
        """Wait until all records that were put are durable."""
        return

    def close(self) -> None:
        """Release the store's resources; closing twice does nothing."""
        return

    def __del__(self) -> None:
        """Close a store that is no longer used, to free its lock."""
        try:  # noqa: SIM105  (modules may be gone when the interpreter ends)
            self.close()
        except Exception:
            pass


def is_changes(directory: pathlib.Path) -> bool:
    """Return whether a snapshot has only the changes since an earlier one."""
    return snapshots.read_manifest(directory).kind == snapshots.CHANGES


def write_changes(directory: pathlib.Path, store: RowStore, ids: np.ndarray) -> None:
    """Write a snapshot of the kind "changes": the records of distinct ids, int64 ``[n]``."""
    # An id without a record now was deleted since the earlier snapshot, or never had one.
    removed: list[np.ndarray] = [ids[:0]]

    def written() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, ids.size, _PART):
            part = ids[start : start + _PART]
            found, records = store.get(part)
            removed.append(part[~found])
            yield part[found], records[found]

    with snapshots.writing(directory, snapshots.CHANGES, store.format, {}) as unfinished:
        snapshots.write_records(unfinished / snapshots.RECORDS, store.format, written())
        np.save(unfinished / _REMOVED, np.concatenate(removed))


def apply_changes(
    directory: pathlib.Path,
    store: RowStore,
    is_own: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Apply a snapshot of the kind "changes" to a store that has the records before it.

    ``is_own(ids)`` returns which ids belong in this store, bool ``[n]``; None: all do.
    """
    manifest = snapshots.read_manifest(directory)
    removed = np.load(directory / _REMOVED)
    if is_own is not None:
        removed = removed[is_own(removed)]
    if removed.size:
        store.delete(removed)
    for ids, records in snapshots.read_records(directory / snapshots.RECORDS, manifest.format):
        if is_own is not None:
            mine = is_own(ids)
            ids, records = ids[mine], records[mine]
        if ids.size:
            store.put(ids, records)
    store.flush()
