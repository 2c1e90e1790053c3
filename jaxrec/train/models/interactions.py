"""The sequences of items of each user, from rows of interactions or from columns of lists."""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.arguments import ConfigError
from jaxrec.data import DataError, ParquetGroups
from jaxrec.data.column_types import is_list
from jaxrec.data.encode import joined
from jaxrec.data.files import DataFiles
from jaxrec.train.config import DataConfig
from jaxrec.train.features import parquet_data


def item_column(data: DataConfig) -> str:
    """Return the name of the column of a run's items; raise a ConfigError if none is named."""
    if len(data.history) == 1 and not data.item:
        return data.history[0]
    if len(data.item) == 1 and data.user is not None and not data.history:
        return data.item[0]
    raise ConfigError(
        "sequences of items are a column of lists, such as --history items, or rows of "
        "interactions, such as --user user --item item --time timestamp"
    )


def read_sequences(data: DataConfig, path: pathlib.Path | None) -> pa.Array:
    """Return the items of each sequence of a run's files, oldest first: ``[sequences]`` lists.

    Rows of one user are a sequence, in the order of their times, or of the files where times are
    equal or none are named.
    """
    item = item_column(data)
    files = parquet_data(path, data)
    if data.history:
        column = _read(files, (item,))[item]
        if not is_list(column.type):
            raise DataError(
                f"{path}, column {item!r} is of type {column.type}; --history names a column of "
                "lists, and --user, --item and --time those of interactions"
            )
        # A null list is no sequence.
        return joined(column).drop_null().cast(pa.large_list(column.type.value_type))
    names = (data.user, item, *(() if data.time is None else (data.time,)))
    rows = _read(files, tuple(map(str, names)))
    users = _codes(rows[data.user], f"{path}, column {data.user!r}")
    times = np.zeros(len(rows)) if data.time is None else _times(rows[data.time], path, data.time)
    order = np.lexsort((times, users))  # which keeps the order of equal times
    lengths = np.bincount(users)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), joined(rows[item]).take(pa.array(order))
    )


def split_last(sequences: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Split sequences into all items but the last, and the last, without those of one item.

    Returns:
        ``[sequences]`` lists of the earlier items, and ``[sequences]`` last items.
    """
    long = sequences.filter(pc.greater_equal(pc.list_value_length(sequences), 2))
    lengths = pc.list_value_length(long).to_numpy()
    flat = long.flatten()
    ends = np.cumsum(lengths)
    is_last = np.zeros(len(flat), bool)
    is_last[ends - 1] = True
    offsets = np.concatenate([[0], np.cumsum(lengths - 1)]).astype(np.int64)
    before = pa.LargeListArray.from_arrays(pa.array(offsets), flat.filter(pa.array(~is_last)))
    return before, flat.filter(pa.array(is_last))


def _read(files: DataFiles, columns: tuple[str, ...]) -> pa.Table:
    groups = ParquetGroups.of_files(files, columns)
    tables = [groups.read(group) for group in range(len(groups.sizes))]
    if not tables:
        raise DataError(f"{next(iter(groups.schemas))}: it has no rows")
    return pa.concat_tables(tables, promote_options="permissive")


def _codes(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """Return a number from 0 for each distinct value of a column."""
    if column.null_count:
        raise DataError(f"{where}: {column.null_count} users are null; leave their rows out")
    encoded = joined(pc.dictionary_encode(column))
    return encoded.indices.to_numpy().astype(np.int64)


def _times(column: pa.ChunkedArray, path: pathlib.Path | None, name: str) -> np.ndarray:
    """Return a column of times or numbers as int64 or float64."""
    kind = column.type
    where = f"{path}, column {name!r}"
    if column.null_count:
        raise DataError(f"{where}: {column.null_count} times are null; leave their rows out")
    if pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return joined(column).cast(pa.int64()).to_numpy()
    if pa.types.is_date32(kind):
        return joined(column).cast(pa.int32()).to_numpy()
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return joined(column).to_numpy()
    raise DataError(f"{where} is of type {kind}; --time names a column of times or of numbers")
