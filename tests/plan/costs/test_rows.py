"""The exchange by rows beside counts by hand."""

from __future__ import annotations

import pytest

import jaxrec
from jaxrec import optim
from jaxrec.mesh import column_wise, row_wise, table_row_wise, table_wise
from jaxrec.plan.quantities import Rate
from tests.plan.costs.cases import costs_of, evaluate, linked, topology, workload_of


def test_all_rows_of_an_even_exchange_are_gathered_at_owners_and_at_home():
    """Four devices with 12 ids each, in room for 12, all but distinct of ten million rows."""
    counted = topology(gather=Rate(item=1.0))
    found = evaluate(row_wise(), counted, rows=10_000_000, pooling=3)
    # Forward: 12 rows at home, and 12 that others ask for; backward as many gradients.
    assert found.phases["forward compute"] == pytest.approx(24, rel=1e-3)
    assert found.phases["backward compute"] == pytest.approx(24, rel=1e-3)


def test_one_owner_gathers_for_all_and_takes_more_rounds():
    counted = topology(gather=Rate(item=1.0))
    one = table_wise(0, exchange="rows")
    found = evaluate(one, counted, rows=10_000_000, pooling=3)
    assert found.phases["forward compute"] == pytest.approx(12 + 4 * 12, rel=1e-3)
    # 15 places a round, of which each device has 3 or 4 for the owner of 12: 4 rounds, and one.
    sent = topology(**linked(within=1.0))
    found = evaluate(one, sent, rows=10_000_000, pooling=3)
    asked, row = 4, 8 * 4
    assert found.phases["forward exchange"] == pytest.approx(5 * 15 * (asked + row) * 3 / 4)
    assert found.phases["backward exchange"] == pytest.approx(4 * 15 * row * 3 / 4)


def test_parts_of_rows_that_are_updated_together_send_their_sums():
    sent = topology(**linked(within=1.0))
    by_rows = column_wise(exchange="rows")
    apart = evaluate(by_rows, sent, optimizer=optim.sgd(0.1))
    together = evaluate(by_rows, sent, optimizer=optim.sgd(0.1, max_norm=1.0))
    more = together.phases["backward exchange"] - apart.phases["backward exchange"]
    assert more == pytest.approx(apart.phases["backward exchange"] * 8 / (2 * 4), rel=1e-6)


def test_clipping_by_norm_sends_gradients_twice():
    sent = topology(**linked(within=1.0))
    once = evaluate(row_wise(), sent, optimizer=optim.sgd(0.1))
    twice = evaluate(row_wise(), sent, optimizer=optim.sgd(0.1, clip_norm=1.0))
    assert twice.phases["backward exchange"] == 2 * once.phases["backward exchange"]
    assert twice.phases["forward exchange"] == once.phases["forward exchange"]


def test_a_table_on_one_host_is_asked_for_over_the_network():
    apart = topology(hosts=2, each=2, **linked(within=0.0, between=1.0))
    found = evaluate(table_row_wise(0), apart, rows=10_000_000, pooling=3)
    every = evaluate(row_wise(), apart, rows=10_000_000, pooling=3)
    assert found.phases["forward exchange"] > every.phases["forward exchange"] > 0


@pytest.mark.parametrize("needed", [0.0, 9.0, 10.0, 10.5, 20.0, 21.0, 40.0])
def test_empty_positions(needed):
    """Beside the loop that the exchange is."""
    devices = topology(each=8)
    costs = costs_of("rows", workload_of(devices), devices)
    left, rounds = needed, 0
    while left > 1e-9:
        left, rounds = left - 10.0, rounds + 1
    expected = (0.0, 0.0)
    if rounds > 1:
        expected = ((1 + rounds) * 10.0 - needed, rounds * 10.0 - needed)
    assert costs.empty_positions(needed, 10.0) == expected


@pytest.mark.parametrize(("rounds", "steps"), [(0.5, []), (1.0, []), (1.5, [2]), (4.0, [2, 3, 4])])
def test_each_step_of_an_overflow_is_a_round(rounds, steps):
    devices = topology()
    costs = costs_of("rows", workload_of(devices), devices)
    assert costs.overflow_steps(rounds) == steps
    for step in steps:
        # All demands up to the step move the same positions.
        moved = [d + costs.empty_positions(d, 1.0)[1] for d in (step - 0.9, step)]
        assert moved == pytest.approx([step, step])


def test_memory_by_hand():
    """Capacity for 12 ids of 4 samples, rows of 8 columns."""
    devices = topology()
    workload = workload_of(devices, pooling=3)
    costs = costs_of("rows", workload, devices)
    assert (workload.capacity, costs.round_capacity(workload)) == (12, 15)
    assert costs.kept_bytes(workload) == 12 * 12 + 8 * 4 * 8 + 17 * 12
    assert costs.temporary_bytes(workload) == 2 * 12 * (4 * 8 + 32) + 2 * 15 * (4 * 8 + 4)


def test_a_sort_at_home_in_each_pass_and_one_of_positions():
    devices = topology(sort=Rate(item=1.0))
    workload = workload_of(devices, pooling=3)
    costs = costs_of("rows", workload, devices)
    assert (costs.home(workload).forward_compute, costs.home(workload).backward_compute) == (12, 12)
    assert (costs.position().forward, costs.position().backward) == (0, 1)


def test_rows_that_are_not_pooled_are_not_written_as_bags():
    devices = topology(copy=Rate(byte=1.0))
    pooled = workload_of(devices, pooling=3)
    per_id = workload_of(devices, pooling=3, kind=jaxrec.EmbeddingConfig)
    seconds = [costs_of("rows", w, devices).home(w).forward_compute for w in (pooled, per_id)]
    assert seconds == [4 * 4 * 8, 0]
