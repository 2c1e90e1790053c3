"""The sequences of items of each user, from rows of interactions or from columns of lists."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int

from jaxrec.arguments import ConfigError
from jaxrec.data import DataError, ParquetGroups
from jaxrec.data.column_types import is_list
from jaxrec.data.common_types import common_columns
from jaxrec.data.encode import joined
from jaxrec.data.files import DataFiles
from jaxrec.train.config import DataConfig
from jaxrec.train.features import parquet_data
from jaxrec.train.hold_out import LAST, split_of


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


@dataclasses.dataclass(frozen=True, eq=False)
class Sequences:
    """The items of each sequence of a run's files, oldest first.

    Attributes:
        items: ``[sequences]`` lists.
        rows: ``[items]`` int64, the row of the files that has each item of all lists.
        num_rows: Number of rows of the files.
    """

    items: pa.Array
    rows: Int[np.ndarray, " items"]
    num_rows: int


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceSplit:
    """Sequences to train on, and sequences whose last item is to be predicted.

    Attributes:
        training: ``[sequences]`` lists of items.
        before: ``[questions]`` lists of the items before each last item.
        last: ``[questions]``, the last items.
    """

    training: pa.Array
    before: pa.Array
    last: pa.Array


def read_sequences(data: DataConfig, path: pathlib.Path | None) -> Sequences:
    """Read the sequences of a run's files.

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
        lists = joined(column)
        # A null list is no sequence.
        valid = np.flatnonzero(np.asarray(lists.is_valid()))
        lists = lists.drop_null().cast(pa.large_list(column.type.value_type))
        return Sequences(lists, np.repeat(valid, _lengths(lists)), len(column))
    names = (data.user, item, *(() if data.time is None else (data.time,)))
    rows = _read(files, tuple(map(str, names)))
    users = _codes(rows[data.user], f"{path}, column {data.user!r}")
    times = np.zeros(len(rows)) if data.time is None else _times(rows[data.time], path, data.time)
    order = np.lexsort((times, users))  # which keeps the order of equal times
    items = joined(rows[item]).take(pa.array(order))
    return Sequences(_lists(items, np.bincount(users)), order, len(rows))


def split_sequences(data: DataConfig, seed: int) -> SequenceSplit:
    """Split the sequences of a run.

    By default and with "last" the last item of each sequence is held out. With another ``hold_out``
    whole sequences are, with ``hold_out_by`` and ``hold_out_from`` rows of the files. Held-out
    items are not trained on, and the last item of a sequence is to be predicted if it is held out.

    Raises:
        DataError: All sequences are on one side, or there is no last item to predict.
    """
    whole = read_sequences(data, data.path)
    if data.eval_path is not None:
        others = read_sequences(data, data.eval_path)
        before, last = split_last(others.items)
        _check_questions(last, data.eval_path)
        return SequenceSplit(whole.items, before, last)
    if not data.hold_out_options or data.hold_out == LAST:
        before, last = split_last(whole.items)
        return SequenceSplit(before, before, last)
    lengths = _lengths(whole.items)
    held_out = _held_out(data, seed, whole, lengths)
    flat = whole.items.flatten()
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    kept = np.bincount(sequence[~held_out], minlength=len(lengths))
    # An empty sequence has no last item.
    is_asked = np.zeros(len(lengths), bool)
    is_asked[lengths > 0] = held_out[np.cumsum(lengths)[lengths > 0] - 1]
    before, last = split_last(whole.items.filter(pa.array(is_asked)))
    training = _lists(flat.filter(pa.array(~held_out)), kept)
    _check_questions(last, data.path)
    return SequenceSplit(training, before, last)


def _held_out(
    data: DataConfig, seed: int, whole: Sequences, lengths: Int[np.ndarray, " sequences"]
) -> Bool[np.ndarray, " items"]:
    """Return which items of all sequences are held out."""
    split = split_of(data, seed)
    if not split.columns:
        return np.repeat(split.mask(len(lengths), str(data.path)).part(0, len(lengths)), lengths)
    files = parquet_data(data.path, data)
    columns = ParquetGroups(files.paths, split.columns, sources=files.sources)
    mask = split.mask(whole.num_rows, str(data.path), columns)
    return mask.part(0, whole.num_rows)[whole.rows]


def _check_questions(last: pa.Array, path: pathlib.Path | None) -> None:
    """Raise a DataError if no sequence has a last item to predict, after an earlier one."""
    if not len(last):
        raise DataError(
            f"{path}: no sequence has two items, of which the last is held out, to predict it"
        )


def split_last(sequences: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Split sequences into all items but the last, and the last, without those of one item.

    Returns:
        ``[sequences]`` lists of the earlier items, and ``[sequences]`` last items.
    """
    long = sequences.filter(pc.greater_equal(pc.list_value_length(sequences), 2))
    lengths = _lengths(long)
    flat = long.flatten()
    ends = np.cumsum(lengths)
    is_last = np.zeros(len(flat), bool)
    is_last[ends - 1] = True
    before = _lists(flat.filter(pa.array(~is_last)), lengths - 1)
    return before, flat.filter(pa.array(is_last))


def _lengths(lists: pa.Array) -> Int[np.ndarray, " sequences"]:
    return pc.list_value_length(lists).to_numpy().astype(np.int64)


def _lists(values: pa.Array, lengths: Int[np.ndarray, " sequences"]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _read(files: DataFiles, columns: tuple[str, ...]) -> pa.Table:
    groups = ParquetGroups.of_files(files, columns)
    common_columns(groups.schemas_of_rows.items(), columns)  # or an error that names two files
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
