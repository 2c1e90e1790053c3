"""Which options a table has, their loads and what the planner says of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import jaxrec
from jaxrec import optim
from jaxrec.embed.layout import layout_tables
from jaxrec.embed.state import state_bytes
from jaxrec.mesh import row_wise
from jaxrec.mesh.exchange import POOLED
from jaxrec.mesh.layout import layout_mesh
from jaxrec.mesh.shards import MeshShape
from jaxrec.plan import ParameterConstraints, Planner, TableCache, Topology
from jaxrec.plan.costs import make_costs
from jaxrec.plan.costs.base import all_to_all
from jaxrec.plan.model_tables import read_model
from jaxrec.plan.options import enumerate_options, to_placement
from jaxrec.plan.workload import measure_workloads
from tests.plan.models import problem_of

BAG, PER_ID = jaxrec.EmbeddingBagConfig, jaxrec.EmbeddingConfig


def options_of(
    table, constraints=None, *, hosts=2, devices_per_host=4, storages=("device",), speeds=()
):
    """The options of one table on a mesh, with the devices."""
    constraints = constraints or ParameterConstraints()
    topology = Topology.named(
        "h100", devices=hosts * devices_per_host, devices_per_host=devices_per_host
    )
    topology = dataclasses.replace(topology, device_speed=speeds)
    (work,) = measure_workloads(
        read_model([table]),
        batch_size=64 * topology.num_devices,
        num_devices=topology.num_devices,
        constraints={table.name: constraints},
        statistics=None,
    )
    return enumerate_options(work, topology, constraints, storages=storages), topology


def kinds(table, constraints=None, **mesh):
    found, _ = options_of(table, constraints, **mesh)
    return {(o.sharding_type, o.exchange, o.parts) for o in found}


def test_a_bag_table_on_two_hosts_has_every_type_and_both_exchanges():
    assert kinds(BAG("a", 1000, 128, optimizer=optim.sgd(0.1))) == {
        ("data_parallel", "replicated", 1),
        ("table_wise", "rows", 1),
        ("table_wise", "pooled", 1),
        ("row_wise", "rows", 1),
        ("row_wise", "pooled", 1),
        ("column_wise", "rows", 2),
        ("column_wise", "rows", 4),
        ("column_wise", "pooled", 2),
        ("column_wise", "pooled", 4),
        ("table_row_wise", "rows", 1),
        ("table_row_wise", "pooled", 1),
        ("table_column_wise", "rows", 1),
        ("table_column_wise", "pooled", 1),
        ("grid", "rows", 2),
        ("grid", "pooled", 2),
    }


def test_rows_that_are_not_pooled_are_not_summed():
    assert all(way != "pooled" for _, way, _ in kinds(PER_ID("a", 1000, 128)))


@pytest.mark.parametrize(
    "optimizer",
    [optim.rowwise_adagrad(), optim.lamb(), optim.sgd(0.1, max_norm=1.0)],
    ids=["rowwise", "lamb", "max_norm"],
)
def test_rows_that_are_updated_whole_are_cut_both_ways(optimizer):
    found = kinds(BAG("a", 1000, 128, optimizer=optimizer))
    every = {("grid", "rows", 2), ("grid", "pooled", 2)}
    every |= {("column_wise", "rows", 4), ("column_wise", "pooled", 4)}
    assert every | {("table_wise", "pooled", 1), ("row_wise", "pooled", 1)} <= found


def test_sums_over_rows_that_are_cut_both_ways_cost_time():
    grids = {}
    for name, optimizer in [("sums", optim.rowwise_adagrad()), ("none", optim.sgd(0.1))]:
        options, topology = options_of(BAG("a", 1000, 128, optimizer=optimizer))
        (grid,) = [o for o in options if (o.sharding_type, o.exchange) == ("grid", "pooled")]
        grids[name] = make_costs(dataclasses.replace(grid.group, exchange=POOLED), topology)
    with_sums, without = grids["sums"].position(), grids["none"].position()
    assert with_sums.backward_exchange - without.backward_exchange == pytest.approx(
        2 * all_to_all(4, topology)
    )
    assert with_sums.forward_exchange == without.forward_exchange


@pytest.mark.parametrize("kind", ["row_wise", "table_row_wise"])
def test_a_table_of_fewer_rows_than_devices_is_cut_where_asked(kind):
    table = BAG("a", 3, 128)
    assert kind not in {found for found, _, _ in kinds(table)}
    options, _ = options_of(table, ParameterConstraints(sharding_types=[kind]))
    for option in options:
        assert option.load.held.tolist() == [1, 1, 1] + [0] * (len(option.sites[0]) - 3)
        assert np.isfinite(option.load.stacked).all()


def test_a_table_of_fewer_rows_than_all_devices_goes_with_larger_ones_on_several_hosts():
    assert ("row_wise", "rows", 1) in kinds(BAG("a", 6, 128))
    assert ("row_wise", "rows", 1) not in kinds(BAG("a", 6, 128), hosts=1, devices_per_host=8)


def test_gradients_of_clipped_norm_are_summed_anywhere():
    found = kinds(BAG("a", 1000, 128, optimizer=optim.adam(clip_norm=1.0)))
    assert {("grid", "pooled", 2), ("column_wise", "pooled", 4), ("row_wise", "pooled", 1)} <= found


@dataclasses.dataclass(frozen=True)
class WholeRows(optim.RowOptimizer):
    """Divides by the largest element of the gradient, and cannot do so with a part of a row."""

    def init(self, num_rows, dim):
        return {}

    def update(self, rows, gradients, state, step):
        most = abs(gradients).max(axis=1, keepdims=True)
        return rows - self.learning_rate * gradients / most, {}


def test_an_optimizer_that_needs_whole_rows_has_them():
    table = BAG("a", 1000, 128, optimizer=WholeRows())
    assert {kind for kind, _, _ in kinds(table)} == {
        "data_parallel",
        "table_wise",
        "row_wise",
        "table_row_wise",
    }
    with pytest.raises(ValueError, match="column_wise: its optimizer WholeRows needs whole rows"):
        kinds(table, ParameterConstraints(sharding_types=["column_wise"]))


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        (
            {"sharding_types": ["table_wise"]},
            {("table_wise", "rows", 1), ("table_wise", "pooled", 1)},
        ),
        (
            {"sharding_types": ["table_wise"], "exchanges": ["pooled"]},
            {("table_wise", "pooled", 1)},
        ),
        ({"sharding_types": ["row_wise"], "exchanges": ["pooled"]}, {("row_wise", "pooled", 1)}),
        (
            {"sharding_types": ["column_wise"], "min_column_width": 64},
            {("column_wise", "rows", 2), ("column_wise", "pooled", 2)},
        ),
        (
            {"sharding_types": ["column_wise"], "devices": [1, 6], "exchanges": ["rows"]},
            {("column_wise", "rows", 2)},
        ),
        ({"sharding_types": ["data_parallel"]}, {("data_parallel", "replicated", 1)}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_constraints_leave_their_options(constraints, expected):
    assert kinds(BAG("a", 1000, 128), ParameterConstraints(**constraints)) == expected


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_devices_are_those_allowed(kind):
    constraints = ParameterConstraints(sharding_types=[kind], devices=[1, 6])
    found, _ = options_of(BAG("a", 1000, 128), constraints)
    assert {device for o in found for site in o.sites for device in site} == {1, 6}


@pytest.mark.parametrize("kind", ["table_row_wise", "table_column_wise", "grid"])
def test_hosts_are_those_with_all_devices_allowed(kind):
    constraints = ParameterConstraints(sharding_types=[kind], devices=[0, 4, 5, 6, 7])
    found, _ = options_of(BAG("a", 1000, 128), constraints)
    assert {site for o in found for site in o.sites} == {(4, 5, 6, 7)}


@pytest.mark.parametrize(
    ("table", "constraints", "message"),
    [
        (
            BAG("a", 100, 48),
            {"sharding_types": ["column_wise"]},
            r"table 'a' \(100 rows, 48 columns\) can be placed in none of the ways that its "
            "constraints leave: column_wise: 48 columns do not divide into equal parts of 32 or "
            "more",
        ),
        (
            BAG("a", 100, 64),
            {"sharding_types": ["data_parallel"], "devices": [0]},
            "it takes all devices, and only some are allowed",
        ),
        (
            BAG("a", 100, 64),
            {"sharding_types": ["table_row_wise"], "devices": [0, 7]},
            "it takes whole hosts, and none is allowed",
        ),
        (BAG("a", 100, 64), {"devices": [8]}, "may be on device 8, but there are 8"),
        (
            PER_ID("a", 100, 64),
            {"sharding_types": ["row_wise"], "exchanges": ["pooled"]},
            "exchange 'pooled' is not possible, since its rows are not pooled",
        ),
        (
            BAG("a", 100, 64),
            {"sharding_types": ["data_parallel"], "storages": ["host"]},
            "copies are kept on devices",
        ),
        (
            BAG("a", 2**32, 64),
            {"sharding_types": ["table_wise"]},
            "4,294,967,296 rows on a device, more than the 2,147,483,645 that int32 can number",
        ),
    ],
    ids=["columns", "copies", "hosts", "device", "pooled", "storage", "int32"],
)
def test_an_impossible_option_is_refused_with_its_reason(table, constraints, message):
    with pytest.raises(ValueError, match=message):
        options_of(table, ParameterConstraints(**constraints))


def test_storages_other_than_the_device_come_only_when_asked_for():
    table = BAG("a", 1000, 128)
    assert {o.storage for o in options_of(table)[0]} == {"device"}
    found, _ = options_of(table, storages=("device", "host"))
    assert {o.storage for o in found} == {"device", "host"}
    constraints = ParameterConstraints(storages=["store"], cache_ratio=0.3, store="file:///data/a")
    found, _ = options_of(BAG("a", 100_000, 128), constraints)
    assert {(o.storage, o.cache_ratio) for o in found} == {("store", 0.3)}
    assert {o.cache for o in found} == {TableCache(30_000, "file:///data/a")}


@pytest.mark.parametrize("optimizer", [optim.sgd(0.1), optim.rowwise_adagrad()])
@pytest.mark.parametrize(
    ("hosts", "each", "speeds"),
    [(1, 1, ()), (1, 4, ()), (2, 2, ()), (3, 2, ()), (1, 4, (7, 2, 1, 3)), (2, 2, (1, 1.2))],
)
def test_loads_are_those_of_the_blocks_that_are_laid_out(hosts, each, speeds, optimizer):
    """Rows held, of every option, beside the arrays of `jaxrec.mesh`."""
    table = BAG("a", 1001, 96, optimizer=optimizer)
    constraint = ParameterConstraints(min_column_width=16)
    every, topology = options_of(
        table, constraint, hosts=hosts, devices_per_host=each, speeds=speeds
    )
    assert any(option.shares for option in every) == bool(speeds)
    tables = layout_tables([table], optim.sgd(0.1))
    for option in every:
        sites = list(range(option.parts))
        placement = to_placement(option, sites, topology)
        layout = layout_mesh(tables, {"a": placement}, MeshShape(hosts, each))
        held = np.zeros(topology.num_devices)
        for site in sites:
            np.add.at(held, np.array(option.sites[site]), option.load.held)
        (group,) = layout.groups
        assert group.local_rows == held.max()
        assert group.group.dim == option.group.width
        assert layout.exchanges[0] == option.group.exchange
        found = np.zeros(topology.num_devices)
        for _, placed in layout.shards("a"):
            where = slice(None) if group.is_replicated else placed.shard.device
            found[where] += placed.shard.num_rows
        np.testing.assert_array_equal(held, found)


def test_rows_in_proportion_to_speed_and_as_many_as_a_round_holds():
    asked = ParameterConstraints(sharding_types=["row_wise"], exchanges=["rows"])
    found, _ = options_of(BAG("a", 1000, 64), asked, hosts=1, speeds=(1, 2, 2, 3))
    assert [option.shares for option in found] == [
        (),
        (1.0, 2.0, 2.0, 3.0),
        (1.0, 1.331, 1.331, 1.662),
    ]
    # A round has capacity for 1.25 even shares, 312 of 1,000 rows.
    assert [option.load.held.tolist() for option in found] == [
        [250, 250, 250, 250],
        [125, 250, 250, 375],
        [188, 250, 250, 312],
    ]
    # On some of the devices shares are theirs.
    some = dataclasses.replace(asked, devices=(1, 3))
    found, topology = options_of(BAG("a", 1000, 64), some, hosts=1, speeds=(1, 2, 2, 3))
    assert [option.shares for option in found] == [(), (1.0, 1.5)]
    placement = to_placement(found[1], (0,), topology)
    assert (placement.places, placement.shares) == ((1, 3), (1.0, 1.5))


def random_tables(random):
    """A collection of tables of one kind with random shapes and optimizers."""
    kind = BAG if random.random() < 0.7 else PER_ID
    optimizers = [
        optim.sgd(0.1),
        optim.rowwise_adagrad(),
        optim.adam(clip_norm=1.0),
        optim.adagrad(max_norm=1.0),
        WholeRows(),
    ]
    dims = [1, 7, 16, 48, 64, 96, 128, 256]
    return [
        kind(
            f"t{i}",
            int(10 ** random.uniform(0, 9)),
            int(random.choice(dims)),
            optimizer=optimizers[random.integers(5)],
            dtype=str(random.choice(["float32", "bfloat16"])),
        )
        for i in range(random.integers(1, 9))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_planned_is_laid_out(seed):
    random = np.random.default_rng(seed)
    tables = random_tables(random)
    hosts, each = (int(n) for n in random.choice([1, 2, 4, 8], 2))
    constraints = {
        table.name: ParameterConstraints(
            pooling_factors=float(10 ** random.uniform(0, 2)), min_column_width=8
        )
        for table in tables
    }
    topology = dataclasses.replace(
        Topology.named("h100", devices=hosts * each, devices_per_host=each), memory=2 * 10**12
    )
    planner = Planner(topology, constraints, time_limit=2.0)
    plan = planner.plan(tables, batch_size=64 * topology.num_devices)
    layout = layout_mesh(
        layout_tables(tables, optim.sgd(0.1)), plan.to_dict(), MeshShape(hosts, each)
    )
    # What is expected to be held is what the arrays are going to have.
    allocated = sum(
        group.local_rows * group.group.row_format.row_bytes(group.group.dim)
        + group.local_rows * state_bytes(group.group.optimizer, group.group.dim)
        for group in layout.groups
    )
    for device in plan.estimate.devices:
        assert device.bytes["tables"] + device.bytes["padding"] == pytest.approx(allocated)


def test_more_rows_than_int32_can_number_are_laid_out_in_several_arrays():
    """On 64 devices two tables of 30 million rows on one device take 3.8 billion row numbers."""
    tables = [BAG(f"t{i}", 30_000_000, 16, optimizer=optim.sgd(0.1)) for i in range(128)]
    constraints = {t.name: ParameterConstraints(sharding_types=["table_wise"]) for t in tables}
    topology = Topology.named("h100", devices=64)
    plan = Planner(topology, constraints).plan(tables, batch_size=6400)
    layout = layout_mesh(layout_tables(tables, optim.sgd(0.1)), plan.to_dict(), MeshShape(8, 8))
    assert [group.local_rows for group in layout.groups] == [30_000_000, 30_000_000]
    (most,) = {device.bytes["tables"] for device in plan.estimate.devices}
    assert most == 2 * 30_000_000 * 64


@pytest.mark.parametrize("rows", [2**31, 3_000_000_000, 10**11])
def test_tables_of_more_rows_than_int32_can_number(rows):
    """They are cut over enough devices, by exchanges that take them, as they are laid out."""
    table = BAG("big", rows, 16, dtype="bfloat16", optimizer=optim.rowwise_adagrad(0.1))
    topology = Topology.named("h100", devices=64)
    plan = Planner(topology).plan([table], batch_size=6400)
    layout = layout_mesh(layout_tables([table], optim.sgd(0.1)), plan.to_dict(), MeshShape(8, 8))
    (placed,) = layout.groups
    assert placed.is_large
    assert placed.local_rows == -(-rows // 64)
    row_bytes = 16 * 2 + 4
    for device in plan.estimate.devices:
        assert device.bytes["tables"] == pytest.approx(rows / 64 * row_bytes, rel=1e-6)
    constraints = {"big": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(ValueError, match=f"{rows:,} rows on a device, more than the 2,147,483,645"):
        Planner(topology, constraints).plan([table], batch_size=6400)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_offered_is_laid_out(seed):
    """Any combination of options and sites, not only the fastest."""
    random = np.random.default_rng(1000 + seed)
    tables = random_tables(random)
    hosts, each = (int(n) for n in random.choice([1, 2, 4, 8], 2))
    placements = {}
    for table in tables:
        found, topology = options_of(
            table, ParameterConstraints(min_column_width=4), hosts=hosts, devices_per_host=each
        )
        option = found[random.integers(len(found))]
        sites = random.permutation(len(option.sites))[: option.parts]
        placements[table.name] = to_placement(option, [int(site) for site in sites], topology)
    layout_mesh(layout_tables(tables, optim.sgd(0.1)), placements, MeshShape(hosts, each))


def test_held_rows_of_a_cache_are_cut_as_rows_are():
    problem = problem_of([(100_001, 64, 2)], types=["row_wise"], storages=("host",))
    for option in problem.options[0]:
        half, larger = divmod(option.cache.rows, 2)
        np.testing.assert_array_equal(option.load.held, [half + larger, half])
        updated, held = option.load.updated, option.load.held
        np.testing.assert_allclose(updated / updated.sum(), held / held.sum(), rtol=1e-12)
        assert option.stored_bytes == 100_001 * 64 * 4
        assert option.home.prefetch > 0


def test_a_table_of_more_rows_than_its_devices_can_number_has_a_cache_alone():
    table = BAG("a", 2**36, 64)
    with pytest.raises(ValueError, match="that int32 can number"):
        options_of(table)
    found, _ = options_of(table, ParameterConstraints(cache_ratio=1e-6), storages=["host"])
    assert {o.cache.rows for o in found} == {math.ceil(2**36 * 1e-6)}


TABLES = [
    jaxrec.EmbeddingBagConfig("few", 3, 64),
    jaxrec.EmbeddingConfig("ids", 1000, 48),
    jaxrec.EmbeddingBagConfig("fixed", 1000, 64),
]


def considered(**settings):
    constraints = {"fixed": ParameterConstraints(placement=row_wise(shares=range(1, 9)))}
    planner = Planner(Topology.named("h100", devices=8), constraints, **settings)
    return planner, planner.options(TABLES, batch_size=64)


def test_ways_and_reasons():
    _, ways = considered()
    assert ways["few"].ways == (
        "data_parallel",
        "table_wise by rows",
        "table_wise by pooled",
        "column_wise in 2 parts by rows",
        "column_wise in 2 parts by pooled",
    )
    assert ways["few"].left_out[0] == "row_wise: 3 rows are fewer than the 8 devices"
    assert ways["ids"].ways == ("data_parallel", "table_wise by rows", "row_wise by rows")
    assert (
        "column_wise: 48 columns do not divide into equal parts of 32 or more"
        in ways["ids"].left_out
    )
    assert str(ways["fixed"]) == "considered: row_wise, as its constraints place it"


def test_the_plan_has_a_way_that_is_considered():
    planner, ways = considered()
    for name, placement in planner.plan(TABLES, batch_size=64).to_dict().items():
        assert any(way.startswith(placement.kind) for way in ways[name].ways)


def test_rows_beside_the_devices_are_ways():
    _, ways = considered(storages=["device", "host"])
    assert "row_wise by rows, rows in storage host" in ways["ids"].ways
    assert "data_parallel: copies are kept on devices" in ways["ids"].left_out


def test_no_way_is_said_with_its_reasons():
    constraints = {"ids": ParameterConstraints(sharding_types=["column_wise"])}
    ways = Planner(Topology.named("h100", devices=8), constraints).options(TABLES, batch_size=64)
    assert str(ways["ids"]).startswith("considered: none\nleft out: column_wise: 48 columns")
