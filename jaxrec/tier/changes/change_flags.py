"""Sets of rows and of ids that changed, with a bit for each consumer of the changes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

MAX_CONSUMERS = 64

# Number of rows of a block, and of blocks that are searched at a time.
_BLOCK = 1 << 12
_BLOCKS = 1 << 8

# Number of added ids above which they are merged with the earlier ones.
_PENDING = 1 << 16


class RowFlags:
    """Changed rows of a table: a bit for each row and consumer that has not read the change."""

    def __init__(self, num_rows: int, num_consumers: int) -> None:
        self.num_rows = num_rows
        num_blocks = -(-num_rows // _BLOCK)
        # A byte a row for up to eight consumers. `np.zeros` takes memory only for pages that are
        # marked.
        self._flags = np.zeros((num_blocks, _BLOCK), flag_type(num_consumers))
        self._is_marked = np.zeros(num_blocks, np.bool_)

    @property
    def nbytes(self) -> int:
        """Number of bytes of all flags."""
        return self._flags.nbytes + self._is_marked.nbytes

    def mark(self, rows: np.ndarray, bits: int | np.ndarray) -> None:
        """Set bits of rows, ``[n]``; ``bits`` is one number for all rows, or ``[n]`` numbers."""
        # NumPy writes a repeated row once, which is right only if all get the same bits.
        self._flags.reshape(-1)[rows] |= np.asarray(bits, self._flags.dtype)
        self._is_marked[rows // _BLOCK] = True

    def rows(self, bit: int) -> np.ndarray:
        """Return the rows that have ``bit`` set, int64, ascending."""
        found = [np.zeros(0, np.int64)]
        for blocks in self._marked_blocks():
            block, column = np.nonzero(self._flags[blocks] & self._flags.dtype.type(bit))
            found.append(blocks[block] * _BLOCK + column)
        return np.concatenate(found)

    def clear(self, bit: int) -> None:
        """Clear ``bit`` of all rows."""
        kept = ~self._flags.dtype.type(bit)
        for blocks in self._marked_blocks():
            flags = self._flags[blocks] & kept
            self._flags[blocks] = flags
            self._is_marked[blocks] = flags.any(axis=1)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Clear all bits of distinct rows, ``[n]``, and return the bits that were set, ``[n]``."""
        flags = self._flags.reshape(-1)
        bits = flags[rows]
        flags[rows] = 0
        return bits

    def _marked_blocks(self) -> Iterator[np.ndarray]:
        """Yield the indices of blocks of rows with a bit set, up to `_BLOCKS` at a time."""
        # A table of a billion rows with few changes is not searched whole.
        blocks = np.flatnonzero(self._is_marked)
        return (blocks[start : start + _BLOCKS] for start in range(0, blocks.size, _BLOCKS))


class IdFlags:
    """Changed 64-bit ids: a bit for each id and consumer that has not read the change.

    Only ids with a bit set take memory.
    """

    def __init__(self, num_consumers: int) -> None:
        dtype = flag_type(num_consumers)
        self._ids, self._flags = np.zeros(0, np.int64), np.zeros(0, dtype)
        self._added: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_added = 0

    def __len__(self) -> int:
        self._merge()
        return self._ids.size

    def mark(self, ids: np.ndarray, bits: int | np.ndarray) -> None:
        """Set bits of ids, ``[n]``; ``bits`` is one number for all ids, or ``[n]`` numbers."""
        flags = np.broadcast_to(np.asarray(bits, self._flags.dtype), ids.shape)
        self._added.append((ids[flags != 0], flags[flags != 0]))
        self._num_added += self._added[-1][0].size
        # As many added as merged ids before the next sort: each id is sorted a few times in all.
        if self._num_added > max(_PENDING, self._ids.size):
            self._merge()

    def ids(self, bit: int) -> np.ndarray:
        """Return the ids that have ``bit`` set, int64, ascending."""
        self._merge()
        return self._ids[self._flags & self._flags.dtype.type(bit) != 0]

    def clear(self, bit: int) -> None:
        """Clear ``bit`` of all ids."""
        self._merge()
        self._flags &= ~self._flags.dtype.type(bit)
        is_kept = self._flags != 0
        self._ids, self._flags = self._ids[is_kept], self._flags[is_kept]

    def _merge(self) -> None:
        if not self._added:
            return
        ids, flags = zip((self._ids, self._flags), *self._added, strict=True)
        all_ids, all_flags = np.concatenate(ids), np.concatenate(flags)
        order = np.argsort(all_ids, kind="stable")
        self._ids, starts = np.unique(all_ids[order], return_index=True)
        if starts.size:
            self._flags = np.bitwise_or.reduceat(all_flags[order], starts)
        self._added, self._num_added = [], 0


def flag_type(num_consumers: int) -> np.dtype:
    """Return the smallest unsigned type with a bit for each consumer."""
    return np.dtype(f"uint{next(bits for bits in (8, 16, 32, 64) if bits >= num_consumers)}")
