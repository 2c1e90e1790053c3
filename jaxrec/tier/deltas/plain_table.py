"""Published tables whose ids are their row indices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxrec.tier.deltas.manifest import TableFacts
from jaxrec.tier.deltas.table import PublishedTable, Values
from jaxrec.tier.rows.first_rows import NewRows, reset


class PlainTable(PublishedTable):
    """A table whose ids are its row indices, on one device or a mesh."""

    @property
    def facts(self) -> TableFacts:
        return self._facts()

    def scan(self, with_state: bool) -> Iterator[tuple[np.ndarray, Values]]:
        size, count = self._shapes.rows_at_once, self.config.num_embeddings
        for start in range(0, count, size):
            ids = np.arange(start, min(start + size, count))
            yield ids, self.read_rows(ids, with_state)

    def read(self, ids: np.ndarray, with_state: bool) -> tuple[np.ndarray, Values]:
        return np.ones(ids.size, np.bool_), self.read_rows(ids, with_state)

    def write(self, ids: np.ndarray, values: Values) -> None:
        self.write_rows(ids, values)

    def forget(self, ids: np.ndarray) -> None:
        if ids.size:
            raise AssertionError(f"table {self.name}: each id of a plain table has a row")

    def forget_others(self, ids: np.ndarray, key: tuple[int, int] | None) -> None:
        if key is None:
            return
        is_other = np.ones(self.config.num_embeddings, np.bool_)
        is_other[ids] = False
        for part in self.parts(np.flatnonzero(is_other)):
            store = self._collection.tables.get_value()
            placed = reset(
                store.placed, [NewRows(self.config, part, part)], np.array(key, np.uint32)
            )
            self._collection.tables.set_value(store.with_placed(placed))

    def find_shortage(self, ids: np.ndarray, removed: np.ndarray | None) -> str:
        return ""
