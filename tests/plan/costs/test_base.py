"""Costs of all exchanges, and of collectives."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from flax import nnx

import jaxrec
from jaxrec import optim
from jaxrec.mesh import (
    ExchangePrecision,
    column_wise,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from jaxrec.mesh.exchange import EXCHANGES, ROWS
from jaxrec.mesh.exchange.base import Workload
from jaxrec.mesh.exchange.rows import Rows
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, Topology
from jaxrec.plan.costs import Group, make_costs
from jaxrec.plan.costs.base import all_gather, all_to_all, latency, reduce_scatter
from jaxrec.plan.quantities import Rate
from tests.plan.costs.cases import costs_of, evaluate, linked, topology, workload_of

Bag = jaxrec.EmbeddingBagConfig


def test_weights_travel_with_ids():
    sent = topology(**linked(within=1.0))
    table = jaxrec.EmbeddingBagConfig("a", 1000, 8, optimizer=optim.sgd(0.1))
    found = {}
    for weighted in (False, True):
        constraints = {"a": ParameterConstraints(pooling_factors=100, is_weighted=weighted)}
        plan = ShardingPlan.from_dict({"a": row_wise(exchange="pooled")})
        made = Planner(sent, constraints).evaluate([table], plan, batch_size=64)
        found[weighted] = made.estimate.phases["forward exchange"]
    assert found[True] - found[False] == pytest.approx(1.25 * 2048 * 4 * 3 / 4)


@pytest.mark.parametrize(
    ("placement", "each"),
    [(data_parallel(), 4), (row_wise(), 4), (row_wise(), 1)],
    ids=["replicated", "rows", "alone"],
)
def test_max_pooling_writes_winners_and_gradients_of_rows(placement, each):
    """Four bags of three ids, and rows of 32 bytes."""
    devices = topology(each=each, copy=Rate(byte=1.0))
    largest, total = [
        evaluate(placement, devices, pooling=3, kind=functools.partial(Bag, pooling=pooling))
        for pooling in ("max", "sum")
    ]
    added = {name: largest.phases[name] - total.phases[name] for name in total.phases}
    assert added.pop("forward compute") == 4 * 32
    assert added.pop("backward compute") == 12 * 32
    assert not any(added.values())


def test_max_pooling_keeps_winners_and_gradients_of_rows():
    devices = topology()
    group = costs_of("rows", workload_of(devices, pooling=3), devices)
    kept = {
        pooling: group.kept_bytes(
            workload_of(devices, pooling=3, kind=functools.partial(Bag, pooling=pooling))
        )
        for pooling in ("max", "sum")
    }
    assert kept["max"] - kept["sum"] == (4 + 12) * 32


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


@pytest.mark.parametrize(
    "placement",
    [row_wise(), row_wise(exchange="pooled"), table_wise(0), data_parallel()],
    ids=["rows", "pooled", "bags", "replicated"],
)
def test_packed_rows_are_updated_by_kernels_that_copy_gradients(placement):
    """Four devices with 12 ids each of ten million rows: 12 at each owner, or 48 at one or all."""
    copied = dataclasses.replace(topology(copy=Rate(byte=1.0)), packed_copies=15.0)
    times = {}
    for dtype in ("float32", "int8", "float8_e4m3"):
        found = evaluate(placement, copied, rows=10_000_000, pooling=3, dtype=dtype)
        times[dtype] = found.phases["backward compute"]
    lookups = 12 if placement.kind == "row_wise" else 48
    for dtype in ("int8", "float8_e4m3"):
        more = times[dtype] - times["float32"]
        assert more == pytest.approx(15 * lookups * 4 * 8, rel=1e-3)


def test_tables_of_a_group_start_its_kernels_once():
    started = topology(sort=Rate(call=1.0))
    tables = [jaxrec.EmbeddingBagConfig(f"t{i}", 100, 8) for i in range(5)]
    plan = ShardingPlan.from_dict({table.name: row_wise() for table in tables})
    together = Planner(started).evaluate(tables, plan, batch_size=16).estimate
    assert len(together.groups) == 1
    alone = Planner(started).evaluate(tables[:1], plan, batch_size=16).estimate
    assert together.seconds == alone.seconds == pytest.approx(3)


def test_a_plan_on_one_device_sends_nothing():
    sent = topology(each=1, **linked(within=1.0, between=1.0))
    found = evaluate(table_wise(0), sent)
    assert found.phases["forward exchange"] == found.phases["backward exchange"] == 0


@dataclasses.dataclass(frozen=True)
class Pigeons(Rows):
    """An exchange of another package."""

    name = "pigeons"


def test_groups_are_of_one_width_and_exchange():
    devices = topology()
    workload = workload_of(devices, optimizer=optim.rowwise_adagrad())
    whole, half = (Group.of(workload, width, ROWS) for width in (8, 4))
    assert (whole.joins_columns, half.joins_columns) == (False, True)
    assert str(half) == "float32_4 by rows"
    assert whole.stored_row_bytes == 8 * 4 + 4
    with pytest.raises(
        ValueError, match="no costs for exchange 'pigeons', only for bags, pooled_by_host"
    ):
        make_costs(dataclasses.replace(whole, exchange=Pigeons()), devices)


@pytest.mark.parametrize(
    ("placement", "exchange"),
    [
        (data_parallel(), "replicated"),
        (row_wise(exchange="rows"), "rows"),
        (row_wise(exchange="pooled"), "pooled"),
        (table_wise(0), "bags"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bytes_on_links_are_those_that_the_exchange_sends(placement, exchange):
    """Beside `Exchange.traffic`, but for the numbers of rows that it sends with them."""
    sent = topology(**linked(within=1.0))
    found = evaluate(placement, sent, rows=10_000_000, pooling=4)
    lookups, bags = 16, 4
    # A message has space for 1.25 x 16 / 4 rows.
    work = Workload(4, 8, lookups, bags, capacity=5, owner_lookups=lookups, owner_bags=bags)
    expected = sum(EXCHANGES[exchange].traffic(work).values())
    bytes = found.phases["forward exchange"] + found.phases["backward exchange"]
    assert bytes * 4 / 3 == pytest.approx(expected, abs=4 * 3 * 4)


@pytest.mark.parametrize(
    ("placement", "hosts"),
    [
        pytest.param(row_wise(exchange="rows"), 1, id="rows"),
        pytest.param(row_wise(exchange="pooled"), 1, id="pooled"),
        pytest.param(table_wise(0), 1, id="bags"),
        pytest.param(table_row_wise(0, exchange="pooled"), 2, id="pooled_by_host"),
        pytest.param(data_parallel(), 1, id="replicated"),
    ],
)
def test_embeddings_and_gradients_travel_in_their_formats(placement, hosts):
    """Rows of 8 columns have 32 bytes in float32, 16 in float16 and 12 in float8."""
    sent = topology(hosts=hosts, each=4, **linked(within=1.0, between=100.0))

    def seconds(**formats):
        phases = evaluate(
            placement, sent, rows=10_000_000, precision=ExchangePrecision(**formats)
        ).phases
        return phases["forward exchange"], phases["backward exchange"]

    (forward, backward), narrow = seconds(), seconds(forward="float16", backward="float8")
    narrower = seconds(forward="float8", backward="float16")
    assert (forward - narrow[0]) / 16 == pytest.approx((forward - narrower[0]) / 20)
    assert (backward - narrow[1]) / 20 == pytest.approx((backward - narrower[1]) / 16)
    assert backward > narrower[1]
    assert (forward > narrow[0]) == (placement.kind != "data_parallel")
    assert seconds(forward="int8", backward="int8") == seconds(
        forward="bfloat16", backward="float16"
    )  # 8 columns and 8 bytes of scales


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


@pytest.mark.parametrize(("hosts", "each", "expected"), [(1, 1, 0.0), (1, 4, 2.0), (2, 2, 2.0)])
def test_one_device_starts_no_collective(hosts, each, expected):
    assert latency(topology(hosts=hosts, each=each, **linked(call=2.0))) == expected


PLACEMENTS = {
    "rows": row_wise(),
    "pooled": row_wise(exchange="pooled"),
    "bags": table_wise(1),
    "replicated": data_parallel(),
    "columns": column_wise((0, 1)),
}
TOPOLOGY = Topology.named("h100", devices=8)


def phases(placement, **settings) -> dict[str, float]:
    config = jaxrec.EmbeddingBagConfig("a", 100_000, 64, **settings)
    plan = ShardingPlan.from_dict({"a": placement})
    return Planner(TOPOLOGY).evaluate([config], plan, batch_size=4096).estimate.phases


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_frozen_tables_have_no_backward_pass(placement):
    trained, frozen = phases(placement), phases(placement, trainable=False)
    for phase, seconds in frozen.items():
        expected = 0 if phase.startswith("backward") else trained[phase]
        assert seconds == pytest.approx(expected)


def test_plan_for_a_quantized_model():
    config = jaxrec.EmbeddingBagConfig("a", 1000, 64)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    plans = [
        Planner(TOPOLOGY).plan(each, batch_size=4096)
        for each in (model, jaxrec.serve.quantize(model, "int4"))
    ]
    trained, served = (plan.estimate for plan in plans)
    assert served.phases["backward compute"] == served.phases["backward exchange"] == 0
    assert served.seconds < trained.seconds
    assert served.tables[0].dtype == "int4"
