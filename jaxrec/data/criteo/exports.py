"""Writers of converted click logs: TorchRec's npy files, MLPerf's multi-hot data and records."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Integer

from jaxrec.data.arrays import GROUP_ROWS, NpzWriter, sizes_of_groups
from jaxrec.data.criteo.conversion import files_of_sources, read_summary
from jaxrec.data.files import DataError
from jaxrec.data.multi_hot import MultiHot
from jaxrec.data.parquet import ParquetGroups
from jaxrec.data.transforms import (
    CATEGORICAL_NAMES,
    DENSE_NAMES,
    LABEL,
    log_counts,
    log_counts_above,
    table_ids,
)
from jaxrec.files.atomic import write_atomically

Counts = Literal["log", "log_above_smallest", "raw"]

# Functions that make dense features of counts, given the smallest count of their text file.
_TRANSFORMS = {
    "log": lambda counts, smallest: log_counts(counts),
    "log_above_smallest": log_counts_above,
    "raw": lambda counts, smallest: counts.astype(np.float32),
}

# Label, 13 counts and 26 ids of a record.
RECORD_NAMES = (LABEL, *DENSE_NAMES, *CATEGORICAL_NAMES)
RECORD_TYPE = np.dtype("<i4")


@dataclasses.dataclass(frozen=True)
class DayFiles:
    """The arrays of one text file of a log, such as a day.

    Attributes:
        labels: ``[rows, 1]`` int32, an npy file.
        dense: ``[rows, 13]`` float32, an npy file.
        sparse: ``[rows, 26]`` ids, an npy file; or for multi-hot data an npz file with arrays
            ``"0"`` to ``"25"`` of ``[rows, size]`` int32.
    """

    labels: pathlib.Path
    dense: pathlib.Path
    sparse: pathlib.Path


def write_npy(
    source: str | os.PathLike[str], output: str | os.PathLike[str], *, counts: str = "log"
) -> list[DayFiles]:
    """Write a converted log as TorchRec's npy files, three for each text file of the log.

    The text file ``day_0`` becomes ``day_0_labels.npy``, ``day_0_dense.npy`` and
    ``day_0_sparse.npy``, as TorchRec's ``BinaryCriteoUtils`` writes them.
    ``InMemoryBinaryCriteoIterDataPipe`` and `NpyGroups` read these files. Memory does not grow with
    the log.

    Args:
        source: Directory of the Parquet files of ``jaxrec data criteo``.
        output: Directory of the files, which is made if needed; existing files are replaced.
        counts: Transform of the counts. "log": ``log(x + 3)``, as in MLPerf's DLRM v2.
            "log_above_smallest": ``log(x - smallest + 2)`` with the smallest count of the text
            file, as in TorchRec's ``tsv_to_npys``. "raw": the counts as float32.

    Returns:
        The files, one `DayFiles` for each text file. Ids are int32, or int64 if the log was
        converted with ``--ids raw``.

    Raises:
        OSError: A file cannot be read or written.
        DataError: The directory holds no complete conversion.
        ValueError: ``counts`` is unknown.

    Example:
        >>> files = write_npy("OUTPUT", "npy")  # doctest: +SKIP
        >>> groups = NpyGroups({"dense": files[0].dense})  # doctest: +SKIP
    """
    _check_counts(counts)
    made = []
    for day in _days(source):
        files = _day_files(output, day.name, "sparse.npy")
        ids = np.int64 if day.has_raw_ids else np.int32
        with _array(files.sparse, (day.rows, len(CATEGORICAL_NAMES)), ids) as sparse:
            _write_labels_and_dense(day, files, counts, sparse)
        made.append(files)
    return made


def write_multi_hot(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    multi_hot: MultiHot,
    *,
    counts: str = "log",
) -> list[DayFiles]:
    """Write a converted log with several ids in place of each id, as MLPerf's multi-hot data set.

    ``day_0_sparse_multi_hot.npz`` has an array ``[rows, size]`` int32 for each feature, named "0"
    to "25", as ``materialize_synthetic_multihot_dataset.py`` of facebookresearch/dlrm writes it.
    Labels and dense features are the files of `write_npy`. Ids are first taken modulo the rows of
    their tables. Memory does not grow with the log. The reader of facebookresearch/dlrm, and
    `NpyGroups` with `npz_members`, read the files.

    Args:
        source, output, counts: As for `write_npy`.
        multi_hot: The ids that replace each id, with 26 features.

    Returns:
        The files, one `DayFiles` for each text file.

    Raises:
        OSError, DataError: As `write_npy`.
        ValueError: ``multi_hot`` has not 26 features, or ``counts`` is unknown.
    """
    _check_counts(counts)
    if len(multi_hot.keys) != len(CATEGORICAL_NAMES):
        raise ValueError(
            f"a click log has {len(CATEGORICAL_NAMES)} features, multi_hot has "
            f"{len(multi_hot.keys)}"
        )
    made = []
    for day in _days(source):
        files = _day_files(output, day.name, "sparse_multi_hot.npz")
        _write_labels_and_dense(day, files, counts)
        with write_atomically(files.sparse) as unfinished, NpzWriter(unfinished) as writer:
            for feature, name in enumerate(CATEGORICAL_NAMES):
                shape = day.rows, multi_hot.sizes[feature]
                writer.write(str(feature), shape, np.int32, _bags(day, name, multi_hot, feature))
        made.append(files)
    return made


def write_records(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Write a converted log as one file of records, the binary format of MLPerf's DLRM v1.

    `RecordGroups` describes and reads the format. Negative counts become 0, as in the preprocessing
    of facebookresearch/dlrm, whose reader takes ``log(x + 1)``. Memory does not grow with the log.

    Args:
        source: Directory of the Parquet files of ``jaxrec data criteo``.
        path: The file, which appears when it is complete.

    Returns:
        Number of rows.

    Raises:
        OSError: A file cannot be read or written.
        DataError: The directory holds no complete conversion, or its ids are raw: these do not fit
            int32.
    """
    rows = 0
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as unfinished, open(unfinished, "wb") as file:
        for day in _days(source):
            if day.has_raw_ids:
                raise DataError(
                    f"{source} has raw ids, which records of 32-bit integers do not hold; convert "
                    "the log by jaxrec data criteo with --ids hash or contiguous"
                )
            for table in day.tables(RECORD_NAMES):
                numbers = _columns(table, RECORD_NAMES).astype(RECORD_TYPE)
                counts = numbers[:, 1 : 1 + len(DENSE_NAMES)]
                np.maximum(counts, 0, out=counts)
                file.write(numbers.tobytes())
                rows += len(table)
    return rows


@dataclasses.dataclass(frozen=True)
class RecordGroups:
    """Rows of a binary file of records: label, 13 counts and 26 ids, each int32.

    This is the format of ``train_data.bin`` of MLPerf's DLRM v1 (``numpy_to_binary`` in
    ``data_loader_terabyte.py`` of facebookresearch/dlrm), and has no header. The columns are named
    as by ``jaxrec data criteo``: ``label``, ``int_0`` to ``int_12``, ``cat_0`` to ``cat_25``. The
    file is memory-mapped. `write_records` writes such files.

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
    group_rows: int = GROUP_ROWS

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
        return sizes_of_groups(len(self._rows), self.group_rows)

    def read(self, group: int) -> pa.Table:
        """Read the rows of a group."""
        rows = self._rows[group * self.group_rows : (group + 1) * self.group_rows]
        columns = np.ascontiguousarray(rows.T)
        return pa.table(dict(zip(RECORD_NAMES, columns, strict=True)))

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        """Return the file and the number of the group's first row."""
        return pathlib.Path(self.path), group * self.group_rows


@dataclasses.dataclass(frozen=True)
class _Day:
    """The Parquet files of one text file, with its name without ``.gz`` and its smallest count."""

    name: str
    paths: tuple[pathlib.Path, ...]
    rows: int
    smallest: int
    has_raw_ids: bool

    def tables(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the columns ``names`` of each row group."""
        groups = ParquetGroups(self.paths, tuple(names))
        return map(groups.read, range(len(groups.sizes)))


def _days(source: str | os.PathLike[str]) -> list[_Day]:
    """Return the text files of a converted log, in order."""
    smallest = read_summary(source).smallest
    days = []
    for name, paths in files_of_sources(source).items():
        # npy files begin with their shape: the rows are counted before the first row is written.
        metadata = [pq.read_metadata(path) for path in paths]
        kind = metadata[0].schema.to_arrow_schema().field(CATEGORICAL_NAMES[0]).type
        rows = sum(each.num_rows for each in metadata)
        is_raw = kind == pa.uint32()
        days.append(_Day(name.removesuffix(".gz"), paths, rows, smallest[name], is_raw))
    return days


def _check_counts(counts: str) -> None:
    if counts not in _TRANSFORMS:
        raise ValueError(f"counts is {counts!r}; expected one of {', '.join(_TRANSFORMS)}")


def _day_files(output: str | os.PathLike[str], name: str, sparse: str) -> DayFiles:
    directory = pathlib.Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    return DayFiles(*(directory / f"{name}_{end}" for end in ("labels.npy", "dense.npy", sparse)))


def _write_labels_and_dense(
    day: _Day, files: DayFiles, counts: str, sparse: np.ndarray | None = None
) -> None:
    """Write the labels and dense features of a day; fill ``sparse`` with ids in the same pass."""
    names = (LABEL, *DENSE_NAMES) if sparse is None else RECORD_NAMES
    with (
        _array(files.labels, (day.rows, 1), np.int32) as labels,
        _array(files.dense, (day.rows, len(DENSE_NAMES)), np.float32) as dense,
    ):
        start = 0
        for table in day.tables(names):
            part = slice(start, start + len(table))
            labels[part] = _columns(table, [LABEL])
            dense[part] = _TRANSFORMS[counts](_columns(table, DENSE_NAMES), day.smallest)
            if sparse is not None:
                sparse[part] = _columns(table, CATEGORICAL_NAMES)
            start = part.stop


@contextlib.contextmanager
def _array(
    path: pathlib.Path, shape: tuple[int, ...], dtype: np.typing.DTypeLike
) -> Iterator[np.ndarray]:
    """Make an npy file, and yield its mapped array ``[*shape]``, which the block fills."""
    with write_atomically(path) as unfinished:
        array = np.lib.format.open_memmap(unfinished, "w+", np.dtype(dtype), shape)
        yield array
        array.flush()
        del array


def _columns(table: pa.Table, names: Sequence[str]) -> Integer[np.ndarray, "rows columns"]:
    return np.stack([table[name].to_numpy() for name in names], axis=1)


def _bags(day: _Day, name: str, multi_hot: MultiHot, feature: int) -> Iterator[np.ndarray]:
    """Yield the ids of a feature, ``[rows, size]`` for each row group."""
    rows, table_rows = multi_hot.tables[feature], multi_hot.table_rows[feature]
    for table in day.tables([name]):
        ids = table_ids(table[name].to_numpy()[:, None], (table_rows,))[:, 0]
        yield rows[ids]
