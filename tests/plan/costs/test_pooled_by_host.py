"""The pooled exchange in two stages beside counts by hand and the bytes that it sends."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.mesh import grid, row_wise, table_row_wise
from jaxrec.mesh.exchange import POOLED_BY_HOST
from jaxrec.mesh.exchange.base import Workload
from jaxrec.plan.rates import Rate
from tests.plan.costs.cases import costs_of, evaluate, linked, topology, workload_of

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


def test_memory_by_hand():
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
