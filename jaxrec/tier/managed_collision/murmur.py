"""The hash of multi-probe maps."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, UInt32

from jaxrec.tier.managed_collision.uint64 import (
    UInt64,
    add,
    constant,
    exclusive_or,
    multiply,
    rotate_left,
    shift_right,
)


def murmur_hash3(ids: UInt32[Array, "*shape 2"]) -> UInt32[Array, "*shape 2"]:
    """Hash ids as FBGEMM's ``murmur_hash3(id, 0, 0)`` does.

    MurmurHash3's mixing of the 16 bytes of the id and of 0, with its two halves joined by an
    exclusive or (``murmur_hash3_2x64`` in FBGEMM's ``faster_hash_ops/common_utils.cuh``).

    Args:
        ids: ``[..., 2]`` uint32, as `jaxrec.ragged.split_int64` makes them.

    Returns:
        The 64-bit hashes in the same form.

    Example:
        >>> import numpy as np
        >>> from jaxrec.ragged import join_int64, split_int64
        >>> int(join_int64(murmur_hash3(jnp.asarray(split_int64(np.array([3])))))[0])
        1573190477316769101
    """
    first = multiply(UInt64(ids[..., 0], ids[..., 1]), constant(0x87C37B91114253D5))
    first = multiply(rotate_left(first, 31), constant(0x4CF5AD432745937F))
    first = add(multiply(rotate_left(first, 27), constant(5)), constant(0x52DCE729))
    # The second half is 0 up to here.
    second = add(multiply(first, constant(5)), constant(0x38495AB5))
    length = constant(16)
    first, second = exclusive_or(first, length), exclusive_or(second, length)
    first = add(first, second)
    second = add(second, first)
    first, second = _mix(first), _mix(second)
    first = add(first, second)
    second = add(second, first)
    return jnp.stack(exclusive_or(first, second), -1)


def _mix(half: UInt64) -> UInt64:
    half = exclusive_or(half, shift_right(half, 33))
    half = multiply(half, constant(0xFF51AFD7ED558CCD))
    half = exclusive_or(half, shift_right(half, 33))
    half = multiply(half, constant(0xC4CEB9FE1A85EC53))
    return exclusive_or(half, shift_right(half, 33))
