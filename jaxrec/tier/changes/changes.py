"""Changes of tables, as consumers get them."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.tier.changes.tracked_table import ChangedIds

_NO_IDS = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class ChangedRows:
    """Rows that changed.

    Attributes:
        ids: Sorted distinct ids, int64 ``[n]``; an id from 2**63 up has its bits as int64.
        rows: The rows as they are now, ``[n, embedding_dim]``; None: they were not asked for.
        state: Their optimizer state by name, ``[n, ...]``; None: it was not asked for.
    """

    ids: np.ndarray
    rows: np.ndarray | None = None
    state: dict[str, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class TableChanges(ChangedRows):
    """Changes of a table. ``ids``, ``rows`` and ``state`` are those of ids with a row.

    Attributes:
        removed: Ids of an open vocabulary that lost their rows, sorted, int64 ``[m]``. The consumer
            may never have got some of them.
        unknown: Changed rows that ids without a row of their own read
            (`jaxrec.tier.Dynamic.unknown`); its ``ids`` are row indices of the table.
    """

    removed: np.ndarray = dataclasses.field(default_factory=_NO_IDS.copy)
    unknown: ChangedRows = dataclasses.field(default_factory=lambda: ChangedRows(_NO_IDS.copy()))


@dataclasses.dataclass
class HandOver:
    """Changes that a consumer takes over.

    Attributes:
        ids: Changed ids by the path of the table's collection and its name.
        position: Name that the consumer gave the state of the model in which the last hand-over
            ended, and gives the present one; None: it gave none, or read changes otherwise since.
    """

    ids: dict[tuple[str, str], ChangedIds]
    position: str | None
