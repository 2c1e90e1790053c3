"""The list of runs, and the sums of their parts, in Mosaic."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jaxrec.embed.kernels.mosaic.runs import Runs
from jaxrec.embed.kernels.mosaic.sorted_lookups import SortedLookups
from tests.embed.kernels.gpu_cases import backend, compiled_fast

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("mosaic")]


@pytest.fixture
def mosaic():
    return backend("mosaic")


@functools.cache
def list_runs():
    """One program for all cases."""
    return compiled_fast(functools.partial(Runs.of, interpret=True))


@pytest.mark.every_case
@pytest.mark.parametrize("padding", [0, 1, 1250], ids="padding_{}".format)
def test_the_list_of_runs(padding: int):
    """The runs of three programs' lookups, with rows that occur in two of them."""
    rng = np.random.default_rng(0)
    size, num_rows = 2500, 900
    rows = np.sort(rng.integers(0, num_rows, size)).astype(np.int32)
    # As unsigned numbers, bad rows come last.
    rows[size - padding :] = np.where(np.arange(padding) % 2, num_rows, -1)[::-1]
    rows[size - padding :] = np.sort(rows[size - padding :].view(np.uint32)).view(np.int32)
    bags = rng.integers(0, 99, size).astype(np.int32)
    scales = rng.random(size, np.float32)
    lookups = SortedLookups(rows, bags, scales, np.zeros((99, 1)), num_rows, None, 64, 256)
    runs, _ = list_runs()(lookups)
    unique, starts = np.unique(rows[: size - padding], return_index=True)
    count = unique.size
    np.testing.assert_array_equal(runs.rows[:count], unique[:count])
    assert (runs.count.item(), runs.rows[count]) == (count + 1, num_rows)
    np.testing.assert_array_equal(runs.starts[:count], starts[:count])
    assert runs.starts[count] == size - padding
    np.testing.assert_array_equal(runs.bags[:count], bags[starts[:count]])
    np.testing.assert_array_equal(runs.scales[:count], scales[starts[:count]])
