"""Ragged float arrays of fixed capacity for the tests: few shapes, so few compilations."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

BATCH, CAPACITY, LENGTH = 4, 20, 3

# Rows of up to 5 elements fill the capacity to its last place; some exceed LENGTH.
lengths = st.lists(st.integers(0, 5), min_size=BATCH, max_size=BATCH)
seeds = st.integers(0, 2**32 - 1)


def make_rows(lengths: list[int], seed: int, *element: int) -> list[np.ndarray]:
    """Rows of the given lengths of random float64 elements (exact in float32)."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-64, 64, (length, *element)) / 16 for length in lengths]


def flatten(rows: list[np.ndarray], fill: float = np.nan) -> tuple[np.ndarray, np.ndarray]:
    """Float32 values with ``fill`` as padding, and int32 offsets."""
    flat = np.concatenate(rows)
    values = np.full((CAPACITY, *flat.shape[1:]), fill, np.float32)
    values[: len(flat)] = flat
    return values, np.cumsum([0, *map(len, rows)], dtype=np.int32)


def padded(rows: list[np.ndarray], length: int, fill: float = 0) -> np.ndarray:
    """Rows padded or cut to a length, by a loop."""
    dense = np.full((len(rows), length, *rows[0].shape[1:]), fill, np.float64)
    for row, out in zip(rows, dense, strict=True):
        out[: min(len(row), length)] = row[:length]
    return dense
