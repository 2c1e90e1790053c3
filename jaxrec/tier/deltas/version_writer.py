"""Writing the files of a version."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pyarrow as pa
from flax import nnx
from jax.experimental import multihost_utils

from jaxrec.embed.variables import dense_variables, plain
from jaxrec.files.rows import RowWriter, Values, write_arrays
from jaxrec.tier.changes.tracked_tables import ChangedIds
from jaxrec.tier.deltas.folder import VersionFolder, VersionName
from jaxrec.tier.deltas.manifest import REMOVED, ROWS, UNKNOWN, File
from jaxrec.tier.deltas.tables import PublishedTable


class VersionWriter:
    """Writes the files of one version.

    Every process calls its methods, which read rows together; process 0 writes. `finish` raises an
    error of process 0 once all processes have read the rows.
    """

    def __init__(self, folder: VersionFolder, name: VersionName, with_state: bool) -> None:
        self._folder, self._name, self._with_state = folder, name, with_state
        self._is_writer = jax.process_index() == 0
        self._error: BaseException | None = None

    def write_dense(self, model: nnx.Module) -> File:
        """Write the variables of a model outside of its tables; return their file."""
        arrays = {name: _on_host(x.get_value()) for name, x in dense_variables(model).items()}
        path = f"{self._name}/dense.arrow"
        file = File(path, 0, 0, len(arrays))

        def write() -> None:
            nonlocal file
            with self._folder.writing(path) as stream:
                write_arrays(stream, arrays)
            file = File(path, stream.bytes, stream.crc32, len(arrays))

        self._attempt(write)
        return file

    def write_full(self, table: PublishedTable) -> dict[str, File]:
        """Write all rows of a table; return its files by content (`ROWS`, `UNKNOWN`)."""
        with _TableFile(self, table, "full", ROWS) as rows:
            for ids, values in table.scan(self._with_state):
                rows.write(ids, values)
        kind, count = table.facts.unknown
        unknown = np.arange(0 if kind == "zeros" else count)
        return _written(rows, self._write_unknown(table, "full", unknown))

    def write_delta(self, table: PublishedTable, changed: ChangedIds) -> dict[str, File]:
        """Write changed rows of a table, and ids that lost theirs; return its files by content."""
        removed = [changed.removed]
        with _TableFile(self, table, "delta", ROWS) as rows:
            for ids in table.parts(changed.ids):
                has_row, values = table.read(ids, self._with_state)
                rows.write(ids[has_row], values)
                # Changed ids that have no row now are tombstones, too.
                removed.append(ids[~has_row])
        with _TableFile(self, table, "delta", REMOVED) as tombstones:
            tombstones.write(np.unique(np.concatenate(removed)), {})
        return _written(rows, tombstones, self._write_unknown(table, "delta", changed.unknown))

    def finish(self) -> None:
        """Raise the error of a file that could not be written."""
        if isinstance(self._error, OSError):
            raise self._error
        if self._error is not None:
            raise OSError(f"{self._folder}: a file cannot be written: {self._error}")

    def _write_unknown(
        self, table: PublishedTable, section: str, indices: np.ndarray
    ) -> _TableFile:
        with _TableFile(self, table, section, UNKNOWN) as rows:
            for part in table.parts(indices):
                rows.write(part, table.read_rows(part, self._with_state))
        return rows

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call ``action`` in process 0, unless one failed before; keep its error for `finish`."""
        if not self._is_writer or self._error is not None:
            return
        try:
            action()
        except (OSError, pa.ArrowException) as error:
            # Later rows are still read after an error: the other processes take part in these
            # reads, and would wait for this one for ever.
            if jax.process_count() == 1:
                raise
            self._error = error


class _TableFile:
    """Writer of one file of a table in a version; without rows there is no file.

    ``file`` describes the complete file. It stays None if there is none.
    """

    def __init__(
        self, writer: VersionWriter, table: PublishedTable, section: str, kind: str
    ) -> None:
        self._writer, self.kind = writer, kind
        self._path = (
            f"{writer._name}/{section}.{urllib.parse.quote(table.name, safe='')}.{kind}.arrow"
        )
        self._shapes: Mapping[str, Any] = (
            {} if kind == REMOVED else table.shapes(writer._with_state)
        )
        self._stack = contextlib.ExitStack()
        self._stream: Any = None
        self._rows: RowWriter | None = None
        self.file: File | None = None

    def write(self, ids: np.ndarray, values: Values) -> None:
        """Append ids, int64 ``[n]``, and their values; the first ids make the file."""
        if ids.size:
            self._writer._attempt(lambda: self._write(ids, values))

    def _write(self, ids: np.ndarray, values: Values) -> None:
        if self._rows is None:
            self._stream = self._stack.enter_context(self._writer._folder.writing(self._path))
            self._rows = RowWriter(self._stream, self._shapes)
        self._rows.write(ids, values)

    def _complete(self) -> None:
        if self._rows is not None:
            self._rows.close()
            self._stack.close()
            self.file = File(self._path, self._stream.bytes, self._stream.crc32, self._rows.rows)

    def __enter__(self) -> _TableFile:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self._writer._attempt(self._complete)
        # A file that failed, or that was interrupted, belongs to no version.
        with contextlib.suppress(OSError):
            self._stack.close()


def _written(*files: _TableFile) -> dict[str, File]:
    return {each.kind: each.file for each in files if each.file is not None}


def _on_host(value: Any) -> np.ndarray:
    array = plain(value)
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
