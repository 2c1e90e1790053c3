from __future__ import annotations

import math

import numpy as np

from jaxrec.data.transforms import log_counts, log_counts_above, table_ids

COUNTS = [-3, -2, -1, 0, 5, 2**31 - 1]


def test_log_counts():
    found = log_counts(np.array(COUNTS, np.int32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [math.log(max(x, -2) + 3) for x in COUNTS], rtol=1e-6)


def test_log_counts_above_the_smallest():
    """The largest count less the smallest passes 32 bits."""
    found = log_counts_above(np.array(COUNTS, np.int32), -3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [math.log(x + 5) for x in COUNTS], rtol=1e-6)


def test_table_ids():
    hashes = [[0, 2**32 - 1], [17, 2**31]]
    found = table_ids(np.array(hashes, np.uint32), (10, 7))
    assert found.dtype == np.int32
    assert found.tolist() == [[a % 10, b % 7] for a, b in hashes]
