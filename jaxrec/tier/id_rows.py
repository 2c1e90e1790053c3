"""Rows of ids of a table with an open vocabulary, in the table or in its row store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np

from jaxrec.embed.config import TableConfig
from jaxrec.embed.found_ids import OutsideRows, as_ids
from jaxrec.ragged.columns import Column
from jaxrec.ragged.raw_columns import raw_column
from jaxrec.tier.model_tables import TableVocabulary, TieredTable
from jaxrec.tier.transfer import RowTransfer

Returning: TypeAlias = Callable[[], AbstractContextManager[np.ndarray]]


class RowsInStore(OutsideRows):
    """Rows of evicted ids, which a row store has.

    Args:
        table: Name of the table.
        number: Number of the table among those of its vocabulary.
        transfer: The transfer of the vocabulary.
        ids: Distinct ids or ids with repeats without a row in the table, int64 ``[n]``.
        positions: Positions of these ids among those that were asked for.
        returning: Enters a context in which no batch is planned, and gives the ids whose rows are
            on their way back to the table.

    Attributes:
        ids: Those of the ids that the store has, int64 ``[m]``.
    """

    def __init__(
        self,
        table: str,
        number: int,
        transfer: RowTransfer,
        ids: np.ndarray,
        positions: np.ndarray,
        returning: Returning,
    ) -> None:
        self._table, self._number, self._transfer = table, number, transfer
        self._returning = returning
        # A transfer reads distinct ids.
        distinct, inverse = np.unique(ids, return_inverse=True)
        is_stored, self._tables = transfer.fetch(distinct).result()
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
            # Rows that were evicted before are written before.
            self._transfer.wait()
            self._transfer.store.put(self.ids, self._transfer.layout.pack(tables))


def find_outside(
    of: TableVocabulary,
    table: TieredTable,
    ids: np.ndarray,
    rows: np.ndarray,
    returning: Returning,
) -> tuple[np.ndarray, RowsInStore | None]:
    """Look for ids without a row in the table in its store.

    Args:
        of: The vocabulary.
        table: The table.
        ids: int64 ``[n]``.
        rows: Row of each id, -1 where it has none.
        returning: As for `RowsInStore`.

    Returns:
        Whether each id has no row anywhere, bool ``[n]``, and the rows in the store.
    """
    has_none = rows < 0
    if of.transfer is None or not has_none.any():
        return has_none, None
    missing = np.flatnonzero(has_none)
    number, name = of.tables.index(table), table.config.name
    stored = RowsInStore(name, number, of.transfer, ids[missing], missing, returning)
    has_none[stored.positions] = False
    return has_none, stored


def raw_ids(table: TableConfig, ids: Any) -> np.ndarray:
    """Return ids of a table with an open vocabulary as batches have them, int64 ``[n]``.

    Args:
        table: The table.
        ids: Integers of 64 bits, or strings, which are hashed.

    Raises:
        TypeError: An id is neither an integer nor a string.
        ValueError: There are several axes, or an id is -1 or does not fit 64 bits.
    """
    array = as_ids(table.name, ids)
    if not array.size:
        return np.zeros(0, np.int64)
    try:
        lengths = np.ones(array.size, np.int64)
        column = raw_column(table.feature_names[0], Column(array, lengths))
    except (TypeError, ValueError) as error:
        raise type(error)(f"table {table.name!r}: {error}") from None
    return np.asarray(column.values)
