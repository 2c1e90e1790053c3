"""Reading and writing rows by id where a vocabulary assigns rows: in the table or its store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np

from jaxrec.embed.config import TableConfig
from jaxrec.embed.rows import FoundIds, OutsideRows, as_ids, check_distinct, row_indices
from jaxrec.ragged.bounds import raw_column
from jaxrec.ragged.columns import Column
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.rows.first_rows import first_rows
from jaxrec.tier.rows.transfer import RowTransfer

Returning: TypeAlias = Callable[[], AbstractContextManager[np.ndarray]]


class RowsInStore(OutsideRows):
    """Rows of one table that are in its row store: those of evicted ids, ``ids``, int64 ``[m]``.

    The table is number ``number`` of its vocabulary ``of``. In a table of fixed size an id that the
    store lacks has its first row, by ``keys``; in another one it has none. ``returning()`` is a
    context in which no batch is planned; it gives the ids whose rows are on their way back to the
    table.
    """

    # A record of the store has the rows of all tables of the vocabulary, one after the other.
    # Writing one table's row thus reads the others' and writes the whole record.

    def __init__(
        self,
        of: TableVocabulary,
        number: int,
        transfer: RowTransfer,
        keys: Mapping[str, np.ndarray],
        ids: np.ndarray,
        positions: np.ndarray,
        returning: Returning,
    ) -> None:
        self._table, self._number = of.tables[number].config.name, number
        self._transfer, self._returning = transfer, returning
        # A transfer reads distinct ids.
        distinct, inverse = np.unique(ids, return_inverse=True)
        is_stored, self._tables = transfer.fetch(distinct).result()
        if of.num_ids is not None and not is_stored.all():
            for table, stored in zip(of.tables, self._tables, strict=True):
                key, new_ids = keys[table.collection], distinct[~is_stored]
                fresh = first_rows(table.config, table.optimizer, key, new_ids)
                for name, values in stored.items():
                    stored[name] = _merged(is_stored, values, fresh[name])
            is_stored = np.ones_like(is_stored)
        place = np.cumsum(is_stored) - 1
        mine = is_stored[inverse]
        self.positions, self.ids = positions[mine], ids[mine]
        self._index = place[inverse[mine]]

    def read(self) -> dict[str, np.ndarray]:
        return {name: x[self._index] for name, x in self._tables[self._number].items()}

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        tables = [{name: x[self._index] for name, x in each.items()} for each in self._tables]
        tables[self._number] |= values
        with self._returning() as returning:
            if (is_late := np.isin(self.ids, returning)).any():
                raise RuntimeError(
                    f"table {self._table!r}: the row of id {self.ids[np.argmax(is_late)]} is on "
                    "its way back from the store, for a batch that jaxrec.tier.ahead has planned; "
                    "set rows before or after the loop over ahead"
                )
            # Evicted rows may still be on their way to the store, and would overwrite these.
            self._transfer.wait_together()
            self._transfer.put(self.ids, tables)


def find_rows(
    each: TableVocabulary,
    number: int,
    ids: np.ndarray,
    rows: np.ndarray,
    keys: Mapping[str, np.ndarray],
    returning: Returning,
    *,
    is_written: bool,
) -> FoundIds:
    """Return where the rows of ids, int64 ``[n]``, are: on the devices, in the store, or nowhere.

    They are rows of table ``number`` of a vocabulary. ``rows`` has the row of each id on the
    devices, int32 ``[n]``, -1 for none; it is changed. With ``is_written`` an id must have a row.
    """
    table = each.tables[number].config.name
    if is_written:
        check_distinct(table, ids)
    is_missing = rows < 0
    outside = None
    if each.transfer is not None and is_missing.any():
        positions = np.flatnonzero(is_missing)
        outside = RowsInStore(
            each, number, each.transfer, keys, ids[positions], positions, returning
        )
        is_missing[outside.positions] = False
    if is_written and is_missing.any():
        raise ValueError(
            f"table {table!r}: id {ids[np.argmax(is_missing)]} has no row; an id gets one in a "
            "training batch, or from a file by jaxrec.tier.import_rows"
        )
    rows[is_missing] = each.vocabulary.settings.unknown.rows_of(ids[is_missing])
    return FoundIds(rows, outside)


def raw_ids(table: TableConfig, ids: Any, num_ids: int | None = None) -> np.ndarray:
    """Return 64-bit integers or strings as ids of a table, int64 ``[n]``.

    ``num_ids`` is the size of a table of fixed size, None for any id.
    """
    if num_ids is not None:
        return row_indices(table.name, ids, num_ids)
    array = as_ids(table.name, ids)
    if not array.size:
        return np.zeros(0, np.int64)
    try:
        lengths = np.ones(array.size, np.int64)
        column = raw_column(table.feature_names[0], Column(array, lengths))
    except (TypeError, ValueError) as error:
        raise type(error)(f"table {table.name!r}: {error}") from None
    return np.asarray(column.values)


def _merged(is_first: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Interleave rows: where ``is_first`` is set the next of ``first``, else that of ``second``."""
    merged = np.empty((is_first.size, *first.shape[1:]), first.dtype)
    merged[is_first], merged[~is_first] = first, second
    return merged
