"""Changes of the rows of a table's ids: proposed for a batch, carried out, or loaded."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.tier.ids.id_map import Lookup

_NO_IDS = np.zeros(0, np.int64)
_NO_ROWS = np.zeros(0, np.int32)


class VocabularyFullError(ValueError):
    """The batches under way have more distinct ids than the table has rows."""

    def __init__(self, needed: int, available: int, room: int, first_id: int) -> None:
        super().__init__(needed, available, room, first_id)
        self.needed, self.available, self.room, self.first_id = needed, available, room, first_id
        self.index = 0  # of the vocabulary, among those of a batch


class TableFullError(ValueError):
    """No row is left for an id of a batch; the message tells the user which id and what to do."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Rows that a vocabulary gives to a batch's ids, and ids that get or lose a row for it."""

    rows: np.ndarray  # int32 [n], the row of each id of the batch
    new_ids: np.ndarray  # int64 [m]
    new_rows: np.ndarray  # int32 [m]
    # An evicted row may be among `new_rows`: apply the evictions first.
    evicted_ids: np.ndarray  # int64 [e]
    evicted_rows: np.ndarray  # int32 [e]


@dataclasses.dataclass(frozen=True)
class LoadedRows:
    """Rows that ids had in a saved table, and have after a vocabulary loaded its state."""

    old_rows: np.ndarray  # int32 [n], rows in the saved table
    rows: np.ndarray  # int32 [n], rows of the same ids in this table
    # Ids that did not fit into a smaller table, and their rows in the saved table.
    dropped_ids: np.ndarray  # int64 [m]
    dropped_rows: np.ndarray  # int32 [m]


NO_CHANGE = Assignment(_NO_ROWS, _NO_IDS, _NO_ROWS, _NO_IDS, _NO_ROWS)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Changes that a batch would make to a vocabulary, computed and not yet carried out."""

    ids: np.ndarray  # int64 [n], with repeats
    batch: int
    lookup: Lookup
    sightings: np.ndarray  # int64 [absent], of each of `lookup.absent`
    admitted: np.ndarray | None  # bool [absent]; None: every absent id gets a row
    victims: np.ndarray  # int32 [e], rows to evict

    @property
    def new_ids(self) -> np.ndarray:
        """The distinct ids that get rows, int64 ``[m]``."""
        absent = self.lookup.absent
        return absent if self.admitted is None else absent[self.admitted]
