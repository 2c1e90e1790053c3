"""The tables of a model as versions and files of rows see them: rows by id, wherever the rows are.

The model is settled while tables are used (`jaxrec.tier.planning.tier.Tier.settled`): tables agree
with their vocabularies, and stores have all evicted rows.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxrec.embed.collection import Collection, find_collections
from jaxrec.embed.config import TableConfig
from jaxrec.embed.rows import check_values, read, write
from jaxrec.embed.slots import TableRows
from jaxrec.files.rows import Shapes, Values, rows_at_once
from jaxrec.tier.deltas.manifest import TableFacts
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.planning.tier import Tier, tier_of
from jaxrec.tier.rows.first_rows import NewRows, first_rows, reset


class PublishedTable(abc.ABC):
    """A table that is published, or into which published rows are loaded.

    Ids are int64 ``[n]`` and distinct. `Values` are rows ``[n, embedding_dim]`` under ``"rows"``,
    and optimizer state ``[n, ...]`` by name.
    """

    def __init__(self, path: str, collection: Collection, config: TableConfig) -> None:
        self.path, self.config, self.collection = path, config, collection
        logical = collection.tables.get_value().checkpoint_shapes(config.name)
        self._rows, self._state = logical.rows, dict(logical.state)
        self.rows_at_once = rows_at_once(self.shapes(with_state=True))

    @property
    def name(self) -> str:
        """The collection's path and the table's name."""
        return f"{self.path}/{self.config.name}" if self.path else self.config.name

    @property
    @abc.abstractmethod
    def facts(self) -> TableFacts:
        """Description of the table, with its optimizer state."""

    @abc.abstractmethod
    def scan(
        self, with_state: bool, with_stored: bool = True
    ) -> Iterator[tuple[np.ndarray, Values]]:
        """Yield all ids that have a row, here or in the store, with their values."""

    @abc.abstractmethod
    def read(self, ids: np.ndarray, with_state: bool) -> tuple[np.ndarray, Values]:
        """Return whether each id has a row, bool ``[n]``, and the values of those that have one."""

    @abc.abstractmethod
    def write(self, ids: np.ndarray, values: Values) -> None:
        """Set the values of ids; ids without a row get one."""

    @abc.abstractmethod
    def forget(self, ids: np.ndarray) -> None:
        """Remove the rows of ids; ids without one are skipped."""

    @abc.abstractmethod
    def forget_others(self, ids: np.ndarray, key: tuple[int, int] | None) -> None:
        """Remove the rows of all ids except the given ones.

        The removed ids begin anew with first values by ``key`` (`TableFacts.seed`).
        """

    @abc.abstractmethod
    def find_shortage(self, ids: np.ndarray, removed: np.ndarray | None) -> str:
        """Return why the table has no room for ids, in words; empty: it has.

        The ids in ``removed`` would lose their rows before; None: all ids would.
        """

    @property
    def initializer(self) -> str:
        """Name of the initializer; empty if it is a function."""
        return self.config.initializer if isinstance(self.config.initializer, str) else ""

    def shapes(self, with_state: bool) -> Shapes:
        """Return the shapes and types of the table's `Values`, with its optimizer state or not."""
        return {"rows": self._rows} | (self._state if with_state else {})

    def parts(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield ids, int64 ``[n]``, in parts of at most `rows_at_once` ids."""
        size = self.rows_at_once
        return (ids[start : start + size] for start in range(0, ids.size, size))

    def read_rows(self, rows: np.ndarray, with_state: bool) -> Values:
        """Return the values of the rows on the devices at indices ``rows``, ``[n]``."""
        if not rows.size:
            return {
                name: np.zeros((0, *shape.shape[1:]), shape.dtype)
                for name, shape in self.shapes(with_state).items()
            }
        placed = self.collection.tables.get_value().placed
        requests = [TableRows(self.config.name, rows)]
        return read(placed, requests, with_state=with_state).to_host()[0]

    def write_rows(self, rows: np.ndarray, values: Values) -> None:
        """Set the values of the rows on the devices at indices ``rows``, ``[n]``."""
        if not rows.size:
            return
        store = self.collection.tables.get_value()
        if "rows" in values:
            check_values(store, self.config.name, values["rows"])
        placed = write(store.placed, [TableRows(self.config.name, rows)], [values])
        self.collection.tables.set_value(store.with_placed(placed))

    def _facts(self, **details: Any) -> TableFacts:
        state = {
            name: (np.dtype(x.dtype).name, int(x.shape[1]) if len(x.shape) > 1 else None)
            for name, x in sorted(self._state.items())
        }
        config, dtype = self.config, np.dtype(self._rows.dtype).name
        return TableFacts(
            config.num_embeddings, config.embedding_dim, dtype, state=state, **details
        )


class PlainTable(PublishedTable):
    """A table whose ids are its row indices, on one device or a mesh."""

    @property
    def facts(self) -> TableFacts:
        return self._facts()

    def scan(
        self, with_state: bool, with_stored: bool = True
    ) -> Iterator[tuple[np.ndarray, Values]]:
        count = self.config.num_embeddings
        for start in range(0, count, self.rows_at_once):
            ids = np.arange(start, min(start + self.rows_at_once, count))
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
            store = self.collection.tables.get_value()
            placed = reset(
                store.placed, [NewRows(self.config, part, part)], np.array(key, np.uint32)
            )
            self.collection.tables.set_value(store.with_placed(placed))

    def find_shortage(self, ids: np.ndarray, removed: np.ndarray | None) -> str:
        return ""


class OpenTable(PublishedTable):
    """A table whose rows a vocabulary gives to ids (`jaxrec.tier.Dynamic`, `jaxrec.tier.Cached`).

    ``number`` is the table's index in the vocabulary ``of``.
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
        self._model, self.tier, self.of, self._number = model, tier, of, number

    @property
    def facts(self) -> TableFacts:
        unknown = self.of.vocabulary.settings.unknown
        if self.of.num_ids is not None:
            first, second = self.tier.keys[self.path]
            return self._facts(seed=(int(first), int(second)), initializer=self.initializer)
        return self._facts(is_open=True, unknown=(unknown.kind, unknown.rows))

    def scan(
        self, with_state: bool, with_stored: bool = True
    ) -> Iterator[tuple[np.ndarray, Values]]:
        resident, rows = self.of.vocabulary.map.items()
        for part in self.parts(np.arange(resident.size)):
            yield resident[part], self.read_rows(rows[part], with_state)
        if not with_stored or (transfer := self.of.transfer) is None:
            return
        for ids, records in transfer.scan(self.rows_at_once):
            # A row that came back to the devices may still have its old record in the store.
            is_gone = self._rows_of(ids) < 0
            values = transfer.layout.unpack(records[is_gone])[self._number]
            yield ids[is_gone], {name: values[name] for name in self.shapes(with_state)}

    def read(self, ids: np.ndarray, with_state: bool) -> tuple[np.ndarray, Values]:
        rows = self._rows_of(ids)
        has_row = rows >= 0
        values = self.read_rows(rows[has_row], with_state)
        if self.of.transfer is None or has_row.all():
            return has_row, values
        # In a cache every id has a row: an id that the store lacks has its first values.
        is_found, stored = self._stored(ids[~has_row], begin=self.of.num_ids is not None)
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
        transfer = self.of.transfer
        if transfer is None:
            self.give_rows(self.without_row(ids))
        rows = self._rows_of(ids)
        is_here = rows >= 0
        self.write_rows(rows[is_here], _taken(values, is_here))
        if transfer is not None and not is_here.all():
            outside = ids[~is_here]
            # A record has a row of each table of the vocabulary: the other tables' values stay as
            # they are.
            tables = self._stored(outside, begin=True)[1]
            tables[self._number] |= _taken(values, ~is_here)
            transfer.put(outside, tables)

    def give_rows(self, ids: np.ndarray) -> None:
        """Give rows to ids that have none, in all tables of the vocabulary."""
        for part in self.parts(ids):
            self.tier.give_rows(self._model, self.of, part)

    def without_row(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids that have no row on the devices."""
        return ids[self._rows_of(ids) < 0]

    def forget(self, ids: np.ndarray) -> None:
        if ids.size:
            self.tier.forget(self._model, self.of, ids)

    def forget_others(self, ids: np.ndarray, key: tuple[int, int] | None) -> None:
        if key is not None:
            self.tier.keys[self.path] = np.array(key, np.uint32)
        kept = np.sort(ids)
        resident, _ = self.of.vocabulary.map.items()
        self.forget(np.setdiff1d(resident, kept, assume_unique=True))
        if self.of.transfer is not None:
            # Listed first, since deleting during a scan may skip records.
            for stored in [ids for ids, _ in self.of.transfer.scan(1 << 16)]:
                self.forget(np.setdiff1d(stored, kept, assume_unique=True))

    def find_shortage(self, ids: np.ndarray, removed: np.ndarray | None) -> str:
        vocabulary = self.of.vocabulary
        if self.of.transfer is not None:
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
        return self.of.vocabulary.map.find(ids)

    def _stored(self, ids: np.ndarray, begin: bool) -> tuple[np.ndarray, list[Values]]:
        """Return whether the store has ids, and the values of each of the vocabulary's tables.

        With ``begin``, ids without a record get first values and count as found; otherwise zeros.
        """
        transfer = self.of.transfer
        assert transfer is not None
        is_found, records = transfer.get(ids)
        tables = transfer.layout.unpack(records)
        if begin and not is_found.all():
            for table, values in zip(self.of.tables, tables, strict=True):
                key = self.tier.keys[table.collection]
                fresh = first_rows(table.config, table.optimizer, key, ids[~is_found])
                for name, array in values.items():
                    values[name] = merged = array.copy()
                    merged[~is_found] = fresh[name]
            is_found = np.ones_like(is_found)
        return is_found, tables


def published_tables(model: nnx.Module) -> dict[str, PublishedTable]:
    """Return the tables of a model by the path of their collection and their name."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"a model is an nnx.Module, got {model!r}")
    tier = tier_of(model)
    places = {
        (table.collection, table.config.name): (of, number)
        for of in (() if tier is None else tier.vocabularies)
        for number, table in enumerate(of.tables)
    }
    tables: dict[str, PublishedTable] = {}
    for path, collection in find_collections(model).items():
        for config in collection.configs:
            place = places.get((path, config.name))
            table: PublishedTable = (
                PlainTable(path, collection, config)
                if tier is None or place is None
                else OpenTable(path, collection, config, model, tier, *place)
            )
            tables[table.name] = table
    return tables


def _taken(values: Mapping[str, np.ndarray], flags: np.ndarray) -> Values:
    return {name: array[flags] for name, array in values.items()}
