"""Columns of Criteo's click logs: their names, checks of their tables, and their transforms."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int, Integer

NUM_DENSE = 13
NUM_CATEGORICAL = 26
COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL

LABEL = "label"
DENSE_NAMES = tuple(f"int_{i}" for i in range(NUM_DENSE))
CATEGORICAL_NAMES = tuple(f"cat_{i}" for i in range(NUM_CATEGORICAL))


def check_tables(log: str, table_rows: tuple[int, ...], id_bits: int) -> None:
    """Raise a ValueError unless there are 26 tables with rows, and ids of 32 or 64 bits.

    ``log`` is the subject of the error.
    """
    if len(table_rows) != NUM_CATEGORICAL or min(table_rows) < 1:
        raise ValueError(
            f"{log} has {NUM_CATEGORICAL} categorical features, each with a table of 1 row or "
            f"more; got table_rows={table_rows}"
        )
    if id_bits not in (32, 64):
        raise ValueError(f"id_bits is {id_bits!r}; expected 32 or 64")


def log_counts(counts: Int[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Compute ``log(x + 3)`` as float32, MLPerf's transform for TorchRec's DLRM.

    Counts below -2 are taken as -2.
    """
    # Criteo's smallest count is -2, so that only counts of other data are clipped.
    return np.log(np.maximum(counts, -2).astype(np.float32) + 3)


def log_counts_above(
    counts: Int[np.ndarray, "*shape"], smallest: int
) -> Float[np.ndarray, "*shape"]:
    """Compute ``log(x - smallest + 2)`` as float32, TorchRec's preprocessing.

    ``smallest`` is the smallest count of the text file.
    """
    # int64, since the difference of two int32 may overflow.
    return np.log((counts.astype(np.int64) - (smallest - 2)).astype(np.float32))


def table_ids(
    hashes: Integer[np.ndarray, "rows tables"], table_rows: tuple[int, ...]
) -> Int[np.ndarray, "rows tables"]:
    """Compute int32 ids modulo the rows of their tables, as TorchRec does."""
    return (hashes % np.array(table_rows, hashes.dtype)).astype(np.int32)
