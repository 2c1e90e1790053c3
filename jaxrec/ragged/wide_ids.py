"""64-bit ids as two 32-bit words, the one form in which they may go to a device.

JAX cuts 64-bit integers to 32 bits silently unless ``jax_enable_x64`` is set. `WideIds` keeps the
high and the low words in two arrays, for batches and arithmetic. Code that gathers or stores whole
ids keeps both words side by side: ``[..., 2]`` uint32, high word first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Int64, UInt32

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.bounds import BAD_ID
from jaxrec.ragged.columns import integers

Words: TypeAlias = UInt32[AnyArray, "*shape 2"]


def split_int64(ids: Any) -> UInt32[np.ndarray, "*shape 2"]:
    """Split each id into its high and its low word.

    Args:
        ids: ``[...]`` int64 or uint64, on the host.

    Returns:
        ``[..., 2]`` uint32: high word, low word.

    Raises:
        TypeError: The ids are not integers.
        ValueError: One does not fit 64 bits.

    Example:
        >>> import numpy as np
        >>> split_int64(np.array([2**32 + 5]))
        array([[1, 5]], dtype=uint32)
    """
    ids = integers("ids", "id", ids)
    if ids.dtype == object:
        raise ValueError(f"id {max(ids.flat, key=abs)} does not fit 64 bits")
    bits = ids.astype(np.int64).view(np.uint64) if ids.dtype.kind == "i" else ids.astype(np.uint64)
    return np.stack([bits >> np.uint64(32), bits & np.uint64(2**32 - 1)], -1).astype(np.uint32)


def join_int64(words: UInt32[AnyArray, "*shape 2"]) -> Int64[np.ndarray, "*shape"]:
    """Join the words of `split_int64`, on the host, to int64 ids (uint64 ids keep their bits).

    Example:
        >>> import numpy as np
        >>> join_int64(split_int64(np.array([-7, 2**40])))
        array([           -7, 1099511627776])
    """
    words = np.asarray(words).astype(np.uint64)
    return np.asarray((words[..., 0] << np.uint64(32)) | words[..., 1]).view(np.int64)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WideIds:
    """64-bit ids on devices: raw ids, or row indices of tables of more than 2**31 rows.

    They are the ``values`` of a batch from `jaxrec.mesh.shard_batch` with ``id_bits=64``, or from
    `jaxrec.tier.managed_collision.id_words`. Slices are wide ids too, and ``np.asarray`` gives
    int64. JAX functions refuse them. ``+``, ``*``, ``^`` and ``%`` treat the ids as unsigned,
    modulo ``2**64``, and ``<`` as signed.

    Attributes:
        high: The upper 32 bits of each id.
        low: The lower 32 bits of each id.
    """

    high: Any
    low: Any

    @classmethod
    def of(cls, ids: np.ndarray) -> WideIds:
        """Split int64 ids on the host into wide ids, in NumPy arrays.

        Example:
            >>> WideIds.of(np.array([2**32 + 5])).low
            array([5], dtype=uint32)
        """
        words = split_int64(ids)
        return cls(words[..., 0].copy(), words[..., 1].copy())

    @classmethod
    def of_words(cls, words: Words) -> WideIds:
        """Make wide ids of ``[..., 2]`` words."""
        return cls(words[..., 0], words[..., 1])

    @property
    def words(self) -> UInt32[Array, "*shape 2"]:
        """The ids as ``[..., 2]`` words."""
        return jnp.stack([self.high, self.low], -1)

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

    def __add__(self, other: WideIds | int) -> WideIds:
        other = _wide(other)
        low = self.low + other.low
        # uint32 wraps around: a sum below an addend has lost a carry.
        return WideIds(self.high + other.high + (low < other.low).astype(jnp.uint32), low)

    def __mul__(self, other: WideIds | int) -> WideIds:
        other = _wide(other)
        high, low = _multiply_words(self.low, other.low)
        return WideIds(high + self.high * other.low + self.low * other.high, low)

    def __xor__(self, other: WideIds | int) -> WideIds:
        other = _wide(other)
        return WideIds(self.high ^ other.high, self.low ^ other.low)

    def __mod__(self, divisor: int) -> Int32[Array, "*shape"]:
        # Long division, for divisors below 2**31. Each step appends the next digit of the id to the
        # remainder, and both must fit a word: the larger the divisor, the fewer bits a digit has.
        bits = 16
        while bits + divisor.bit_length() > 32:
            bits //= 2
        by, mask = np.uint32(divisor), np.uint32(2**bits - 1)
        rest = self.high % by
        for shift in range(32 - bits, -1, -bits):
            rest = (rest << np.uint32(bits) | self.low >> np.uint32(shift) & mask) % by
        return rest.astype(jnp.int32)

    def __lt__(self, other: WideIds) -> Bool[Array, "*shape"]:
        high, other_high = _signed(self.high), _signed(other.high)
        return (high < other_high) | ((high == other_high) & (self.low < other.low))

    def shift_right(self, bits: int) -> WideIds:
        """Shift unsigned ids by 32 to 63 bits."""
        return WideIds(jnp.zeros_like(self.high), self.high >> np.uint32(bits - 32))

    def rotate_left(self, bits: int) -> WideIds:
        """Rotate the bits of the ids by 1 to 31."""
        left, right = np.uint32(bits), np.uint32(32 - bits)
        return WideIds(self.high << left | self.low >> right, self.low << left | self.high >> right)

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
        """Return where the ids equal those of another array, wide or int32."""
        other = widen(other)
        return (self.high == other.high) & (self.low == other.low)

    def minus(self, number: int) -> UInt32[Array, "*shape"]:
        """Return the low word of the ids minus a number."""
        return jnp.asarray(self.low - _words(number)[1])

    def narrow(self) -> Int32[Array, "*shape"]:
        """Return the ids as int32; an id outside ``[0, 2**31)`` becomes `BAD_ID`."""
        return jnp.where(self.is_below(1 << 31), self.low.astype(jnp.int32), BAD_ID)


def narrow(ids: Any) -> Any:
    """Return `WideIds.narrow` of wide ids, and other ids as a JAX array."""
    return ids.narrow() if isinstance(ids, WideIds) else jnp.asarray(ids)


def widen(ids: Any) -> WideIds:
    """Return ids as wide ids: int32 on a device, any integers on the host."""
    if isinstance(ids, WideIds):
        return ids
    if isinstance(ids, np.ndarray):
        return WideIds.of(np.asarray(ids, np.int64))
    ids = jnp.asarray(ids)
    # The shift copies the sign bit into the whole high word, so -1 stays -1.
    return WideIds((ids >> 31).astype(jnp.uint32), ids.astype(jnp.uint32))


def concatenate_wide(parts: Sequence[Any], axis: int = -1) -> Any:
    """Concatenate wide or int32 ids to wide ids."""
    wide = [widen(part) for part in parts]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis), *wide)


def equal_words(
    a: UInt32[Array, "*shape 2"], b: UInt32[Array, "*#shape 2"]
) -> Bool[Array, "*shape"]:
    """Return where two arrays of words hold the same id."""
    return (a[..., 0] == b[..., 0]) & (a[..., 1] == b[..., 1])


def argsort_words(ids: UInt32[Array, "n 2"]) -> Int32[Array, " n"]:
    """Return the stable order that sorts ids as signed integers."""
    # `lax.sort` orders by several keys, so the words need not be joined: the signed high word, then
    # the unsigned low one.
    position = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return jax.lax.sort((_signed(ids[:, 0]), ids[:, 1], position), num_keys=2)[-1]


@jax.jit  # outside of jit, XLA would compile the loop again at each call
def search_words(
    sorted_ids: UInt32[Array, "slots 2"], ids: UInt32[Array, "n 2"]
) -> Int32[Array, " n"]:
    """Return for each id the number of smaller ones in ``sorted_ids``, which ascend as int64."""
    count, wide = sorted_ids.shape[0], WideIds.of_words(ids)

    def halve(
        _: Int32[Array, ""], bounds: tuple[Int32[Array, " n"], Int32[Array, " n"]]
    ) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
        first, last = bounds
        middle = first + (last - first) // 2
        is_below = WideIds.of_words(sorted_ids.at[middle].get(mode="clip")) < wide
        is_below &= first < last
        return jnp.where(is_below, middle + 1, first), jnp.where(is_below, last, middle)

    # `jnp.searchsorted` compares single words only, so the bisection is written out.
    first = jnp.zeros(ids.shape[0], jnp.int32)
    if count == 0:
        return first
    bounds = first, jnp.full_like(first, count)
    return jax.lax.fori_loop(0, count.bit_length(), halve, bounds)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IdRuns:
    """The distinct ids of a list.

    Attributes:
        ids: The distinct ids in ascending order; lines from ``count`` on are arbitrary.
        run: For each id of the list its line in ``ids``; ``n`` at padding.
        count: Number of distinct ids.
    """

    ids: UInt32[Array, "n 2"]
    run: Int32[Array, " n"]
    count: Int32[Array, ""]


@jax.jit
def find_runs(ids: UInt32[Array, "n 2"], is_valid: Bool[Array, " n"]) -> IdRuns:
    """Find the distinct ids where ``is_valid``."""
    size = ids.shape[0]
    position = jnp.arange(size, dtype=jnp.int32)
    if size == 0:
        return IdRuns(ids, position, jnp.int32(0))
    # Padding sorts behind all ids, so the runs of ids are numbered from 0 without gaps.
    is_padding = (~is_valid).astype(jnp.int32)
    keys = (is_padding, _signed(ids[:, 0]), ids[:, 1], position)
    is_padding, _, _, order = jax.lax.sort(keys, num_keys=3)
    in_order = ids[order]
    is_repeat = equal_words(in_order, jnp.roll(in_order, 1, axis=0)).at[0].set(False)
    is_first = (is_padding == 0) & ~is_repeat
    run = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    run = jnp.where(is_padding == 0, run, size)
    distinct = jnp.zeros_like(ids).at[jnp.where(is_first, run, size)].set(in_order, mode="drop")
    runs = jnp.zeros(size, jnp.int32).at[order].set(run)
    return IdRuns(distinct, runs, jnp.sum(is_first, dtype=jnp.int32))


def _wide(number: WideIds | int) -> WideIds:
    return WideIds(*map(jnp.uint32, _words(number))) if isinstance(number, int) else number


def _words(number: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(number >> 32 & 0xFFFFFFFF), np.uint32(number & 0xFFFFFFFF)


def _signed(words: UInt32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _multiply_words(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the high and the low word of the product of two words."""
    # Schoolbook multiplication of 16-bit halves: no partial sum exceeds a word.
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    lowest = a_low * b_low
    middle = a_high * b_low + (lowest >> half)
    cross = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (cross >> half), a * b
