"""Places of the rows of some ids of a table."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


class OutsideRows(abc.ABC):
    """Rows of ids that a store keeps outside of its arrays, such as in a file.

    Attributes:
        positions: Positions of these ids among those that were asked for, int ``[m]``.
    """

    positions: np.ndarray

    @abc.abstractmethod
    def read(self) -> dict[str, np.ndarray]:
        """Return the rows, under ``"rows"``, and their optimizer state by name, ``[m, ...]``."""

    @abc.abstractmethod
    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Set what `read` returns, or some of it; the rest stays as it is."""


@dataclasses.dataclass(frozen=True)
class FoundIds:
    """Places of the rows of some ids.

    Attributes:
        rows: Row index of each id in the table's arrays, int ``[n]``; -1 where the row is outside
            of them.
        outside: The rows outside of the arrays; None: there are none.
    """

    rows: np.ndarray
    outside: OutsideRows | None = None


def as_ids(table: str, ids: Any) -> np.ndarray:
    """Return ids as an array of one axis, of whatever type they have.

    Args:
        table: Name of the table, for errors.
        ids: Any array-like.

    Raises:
        ValueError: There are several axes.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(
            f"table {table!r}: ids have one axis, got an array of shape {list(array.shape)}"
        )
    # NumPy makes floats of a list with integers below and above 2**63.
    if array.dtype.kind == "f" and all(type(value) is int for value in ids):
        return np.array(ids, object)
    return array


def row_indices(table: str, ids: Any, num_embeddings: int) -> np.ndarray:
    """Return the ids of a plain table, which are its row indices, as int64 ``[n]``.

    Args:
        table: Name of the table, for errors.
        ids: Integers, ``[n]``.
        num_embeddings: Number of rows of the table.

    Raises:
        TypeError: The ids are not integers.
        ValueError: An id is outside the table, or ``ids`` has several axes.
    """
    array = as_ids(table, ids)
    if not array.size:
        return np.zeros(0, np.int64)
    # Python integers beyond 64 bits make an array of objects.
    is_integer = array.dtype.kind in "iu" or (
        array.dtype.kind == "O" and all(type(value) is int for value in array.tolist())
    )
    if not is_integer:
        raise TypeError(f"table {table!r}: ids are integers, got an array of {array.dtype}")
    is_outside = (array < 0) | (array >= num_embeddings)
    if is_outside.any():
        position = int(np.argmax(is_outside))
        raise ValueError(
            f"table {table!r} has the rows 0 to {num_embeddings - 1:,}, got id {array[position]} "
            f"at position {position}"
        )
    return array.astype(np.int64)


def check_distinct(table: str, ids: np.ndarray) -> None:
    """Raise where an id occurs twice: only one of its rows could be kept.

    Raises:
        ValueError: An id occurs twice.
    """
    in_order = np.sort(ids)
    is_repeat = in_order[1:] == in_order[:-1]
    if is_repeat.any():
        raise ValueError(
            f"table {table!r}: id {in_order[int(np.argmax(is_repeat))]} is given more than once; "
            "each row is set once"
        )
