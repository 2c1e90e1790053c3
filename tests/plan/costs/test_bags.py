"""Costs of whole bags."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec import optim
from jaxrec.mesh import grid, row_wise, table_row_wise, table_wise
from jaxrec.mesh.exchange import POOLED_BY_HOST
from jaxrec.mesh.exchange.base import Workload
from jaxrec.plan.quantities import Rate
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


HOSTS, EACH, DIM = 2, 4, 8


def exchanged(placement, pooling=4, **rates):
    devices = topology(hosts=HOSTS, each=EACH, **linked(**rates))
    found = evaluate(placement, devices, pooling=pooling)
    return found.phases["forward exchange"] + found.phases["backward exchange"]


def test_bytes_on_links_are_those_that_the_exchange_sends():
    """4 samples of a device with 8 ids each; a message between devices has space for 1.25 x 4."""
    placement = table_row_wise(1, exchange="pooled")
    work = Workload(
        8, DIM, lookups=32, bags=4, capacity=5, owner_lookups=32, owner_bags=4, hosts=HOSTS
    )
    between = exchanged(placement, between=1.0, pooling=8)
    assert between == pytest.approx(POOLED_BY_HOST.sent_between_hosts(work))
    all_bytes = sum(POOLED_BY_HOST.traffic(work).values())
    within = all_bytes - between * HOSTS / (HOSTS - 1) - EACH * 2 * 4  # but for lengths of lists
    found = exchanged(placement, within=1.0, pooling=8)
    assert found == pytest.approx(within * (EACH - 1) / EACH)


def test_a_half_of_the_columns_on_each_host():
    """Both hosts send their halves of the bags at once."""
    placements = table_row_wise(0, exchange="pooled"), grid(exchange="pooled")
    whole, half = (exchanged(placement, between=1.0) for placement in placements)
    rows = HOSTS * 4 * (4 + 2 * 4 * DIM)
    ids = HOSTS * 16 * 4
    assert whole == (rows + ids) / 2
    assert half == (HOSTS * 4 * (4 + 2 * 4 * DIM / 2) + ids) / 2


def test_sums_within_a_host_are_of_the_bags_of_all_hosts():
    devices = topology(hosts=HOSTS, each=EACH, sort=Rate(item=1.0), copy=Rate(byte=1e6))
    workload = workload_of(devices, pooling=4)
    costs = costs_of("pooled_by_host", workload, devices)
    load = costs.load(workload, np.full(EACH, 250))
    assert load.ids.tolist() == [HOSTS * 16] * EACH
    assert load.bags.tolist() == [HOSTS * 4] * EACH
    perf = costs.perf(load)
    sums, bags = EACH * HOSTS * 4 * 4 * DIM, HOSTS * 4 * 4 * DIM
    assert perf.forward_compute.tolist() == [2e6 * sums + 32] * EACH
    assert perf.backward_compute.tolist() == [1e6 * bags + 32] * EACH


def test_a_weight_travels_twice_within_the_host():
    devices = topology(hosts=HOSTS, each=EACH, **linked(within=1.0))
    found = []
    for weighted in (False, True):
        workload = workload_of(devices, pooling=4, is_weighted=weighted)
        costs = costs_of("pooled_by_host", workload, devices)
        found.append(costs.perf(costs.load(workload, np.full(EACH, 250))))
    for phase in ("forward_exchange", "backward_exchange"):
        plain, with_weights = (getattr(perf, phase) for perf in found)
        np.testing.assert_allclose(with_weights - plain, 1.25 * 4 * HOSTS * 16 * 3 / 4)


def test_memory_in_two_stages_by_hand():
    devices = topology(hosts=HOSTS, each=EACH)
    workload = workload_of(devices, pooling=3)
    costs = costs_of("pooled_by_host", workload, devices)
    load = costs.load(workload, np.array([1000, 0, 0, 0]))
    ids, bags = HOSTS * 12, HOSTS * 4
    own = 16 * ids + 4 * DIM * bags + 32 * ids + EACH * (4 + 4 * DIM) * bags
    assert costs.bytes(load).tolist() == [1000 * 4 * DIM + own, own, own, own]
    assert costs.temporary_bytes(workload) == 32 * 12


def test_starting_it_takes_links_of_both_kinds():
    devices = topology(hosts=HOSTS, each=EACH, **linked(call=1.0))
    launch = costs_of("pooled_by_host", workload_of(devices), devices).launch()
    assert (launch.forward_exchange, launch.backward_exchange) == (4, 2)


def test_the_planner_names_it_as_users_do():
    devices = topology(hosts=HOSTS, each=EACH)
    assert evaluate(table_row_wise(1, exchange="pooled"), devices).tables[0].exchange == "pooled"
    group = evaluate(table_row_wise(1, exchange="pooled"), devices).groups[0]
    assert group.name == "float32_8 by pooled_by_host"
    over_all = evaluate(row_wise(exchange="pooled"), devices).groups[0]
    assert over_all.name == "float32_8 by pooled"
