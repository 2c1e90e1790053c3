"""Click logs as records of 32-bit integers, the binary format of MLPerf's first DLRM."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib

import numpy as np
import pyarrow as pa

from jaxrec.data.criteo.text import LABEL, DataError
from jaxrec.data.groups import NPY_GROUP_ROWS
from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES

# Label, 13 counts and 26 ids of a row.
RECORD_NAMES = (LABEL, *DENSE_NAMES, *CATEGORICAL_NAMES)
RECORD_TYPE = np.dtype("<i4")


@dataclasses.dataclass(frozen=True)
class RecordGroups:
    """Rows of a binary file of records: label, 13 counts and 26 ids, each int32.

    The format of ``train_data.bin`` of MLPerf's DLRM v1 (``numpy_to_binary`` in
    ``data_loader_terabyte.py`` of facebookresearch/dlrm), which has no header. The columns have the
    names of `jaxrec data criteo`: ``label``, ``int_0`` to ``int_12``, ``cat_0`` to ``cat_25``. The
    file is memory-mapped. `jaxrec.data.write_records` writes such files.

    Attributes:
        path: The file.
        group_rows: Number of rows of a group.

    Raises:
        OSError: The file cannot be read.
        DataError: The file is empty, or its size is not a multiple of a record's.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "train_data.bin")
        >>> np.arange(80, dtype=np.int32).tofile(path)
        >>> groups = RecordGroups(path)
        >>> groups.sizes, groups.read(0)["int_0"].to_pylist()
        ((2,), [1, 41])
    """

    path: str | os.PathLike[str]
    group_rows: int = NPY_GROUP_ROWS

    @functools.cached_property
    def _rows(self) -> np.ndarray:
        size, record = pathlib.Path(self.path).stat().st_size, 4 * len(RECORD_NAMES)
        if size == 0 or size % record:
            raise DataError(
                f"{self.path} has {size} bytes; records of {len(RECORD_NAMES)} 32-bit integers are "
                f"a multiple of {record}"
            )
        return np.memmap(self.path, RECORD_TYPE, "r").reshape(-1, len(RECORD_NAMES))

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each group."""
        rows = len(self._rows)
        return tuple(
            min(self.group_rows, rows - start) for start in range(0, rows, self.group_rows)
        )

    def read(self, group: int) -> pa.Table:
        """Read the rows of a group."""
        rows = self._rows[group * self.group_rows : (group + 1) * self.group_rows]
        columns = np.ascontiguousarray(rows.T)
        return pa.table(dict(zip(RECORD_NAMES, columns, strict=True)))

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        """Return the file and the number of the group's first row."""
        return pathlib.Path(self.path), group * self.group_rows
