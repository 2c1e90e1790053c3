"""Files of ids and their rows: Parquet, written and read in parts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator

import jax
from flax import nnx

from jaxrec.atomic import write_atomically
from jaxrec.embed.collection import Collection
from jaxrec.embed.rows import read, write
from jaxrec.embed.slots import TableRows
from jaxrec.tier.model_tables import TableVocabulary, collections_of
from jaxrec.tier.row_columns import (
    ID,
    ROW,
    RowWriter,
    TableShapes,
    check_columns,
    checked_ids,
    numbers,
    open_rows,
)
from jaxrec.tier.tier import Tier, tier_of


def export_rows(
    model: nnx.Module,
    table: str,
    path: str | os.PathLike[str],
    *,
    with_state: bool = False,
    with_stored: bool = False,
) -> int:
    """Write the ids of a table with an open vocabulary, and their rows, to a Parquet file.

    Rows are read and written in parts, so that memory does not grow with the table. Call it in the
    thread that trains, between two steps; with several processes, in each of them: process 0
    writes.

    Args:
        model: A model of `jaxrec.tier.make`.
        table: Name of the table.
        path: The file, which appears when it is complete. Its columns are ``id``, int64 in
            ascending order, and ``row``, a list of ``embedding_dim`` numbers of the table's type,
            bfloat16 as float32. An id from 2**63 up has its bits as int64.
        with_state: Whether the optimizer state of the rows is written too, as columns ``state_``
            and its name.
        with_stored: Whether the rows of evicted ids that the table's store holds follow.

    Returns:
        The number of ids.

    Raises:
        KeyError: The model has no such table with an open vocabulary.
        TypeError: The model has no open vocabulary.
        ValueError: The file's name does not end in .parquet; two tables have that name; or the
            table has no store, with ``with_stored``.
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
    path = _parquet_path(path, "written to")
    tier, found = _find(model, table)
    transfer = found.of.transfer
    if with_stored and transfer is None:
        raise ValueError(
            f"table {table!r} has no store, so that rows of evicted ids are lost; leave "
            "with_stored out, or give the table Dynamic(store='memory://')"
        )
    count = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(tier.settled(model))
        file: RowWriter | None = None
        if jax.process_index() == 0:
            unfinished = stack.enter_context(write_atomically(path))
            file = RowWriter(unfinished, found.shapes, with_state=with_state)
            stack.enter_context(contextlib.closing(file))
        ids, rows = found.of.vocabulary.map.items()
        for part in _parts(ids.size, found.shapes.rows_at_once):
            request = TableRows(table, rows[part])
            (values,) = read(found.collection.tables.get_value().placed, [request]).to_host()
            if file is not None:
                file.write(ids[part], values)
            count += len(request.rows)
        if with_stored and transfer is not None:
            for stored_ids, records in transfer.scan(found.shapes.rows_at_once):
                # A row that has come back from the store may still be there, as it was.
                is_gone = found.of.vocabulary.map.find(stored_ids) < 0
                values = transfer.layout.unpack(records[is_gone])[found.number]
                if file is not None:
                    file.write(stored_ids[is_gone], values)
                count += int(is_gone.sum())
    return count


def import_rows(model: nnx.Module, table: str, path: str | os.PathLike[str]) -> int:
    """Set rows of a table with an open vocabulary from a file that `export_rows` wrote.

    Ids that have a row keep it, and its values are overwritten. Other ids get free rows without the
    conditions of admission; no id is evicted. The optimizer state is read from the file. If the
    file has none, new rows have a fresh state and the others keep theirs. For new ids, other
    tables that read the same features get first values: import these tables too. The file is
    checked before anything changes, and read in parts. Call it in the thread that trains, between
    two steps; with several processes, in each of them: each reads the file.

    Args:
        model: A model of `jaxrec.tier.make`.
        table: Name of the table.
        path: The Parquet file. Ids may have any order; columns other than ``id``, ``row`` and the
            state's are ignored.

    Returns:
        The number of ids.

    Raises:
        KeyError, TypeError: As `export_rows`.
        ValueError: The file is damaged, or its rows have another width or type; an id is null,
            repeated or -1; there are fewer free rows than new ids.
        OSError: The file cannot be read.
    """
    path = _parquet_path(path, "read from")
    tier, found = _find(model, table)
    with tier.settled(model), open_rows(path) as file:
        state = check_columns(path, file.schema_arrow, found.shapes)
        ids = checked_ids(path, file, found.shapes, state)
        vocabulary = found.of.vocabulary
        new_ids = ids[vocabulary.map.find(ids) < 0]
        if new_ids.size > (free := vocabulary.room - len(vocabulary)):
            raise ValueError(
                f"{path} has {ids.size:,} ids, of which {new_ids.size:,} have no row in table "
                f"{table!r}, and {free:,} of its {vocabulary.room:,} rows for ids are free; "
                "give it more rows (num_embeddings), or import fewer ids"
            )
        for part in _parts(new_ids.size, found.shapes.rows_at_once):
            tier.give_rows(model, found.of, new_ids[part])
        for batch in file.iter_batches(found.shapes.rows_at_once, columns=[ID, ROW, *state]):
            requests = [TableRows(table, vocabulary.map.find(batch.column(ID).to_numpy()))]
            values = {"rows": numbers(batch.column(ROW), found.shapes.rows)}
            for name, key in state.items():
                values[key] = numbers(batch.column(name), found.shapes.state[key])
            store = found.collection.tables.get_value()
            placed = write(store.placed, requests, [values])
            found.collection.tables.set_value(store.with_placed(placed))
    return int(ids.size)


@dataclasses.dataclass(frozen=True)
class _Table:
    """A table and its vocabulary.

    Attributes:
        of: The vocabulary.
        number: Its number among the tables of the vocabulary.
        collection: Its collection.
        shapes: Shapes and types of its rows and state.
    """

    of: TableVocabulary
    number: int
    collection: Collection
    shapes: TableShapes


def _find(model: nnx.Module, name: str) -> tuple[Tier, _Table]:
    if (tier := tier_of(model)) is None:
        raise TypeError(
            "the model has no table with an open vocabulary; make it with jaxrec.tier.make(model, "
            "{table: jaxrec.tier.Dynamic()})"
        )
    tables = [
        (table, each, number)
        for each in tier.vocabularies
        for number, table in enumerate(each.tables)
    ]
    matching = [found for found in tables if found[0].config.name == name]
    if not matching:
        names = ", ".join(sorted({repr(table.config.name) for table, _, _ in tables}))
        raise KeyError(f"no table {name!r} has an open vocabulary; tables with one: {names}")
    if len(matching) > 1:
        paths = " and ".join(table.collection or "the model" for table, _, _ in matching)
        raise ValueError(
            f"{paths} have a table {name!r} each; give their tables different names to export or "
            "import one"
        )
    (table, each, number) = matching[0]
    collection = collections_of(model)[table.collection]
    logical = collection.tables.get_value().checkpoint_shapes(name)
    shapes = TableShapes(name, logical.rows, logical.state)
    return tier, _Table(each, number, collection, shapes)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


def _parquet_path(path: str | os.PathLike[str], verb: str) -> pathlib.Path:
    path = pathlib.Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"rows are {verb} .parquet, got {path.name}")
    return path
