"""Against positions that Python counts."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.ragged.bag_layout import bag_ids, bag_starts, spread

pytestmark = pytest.mark.every_case

CASES = {
    "one key": ([2, 0, 3], (3,), (7,)),
    "two keys": ([1, 2, 0, 4], (2, 2), (5, 4)),
    "unequal strides": ([1, 0, 2, 3, 0], (1, 4), (2, 9)),
    "a key of padding": ([0, 0, 1], (2, 1), (3, 1)),
    "full": ([2, 1, 3], (2, 1), (3, 3)),
    "a key without bags": ([2, 1], (0, 2), (0, 3)),
}
cases = pytest.mark.parametrize(("lengths", "strides", "capacities"), CASES.values(), ids=CASES)


def count(lengths, strides, capacities):
    starts, ids, bag, position = [], [], 0, 0
    for stride, capacity in zip(strides, capacities, strict=True):
        end = position + capacity
        for _ in range(stride):
            starts.append(position)
            ids += [bag] * lengths[bag]
            position += lengths[bag]
            bag += 1
        ids += [sum(strides)] * (end - position)
        position = end
    return starts, ids


@cases
def test_starts_and_bags_of_positions(lengths, strides, capacities):
    starts, ids = count(lengths, strides, capacities)
    lengths = np.array(lengths, np.int32)
    np.testing.assert_array_equal(bag_starts(lengths, strides, capacities), starts)
    np.testing.assert_array_equal(bag_ids(lengths, strides, capacities), ids)


@cases
def test_spread(lengths, strides, capacities):
    keys = np.arange(len(strides), dtype=np.int32)
    np.testing.assert_array_equal(spread(keys, strides), np.repeat(keys, strides))
