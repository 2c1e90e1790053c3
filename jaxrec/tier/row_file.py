"""Export and import of the rows of one table."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxrec.files.atomic import write_atomically
from jaxrec.files.rows import RowFile, RowWriter, Values, open_rows
from jaxrec.mesh.agree import fingerprint, in_all_processes, raise_together, require_same
from jaxrec.ragged.raw_ids import RESERVED
from jaxrec.tier.deltas.tables import OpenTable, PublishedTable, published_tables
from jaxrec.tier.planning.tier import tier_of
from jaxrec.tier.store import TierStore

Result = TypeVar("Result")


def export_rows(
    model: nnx.Module,
    name: str,
    path: str | os.PathLike[str],
    *,
    with_state: bool = False,
    with_stored: bool = False,
) -> int:
    """Write the ids of a table and their rows to a file.

    A table with an open vocabulary writes the ids that have a row; another table writes its row
    indices as ids. Rows are read and written in parts, so that memory does not grow with the table.
    Call it in the thread that trains, between two steps. With several processes, call it in each of
    them; process 0 writes.

    Args:
        model: The model, or one of its collections.
        name: Name of the table.
        path: The file, which appears when it is complete. ``.parquet`` has the columns ``id``,
            int64 in ascending order, and ``row``, a list of ``embedding_dim`` numbers of the
            table's type, bfloat16 as float32. Ids from 2**63 up are written as negative int64 of
            the same bits. ``.npy``, for a table without an open vocabulary, is the array
            ``[num_embeddings, embedding_dim]``.
        with_state: Whether to write the optimizer state of the rows, too, in columns named
            ``state_`` and the state's name.
        with_stored: Whether to write the rows of evicted ids, which the table's store holds, after
            the others.

    Returns:
        The number of ids.

    Raises:
        KeyError: The model has no table of that name.
        ValueError: The file's name has another ending; two tables have that name; ``with_stored``
            is set and the table has no store; or ``with_state`` is set for ``.npy``.
        OSError: The file cannot be written.

    Example:
        >>> import jaxrec, pyarrow.parquet, tempfile
        >>> config = jaxrec.EmbeddingBagConfig("item", num_embeddings=10, embedding_dim=2)
        >>> model = jaxrec.tier.make(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
        ...     {"item": jaxrec.tier.Dynamic()})
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[2**60, 7]]}, id_bits=64)
        >>> _ = list(jaxrec.tier.ahead(model, [batch]))
        >>> path = pathlib.Path(tempfile.mkdtemp(), "item.parquet")
        >>> export_rows(model, "item", path)
        2
        >>> pyarrow.parquet.read_table(path)["id"].to_pylist()
        [7, 1152921504606846976]
    """
    path, table = pathlib.Path(path), _find(model, name)
    _check_suffix(path, "written to", table)
    if with_stored and not (isinstance(table, OpenTable) and table.of.transfer is not None):
        raise ValueError(
            f"table {name!r} has no store, so that rows of evicted ids are lost; leave "
            "with_stored out, or give the table Dynamic(store='memory://')"
        )
    if path.suffix == ".npy" and with_state:
        raise ValueError(f"optimizer state is written to .parquet, got {path.name}")
    count, errors = 0, []
    with contextlib.ExitStack() as stack:
        if isinstance(table, OpenTable):
            # Batches may be planned already: their rows must move before ids and rows agree.
            stack.enter_context(table.tier.settled(model))
        parts = iter(table.scan(with_state, with_stored))
        try:
            if jax.process_index() == 0:
                with contextlib.ExitStack() as files:
                    unfinished = files.enter_context(write_atomically(path))
                    make = _npy_writer if path.suffix == ".npy" else _row_writer
                    write = make(files, unfinished, table, with_state)
                    for ids, values in parts:
                        write(ids, values)
                        count += ids.size
        except Exception as error:
            if jax.process_count() == 1:
                raise
            errors.append(error)
        # Reading a table over a mesh is a collective: every process reads all parts, and so does
        # process 0 after an error, or the others would wait for it for ever. An error in reading is
        # raised in all of them. It has ended `parts`, if process 0 has met it above.
        try:
            count += sum(ids.size for ids, _ in parts)
        except Exception as error:
            errors.append(error)
        raise_together(errors[0] if errors else None, (OSError, ValueError))
    return count


def _row_writer(
    stack: contextlib.ExitStack, path: pathlib.Path, table: PublishedTable, with_state: bool
) -> Callable[[np.ndarray, Values], None]:
    shapes = dict(sorted(table.shapes(with_state).items()))
    return stack.enter_context(contextlib.closing(RowWriter(path, shapes))).write


def _npy_writer(
    stack: contextlib.ExitStack, path: pathlib.Path, table: PublishedTable, with_state: bool
) -> Callable[[np.ndarray, Values], None]:
    dtype = np.dtype(table.shapes(with_state)["rows"].dtype)
    # A mapped file, so that the array is never in memory as a whole. NumPy's format has no name for
    # bfloat16 (its kind is not "f"): those tables are written as float32.
    rows: Any = np.lib.format.open_memmap(
        path,
        "w+",
        dtype if dtype.kind == "f" else np.float32,
        (table.config.num_embeddings, table.config.embedding_dim),
    )
    stack.callback(rows.flush)

    def write(ids: np.ndarray, values: Values) -> None:
        rows[ids[0] : ids[-1] + 1] = values["rows"]

    return write


def import_rows(model: nnx.Module, name: str, path: str | os.PathLike[str]) -> int:
    """Set rows of a table from a file that `export_rows` wrote.

    In a table with an open vocabulary, ids that have a row keep it and get the file's values. Other
    ids get free rows, whatever ``admit_after`` demands; when no row is free, they go to the table's
    store. No id is evicted. Other tables that read the same features get first values for new ids:
    import these tables, too. For a table without an open vocabulary the file must have all rows.

    The file's optimizer state is set, too. If the file has none, new rows get a fresh state and the
    others keep theirs. The file is checked before anything changes. Call it in the thread that
    trains, between two steps. With several processes, call it in each of them; each reads the file,
    and an error of one is raised in all.

    Args:
        model: The model, or one of its collections.
        name: Name of the table.
        path: The file. Ids may have any order. Columns other than ``id``, ``row`` and the state's
            are ignored. Files of earlier versions, with the columns ``row`` and ``embedding``, are
            read, too.

    Returns:
        The number of ids.

    Raises:
        KeyError: The model has no table of that name.
        ValueError: The file is damaged, or its rows have another width or type; an id is null,
            repeated or outside the table; the table has no store, and fewer free rows than the
            file has new ids; or the files of two processes have different ids.
        OSError: A process cannot read the file.
    """
    path, table = pathlib.Path(path), _find(model, name)
    _check_suffix(path, "read from", table)
    if isinstance(table, OpenTable):
        with table.tier.settled(model), contextlib.ExitStack() as stack:
            return _load_open(table, *_in_all(lambda: _open_checked(stack, table, path)))
    read = _read_npy if path.suffix == ".npy" else _read_all
    values = _in_all(lambda: read(table, path))
    require_same(f"file {path}", {"columns": ", ".join(values)})
    table.collection.load_table(name, values.pop("rows"))
    if values:
        table.collection.load_table_state(name, values)
    return table.config.num_embeddings


def _in_all(read: Callable[[], Result]) -> Result:
    """Read from a file in every process; an error of one process is raised in all."""
    # Rows are set by collectives, in which the others would wait for a process that cannot read.
    return in_all_processes(read, (OSError, ValueError))


def _open_checked(
    stack: contextlib.ExitStack, table: OpenTable, path: pathlib.Path
) -> tuple[RowFile, list[np.ndarray]]:
    """Open a file and read all of it; return it with the ids of each part, int64 ``[n]``."""
    shapes = table.shapes(with_state=True)
    file = stack.enter_context(open_rows(path, table.config.name, shapes))
    parts = [ids for ids, _ in file.parts()]
    ids = np.concatenate([np.zeros(0, np.int64), *parts])
    _check_distinct(path, ids)
    if (reserved := ids == RESERVED).any():
        raise ValueError(
            f"{path}, row {int(np.argmax(reserved))} (from 0): id -1 (2**64 - 1 unsigned) is "
            "reserved"
        )
    if table.of.num_ids is not None:
        _check_range(path, ids, table.of.num_ids)
    return file, parts


def _load_open(table: OpenTable, file: RowFile, parts: Sequence[np.ndarray]) -> int:
    """Set the rows of a checked file in a table with an open vocabulary."""
    # All processes write the rows of the same ids together. Where one reads a file with other ids,
    # the others would wait for it.
    facts = {f"ids of part {number}": fingerprint(ids) for number, ids in enumerate(parts)}
    require_same(f"file {file.path}", {"columns": ", ".join(file.shapes)} | facts)
    ids = np.concatenate([np.zeros(0, np.int64), *parts])
    vocabulary, new_ids = table.of.vocabulary, table.without_row(ids)
    free = vocabulary.room - len(vocabulary)
    if table.of.transfer is None and new_ids.size > free:
        raise ValueError(
            f"{file.path} has {ids.size:,} ids, of which {new_ids.size:,} have no row in table "
            f"{table.config.name!r}, and {free:,} of its {vocabulary.room:,} rows for ids are "
            "free; give it more rows (num_embeddings), or import fewer ids"
        )
    table.give_rows(new_ids[:free])  # the others go to the store
    # The file is read again, since its rows may be larger than memory. Nothing in it can be wrong
    # from here on: a half-imported table would be worse than none.
    rows = file.parts()
    for _ in parts:
        table.write(*_in_all(lambda: next(rows)))
    return int(ids.size)


def _read_all(table: PublishedTable, path: pathlib.Path) -> Values:
    """Read all rows of a table, and their optimizer state if the file has one."""
    count, all_ids = table.config.num_embeddings, [np.zeros(0, np.int64)]
    with open_rows(path, table.config.name, table.shapes(with_state=True)) as file:
        # The whole table in host memory: the model must not change before the last row is checked,
        # and `load_table` then sends each row to its own device.
        arrays = {
            key: np.zeros((count, *shape.shape[1:]), shape.dtype)
            for key, shape in file.shapes.items()
        }
        for ids, values in file.parts():
            _check_range(path, ids, count)
            for key, array in arrays.items():
                array[ids] = values[key]
            all_ids.append(ids)
    ids = np.concatenate(all_ids)
    _check_distinct(path, ids)
    if ids.size < count:
        missing = np.setdiff1d(np.arange(count), ids)[0]
        raise ValueError(f"{path} lacks id {missing} of the table's {count}")
    return arrays


def _read_npy(table: PublishedTable, path: pathlib.Path) -> Values:
    """Map a file with the rows of a table, ``[num_embeddings, embedding_dim]``, into memory."""
    try:
        rows = np.lib.format.open_memmap(path, "r")
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError(f"{path} is not an npy file of numbers: {error}") from None
    if not isinstance(rows, np.ndarray) or rows.dtype.kind not in "fiu":
        raise ValueError(f"{path}: expected one array of numbers")
    wanted = table.config.num_embeddings, table.config.embedding_dim
    if rows.shape != wanted:
        raise ValueError(
            f"{path}: table {table.config.name!r} has shape {wanted}, the file's {rows.shape}"
        )
    return {"rows": rows}


def _find(model: nnx.Module, name: str) -> PublishedTable:
    tables = list(published_tables(model).values())
    found = [table for table in tables if table.config.name == name]
    if not found:
        names = ", ".join(sorted({repr(table.config.name) for table in tables}))
        raise KeyError(f"no table is named {name!r}; there are {names}")
    if len(found) > 1:
        paths = " and ".join(table.path or "the model" for table in found)
        raise ValueError(
            f"{paths} have a table {name!r} each; give their tables different names to export or "
            "import one"
        )
    (table,) = found
    # A collection alone does not know the tier's other collections, whose rows move with its own.
    tier, store = tier_of(model), table.collection.tables.get_value()
    if tier is not None and not isinstance(table, OpenTable) and isinstance(store, TierStore):
        open_tables = {
            (each.collection, each.config.name) for of in tier.vocabularies for each in of.tables
        }
        if (store.path, name) in open_tables:
            raise ValueError(
                f"table {name!r} is kept by the model that jaxrec.tier.make made, of which this is "
                "a part; give that model"
            )
    return table


def _check_suffix(path: pathlib.Path, verb: str, table: PublishedTable) -> None:
    suffixes = (".parquet",) if isinstance(table, OpenTable) else (".npy", ".parquet")
    if path.suffix not in suffixes:
        raise ValueError(f"rows are {verb} {' or '.join(suffixes)}, got {path.name}")


def _check_range(path: pathlib.Path, ids: np.ndarray, count: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < count:
        raise ValueError(
            f"{path}: ids reach from {ids.min()} to {ids.max()}, but the table has {count}"
        )


def _check_distinct(path: pathlib.Path, ids: np.ndarray) -> None:
    in_order = np.sort(ids)
    if (again := in_order[1:] == in_order[:-1]).any():
        raise ValueError(f"{path}: id {in_order[int(np.argmax(again))]} is there more than once")
