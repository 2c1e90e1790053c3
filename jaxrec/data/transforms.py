"""Columns of Criteo's click logs, and their transforms for a model."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, Integer

NUM_DENSE = 13
NUM_CATEGORICAL = 26
COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL

LABEL = "label"
DENSE_NAMES = tuple(f"int_{i}" for i in range(NUM_DENSE))
CATEGORICAL_NAMES = tuple(f"cat_{i}" for i in range(NUM_CATEGORICAL))


def log_counts(counts: Int[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Compute ``log(x + 3)``, with which MLPerf trains TorchRec's DLRM.

    Criteo's smallest count is -2, and missing counts are 0. Counts below -2 are taken as -2.

    Returns:
        float32.
    """
    return np.log(np.maximum(counts, -2).astype(np.float32) + 3)


def log_counts_above(
    counts: Int[np.ndarray, "*shape"], smallest: int
) -> Float[np.ndarray, "*shape"]:
    """Compute ``log(x - smallest + 2)``, TorchRec's preprocessing; ``smallest`` is of a file.

    Returns:
        float32.
    """
    return np.log((counts.astype(np.int64) - (smallest - 2)).astype(np.float32))


def table_ids(
    hashes: Integer[np.ndarray, "rows tables"], table_rows: tuple[int, ...]
) -> Int[np.ndarray, "rows tables"]:
    """Compute ids modulo the rows of their tables, as TorchRec does; a missing id is 0.

    Returns:
        int32.
    """
    return (hashes % np.array(table_rows, hashes.dtype)).astype(np.int32)
