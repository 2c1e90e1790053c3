"""The tables of a model whose changes are tracked."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from flax import nnx

from jaxrec.embed.collection import Collection
from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import tapped_modules
from jaxrec.ragged.raw_ids import RESERVED
from jaxrec.tier.changes.tracked_table import TrackedOpenTable, TrackedTable
from jaxrec.tier.managed_collision.modules import ManagedCollisions
from jaxrec.tier.model_tables import TableVocabulary
from jaxrec.tier.tier import Tier
from jaxrec.tier.vocabulary.vocabulary import Assignment, Vocabulary


@dataclasses.dataclass(frozen=True)
class TrackedVocabulary:
    """The ids that the rows of a vocabulary's tables have now, and these tables.

    Attributes:
        vocabulary: The vocabulary; what it has may be ahead of the tables.
        has_store: Whether evicted rows are kept.
        ids_of_rows: The id of each row, int64 ``[rows]``, -1 where it has none.
        tables: The tables.
    """

    vocabulary: Vocabulary
    has_store: bool
    ids_of_rows: np.ndarray
    tables: tuple[TrackedOpenTable, ...]

    def move(self, assignment: Assignment, bits: int) -> None:
        """Record rows that were evicted and given to other ids."""
        for table in self.tables:
            table.move(assignment, bits)
        self.ids_of_rows[assignment.evicted_rows] = RESERVED
        self.ids_of_rows[assignment.new_rows] = assignment.new_ids

    def restore(self, bits: int) -> None:
        """Record that all may have changed, after the vocabulary took the ids of a checkpoint."""
        old_ids = self.ids_of_rows[self.ids_of_rows != RESERVED]
        self.read_ids()
        for table in self.tables:
            table.mark_gone(old_ids, bits)
            table.mark_all(bits)

    def read_ids(self) -> None:
        """Take the ids of rows from the vocabulary, when the tables agree with it."""
        ids, rows = self.vocabulary.map.items()
        self.ids_of_rows[:] = RESERVED
        self.ids_of_rows[rows] = ids


@dataclasses.dataclass(frozen=True)
class TrackedModel:
    """The tables of a model.

    Attributes:
        collections: Its collections by path.
        tables: The trained tables by name, or by path and name where several have one name.
        all_tables: The trained tables and the frozen ones, likewise.
        vocabularies: The vocabularies of the model's `Tier`, in its order.
        readers: The tables that read each feature.
    """

    collections: dict[str, Collection]
    tables: dict[str, TrackedTable]
    all_tables: dict[str, TrackedTable]
    vocabularies: tuple[TrackedVocabulary, ...]
    readers: dict[str, list[TrackedTable]]

    @classmethod
    def of(cls, model: nnx.Module, tier: Tier | None, num_consumers: int) -> TrackedModel:
        """Find the tables of a model.

        Raises:
            TypeError: There are none, or rows are given to ids in the compiled step.
            ValueError: An optimizer changes rows that no batch has.
        """
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
    found = {
        path: module
        for path, module in tapped_modules(model).items()
        if isinstance(module, Collection)
    }
    if not found:
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
    tracked = TrackedVocabulary(each.vocabulary, each.transfer is not None, ids_of_rows, tables)
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
