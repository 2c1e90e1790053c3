"""The list of runs in Triton."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxrec.embed.kernels.triton.runs import Runs
from jaxrec.embed.kernels.triton.sorted_lookups import SortedLookups

pytestmark = pytest.mark.jax_version


@pytest.mark.parametrize("padding", [0, 1, 3000], ids="padding_{}".format)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_the_list_of_runs(padding: int, weighted: bool):
    """The runs of three programs' lookups, with rows that occur in two of them.

    Weighted lookups come with bags and scales in the order before the sort.
    """
    rng = np.random.default_rng(0)
    size, num_rows = 6000, 2000
    rows = np.sort(rng.integers(0, num_rows, size)).astype(np.int32)
    # As unsigned numbers, bad rows come last.
    rows[size - padding :] = np.where(np.arange(padding) % 2, num_rows, -1)[::-1]
    rows[size - padding :] = np.sort(rows[size - padding :].view(np.uint32)).view(np.int32)
    bags = rng.integers(0, 99, size).astype(np.int32)
    scales = rng.random(size, np.float32)
    if weighted:
        order = rng.permutation(size).astype(np.int32)
        unsorted_bags, unsorted_scales = np.empty_like(bags), np.empty_like(scales)
        unsorted_bags[order], unsorted_scales[order] = bags, scales
        terms = unsorted_bags, unsorted_scales, order
    else:
        terms = bags, None, None
    lookups = SortedLookups(rows, *terms, np.zeros((99, 1)), num_rows, None, 64, 256)
    by_row, runs, _ = jax.jit(functools.partial(Runs.of, interpret=True))(lookups)
    unique, starts = np.unique(rows[: size - padding], return_index=True)
    count = unique.size
    np.testing.assert_array_equal(runs.rows[:count], unique[:count])
    assert (runs.count.item(), runs.rows[count]) == (count + 1, num_rows)
    np.testing.assert_array_equal(runs.starts[:count], starts[:count])
    assert runs.starts[count] == size - padding
    np.testing.assert_array_equal(runs.bags[:count], bags[starts[:count]])
    np.testing.assert_array_equal(by_row.bags, bags)
    if weighted:
        np.testing.assert_array_equal(by_row.scales, scales)
        np.testing.assert_array_equal(runs.scales[:count], scales[starts[:count]])
    else:
        assert runs.scales is None
