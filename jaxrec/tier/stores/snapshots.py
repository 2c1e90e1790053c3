"""Snapshots of row stores: directories of files with checksums.

The file ``snapshot.json`` has a snapshot's kind, the format of its records, and the size and CRC-32
of its other files. The kind ``"arrow"`` has all records in ``records.arrow``, an Arrow IPC file
with the columns ``id`` and ``record``. The kind ``"changes"`` has the records that were written
since an earlier snapshot, and the ids of removed records. Stores with a quicker way write kinds of
their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxrec.files.atomic import sync, write_atomically
from jaxrec.files.manifest import Segment, check_seal, seal
from jaxrec.tier.stores.record_format import RecordFormat

MANIFEST = "snapshot.json"
CHANGES = "changes"
RECORDS = "records.arrow"

# Modules with functions `read_snapshot(directory, manifest)` and `check_snapshot(directory,
# manifest)` for other kinds. Names, since these modules import this one.
_KINDS = {"file": "jaxrec.tier.stores.file_store", "rocksdb": "jaxrec.tier.stores.rocksdb_database"}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of a snapshot's file ``snapshot.json``.

    ``files`` has the size and CRC-32 of each file by path; the CRC-32 is None for a file whose
    content has checksums of its own. ``details`` are numbers that a kind of snapshot adds.
    """

    kind: str
    format: RecordFormat
    files: dict[str, tuple[int, int | None]]
    details: dict[str, Any]


@contextlib.contextmanager
def writing(
    directory: pathlib.Path,
    kind: str,
    format: RecordFormat,
    details: dict[str, Any],
    has_own_checksums: Callable[[pathlib.Path], bool] = lambda path: False,
) -> Iterator[pathlib.Path]:
    """Write a snapshot into a directory, which appears when it is complete and on the disk.

    The block writes the files of the snapshot to the yielded path. It may fill in ``details`` until
    it ends. No CRC-32 is recorded for files whose path ``has_own_checksums``.
    """
    directory = pathlib.Path(directory)
    if directory.exists():
        raise FileExistsError(f"{directory} exists; a snapshot needs a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(directory) as unfinished:
        unfinished.mkdir()
        yield unfinished
        paths = sorted(path for path in unfinished.rglob("*") if path.is_file())
        files = {}
        for path in paths:
            size = path.stat().st_size
            crc = None if has_own_checksums(path) else _crc(path, size)
            files[path.relative_to(unfinished).as_posix()] = size, crc
        fields = {"format": dataclasses.asdict(format), "files": files, "details": details}
        manifest = unfinished / MANIFEST
        manifest.write_bytes(seal({"kind": kind, **fields}))
        # Files before their directories, and the rename last: after a power cut the snapshot is
        # there whole or not at all.
        for path in [*paths, manifest, *(each for each in unfinished.rglob("*") if each.is_dir())]:
            sync(path)
        sync(unfinished)
    sync(directory.parent)


def write(
    directory: pathlib.Path, format: RecordFormat, parts: Iterable[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Write a snapshot of the kind ``"arrow"``; ``parts`` are what `RowStore.scan` yields."""
    details = {"count": 0}
    with writing(directory, "arrow", format, details) as unfinished:
        details["count"] = write_records(unfinished / RECORDS, format, parts)


def write_records(
    path: pathlib.Path, format: RecordFormat, parts: Iterable[tuple[np.ndarray, np.ndarray]]
) -> int:
    """Write the ids and records of all parts to an Arrow IPC file; return the number of records."""
    import pyarrow as pa

    record = pa.binary(format.width)
    schema = pa.schema([("id", pa.int64()), ("record", record)])
    schema = schema.with_metadata({"format": str(format)})
    count = 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for ids, records in parts:
            values = pa.py_buffer(np.ascontiguousarray(records))
            # Arrow takes the records' memory as it lies, without an object for each of them.
            columns = [pa.array(ids), pa.Array.from_buffers(record, ids.size, [None, values])]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            count += ids.size
    return count


def read_manifest(directory: pathlib.Path) -> Manifest:
    """Read the manifest of a snapshot; raise a ValueError if it is missing or damaged."""
    path = pathlib.Path(directory) / MANIFEST
    try:
        content = json.loads(path.read_text())
        check_seal(content)
        files = {name: (size, crc) for name, (size, crc) in content["files"].items()}
        format = RecordFormat(**content["format"])
        return Manifest(content["kind"], format, files, content["details"])
    except FileNotFoundError:
        raise ValueError(
            f"{directory} is not a snapshot of a row store: it lacks {MANIFEST}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the snapshot is damaged: {path} ({error})") from None


def check(directory: pathlib.Path, format: RecordFormat) -> Manifest:
    """Compare the files of a snapshot with its manifest, and return the manifest.

    A ValueError is raised if the snapshot is damaged, or its records do not have the ``format``.
    """
    directory = pathlib.Path(directory)
    manifest = read_manifest(directory)
    format.check_same(manifest.format, f"the snapshot {directory}")
    for name, (size, crc) in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"the snapshot is damaged: {path} is missing")
        if path.stat().st_size != size:
            raise ValueError(
                f"the snapshot is damaged: {path} has {path.stat().st_size:,} bytes, {size:,} were "
                "saved"
            )
        if crc is not None and _crc(path, size) != crc:
            raise ValueError(f"the snapshot is damaged: {path} has not the bytes that were saved")
    if manifest.kind not in ("arrow", CHANGES):  # whose files all have checksums
        _module(directory, manifest).check_snapshot(directory, manifest)
    return manifest


def read(directory: pathlib.Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Iterate over the ids, int64 ``[n]``, and records, uint8 ``[n, width]``, of a snapshot."""
    directory = pathlib.Path(directory)
    manifest = read_manifest(directory)
    if manifest.kind == CHANGES:
        raise ValueError(
            f"the snapshot {directory} has changes since an earlier snapshot, not all records; "
            "load the checkpoint that it belongs to"
        )
    if manifest.kind != "arrow":
        return _module(directory, manifest).read_snapshot(directory, manifest)
    return read_records(directory / RECORDS, manifest.format)


def read_records(
    path: pathlib.Path, format: RecordFormat
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the ids, int64 ``[n]``, and records, uint8 ``[n, width]``, of an Arrow file."""
    import pyarrow as pa

    width = format.width
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            column = batch.column(1)
            values = np.frombuffer(column.buffers()[1], np.uint8)
            start = column.offset * width
            records = values[start : start + len(batch) * width].reshape(-1, width)
            yield batch.column(0).to_numpy().copy(), records.copy()


def _module(directory: pathlib.Path, manifest: Manifest) -> Any:
    if manifest.kind not in _KINDS:
        raise ValueError(
            f"the snapshot {directory} has the unknown kind {manifest.kind!r}; another version of "
            "jaxrec wrote it"
        )
    return importlib.import_module(_KINDS[manifest.kind])


def _crc(path: pathlib.Path, size: int) -> int:
    """Return the CRC-32 of a file of ``size`` bytes."""
    return int(Segment(path.name, 0, size).checksum(path.parent), 16)
