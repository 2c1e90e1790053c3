"""Which process has the record of an id."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.tier.stores.division import NUM_BUCKETS, Division


@pytest.mark.parametrize("num_ids", [None, 10**5, 4 * 10**9])
@pytest.mark.parametrize("num_processes", [1, 2, 16])
def test_each_id_has_one_owner_and_processes_have_equal_shares(num_ids, num_processes):
    rng = np.random.default_rng(0)
    low, high = (-(2**63), 2**63) if num_ids is None else (0, num_ids)
    ids = np.unique(rng.integers(low, high, 50_000))
    divisions = [Division(process, num_processes, num_ids) for process in range(num_processes)]
    owned = np.stack([division.is_own(ids) for division in divisions])
    np.testing.assert_array_equal(owned.sum(axis=0), 1)
    np.testing.assert_array_equal(owned.argmax(axis=0), divisions[0].owners(ids))
    share = ids.size / num_processes
    assert np.all(np.abs(owned.sum(axis=1) - share) < 0.15 * share)


def test_twice_the_processes_halve_the_parts():
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, 1000)
    np.testing.assert_array_equal(Division(0, 8).owners(ids) // 2, Division(0, 4).owners(ids))


def test_neighbours_in_a_file_have_one_owner():
    """A page of a file of 4 KB has records of one process, but for few pages."""
    ids = np.arange(10**9, 10**9 + 2**20)
    owners = Division(0, 16, num_ids=4 * 10**9).owners(ids)
    assert np.count_nonzero(np.diff(owners)) <= ids.size / 1024


def test_more_processes_than_buckets_are_refused():
    with pytest.raises(ValueError, match="1,024 processes or fewer, got 1,025"):
        Division(0, NUM_BUCKETS + 1)
