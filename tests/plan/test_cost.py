"""The formulas beside others: sums over devices and links, and counts of what the exchange does."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import jaxrec
from jaxrec import optim
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, Topology
from jaxrec.plan.cost import (
    PHASES,
    GroupKey,
    all_gather,
    all_to_all,
    overflow_rooms,
    phases,
    reduce_scatter,
)
from jaxrec.plan.rates import Links, Rate

FREE = Rate()


def topology(*, hosts=1, each=4, **rates):
    """Devices on which all is free but what is named."""
    free = dict.fromkeys(("gather", "update", "sort", "copy", "host_link", "disk_link"), FREE)
    links = {"within": Links(FREE, FREE, FREE), "between": Links(FREE, FREE, FREE)}
    known = {"name": "test", "memory": 10**12, "granule": 1, "host_memory": 10**13}
    return Topology(hosts=hosts, devices_per_host=each, **{**free, **links, **known, **rates})


def linked(within=0.0, between=0.0):
    """Rates of links, in seconds a byte."""
    return {
        name: Links(Rate(byte=byte), Rate(byte=byte), Rate(byte=byte))
        for name, byte in (("within", within), ("between", between))
    }


def evaluate(placement, topology, *, rows=1000, dim=8, pooling=1, batch=4, **config):
    table = jaxrec.EmbeddingBagConfig(
        "a", rows, dim, **{"optimizer": optim.sgd(0.1), "dtype": "float32", **config}
    )
    said = {"a": ParameterConstraints(pooling_factors=pooling)}
    plan = ShardingPlan.from_dict({"a": placement})
    batch_size = batch * topology.num_devices
    return Planner(topology, said).evaluate([table], plan, batch_size=batch_size).estimate


@pytest.mark.parametrize(("hosts", "each"), [(1, 1), (1, 8), (2, 4), (4, 1)])
def test_an_all_to_all_takes_the_slower_of_its_links(hosts, each):
    """Beside a count of the parts that leave a device, one by one."""
    devices = hosts * each
    part = 1.0 / devices
    within = sum(part for other in range(1, devices) if other // each == 0)
    between = sum(part for other in range(1, devices) if other // each != 0)
    for speeds in ((1.0, 0.0), (0.0, 1.0), (1.0, 3.0)):
        links = topology(hosts=hosts, each=each, **linked(*speeds))
        expected = max(within * speeds[0], between * speeds[1])
        assert all_to_all(1.0, links) == pytest.approx(expected)


@pytest.mark.parametrize("collective", [reduce_scatter, all_gather])
@pytest.mark.parametrize(("hosts", "each"), [(1, 1), (1, 8), (2, 4), (4, 1)])
def test_sums_go_by_host_and_then_between_hosts(collective, hosts, each):
    """Beside a ring within each host, and one of the parts between hosts."""
    links = topology(hosts=hosts, each=each, **linked(1.0, 10.0))
    ring = sum(1.0 / each for _ in range(each - 1))
    between = sum(1.0 / each / hosts for _ in range(hosts - 1))
    assert collective(1.0, links) == pytest.approx(ring + 10.0 * between)


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


def test_repeats_travel_once_by_rows_and_each_by_sums():
    """A thousand ids of ten rows."""
    counted = topology(gather=Rate(item=1.0), each=2)
    rows = evaluate(row_wise(), counted, rows=10, pooling=100, batch=10)
    sums = evaluate(row_wise(exchange="sums"), counted, rows=10, pooling=100, batch=10)
    assert rows.phases["forward compute"] == pytest.approx(1000 + 10)
    assert sums.phases["forward compute"] == pytest.approx(1000)


def test_sums_of_all_bags_are_scattered_and_gathered():
    sent = topology(**linked(within=1.0))
    found = evaluate(row_wise(exchange="sums"), sent, pooling=100, batch=16, dim=32)
    bags = 4 * 16
    lengths = 4 * bags * 3 / 4
    ids = 1.25 * 2048 * 4 * 3 / 4
    assert found.phases["forward exchange"] == pytest.approx(
        4 * 32 * bags * 3 / 4 + lengths + ids, rel=1e-6
    )
    assert found.phases["backward exchange"] == pytest.approx(4 * 32 * bags * 3 / 4)


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


def test_weights_travel_with_ids():
    sent = topology(**linked(within=1.0))
    table = jaxrec.EmbeddingBagConfig("a", 1000, 8, optimizer=optim.sgd(0.1))
    found = {}
    for weighted in (False, True):
        said = {"a": ParameterConstraints(pooling_factors=100, is_weighted=weighted)}
        plan = ShardingPlan.from_dict({"a": row_wise(exchange="sums")})
        made = Planner(sent, said).evaluate([table], plan, batch_size=64)
        found[weighted] = made.estimate.phases["forward exchange"]
    assert found[True] - found[False] == pytest.approx(1.25 * 2048 * 4 * 3 / 4)


@pytest.mark.parametrize(
    ("placement", "updated"),
    [(data_parallel(), 1000), (table_wise(1), 1000), (row_wise(), 250), (column_wise(), 1000)],
    ids=["copies", "one owner", "rows", "columns"],
)
def test_every_row_that_is_looked_up_is_updated_by_its_owners(placement, updated):
    """A batch of so many ids that all rows are among them."""
    counted = topology(update=Rate(item=1.0))
    found = evaluate(placement, counted, pooling=5000, batch=4)
    assert found.phases["backward compute"] == pytest.approx(updated, rel=1e-3)


def test_state_is_read_and_written_with_rows():
    bytes = {}
    for name, optimizer in (("sgd", optim.sgd(0.1)), ("adam", optim.adam())):
        counted = topology(update=Rate(byte=1.0))
        found = evaluate(row_wise(), counted, pooling=5000, optimizer=optimizer, dim=16)
        bytes[name] = found.phases["backward compute"]
        assert sum(d.bytes["tables"] for d in found.devices) == found.tables[0].bytes
    assert bytes["adam"] == pytest.approx(3 * bytes["sgd"])


def test_narrow_rows_take_as_long_as_a_granule():
    coarse = dataclasses.replace(topology(gather=Rate(byte=1.0)), granule=64)
    narrow = evaluate(data_parallel(), coarse, dim=4)
    wide = evaluate(data_parallel(), coarse, dim=16)
    assert narrow.phases["forward compute"] == wide.phases["forward compute"]


def test_tables_of_a_group_start_its_kernels_once():
    started = topology(sort=Rate(call=1.0))
    tables = [jaxrec.EmbeddingBagConfig(f"t{i}", 100, 8) for i in range(5)]
    plan = ShardingPlan.from_dict({table.name: row_wise() for table in tables})
    together = Planner(started).evaluate(tables, plan, batch_size=16).estimate
    assert len(together.groups) == 1
    alone = Planner(started).evaluate(tables[:1], plan, batch_size=16).estimate
    assert together.seconds == alone.seconds == pytest.approx(3)


def test_clipping_by_norm_sends_gradients_twice():
    sent = topology(**linked(within=1.0))
    once = evaluate(row_wise(), sent, optimizer=optim.sgd(0.1))
    twice = evaluate(row_wise(), sent, optimizer=optim.sgd(0.1, clip_norm=1.0))
    assert twice.phases["backward exchange"] == 2 * once.phases["backward exchange"]
    assert twice.phases["forward exchange"] == once.phases["forward exchange"]


def test_parts_of_rows_that_are_updated_together_send_their_sums():
    sent = topology(**linked(within=1.0))
    by_rows = column_wise(exchange="rows")
    apart = evaluate(by_rows, sent, optimizer=optim.sgd(0.1))
    together = evaluate(by_rows, sent, optimizer=optim.sgd(0.1, max_norm=1.0))
    more = together.phases["backward exchange"] - apart.phases["backward exchange"]
    assert more == pytest.approx(apart.phases["backward exchange"] * 8 / (2 * 4), rel=1e-6)


def test_a_table_on_one_host_is_asked_for_over_the_network():
    apart = topology(hosts=2, each=2, **linked(within=0.0, between=1.0))
    found = evaluate(table_row_wise(0), apart, rows=10_000_000, pooling=3)
    every = evaluate(row_wise(), apart, rows=10_000_000, pooling=3)
    assert found.phases["forward exchange"] > every.phases["forward exchange"] > 0


@pytest.mark.parametrize("needed", [0.0, 9.0, 10.0, 10.5, 20.0, 21.0, 40.0])
def test_places_beyond_those_needed(needed):
    """Beside the loop that the exchange is."""
    key = GroupKey("", 8, "float32", optim.sgd(0.1), "rows", "device", False, 0)
    left, rounds = needed, 0
    while left > 1e-9:
        left, rounds = left - 10.0, rounds + 1
    found = overflow_rooms(key, needed, 10.0, devices=8)
    if rounds <= 1:
        assert found == (0.0, 0.0)
    else:
        assert found == ((1 + rounds) * 10.0 - needed, rounds * 10.0 - needed)
    sums = dataclasses.replace(key, way="sums")
    most = 8 * 10.0 / 1.25
    expected = most - needed if rounds > 1 else 0.0
    assert overflow_rooms(sums, needed, 10.0, devices=8) == (expected, expected)


def test_a_plan_on_one_device_sends_nothing():
    sent = topology(each=1, **linked(within=1.0, between=1.0))
    found = evaluate(table_wise(0), sent)
    assert found.phases["forward exchange"] == found.phases["backward exchange"] == 0


def test_phases_by_name():
    np.testing.assert_array_equal(phases(prefetch=2.0), [0, 0, 0, 0, 2.0])
    assert len(PHASES) == 5


@pytest.mark.parametrize("field", ["call", "item", "byte"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "1"])
def test_rates_are_numbers(unchecked, field, value):
    with pytest.raises(ValueError, match=f"a rate's {field} is seconds"):
        Rate(**{field: value})
