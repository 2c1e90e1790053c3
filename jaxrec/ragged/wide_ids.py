"""Row indices of 64 bits on devices, as two words of 32 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.bounds import BAD_ID
from jaxrec.ragged.words import join_int64, split_int64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WideIds:
    """Row indices of 64 bits on devices, for tables of more than 2**31 rows over a mesh.

    They are the ``values`` of a batch that `jaxrec.mesh.shard_batch` made with ``id_bits=64``.
    Slices are wide ids too, and ``np.asarray`` gives int64. JAX refuses them, since it would need
    ``jax_enable_x64`` to take them whole.

    Attributes:
        high: The upper 32 bits of each id.
        low: The lower 32 bits of each id.
    """

    high: Any
    low: Any

    @classmethod
    def of(cls, ids: np.ndarray) -> WideIds:
        """Return int64 ids, which are on the host, as wide ids in NumPy arrays.

        Example:
            >>> WideIds.of(np.array([2**32 + 5])).low
            array([5], dtype=uint32)
        """
        words = split_int64(ids)
        return cls(words[..., 0].copy(), words[..., 1].copy())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the ids."""
        return self.low.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.low.size

    @property
    def dtype(self) -> np.dtype:
        """int64."""
        return np.dtype(np.int64)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> WideIds:
        return WideIds(self.high[index], self.low[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return join_int64(np.stack([np.asarray(self.high), np.asarray(self.low)], -1))

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            "wide ids are two words of 32 bits on a device, which JAX does not take as one array; "
            "jaxrec's collections look them up, and np.asarray(ids) reads them on the host"
        )

    def is_below(self, bound: int) -> Bool[AnyArray, "*shape"]:
        """Return which ids are in ``[0, bound)``."""
        high, low = _words(bound)
        is_negative = self.high >= np.uint32(1 << 31)
        return ~is_negative & ((self.high < high) | ((self.high == high) & (self.low < low)))

    def is_equal(self, other: Any) -> Bool[AnyArray, "*shape"]:
        """Return which ids are those of another array, of wide ids or int32."""
        other = widen(other)
        return (self.high == other.high) & (self.low == other.low)

    def minus(self, number: int) -> UInt32[Array, "*shape"]:
        """Return the lower 32 bits of the ids minus a number."""
        return jnp.asarray(self.low - _words(number)[1])

    def narrow(self) -> Int32[Array, "*shape"]:
        """Return the ids as int32, `BAD_ID` for those that int32 does not hold."""
        return jnp.where(self.is_below(1 << 31), self.low.astype(jnp.int32), BAD_ID)


def narrow(ids: Any) -> Any:
    """Return ids as an int32 array; see `WideIds.narrow`."""
    return ids.narrow() if isinstance(ids, WideIds) else jnp.asarray(ids)


def widen(ids: Any) -> WideIds:
    """Return ids as wide ids: int32, or of any width on the host."""
    if isinstance(ids, WideIds):
        return ids
    if isinstance(ids, np.ndarray):
        return WideIds.of(np.asarray(ids, np.int64))
    ids = jnp.asarray(ids)
    return WideIds((ids >> 31).astype(jnp.uint32), ids.astype(jnp.uint32))


def concatenate_wide(parts: Sequence[Any], axis: int = -1) -> Any:
    """Concatenate ids, wide or int32, to wide ids."""
    wide = [widen(part) for part in parts]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *wide)


def _words(number: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(number >> 32), np.uint32(number & 0xFFFFFFFF)
