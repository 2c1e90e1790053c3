"""Costs of replicated tables and of one device."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec import optim
from jaxrec.mesh import data_parallel, row_wise, table_wise
from jaxrec.mesh.exchange import ALONE
from jaxrec.plan.costs import Group, make_costs
from jaxrec.plan.quantities import Rate
from tests.plan.costs.cases import costs_of, evaluate, linked, topology, workload_of


def test_every_device_sums_sorts_and_updates_what_all_looked_up():
    """4 devices with 12 ids each, in arrays of 12, all but distinct of ten million rows."""
    rates = {"sort": Rate(item=1e6), "gather": Rate(item=1e3), "update": Rate(item=1.0)}
    found = evaluate(data_parallel(), topology(**rates), rows=10_000_000, pooling=3)
    # Two sorts of its own ids and one of all; rows at home, their sums, and the sums of all.
    assert found.phases["forward compute"] == pytest.approx(12e3)
    expected = (2 + 4) * 12e6 + (12 + 4 * 12) * 1e3 + 4 * 12
    assert found.phases["backward compute"] == pytest.approx(expected, rel=1e-6)


def test_sums_of_gradients_are_gathered():
    found = evaluate(data_parallel(), topology(**linked(within=1.0)), pooling=3)
    assert found.phases["forward exchange"] == 0
    assert found.phases["backward exchange"] == 4 * 12 * (4 + 4 * 8) * 3 / 4


def test_memory_by_hand():
    devices = topology()
    workload = workload_of(devices, pooling=3)
    costs = costs_of("replicated", workload, devices)
    assert costs.kept_bytes(workload) == 12 * 12 + 8 * 4 * 8
    assert costs.temporary_bytes(workload) == 12 * (4 * 8 + 32) * (1 + 4)


def test_no_device_waits_for_another():
    devices = topology(gather=Rate(item=1.0), update=Rate(item=1.0))
    workload = workload_of(devices)
    costs = costs_of("replicated", workload, devices)
    load = costs.load(workload, np.array([1000]))
    assert load.held == 1000
    assert costs.perf(load).total == 0
    assert costs.empty_positions(100.0, 10.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    "placement", [row_wise(), row_wise(exchange="pooled"), table_wise(0)], ids=str
)
def test_rows_are_read_sorted_and_updated_once(placement):
    """A device with 12 ids, in arrays of 12, all but distinct of ten million rows."""
    rates = {"sort": Rate(item=1e6), "gather": Rate(item=1e3), "update": Rate(item=1.0)}
    found = evaluate(placement, topology(each=1, **rates), rows=10_000_000, pooling=3)
    assert found.phases["forward compute"] == pytest.approx(12e3)
    assert found.phases["backward compute"] == pytest.approx(12e6 + 12e3 + 12, rel=1e-6)


def test_a_bound_on_the_norm_sums_gradients_twice():
    counted = topology(each=1, sort=Rate(item=1.0))
    found = evaluate(row_wise(), counted, pooling=3, optimizer=optim.sgd(0.1, clip_norm=1.0))
    assert found.phases["backward compute"] == pytest.approx(2 * 12)


def test_bags_are_written_and_nothing_is_sent():
    devices = topology(each=1, copy=Rate(byte=1.0), **linked(within=1.0, call=1.0))
    found = evaluate(row_wise(), devices, pooling=3)
    assert found.phases["forward compute"] == 4 * 4 * 8
    assert found.phases["forward exchange"] == found.phases["backward exchange"] == 0


def test_kernels_are_started_once():
    devices = topology(each=1, **dict.fromkeys(("gather", "sort", "update"), Rate(call=1.0)))
    found = evaluate(row_wise(), devices)
    assert found.phases["forward compute"] == 1
    assert found.phases["backward compute"] == 3


def test_memory_of_one_device_by_hand():
    devices = topology(each=1)
    workload = workload_of(devices, pooling=3)
    costs = make_costs(Group.of(workload, workload.dim, ALONE), devices)
    assert costs.kept_bytes(workload) == 12 * 12 + 8 * 4 * 8
    assert costs.temporary_bytes(workload) == 32 * 12
