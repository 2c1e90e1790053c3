"""Records of the use of rows."""

from __future__ import annotations

import numpy as np

from jaxrec.tier import Records

TYPES = {
    "ids": np.int64,
    "last_use": np.int64,
    "count": np.uint32,
    "born": np.int64,
    "power": np.uint8,
    "last_seconds": np.int64,
}


def test_rows_are_free_at_first():
    records = Records.empty(3)
    assert {name: array.dtype for name, array in records.arrays().items()} == TYPES
    assert all(array.shape == (3,) for array in records.arrays().values())
    assert records.born.tolist() == [-1, -1, -1]
    assert records.count.tolist() == [0, 0, 0]


def test_take_copies():
    records = Records.empty(4)
    records.ids[:] = [9, 8, 7, 6]
    records.count[:] = [1, 2, 3, 4]
    few = records.take(np.array([2, 0]))
    records.ids[:] = 0
    assert few.ids.tolist() == [7, 9]
    assert few.count.tolist() == [3, 1]
    assert {name: array.dtype for name, array in few.arrays().items()} == TYPES
    assert records.take(np.zeros(0, np.int32)).ids.shape == (0,)
