"""The pooled exchange beside counts by hand."""

from __future__ import annotations

import pytest

from jaxrec.mesh import row_wise
from jaxrec.plan.quantities import Rate
from tests.plan.costs.cases import costs_of, evaluate, linked, topology, workload_of


def test_repeats_travel_once_by_rows_and_each_by_sums():
    """A thousand ids of ten rows."""
    counted = topology(gather=Rate(item=1.0), each=2)
    rows = evaluate(row_wise(), counted, rows=10, pooling=100, batch=10)
    sums = evaluate(row_wise(exchange="pooled"), counted, rows=10, pooling=100, batch=10)
    assert rows.phases["forward compute"] == pytest.approx(1000 + 10)
    assert sums.phases["forward compute"] == pytest.approx(1000)


def test_sums_of_all_bags_are_scattered_and_gathered():
    sent = topology(**linked(within=1.0))
    found = evaluate(row_wise(exchange="pooled"), sent, pooling=100, batch=16, dim=32)
    bags = 4 * 16
    lengths = 4 * bags * 3 / 4
    ids = 1.25 * 2048 * 4 * 3 / 4
    assert found.phases["forward exchange"] == pytest.approx(
        4 * 32 * bags * 3 / 4 + lengths + ids, rel=1e-6
    )
    assert found.phases["backward exchange"] == pytest.approx(4 * 32 * bags * 3 / 4)


def test_a_weight_travels_with_each_id():
    devices = topology(**linked(within=1.0))
    plain, weighted = (workload_of(devices, is_weighted=w) for w in (False, True))
    positions = [costs_of("pooled", w, devices).position() for w in (plain, weighted)]
    assert [p.forward_exchange for p in positions] == [4 * 3 / 4, 8 * 3 / 4]
    assert [p.backward_exchange for p in positions] == [0, 4 * 3 / 4]


@pytest.mark.parametrize("needed", [0.0, 10.0, 10.5, 40.0, 64.0])
def test_ids_that_do_not_fit_take_capacity_for_any(needed):
    devices = topology(each=8)
    costs = costs_of("pooled", workload_of(devices), devices)
    # One round has capacity for 1.25 c = 10, and any ids of 8 devices fit 8 c = 64.
    expected = 64 - needed if needed > 10 else 0.0
    assert costs.empty_positions(needed, 10.0) == (expected, expected)
    assert costs.overflow_steps(needed / 10) == ([6.4] if needed > 10 else [])


def test_memory_by_hand():
    """Capacity for 12 ids of 4 samples on each of 4 devices, rows of 8 columns."""
    devices = topology()
    workload = workload_of(devices, pooling=3)
    costs = costs_of("pooled", workload, devices)
    assert costs.kept_bytes(workload) == 12 * 12 + 8 * 4 * 8 + 13 * 12 + 4 * 4 * 4
    assert costs.temporary_bytes(workload) == 4 * 8 * 4 * 4 + 24 * 15 + 32 * 12


def test_owners_copy_their_sums_of_all_bags_twice():
    devices = topology(copy=Rate(byte=1.0))
    workload = workload_of(devices)
    assert costs_of("pooled", workload, devices).home(workload).forward_compute == 2 * 4 * 8 * 16
