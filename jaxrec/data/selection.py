"""Selected rows of a data set: a set of row numbers, and the row groups that have only these."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, UInt8

from jaxrec.data.groups import GroupRange, LocatedGroups

# Number of rows whose count is kept, to find a row by its place among the selected ones.
_BLOCK = 1 << 16


@dataclasses.dataclass(eq=False)
class RowMask:
    """A set of rows of a data set, with a bit for each row.

    Attributes:
        bits: ``[ceil(total / 8)]``, the bits of the rows, the highest bit of a byte first.
        total: Number of rows of the data set.
        count: Number of rows of the set.

    Example:
        >>> mask = RowMask.empty(5)
        >>> mask.add(2, np.array([True, False, True]))
        >>> mask.count, mask.part(0, 5).tolist(), mask.inverted().part(0, 5).tolist()
        (2, [False, False, True, False, True], [True, True, False, True, False])
        >>> mask.row(1)
        4
    """

    bits: UInt8[np.ndarray, " bytes"]
    total: int
    count: int

    @classmethod
    def empty(cls, total: int) -> RowMask:
        """Return the set without rows."""
        return cls(np.zeros(-(-total // 8), np.uint8), total, 0)

    def add(self, first: int, is_selected: Bool[np.ndarray, " rows"]) -> None:
        """Add the selected ones of the rows from number ``first`` on, none of which are in it."""
        first_byte, lead = divmod(first, 8)
        packed = np.packbits(np.concatenate([np.zeros(lead, bool), is_selected]))
        self.bits[first_byte : first_byte + len(packed)] |= packed
        self.count += int(np.count_nonzero(is_selected))

    def inverted(self) -> RowMask:
        """Return the set of all other rows."""
        return RowMask(~self.bits, self.total, self.total - self.count)

    def part(self, start: int, stop: int) -> Bool[np.ndarray, " rows"]:
        """Return which of the rows ``[start, stop)`` are in the set."""
        first_byte = start // 8
        bits = np.unpackbits(self.bits[first_byte : -(-stop // 8)])
        return bits[start - 8 * first_byte :][: stop - start].astype(bool)

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """Number of selected rows before each block, and in all of them."""
        counts = [
            np.count_nonzero(self.part(start, min(start + _BLOCK, self.total)))
            for start in range(0, self.total, _BLOCK)
        ]
        return np.cumsum([0, *counts])

    def row(self, place: int) -> int:
        """Return the number of the selected row that has ``place`` others before it."""
        block = int(np.searchsorted(self._before, place, side="right")) - 1
        start = block * _BLOCK
        selected = np.flatnonzero(self.part(start, min(start + _BLOCK, self.total)))
        return start + int(selected[place - self._before[block]])

    @property
    def stretch(self) -> tuple[int, int]:
        """The first selected row, and the row after the last one."""
        return self.row(0), self.row(self.count - 1) + 1


class RowNumbers(int):
    """Numbers of selected rows of a file, as an int: the number of the first one.

    ``RowNumbers(numbers) + n`` is ``numbers[n]``, so that code that adds a row's index to the
    number of the first row names the right row in errors.
    """

    def __new__(cls, numbers: np.ndarray) -> RowNumbers:
        made = super().__new__(cls, numbers[0] if len(numbers) else 0)
        made.numbers = numbers
        return made

    numbers: np.ndarray

    def __add__(self, rows: int) -> RowNumbers:
        return RowNumbers(self.numbers[rows:])

    def __reduce__(self) -> tuple[type[RowNumbers], tuple[np.ndarray]]:
        return RowNumbers, (self.numbers,)


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedGroups:
    """The selected rows of row groups; groups without any are left out.

    Attributes:
        groups: The row groups.
        mask: The selected rows, by their numbers in all groups.

    Example:
        >>> from jaxrec.data import TableGroups
        >>> mask = RowMask.empty(3)
        >>> mask.add(0, np.array([True, False, True]))
        >>> rows = SelectedGroups(TableGroups(pa.table({"id": [7, 8, 9]})), mask)
        >>> rows.sizes, rows.read(0)["id"].to_pylist()
        ((2,), [7, 9])
    """

    groups: LocatedGroups
    mask: RowMask

    @functools.cached_property
    def _kept(self) -> tuple[tuple[int, int, int], ...]:
        """Number of each group with selected rows, its first row among all, and their count."""
        kept, first = [], 0
        for group, rows in enumerate(self.groups.sizes):
            if count := int(np.count_nonzero(self.mask.part(first, first + rows))):
                kept.append((group, first, count))
            first += rows
        return tuple(kept)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each group."""
        return tuple(count for *_, count in self._kept)

    def _part(self, group: int) -> Bool[np.ndarray, " rows"]:
        number, first, _ = self._kept[group]
        return self.mask.part(first, first + self.groups.sizes[number])

    def read(self, group: int) -> pa.Table:
        """Read the selected rows of a group."""
        return self.groups.read(self._kept[group][0]).filter(pa.array(self._part(group)))

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        path, first = self.groups.location(self._kept[group][0])
        return path, RowNumbers(first + np.flatnonzero(self._part(group)))


def selected_rows(groups: LocatedGroups, mask: RowMask) -> GroupRange | SelectedGroups:
    """Return a set of rows as row groups: as a `GroupRange` if the rows are consecutive."""
    start, stop = mask.stretch
    if stop - start == mask.count:
        return GroupRange(groups, start, stop)
    return SelectedGroups(groups, mask)
