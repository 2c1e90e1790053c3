"""Order of 64-bit ids that are held as two words: sorting, searching, runs of equal ids."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32


def equal(a: UInt32[Array, "*shape 2"], b: UInt32[Array, "*#shape 2"]) -> Bool[Array, "*shape"]:
    """Return where two ids are the same."""
    return (a[..., 0] == b[..., 0]) & (a[..., 1] == b[..., 1])


def argsort_ids(ids: UInt32[Array, "n 2"]) -> Int32[Array, " n"]:
    """Return the stable order that sorts ids as signed integers."""
    position = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return jax.lax.sort((_signed(ids[:, 0]), ids[:, 1], position), num_keys=2)[-1]


@jax.jit  # for callers outside of jit, where XLA would compile the loop anew at each call
def search_ids(
    sorted_ids: UInt32[Array, "slots 2"], ids: UInt32[Array, "n 2"]
) -> Int32[Array, " n"]:
    """Return for each id the number of smaller sorted ids, by binary search.

    Args:
        sorted_ids: Ids in ascending order, as signed integers.
        ids: The ids to find.
    """
    count = sorted_ids.shape[0]
    high, low = _signed(ids[:, 0]), ids[:, 1]

    def halve(
        _: Int32[Array, ""], bounds: tuple[Int32[Array, " n"], Int32[Array, " n"]]
    ) -> tuple[Int32[Array, " n"], Int32[Array, " n"]]:
        first, last = bounds
        middle = first + (last - first) // 2
        other = sorted_ids.at[middle].get(mode="clip")
        other_high, other_low = _signed(other[:, 0]), other[:, 1]
        is_below = (other_high < high) | ((other_high == high) & (other_low < low))
        is_below &= first < last
        return jnp.where(is_below, middle + 1, first), jnp.where(is_below, last, middle)

    if count == 0:
        return jnp.zeros(ids.shape[0], jnp.int32)
    bounds = jnp.zeros_like(high), jnp.full_like(high, count)
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
    """Find the distinct ids of a list, without its padding."""
    size = ids.shape[0]
    position = jnp.arange(size, dtype=jnp.int32)
    if size == 0:
        return IdRuns(ids, position, jnp.int32(0))
    is_padding = (~is_valid).astype(jnp.int32)
    keys = (is_padding, _signed(ids[:, 0]), ids[:, 1], position)
    is_padding, _, _, order = jax.lax.sort(keys, num_keys=3)
    in_order = ids[order]
    is_first = (is_padding == 0) & ~equal(in_order, jnp.roll(in_order, 1, axis=0)).at[0].set(False)
    run = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    run = jnp.where(is_padding == 0, run, size)
    distinct = jnp.zeros_like(ids).at[jnp.where(is_first, run, size)].set(in_order, mode="drop")
    runs = jnp.zeros(size, jnp.int32).at[order].set(run)
    return IdRuns(distinct, runs, jnp.sum(is_first, dtype=jnp.int32))


def _signed(words: UInt32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(words, jnp.int32)
