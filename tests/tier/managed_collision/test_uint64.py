"""Arithmetic of two words against Python's integers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.tier.managed_collision import uint64

rng = np.random.default_rng(0)
VALUES = [0, 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
VALUES += rng.integers(2**64, size=40, dtype=np.uint64).tolist()
OTHERS = VALUES[::-1]


def words(values):
    values = np.array(values, np.uint64)
    high, low = values >> np.uint64(32), values & np.uint64(2**32 - 1)
    return uint64.UInt64(jnp.asarray(high.astype(np.uint32)), jnp.asarray(low.astype(np.uint32)))


def integers(value):
    return [int(high) << 32 | int(low) for high, low in zip(*map(np.asarray, value), strict=True)]


OPERATIONS = {
    "add": (uint64.add, lambda a, b: a + b),
    "multiply": (uint64.multiply, lambda a, b: a * b),
    "exclusive_or": (uint64.exclusive_or, lambda a, b: a ^ b),
    "shift_right": (lambda a, b: uint64.shift_right(a, 33), lambda a, b: a >> 33),
    "rotate_left": (lambda a, b: uint64.rotate_left(a, 27), lambda a, b: a << 27 | a >> 37),
}


@pytest.mark.parametrize(("operation", "expected"), OPERATIONS.values(), ids=OPERATIONS)
def test_modulo_2_to_the_64(operation, expected):
    got = integers(operation(words(VALUES), words(OTHERS)))
    assert got == [expected(a, b) % 2**64 for a, b in zip(VALUES, OTHERS, strict=True)]


@pytest.mark.parametrize(
    "divisor", [1, 2, 100, 2**16 - 1, 2**16, 10**6, 2**24, 2**28 + 1, 10**9 + 7, 2**31 - 1]
)
def test_remainder(divisor):
    rest = uint64.remainder(words(VALUES), divisor)
    assert rest.tolist() == [value % divisor for value in VALUES]
