"""Plans as a whole: they fit, are close to their bound, and are carried out by `jaxrec.shard`."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec import optim
from jaxrec.mesh import row_wise, table_wise
from jaxrec.plan import (
    ParameterConstraints,
    PlanError,
    Planner,
    ShardingPlan,
    TableCache,
    Topology,
)
from jaxrec.plan.partitioners import place_fastest
from tests.plan.models import criteo, plan_on_h100, six_tables

lookup = nnx.jit(jaxrec.EmbeddingBagCollection.__call__)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 8, 16])
@pytest.mark.parametrize("model", [six_tables, criteo], ids=["six", "criteo"])
def test_plans_fit_and_are_close_to_their_bound(model, devices):
    tables, constraints = model()
    planner = Planner(Topology.named("h200", devices=devices), constraints, time_limit=30)
    plan = planner.plan(tables, batch_size=65536)
    assert set(plan.to_dict()) == {table.name for table in tables}
    found = plan.estimate
    assert found.bound <= found.seconds
    assert found.gap <= (0.08 if "cut short" in found.search else 0.02)
    for device in found.devices:
        assert sum(device.bytes.values()) <= found.capacity


def test_a_plan_for_a_mesh_is_carried_out():
    tables = [
        jaxrec.EmbeddingBagConfig("a", 100, 8),
        jaxrec.EmbeddingBagConfig("b", 3, 8),
        jaxrec.EmbeddingBagConfig("c", 50, 4, pooling="mean"),
    ]
    mesh = jax.make_mesh((8,), ("data",))
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {"a": [[1, 2]] * 8, "b": [[i % 3] for i in range(8)], "c": [[i, 7] for i in range(8)]}
    )
    model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    expected = np.asarray(model(batch).values)
    plan = Planner(Topology.from_mesh(mesh)).plan(model, batch_size=8)
    sharded = jaxrec.shard(model, plan, mesh)
    found = lookup(sharded, jaxrec.mesh.shard_batch(batch, mesh)).values
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("machine", ["cpu", "a100", "h100", "h200"])
@pytest.mark.parametrize(("ids", "exchange"), [(1, "rows"), (100, "pooled")])
def test_sums_travel_for_long_bags_alone(machine, ids, exchange):
    tables = [jaxrec.EmbeddingBagConfig(f"t{i}", 1_000_000, 64) for i in range(8)]
    constraint = ParameterConstraints(sharding_types=["row_wise"], pooling_factors=ids)
    topology = Topology.named(machine, devices=8)
    planner = Planner(topology, {table.name: constraint for table in tables})
    placements = planner.plan(tables, batch_size=8192).to_dict()
    assert {placement.exchange for placement in placements.values()} == {exchange}


def unlike(speeds, *, hosts=1):
    """Devices of an H100's rates, times these speeds."""
    plain = Topology.named("h100", devices=hosts * 4, devices_per_host=4)
    return dataclasses.replace(plain, device_speed=speeds)


def test_faster_devices_get_more_rows_of_a_table():
    table = jaxrec.EmbeddingBagConfig("a", 1000, 16)
    constraint = ParameterConstraints(
        pooling_factors=200, sharding_types=["row_wise"], exchanges=["pooled"]
    )
    planner = Planner(unlike((1, 1, 3, 3)), {"a": constraint})
    plan = planner.plan([table], batch_size=4 * 65536)
    placement = plan.to_dict()["a"]
    assert placement == row_wise(shares=(1, 1, 3, 3), exchange="pooled")
    again = ShardingPlan.from_json(plan.to_json(), planner.context([table], batch_size=4 * 65536))
    assert again.to_dict() == plan.to_dict()
    given = planner.evaluate([table], plan, batch_size=4 * 65536).estimate
    assert given.seconds == pytest.approx(plan.estimate.seconds)
    for device, planned in zip(given.devices, plan.estimate.devices, strict=True):
        assert device.seconds == pytest.approx(planned.seconds)
        assert device.waits < 0.02 * given.seconds
    even = ShardingPlan.from_dict({"a": row_wise(exchange="pooled")})
    even = planner.evaluate([table], even, batch_size=4 * 65536).estimate
    assert even.seconds > 1.1 * given.seconds
    assert even.devices[3].waits > 0.1 * even.seconds > 10 * even.devices[0].waits
    # The plan is carried out.
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    model = jaxrec.EmbeddingBagCollection([table], rngs=nnx.Rngs(0))
    batch = jaxrec.KeyedJaggedArray.from_lists({"a": [[i, 999 - i] for i in range(8)]})
    expected = np.asarray(model(batch).values)
    sharded = jaxrec.shard(model, plan, mesh)
    found = lookup(sharded, jaxrec.mesh.shard_batch(batch, mesh)).values
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_faster_hosts_get_more_tables():
    tables = [jaxrec.EmbeddingBagConfig(f"t{i}", 1000, 64) for i in range(32)]
    constraint = ParameterConstraints(
        pooling_factors=100, sharding_types=["table_wise"], exchanges=["rows"]
    )
    planner = Planner(unlike((1, 3), hosts=2), {table.name: constraint for table in tables})
    plan = planner.plan(tables, batch_size=8 * 1024)
    counts = np.bincount([each.places[0] for _, each in plan.placements], minlength=8)
    assert counts[4:].min() >= counts[:4].max()
    assert plan.estimate.gap <= 0.05


def test_memory_is_that_of_the_device_with_the_least():
    topology = dataclasses.replace(
        Topology.named("h100", devices=4), device_memory=[4 * 10**9, 3 * 10**9, 10**9, 2 * 10**9]
    )
    tables = [jaxrec.EmbeddingBagConfig("a", 4_000_000, 64)]  # 1.024 GB
    plan = Planner(topology).plan(tables, batch_size=512)
    alike = dataclasses.replace(topology, device_memory=(), memory=10**9)
    assert plan.to_dict() == Planner(alike).plan(tables, batch_size=512).to_dict()
    assert [device.memory for device in plan.estimate.devices] == list(topology.device_memory)
    free = [line.split()[7:9] for line in str(plan).splitlines() if line[:2] in ("0 ", "2 ")]
    assert [unit for _, unit in free] == ["GB", "MB"]
    large = [jaxrec.EmbeddingBagConfig("a", 20_000_000, 64)]  # 5.12 GB, of 10 in all
    with pytest.raises(PlanError, match=r"(?s)A device has 1\.00 GB.*devices of 2 GB"):
        Planner(topology).plan(large, batch_size=512)


WAYS = [
    *(("data_parallel", None), ("table_wise", "rows"), ("table_wise", "pooled")),
    *(
        ("row_wise", "rows"),
        ("row_wise", "pooled"),
        ("column_wise", "rows"),
        ("column_wise", "pooled"),
    ),
    *(("table_row_wise", "rows"), ("table_row_wise", "pooled"), ("table_column_wise", "rows")),
    *(("table_column_wise", "pooled"), ("grid", "rows"), ("grid", "pooled")),
]


class Both(nnx.Module):
    """Bags of every sharding type and exchange, and per-id tables of every sharding type."""

    def __init__(self, *, rngs):
        self.bags = jaxrec.EmbeddingBagCollection(
            [jaxrec.EmbeddingBagConfig(f"{kind} {way}", 20, 8) for kind, way in WAYS],
            optimizer=jaxrec.optim.sgd(0.1),
            rngs=rngs,
        )
        self.rows = jaxrec.EmbeddingCollection(
            [
                jaxrec.EmbeddingConfig(f"{kind} alone", 20, 8)
                for kind in dict.fromkeys(kind for kind, _ in WAYS)
            ],
            optimizer=jaxrec.optim.rowwise_adagrad(0.1),
            rngs=rngs,
        )

    def __call__(self, bags, rows):
        alone = self.rows(rows)
        return (self.bags(bags).values ** 2).mean() + sum(
            (alone[key].values ** 2).sum() for key in sorted(alone)
        )


@pytest.mark.slow
def test_every_type_and_exchange_that_is_planned_is_carried_out():
    """A step on two hosts of four devices, beside the same on one device."""
    mesh = jax.make_mesh((2, 4), ("host", "device"))
    random = np.random.default_rng(0)

    def batch_of(names):
        ids = {name: [list(random.integers(0, 20, 3)) for _ in range(16)] for name in names}
        return jaxrec.KeyedJaggedArray.from_lists(ids)

    @nnx.jit
    def step(model, optimizer, *features):
        loss, gradients = jaxrec.value_and_grad(lambda model: model(*features))(model)
        optimizer.update(model, gradients)
        return loss

    models = [Both(rngs=nnx.Rngs(0)) for _ in range(2)]
    names = [[config.name for config in c.configs] for c in (models[0].bags, models[0].rows)]
    constraints = {
        name: ParameterConstraints(
            sharding_types=[name.split()[0]],
            exchanges=[name.split()[1]] if name.split()[1] in ("rows", "pooled") else None,
            min_column_width=1,
        )
        for name in names[0] + names[1]
    }
    planner = Planner(Topology.from_mesh(mesh), constraints)
    plan = planner.plan(models[1], batch_size=16)
    for name, placement in plan.to_dict().items():
        kind, way = name.split()
        assert placement.kind == kind
        assert way not in ("rows", "pooled") or placement.exchange == way
    batch = batch_of(names[0]), batch_of(names[1])
    expected = step(models[0], jaxrec.Optimizer(models[0], optax.sgd(0.1)), *batch)
    sharded = jaxrec.shard(models[1], plan, mesh)
    optimizer = jaxrec.Optimizer(sharded, optax.sgd(0.1))
    found = step(sharded, optimizer, *jaxrec.mesh.shard_batch(batch, mesh))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    for name in names[0]:
        np.testing.assert_allclose(
            sharded.bags.table(name), models[0].bags.table(name), rtol=1e-5, atol=1e-6
        )
    for name in names[1]:
        np.testing.assert_allclose(
            sharded.rows.table(name), models[0].rows.table(name), rtol=1e-5, atol=1e-6
        )


def test_an_abstract_model_has_the_same_plan():
    def make():
        tables = [jaxrec.EmbeddingBagConfig("a", 1000, 16)]
        return jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))

    planner = Planner(Topology.named("h100", devices=8))
    assert planner.plan(nnx.eval_shape(make), batch_size=64) == planner.plan(make(), batch_size=64)


def test_a_pinned_placement_is_kept():
    tables, constraints = six_tables()
    placement = jaxrec.mesh.table_wise(device=1)
    constraints["shop"] = ParameterConstraints(placement=placement)
    plan = Planner(Topology.named("h100", devices=2), constraints).plan(tables, batch_size=4096)
    assert plan.to_dict()["shop"] == placement


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "proposers alone"])
def test_the_planner_is_at_the_best(counted, is_exact):
    """The planner's own problem is another: its capacity is that of devices."""
    problem, _ = counted
    tables = [
        jaxrec.EmbeddingBagConfig(f"t{i}", 1000 * (i + 1), 32, optimizer=optim.sgd(0.1))
        for i in range(3)
    ]
    planner = Planner(problem.topology, is_exact=is_exact, gap=1e-4)
    plan = planner.plan(tables, batch_size=problem.topology.num_devices * 64)
    assert plan.estimate.seconds >= plan.estimate.bound
    if is_exact:
        assert plan.estimate.gap <= 1e-3
    else:
        assert plan.estimate.bound == 0
        assert "gap" not in str(plan)


def test_a_store_is_slower_than_host_memory():
    tables = [jaxrec.EmbeddingBagConfig("a", 2_000_000, 64)]
    topology = Topology.named("h100", devices=1)
    seconds = {}
    for storage in ("device", "host", "store"):
        planner = Planner(topology, storages=[storage], store="file:///data/{table}")
        plan = planner.plan(tables, batch_size=4096)
        seconds[storage] = plan.estimate.seconds
    assert seconds["device"] < seconds["host"] < seconds["store"]


class Towers(nnx.Module):
    """A table of 520 MB with row-wise Adagrad's state, and a small one."""

    def __init__(self):
        tables = [
            jaxrec.EmbeddingBagConfig("item", 2_000_000, 64),
            jaxrec.EmbeddingBagConfig("day", 7, 64),
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))


def test_a_function_is_made_abstractly_and_gets_caches_where_it_does_not_fit():
    device = Topology.named("h100", devices=1)
    small = dataclasses.replace(device, memory=200_000_000)
    assert Planner(device).plan(Towers, batch_size=64).caches == ()
    plan = Planner(small).plan(Towers, batch_size=64)
    ((name, cache),) = plan.caches
    assert (name, cache.storage) == ("item", "host")
    assert cache.rows < 2_000_000
    assert {table.name: table.storage for table in plan.estimate.tables} == {
        "item": "host",
        "day": "device",
    }
    assert "host 20% cached" in str(plan)
    # A model that is made can have no caches.
    with pytest.raises(PlanError, match=r"storage host for 'item' \(with caches on the devices\)"):
        Planner(small).plan(nnx.eval_shape(Towers), batch_size=64)
    again = Planner(small).evaluate(Towers, plan, batch_size=64)
    assert again.caches == plan.caches
    assert again.estimate.seconds == pytest.approx(plan.estimate.seconds)
    made_for = Planner(small).context(Towers, batch_size=64)
    assert ShardingPlan.from_json(plan.to_json(), made_for) == plan


def test_a_fixed_placement_has_a_cache_that_is_asked_for():
    fixed = ParameterConstraints(placement=table_wise(1), storages=["host"], cache_ratio=0.01)
    plan = Planner(Topology.named("h100", devices=2), {"item": fixed}).plan(Towers, batch_size=64)
    assert plan.caches == (("item", TableCache(20_000)),)
    assert plan.to_dict()["item"] == table_wise(1)


def test_tables_of_more_rows_than_arrays_have_are_planned():
    def make():
        config = jaxrec.EmbeddingBagConfig("user", 4_000_000_000, 8)
        return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))

    plan = Planner(Topology.named("h100", devices=1)).plan(make, batch_size=64)
    ((name, cache),) = plan.caches
    assert name == "user"
    assert cache.rows < 2**31


def test_no_proposer_with_a_proposal_is_an_error():
    planner = Planner(Topology.named("h100", devices=2), proposers=[lambda problem: iter(())])
    with pytest.raises(ValueError, match="none of the proposers"):
        planner.plan([jaxrec.EmbeddingBagConfig("a", 100, 8)], batch_size=4)


def test_own_proposers_and_partitioners_are_used():
    called = []

    def propose(problem):
        called.append("propose")
        yield (0,) * len(problem.tables)

    def partition(problem, proposal):
        called.append("partition")
        return place_fastest(problem, proposal)

    planner = Planner(
        Topology.named("h100", devices=2),
        proposers=[propose],
        partitioners=[partition],
        is_exact=False,
    )
    plan = planner.plan([jaxrec.EmbeddingBagConfig("a", 100, 8)], batch_size=4)
    assert called == ["propose", "partition"]
    assert plan.estimate.search.startswith("1 proposals")


def test_proposers_take_turns():
    """A search that runs out of time has proposals of each, so that one that fits is among them."""
    called = []

    def proposer(name):
        def propose(problem):
            for number in range(2):
                called.append(f"{name}{number}")
                yield (len(called) - 1,)

        return propose

    planner = Planner(
        Topology.named("h100", devices=2), proposers=[proposer("a"), proposer("b")], is_exact=False
    )
    planner.plan([jaxrec.EmbeddingBagConfig("a", 100, 8)], batch_size=4)
    assert called == ["a0", "b0", "a1", "b1"]


def test_a_plan_error_is_a_value_error():
    assert issubclass(PlanError, ValueError)


def test_weights_take_memory_of_batches():
    weighted = plan_on_h100({"a": ParameterConstraints(is_weighted=True)}).estimate
    assert (
        weighted.devices[0].bytes["batches"] > plan_on_h100().estimate.devices[0].bytes["batches"]
    )


def test_batches_ahead_take_memory():
    one, five = plan_on_h100(batches=1).estimate, plan_on_h100(batches=5).estimate
    assert five.devices[0].bytes["batches"] == 5 * one.devices[0].bytes["batches"]


def test_dense_parameters_take_memory():
    assert plan_on_h100(dense_bytes=1000).estimate.devices[0].bytes["dense"] == 6000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reserve": 1.0}, "reserve is a fraction of memory"),
        ({"storages": ()}, "storages are some of device, host, store"),
        ({"storages": ("tape",)}, "storages are some of device, host, store"),
        ({"storages": "host"}, "storages are some of device, host, store, got 'host'"),
        ({"store": "redis://me:secret@host/0"}, r"the URL redis://\.\.\. has credentials"),
        ({"time_limit": 0.0}, "time_limit is above 0"),
        ({"gap": 0.0}, "gap is above 0"),
        ({"batches": 0}, "batches is 1 or more"),
        ({"proposers": ()}, "at least one proposer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Planner(Topology.named("h100", devices=4), **settings)


@pytest.mark.parametrize("batch_size", [0, -4, 401])
def test_the_batch_is_divided_among_devices(batch_size):
    with pytest.raises(ValueError, match="the batch is divided among 4 devices"):
        plan_on_h100(batch_size=batch_size)


def test_a_pinned_placement_must_fit():
    constraints = {"a": ParameterConstraints(placement=table_wise(device=9))}
    with pytest.raises(ValueError, match="table 'a' is placed table_wise on device 9"):
        plan_on_h100(constraints)


def test_all_placements_may_be_pinned():
    constraints = {name: ParameterConstraints(placement=table_wise(2)) for name in ("a", "b")}
    found = plan_on_h100(constraints)
    assert found.to_dict() == {"a": table_wise(2), "b": table_wise(2)}
    assert found.estimate.search == "every placement was decided"
