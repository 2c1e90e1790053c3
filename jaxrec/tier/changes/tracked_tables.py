"""The tables of a model whose changes are tracked."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from flax import nnx

from jaxrec.embed.collection import Collection, find_collections
from jaxrec.embed.config import TableConfig
from jaxrec.embed.store import TableStore
from jaxrec.ragged.raw_ids import RESERVED
from jaxrec.tier.changes.change_flags import IdFlags, RowFlags
from jaxrec.tier.managed_collision.modules import ManagedCollisions
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.planning.tier import Tier
from jaxrec.tier.vocabulary.assignment import Assignment
from jaxrec.tier.vocabulary.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class ChangedIds:
    """Changes of a table that a consumer has not read; sorted distinct int64 arrays."""

    ids: np.ndarray  # ids with a row that changed
    removed: np.ndarray  # ids that lost their rows
    unknown: np.ndarray  # indices of changed rows that ids without a row of their own read


class TrackedTable:
    """The changes of a plain table, whose ids are its row indices."""

    def __init__(self, collection: str, config: TableConfig, num_consumers: int) -> None:
        self.collection, self.config = collection, config
        self.flags = RowFlags(config.num_embeddings, num_consumers)

    def mark(self, rows: np.ndarray, bits: int) -> None:
        """Set ``bits`` of changed rows, which may repeat; indices outside the table are skipped."""
        if rows.size and (rows.min() < 0 or rows.max() >= self.flags.num_rows):
            rows = rows[(rows >= 0) & (rows < self.flags.num_rows)]
        self.flags.mark(rows, bits)

    def mark_all(self, bits: int) -> None:
        """Set ``bits`` of every row."""
        self.flags.mark(np.arange(self.flags.num_rows), bits)

    def changes(self, bit: int) -> ChangedIds:
        """Return the changes that the consumer with ``bit`` has not read."""
        none = np.zeros(0, np.int64)
        return ChangedIds(self.flags.rows(bit), none, none)

    def clear(self, bit: int) -> None:
        """Note that the consumer with ``bit`` has read all changes."""
        self.flags.clear(bit)

    def load(self, changed: ChangedIds, bit: int) -> None:
        """Record changes that `changes` returned once more, for the consumer with ``bit``."""
        self.mark(changed.ids, bit)


class TrackedOpenTable(TrackedTable):
    """The changes of a table with an open vocabulary, whose rows move between ids.

    ``ids_of_rows``, int64 ``[num_embeddings]``, has each row's id, -1 where it has none; the tables
    of a vocabulary share it.
    """

    def __init__(
        self,
        collection: str,
        config: TableConfig,
        num_consumers: int,
        of: TableVocabulary,
        ids_of_rows: np.ndarray,
    ) -> None:
        super().__init__(collection, config, num_consumers)
        self._unknown = of.vocabulary.settings.unknown
        self._has_store, self._ids_of_rows = of.transfer is not None, ids_of_rows
        # Changed ids without a row in the table: their rows are in the store or lost.
        self._gone = IdFlags(num_consumers)

    def move(self, assignment: Assignment, bits: int) -> None:
        """Record evictions and new ids of rows, before ``ids_of_rows`` changes."""
        rows = assignment.evicted_rows
        # Flags are of rows, so that they must leave a row together with its id. With a store only
        # changed rows are news; without one, each evicted id has lost its row.
        changed = self.flags.take(rows)
        self.mark_gone(assignment.evicted_ids, changed if self._has_store else bits)
        self.flags.mark(assignment.new_rows, bits)

    def mark_gone(self, ids: np.ndarray, bits: int | np.ndarray) -> None:
        """Record changes of ids whose rows are in the store or lost."""
        self._gone.mark(ids, bits)

    def mark_all(self, bits: int) -> None:
        self.flags.mark(np.arange(self._unknown.rows), bits)
        self.flags.mark(np.flatnonzero(self._ids_of_rows != RESERVED), bits)

    def changes(self, bit: int) -> ChangedIds:
        rows = self.flags.rows(bit)
        is_own = rows >= self._unknown.rows
        ids = self._ids_of_rows[rows[is_own]]
        ids = ids[ids != RESERVED]
        gone = self._gone.ids(bit)
        if gone.size:  # `np.isin` sorts all ids of the table
            gone = gone[~np.isin(gone, self._ids_of_rows)]  # some have come back
        ids, removed = (np.concatenate([ids, gone]), gone[:0]) if self._has_store else (ids, gone)
        unknown = rows[~is_own] if self._unknown.kind != "zeros" else rows[:0]
        return ChangedIds(np.sort(ids), removed, unknown)

    def clear(self, bit: int) -> None:
        super().clear(bit)
        self._gone.clear(bit)

    def load(self, changed: ChangedIds, bit: int) -> None:
        self.mark(changed.unknown, bit)
        self.flags.mark(np.flatnonzero(np.isin(self._ids_of_rows, changed.ids)), bit)
        self.mark_gone(np.concatenate([changed.ids, changed.removed]), bit)


@dataclasses.dataclass(frozen=True)
class TrackedVocabulary:
    """A vocabulary with its tracked tables.

    ``ids_of_rows``, int64 ``[rows]``, has the id of each row of the tables, -1 for a row without.
    It changes with the tables; the vocabulary's map already has the ids of batches to come.
    """

    vocabulary: Vocabulary
    ids_of_rows: np.ndarray
    tables: tuple[TrackedOpenTable, ...]

    def move(self, assignment: Assignment, bits: int) -> None:
        """Record evictions and new ids of rows."""
        for table in self.tables:
            table.move(assignment, bits)
        self.ids_of_rows[assignment.evicted_rows] = RESERVED
        self.ids_of_rows[assignment.new_rows] = assignment.new_ids

    def restore(self, bits: int) -> None:
        """Record a change of every row and id, after the ids of a checkpoint were loaded."""
        # Ids that the checkpoint does not have have lost their rows, so that the old ids count as
        # changed, too.
        old_ids = self.ids_of_rows[self.ids_of_rows != RESERVED]
        self.read_ids()
        for table in self.tables:
            table.mark_gone(old_ids, bits)
            table.mark_all(bits)

    def read_ids(self) -> None:
        """Copy the ids of rows from the vocabulary, when the tables agree with it."""
        ids, rows = self.vocabulary.map.items()
        self.ids_of_rows[:] = RESERVED
        self.ids_of_rows[rows] = ids


@dataclasses.dataclass(frozen=True)
class TrackedModel:
    """The tables of a model, by name, or by path and name if several have one name.

    ``tables`` are the trained ones, ``all_tables`` also the frozen ones; ``readers`` has the tables
    that read each feature.
    """

    collections: dict[str, Collection]
    tables: dict[str, TrackedTable]
    all_tables: dict[str, TrackedTable]
    vocabularies: tuple[TrackedVocabulary, ...]
    readers: dict[str, list[TrackedTable]]

    @classmethod
    def of(cls, model: nnx.Module, tier: Tier | None, num_consumers: int) -> TrackedModel:
        """Find the tables of a model."""
        found = _collections(model)
        for each in found.values():
            _check_optimizers(each.tables.get_value())
        of_tier = () if tier is None else tier.vocabularies
        vocabularies = [_vocabulary(each, num_consumers) for each in of_tier]
        tables: list[TrackedTable] = [table for each in vocabularies for table in each.tables]
        is_open = {(table.collection, table.config.name) for table in tables}
        tables += [
            TrackedTable(path, config, num_consumers)
            for path, collection in found.items()
            for config in collection.configs
            if (path, config.name) not in is_open
        ]
        trained = {path: _trained(each.tables.get_value()) for path, each in found.items()}
        all_tables = _by_name(tables)
        tables = [table for table in tables if table.config.name in trained[table.collection]]
        readers: dict[str, list[TrackedTable]] = collections.defaultdict(list)
        for table in tables:
            for feature in table.config.feature_names:
                readers[feature].append(table)
        return cls(found, _by_name(tables), all_tables, tuple(vocabularies), dict(readers))

    @property
    def is_on_mesh(self) -> bool:
        """Whether the tables lie over a mesh."""
        stores = (each.tables.get_value().placed for each in self.collections.values())
        return any(store.devices.mesh is not None for store in stores)


def _collections(model: nnx.Module) -> dict[str, Collection]:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"ChangeTracker: model is an nnx.Module, got {model!r}")
    for path, module in nnx.iter_modules(model):
        if isinstance(module, ManagedCollisions):
            raise TypeError(
                f"module {'/'.join(map(str, path)) or 'model'!r} gives rows to ids in the compiled "
                "step, where ChangeTracker does not see them; use a table with an open vocabulary "
                "(jaxrec.tier.make)"
            )
    if not (found := find_collections(model)):
        raise TypeError(
            "the model has no tables: no jaxrec.EmbeddingBagCollection or EmbeddingCollection"
        )
    return found


def _vocabulary(each: TableVocabulary, num_consumers: int) -> TrackedVocabulary:
    ids_of_rows = np.full(each.vocabulary.num_rows, RESERVED, np.int64)
    tables = tuple(
        TrackedOpenTable(table.collection, table.config, num_consumers, each, ids_of_rows)
        for table in each.tables
    )
    tracked = TrackedVocabulary(each.vocabulary, ids_of_rows, tables)
    tracked.read_ids()
    return tracked


def _trained(store: TableStore) -> set[str]:
    """Return the names of the tables whose rows change."""
    names = (config.name for config in store.layout.configs)
    return {name for name in names if store.rows_of(name, ()).optimizer.is_trained}


def _check_optimizers(store: TableStore) -> None:
    for group in store.groups.values():
        if group.optimizer.sweeps:
            raise ValueError(
                f"table {group.tables[0].name!r} has the optimizer "
                f"{type(group.optimizer).__name__}, which changes all of its rows between steps, "
                "so that batches do not show which changed; save and publish whole models"
            )


def _by_name(tables: Sequence[TrackedTable]) -> dict[str, TrackedTable]:
    counts = collections.Counter(table.config.name for table in tables)
    return {
        table.config.name
        if counts[table.config.name] == 1
        else f"{table.collection}/{table.config.name}": table
        for table in tables
    }
