"""Export and import of single tables: npy and Parquet."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Array

from jaxrec.atomic import write_atomically
from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.train.checkpoint import CheckpointError

# Number of rows that are written or read at once.
_ROWS = 1 << 16

_ROW, _EMBEDDING = "row", "embedding"

Collection = EmbeddingBagCollection | EmbeddingCollection


def export_table(collection: Collection, name: str, path: str | os.PathLike[str]) -> None:
    """Write the rows of a table to an npy or a Parquet file.

    Args:
        collection: The table's collection.
        name: Name of the table.
        path: The file, which appears when it is complete. ``.npy``: the array
            ``[num_embeddings, embedding_dim]``, bfloat16 as float32. ``.parquet``: columns ``row``
            and ``embedding``, a list of ``embedding_dim`` numbers.

    Raises:
        KeyError: The collection has no such table.
        ValueError: The file's name has another ending.
        OSError: The file cannot be written.

    Example:
        >>> import jaxrec, tempfile
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=3, embedding_dim=2)
        >>> bags = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "user.npy")
        >>> export_table(bags, "user", path)
        >>> np.load(path).shape
        (3, 2)
    """
    path = pathlib.Path(path)
    if path.suffix not in (".npy", ".parquet"):
        raise ValueError(f"a table is written to .npy or .parquet, got {path.name}")
    shape = _shape(collection, name)
    pieces = _pieces(collection, name, shape[0])
    with write_atomically(path) as unfinished:
        if path.suffix == ".npy":
            _write_npy(unfinished, pieces, shape)
        else:
            _write_parquet(unfinished, pieces)


def _shape(collection: Collection, name: str) -> tuple[int, int]:
    """Return the shape of a table.

    Raises:
        KeyError: The collection has no such table.
    """
    shapes = {each.name: (each.num_embeddings, each.embedding_dim) for each in collection.configs}
    if name not in shapes:
        raise KeyError(f"no table is named {name!r}; there are {', '.join(map(repr, shapes))}")
    return shapes[name]


def _pieces(collection: Collection, name: str, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """Iterate over a table some rows at a time, so that no device holds more."""
    for start, piece in collection.tables.get_value().parts(name, _ROWS):
        yield start, piece if piece.dtype.kind == "f" else piece.astype(np.float32)


def _write_npy(
    path: pathlib.Path, pieces: Iterator[tuple[int, np.ndarray]], shape: tuple[int, int]
) -> None:
    array = None
    for start, piece in pieces:
        if array is None:
            array = np.lib.format.open_memmap(path, "w+", piece.dtype, shape)
        array[start : start + len(piece)] = piece
    assert array is not None  # tables have rows
    array.flush()


def _write_parquet(path: pathlib.Path, pieces: Iterator[tuple[int, np.ndarray]]) -> None:
    writer = None
    with contextlib.ExitStack() as stack:
        for start, piece in pieces:
            flat = pa.array(np.ascontiguousarray(piece).reshape(-1))
            numbers = pa.array(np.arange(start, start + len(piece)))
            lists = pa.FixedSizeListArray.from_arrays(flat, piece.shape[1])
            table = pa.table({_ROW: numbers, _EMBEDDING: lists})
            if writer is None:
                writer = stack.enter_context(
                    pq.ParquetWriter(path, table.schema, write_page_checksum=True)
                )
            writer.write_table(table)


def import_table(collection: Collection, name: str, path: str | os.PathLike[str]) -> None:
    """Set the rows of a table from an npy or a Parquet file in the format of `export_table`.

    Args:
        collection: The table's collection; its optimizer state does not change.
        name: Name of the table.
        path: File ``.npy`` or ``.parquet``. The rows of a Parquet file may have any order.

    Raises:
        KeyError: The collection has no such table.
        ValueError: The file holds another shape: a row is missing, repeated, null or has another
            length.
        OSError: The file cannot be read.
    """
    path = pathlib.Path(path)
    if path.suffix == ".npy":
        rows = _read_npy(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path, _shape(collection, name))
    else:
        raise ValueError(f"a table is read from .npy or .parquet, got {path.name}")
    _load(collection, name, rows, str(path))


def _read_npy(path: pathlib.Path) -> np.ndarray:
    try:
        rows = np.lib.format.open_memmap(path, "r")
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError(f"{path} is not an npy file of numbers: {error}") from None
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "fiu":
        raise ValueError(f"{path}: expected one array of numbers")
    return rows


def _read_parquet(path: pathlib.Path, shape: tuple[int, ...]) -> np.ndarray:
    rows, seen = np.zeros(shape, np.float32), np.zeros(shape[0], bool)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if missing := {_ROW, _EMBEDDING} - set(file.schema_arrow.names):
                raise ValueError(f"{path} is not a table: it has no column {sorted(missing)[0]!r}")
            for batch in file.iter_batches(_ROWS, columns=[_ROW, _EMBEDDING]):
                numbers = _row_numbers(path, batch.column(_ROW), seen)
                rows[numbers] = _embeddings(path, batch.column(_EMBEDDING), numbers, shape[1])
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None
    if not seen.all():
        raise ValueError(f"{path} lacks row {np.flatnonzero(~seen)[0]} of the table's {shape[0]}")
    return rows


def _row_numbers(path: pathlib.Path, column: pa.Array, seen: np.ndarray) -> np.ndarray:
    """Check the row numbers of a part of a file, and mark them in ``seen``."""
    if not pa.types.is_integer(column.type):
        raise ValueError(f"{path}: column {_ROW!r} holds {column.type}, expected integers")
    if column.null_count:
        raise ValueError(f"{path}: column {_ROW!r} has nulls")
    numbers = column.to_numpy()
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(seen):
        raise ValueError(
            f"{path}: rows reach from {numbers.min()} to {numbers.max()}, but the table has "
            f"{len(seen)}"
        )
    # Equal neighbours in sorted order are repeated numbers.
    order = np.argsort(numbers, kind="stable")
    again = seen[numbers]
    again[order[1:]] |= numbers[order[1:]] == numbers[order[:-1]]
    if again.any():
        raise ValueError(f"{path}: row {numbers[again.argmax()]} is there more than once")
    seen[numbers] = True
    return numbers


def _embeddings(
    path: pathlib.Path, column: pa.Array, numbers: np.ndarray, width: int
) -> np.ndarray:
    """Check the embeddings of a part of a file; return ``[len(numbers), width]``."""
    types = pa.types
    is_list = types.is_list(column.type) or types.is_large_list(column.type)
    is_list |= types.is_fixed_size_list(column.type)
    if not is_list or not (
        types.is_floating(column.type.value_type) or types.is_integer(column.type.value_type)
    ):
        raise ValueError(
            f"{path}: column {_EMBEDDING!r} holds {column.type}, expected lists of numbers"
        )
    # The length of a null is null.
    lengths = pc.list_value_length(column).fill_null(-1).to_numpy()
    if (lengths != width).any():
        place = (lengths != width).argmax()
        has = "is null" if lengths[place] < 0 else f"has {lengths[place]} numbers"
        raise ValueError(
            f"{path}: the embedding of row {numbers[place]} {has}, the table's have {width}"
        )
    values = column.flatten()
    if values.null_count:
        place = values.is_null().index(True).as_py() // width
        raise ValueError(f"{path}: the embedding of row {numbers[place]} has nulls")
    return values.to_numpy().reshape(-1, width)


def _load(collection: Collection, name: str, rows: Array | np.ndarray, where: str) -> None:
    wanted = _shape(collection, name)
    if tuple(rows.shape) != wanted:
        raise CheckpointError(
            f"{where}: table {name!r} has shape {wanted}, the file's {tuple(rows.shape)}"
        )
    collection.load_table(name, rows)
