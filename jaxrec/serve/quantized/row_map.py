"""Rows of the remaining ids of a pruned table, in two bits for each id."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxrec.ragged.bounds import BAD_ID

_WORD_BITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowMap:
    """Map from the ids of a pruned table to the rows that remain, which keep their order.

    The row of an id is the number of remaining ids before it: a count for each word of 32 ids, and
    the set bits of the id's own word below its bit.

    Attributes:
        kept: ``[words]`` bit ``id % 32`` of word ``id // 32`` is set if the id has a row.
        before: ``[words]`` number of rows of the ids of all earlier words.
        num_ids: Number of ids.
        num_rows: Number of rows that remain.
    """

    kept: UInt32[Array, " words"]
    before: Int32[Array, " words"]
    num_ids: int = dataclasses.field(metadata={"static": True})
    num_rows: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of_kept(cls, is_kept: Bool[np.ndarray, " ids"]) -> RowMap:
        """Make the map of a table, given which ids keep their rows."""
        words = -(-is_kept.size // _WORD_BITS)
        bits = np.zeros(words * _WORD_BITS, np.bool_)
        bits[: is_kept.size] = is_kept
        kept = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
        counts = np.bitwise_count(kept).astype(np.int32)
        before = np.cumsum(counts, dtype=np.int32) - counts
        return cls(jnp.asarray(kept), jnp.asarray(before), int(is_kept.size), int(np.sum(is_kept)))

    @classmethod
    def zeros(cls, num_ids: int, num_rows: int) -> RowMap:
        """Make a map whose arrays are yet to be set."""
        words = -(-num_ids // _WORD_BITS)
        return cls(jnp.zeros(words, jnp.uint32), jnp.zeros(words, jnp.int32), num_ids, num_rows)

    def find(self, ids: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """Return the row of each id: ``num_rows`` for a pruned id, `BAD_ID` for a number that is
        no id; traced."""
        return _find(jnp, self.kept, self.before, ids, self.num_ids, self.num_rows)

    def find_on_host(self, ids: np.ndarray) -> np.ndarray:
        """`find` for ids of the table, in NumPy."""
        kept, before = np.asarray(self.kept), np.asarray(self.before)
        return _find(np, kept, before, ids.astype(np.int32), self.num_ids, self.num_rows)

    def kept_ids(self) -> np.ndarray:
        """Return the ids that have rows, ascending, int64 ``[num_rows]``."""
        as_bytes = np.asarray(self.kept).astype("<u4").view(np.uint8)
        return np.flatnonzero(np.unpackbits(as_bytes, bitorder="little"))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the map."""
        return int(self.kept.nbytes + self.before.nbytes)


def _find(xp: Any, kept: Any, before: Any, ids: Any, num_ids: int, num_rows: int) -> Any:
    is_id = (ids >= 0) & (ids < num_ids)
    words = xp.where(is_id, ids, 0) // _WORD_BITS
    word = kept[words]
    bit = xp.left_shift(xp.uint32(1), (ids % _WORD_BITS).astype(xp.uint32))
    below = xp.bitwise_count(word & (bit - xp.uint32(1))).astype(xp.int32)
    row = xp.where((word & bit) != 0, before[words] + below, xp.int32(num_rows))
    return xp.where(is_id, row, xp.int32(BAD_ID))
