"""The exchange of whole bags beside counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec import optim
from jaxrec.mesh import table_wise
from jaxrec.plan.rates import Rate
from tests.plan.costs.cases import costs_of, evaluate, linked, topology, workload_of


def test_bags_go_straight_home():
    """One owner pools for four devices 16 bags each, of a hundred ids in room for 2048."""
    sent = topology(**linked(within=1.0))
    found = evaluate(table_wise(0), sent, pooling=100, batch=16, dim=32)
    bags, places = 4 * 16, 4 * 2048
    assert found.phases["forward exchange"] == (bags * (4 + 32 * 4) + places * 4) * 3 / 4
    assert found.phases["backward exchange"] == bags * 32 * 4 * 3 / 4
    counted = topology(gather=Rate(item=1.0), sort=Rate(item=1000.0))
    found = evaluate(table_wise(0), counted, pooling=100, batch=16, dim=32)
    assert found.phases["forward compute"] == 4 * 1600
    assert found.phases["backward compute"] == 4 * 1600 + 1000 * places


def test_owners_have_positions_for_the_ids_and_bags_of_all_devices():
    """Capacity for 12 ids of 4 samples on each of 4 devices."""
    devices = topology()
    workload = workload_of(devices, pooling=3)
    load = costs_of("bags", workload, devices).load(workload, np.array([1000]))
    assert (load.ids, load.bags, load.exchanged, load.held) == (48, 16, 48, 1000)


def test_memory_by_hand():
    devices = topology()
    workload = workload_of(devices, pooling=3)
    costs = costs_of("bags", workload, devices)
    assert costs.kept_bytes(workload) == 12 * 12 + 8 * 4 * 8
    assert costs.temporary_bytes(workload) == 32 * 12
    load = costs.load(workload, np.array([1000]))
    assert costs.bytes(load) == 1000 * 8 * 4 + 48 * 16 + 16 * 8 * 4


def test_a_weight_travels_with_each_id():
    devices = topology(**linked(within=1.0))
    plain, weighted = (workload_of(devices, is_weighted=w) for w in (False, True))
    loads = [costs_of("bags", w, devices).load(w, np.array([1000])) for w in (plain, weighted)]
    forward = [
        costs_of("bags", w, devices).perf(load).forward_exchange.item()
        for w, load in zip((plain, weighted), loads, strict=True)
    ]
    assert forward[1] - forward[0] == pytest.approx(4 * loads[0].ids.item() * 3 / 4)


def test_column_shards_of_whole_rows_add_up_a_number_for_each_lookup():
    """Two shards of 4 of 8 columns share the all-reduce of 4 bytes for each of 4 x 8 lookups."""
    devices = topology(**linked(within=1.0))
    seconds = []
    for optimizer in (optim.sgd(0.1), optim.sgd(0.1, max_norm=1.0)):
        workload = workload_of(devices, optimizer=optimizer)
        costs = costs_of("bags", workload, devices, width=4)
        seconds.append(2 * costs.home(workload).backward_exchange)
    assert seconds == pytest.approx([0, 2 * 4 * 4 * 8 * 3 / 4])


def test_bags_are_copied_twice_at_home_in_each_pass():
    devices = topology(copy=Rate(byte=1.0))
    workload = workload_of(devices)
    home = costs_of("bags", workload, devices).home(workload)
    assert (home.forward_compute, home.backward_compute) == (2 * 4 * 8 * 4, 2 * 4 * 8 * 4)
