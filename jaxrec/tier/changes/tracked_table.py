"""Changes of one table, as its consumers have not yet read them."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.embed.config import TableConfig
from jaxrec.ragged.raw_ids import RESERVED
from jaxrec.tier.changes.change_flags import IdFlags, RowFlags
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.vocabulary.vocabulary import Assignment


@dataclasses.dataclass(frozen=True)
class ChangedIds:
    """Ids of a table that changed, each sorted and distinct, int64.

    Attributes:
        ids: Ids whose rows changed.
        removed: Ids that lost their rows.
        unknown: Indices of changed rows that ids without a row of their own read.
    """

    ids: np.ndarray
    removed: np.ndarray
    unknown: np.ndarray


class TrackedTable:
    """The changes of a plain table, whose ids are its row indices.

    Args:
        collection: Path of the table's collection.
        config: The table.
        num_consumers: Number of consumers.
    """

    def __init__(self, collection: str, config: TableConfig, num_consumers: int) -> None:
        self.collection, self.config = collection, config
        self.flags = RowFlags(config.num_embeddings, num_consumers)

    def mark(self, rows: np.ndarray, bits: int) -> None:
        """Record changes of rows, with repeats; indices outside the table are skipped."""
        if rows.size and (rows.min() < 0 or rows.max() >= self.flags.num_rows):
            rows = rows[(rows >= 0) & (rows < self.flags.num_rows)]
        self.flags.mark(rows, bits)

    def mark_all(self, bits: int) -> None:
        """Record a change of every row."""
        self.flags.mark(np.arange(self.flags.num_rows), bits)

    def changes(self, bit: int) -> ChangedIds:
        """Return the changes that a consumer has not read."""
        none = np.zeros(0, np.int64)
        return ChangedIds(self.flags.rows(bit), none, none)

    def clear(self, bit: int) -> None:
        """Record that a consumer has read the changes."""
        self.flags.clear(bit)

    def load(self, changed: ChangedIds, bit: int) -> None:
        """Record the changes that `changes` returned."""
        self.mark(changed.ids, bit)


class TrackedOpenTable(TrackedTable):
    """The changes of a table with an open vocabulary, whose rows come and go.

    Args:
        collection: Path of the table's collection.
        config: The table.
        num_consumers: Number of consumers.
        of: The vocabulary.
        ids_of_rows: The id of each row, int64 ``[num_embeddings]``, -1 where it has none; the
            tables of a vocabulary share the array.
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
        # Changed ids without a row in the table: their rows are in the store, or lost.
        self._gone = IdFlags(num_consumers)

    def move(self, assignment: Assignment, bits: int) -> None:
        """Record rows that were evicted and given to other ids, before the ids of rows change."""
        rows = assignment.evicted_rows
        changed = self.flags.take(rows)
        self.mark_gone(assignment.evicted_ids, changed if self._has_store else bits)
        self.flags.mark(assignment.new_rows, bits)

    def mark_gone(self, ids: np.ndarray, bits: int | np.ndarray) -> None:
        """Record changes of ids whose rows are in the store, or lost."""
        self._gone.mark(ids, bits)

    def mark_all(self, bits: int) -> None:
        self.flags.mark(np.arange(self._unknown.rows), bits)
        self.flags.mark(np.flatnonzero(self._ids_of_rows != RESERVED), bits)

    def changes(self, bit: int) -> ChangedIds:
        rows = self.flags.rows(bit)
        is_own = rows >= self._unknown.rows
        ids = self._ids_of_rows[rows[is_own]]
        ids = ids[ids != RESERVED]
        gone = self._without_row(self._gone.ids(bit))  # some have come back
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

    def _without_row(self, ids: np.ndarray) -> np.ndarray:
        return ids[~np.isin(ids, self._ids_of_rows)] if ids.size else ids
