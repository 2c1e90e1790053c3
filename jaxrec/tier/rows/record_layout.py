"""The layout of a record: the rows of a vocabulary's tables and their optimizer state, as bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.tier.stores.record_format import RecordFormat


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """Places of the rows and states of a vocabulary's tables in a record.

    Attributes:
        leaves: For each array the number of its table, its name (``"rows"`` or a state's), its
            width (None for one number a row) and its type.
    """

    leaves: tuple[tuple[int, str, int | None, np.dtype], ...]

    @classmethod
    def of(cls, shapes: Sequence[LogicalTable]) -> RecordLayout:
        """Make the layout of tables of some shapes (`TableStore.checkpoint_shapes`)."""
        leaves = []
        for number, table in enumerate(shapes):
            for name, array in {"rows": table.rows, **dict(sorted(table.state.items()))}.items():
                width = array.shape[1] if len(array.shape) > 1 else None
                leaves.append((number, name, width, np.dtype(array.dtype)))
        return cls(tuple(leaves))

    @property
    def width(self) -> int:
        """Number of bytes of a record."""
        return sum((width or 1) * dtype.itemsize for _, _, width, dtype in self.leaves)

    def record_format(self, names: Sequence[str] = (), num_ids: int | None = None) -> RecordFormat:
        """Return the format of the records for a store.

        Args:
            names: Names of the tables; without them the tables are numbered.
            num_ids: Ids are 0 to ``num_ids`` - 1; None: any 64-bit ids but -1.
        """
        fields = (
            f"{names[number] if names else f'table {number}'} {name} {dtype}[{width or 1}]"
            for number, name, width, dtype in self.leaves
        )
        return RecordFormat(self.width, ", ".join(fields), num_ids)

    def pack(self, tables: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Return records, uint8 ``[n, width]``, of the rows and states of the tables."""
        parts = []
        for number, name, width, dtype in self.leaves:
            values = np.ascontiguousarray(tables[number][name], dtype)
            parts.append(values.reshape(len(values), width or 1).view(np.uint8))
        return np.concatenate(parts, axis=1)

    def unpack(self, records: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Return the rows and states of the tables, as views of the records: reverses `pack`.

        Args:
            records: uint8 ``[n, width]``; the bytes of each record lie together.
        """
        tables: dict[int, dict[str, np.ndarray]] = {}
        start = 0
        for number, name, width, dtype in self.leaves:
            stop = start + (width or 1) * dtype.itemsize
            values = records[:, start:stop].view(dtype)
            tables.setdefault(number, {})[name] = values if width else values[:, 0]
            start = stop
        return [tables[number] for number in sorted(tables)]
