"""Slots of some rows of a table."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class RowSlots:
    """Slots of some rows of a table in one group, for `TableStore.read_rows` and `write_rows`.

    A table that is cut by columns has one of these for each column slice.

    Attributes:
        group: Name of the group.
        columns: First column of the slice and the column after its last.
        slots: int32 slots, ``[n]``; over a mesh ``[devices, n]`` with -1 at padding.
        index: For each slot the position of its row among the given rows, shaped like ``slots``;
            -1 at padding.
        is_in_order: Whether ``index`` is 0, 1, ..., the position of each row.
    """

    group: str
    columns: tuple[int, int]
    slots: np.ndarray
    index: np.ndarray
    is_in_order: bool = False
