"""Published tables whose rows a vocabulary gives to ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from flax import nnx

from jaxrec.embed.collection import Collection
from jaxrec.embed.config import TableConfig
from jaxrec.tier.deltas.manifest import TableFacts
from jaxrec.tier.deltas.table import PublishedTable, Values
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.planning.tier import Tier
from jaxrec.tier.rows.first_rows import first_rows


class OpenTable(PublishedTable):
    """A table whose rows a vocabulary gives to ids (`jaxrec.tier.Dynamic`, `jaxrec.tier.Cached`).

    Args:
        path, collection, config: As for `PublishedTable`.
        model: The model.
        tier: Its vocabularies.
        of: The vocabulary.
        number: Number of the table among those of the vocabulary.
    """

    def __init__(
        self,
        path: str,
        collection: Collection,
        config: TableConfig,
        model: nnx.Module,
        tier: Tier,
        of: TableVocabulary,
        number: int,
    ) -> None:
        super().__init__(path, collection, config)
        self._model, self._tier, self._of, self._number = model, tier, of, number

    @property
    def facts(self) -> TableFacts:
        unknown = self._of.vocabulary.settings.unknown
        if self._of.num_ids is not None:
            first, second = self._tier.keys[self.path]
            return self._facts(seed=(int(first), int(second)), initializer=self.initializer)
        return self._facts(is_open=True, unknown=(unknown.kind, unknown.rows))

    def scan(self, with_state: bool) -> Iterator[tuple[np.ndarray, Values]]:
        resident, rows = self._of.vocabulary.map.items()
        for part in self.parts(np.arange(resident.size)):
            yield resident[part], self.read_rows(rows[part], with_state)
        if (transfer := self._of.transfer) is None:
            return
        for ids, records in transfer.scan(self._shapes.rows_at_once):
            # A row that has come back from the store may still be there, as it was.
            is_gone = self._rows_of(ids) < 0
            values = transfer.layout.unpack(records[is_gone])[self._number]
            yield ids[is_gone], {name: values[name] for name in self.shapes(with_state)}

    def read(self, ids: np.ndarray, with_state: bool) -> tuple[np.ndarray, Values]:
        rows = self._rows_of(ids)
        has_row = rows >= 0
        values = self.read_rows(rows[has_row], with_state)
        if self._of.transfer is None or has_row.all():
            return has_row, values
        is_found, stored = self._stored(ids[~has_row], begin=self._of.num_ids is not None)
        mine = stored[self._number]
        has_value = has_row.copy()
        has_value[~has_row] = is_found
        merged = {}
        for name, array in values.items():
            all_values = np.zeros((ids.size, *array.shape[1:]), array.dtype)
            all_values[has_row], all_values[~has_row] = array, mine[name]
            merged[name] = all_values[has_value]
        return has_value, merged

    def write(self, ids: np.ndarray, values: Values) -> None:
        transfer = self._of.transfer
        if transfer is None:
            for part in self.parts(ids[self._rows_of(ids) < 0]):
                self._tier.give_rows(self._model, self._of, part)
        rows = self._rows_of(ids)
        is_here = rows >= 0
        self.write_rows(rows[is_here], _taken(values, is_here))
        if transfer is not None and not is_here.all():
            outside = ids[~is_here]
            tables = self._stored(outside, begin=True)[1]
            tables[self._number] |= _taken(values, ~is_here)
            transfer.put(outside, tables)

    def forget(self, ids: np.ndarray) -> None:
        if ids.size:
            self._tier.forget(self._model, self._of, ids)

    def forget_others(self, ids: np.ndarray, key: tuple[int, int] | None) -> None:
        if key is not None:
            self._tier.keys[self.path] = np.array(key, np.uint32)
        kept = np.sort(ids)
        resident, _ = self._of.vocabulary.map.items()
        self.forget(np.setdiff1d(resident, kept, assume_unique=True))
        if self._of.transfer is not None:
            for stored in [ids for ids, _ in self._of.transfer.scan(1 << 16)]:
                self.forget(np.setdiff1d(stored, kept, assume_unique=True))

    def find_shortage(self, ids: np.ndarray, removed: np.ndarray | None) -> str:
        vocabulary = self._of.vocabulary
        if self._of.transfer is not None:
            return ""
        needed = ids.size
        if removed is not None:
            resident, _ = vocabulary.map.items()
            needed = np.union1d(np.setdiff1d(resident, removed), ids).size
        if needed <= vocabulary.room:
            return ""
        return (
            f"it has {needed:,} ids, and the copy has {vocabulary.room:,} rows for ids; give the "
            "copy more rows (num_embeddings), or a store: Dynamic(store='memory://')"
        )

    def _rows_of(self, ids: np.ndarray) -> np.ndarray:
        return self._of.vocabulary.map.find(ids)

    def _stored(self, ids: np.ndarray, begin: bool) -> tuple[np.ndarray, list[Values]]:
        """Return whether the store has ids, and the values of the vocabulary's tables.

        Args:
            ids: The ids.
            begin: Whether ids that it has not are given first values, and count as found;
                otherwise their values are zeros.
        """
        transfer = self._of.transfer
        assert transfer is not None
        is_found, records = transfer.get(ids)
        tables = transfer.layout.unpack(records)
        if begin and not is_found.all():
            for table, values in zip(self._of.tables, tables, strict=True):
                key = self._tier.keys[table.collection]
                fresh = first_rows(table.config, table.optimizer, key, ids[~is_found])
                for name, array in values.items():
                    values[name] = merged = array.copy()
                    merged[~is_found] = fresh[name]
            is_found = np.ones_like(is_found)
        return is_found, tables


def _taken(values: Mapping[str, np.ndarray], flags: np.ndarray) -> Values:
    return {name: array[flags] for name, array in values.items()}
