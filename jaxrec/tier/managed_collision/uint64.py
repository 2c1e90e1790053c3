"""Arithmetic of 64-bit integers as two uint32 arrays, for devices without 64-bit types."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

Word: TypeAlias = UInt32[Array, "..."]


class UInt64(NamedTuple):
    """64-bit integers, modulo ``2**64``, as two arrays of 32 bits."""

    high: Word
    low: Word


def constant(value: int) -> UInt64:
    """Return a constant, a scalar."""
    return UInt64(jnp.uint32(value >> 32 & 0xFFFFFFFF), jnp.uint32(value & 0xFFFFFFFF))


def add(a: UInt64, b: UInt64) -> UInt64:
    """Return ``a + b``."""
    low = a.low + b.low
    return UInt64(a.high + b.high + (low < b.low).astype(jnp.uint32), low)


def multiply(a: UInt64, b: UInt64) -> UInt64:
    """Return ``a * b``."""
    high, low = _multiply_words(a.low, b.low)
    return UInt64(high + a.high * b.low + a.low * b.high, low)


def exclusive_or(a: UInt64, b: UInt64) -> UInt64:
    """Return ``a ^ b``."""
    return UInt64(a.high ^ b.high, a.low ^ b.low)


def shift_right(a: UInt64, bits: int) -> UInt64:
    """Return ``a >> bits`` for 32 to 63 bits."""
    return UInt64(jnp.zeros_like(a.high), a.high >> np.uint32(bits - 32))


def rotate_left(a: UInt64, bits: int) -> UInt64:
    """Rotate by 1 to 31 bits."""
    left, right = np.uint32(bits), np.uint32(32 - bits)
    return UInt64(a.high << left | a.low >> right, a.low << left | a.high >> right)


def remainder(a: UInt64, divisor: int) -> Int32[Array, "..."]:
    """Return ``a % divisor`` for a divisor of 1 to ``2**31 - 1``, by long division.

    A digit has as many bits as fit 32 bits together with a remainder.
    """
    bits = 16
    while bits + divisor.bit_length() > 32:
        bits //= 2
    by, mask = np.uint32(divisor), np.uint32(2**bits - 1)
    rest = a.high % by
    for shift in range(32 - bits, -1, -bits):
        rest = (rest << np.uint32(bits) | a.low >> np.uint32(shift) & mask) % by
    return rest.astype(jnp.int32)


def _multiply_words(a: Word, b: Word) -> tuple[Word, Word]:
    """Return the high and the low word of the product of two words."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    lowest = a_low * b_low
    middle = a_high * b_low + (lowest >> half)
    cross = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> half) + (cross >> half), a * b
