"""Tables on every device beside counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.mesh import data_parallel
from jaxrec.plan.rates import Rate
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
