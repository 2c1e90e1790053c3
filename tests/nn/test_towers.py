"""A multi-tower model with its towers on different hosts is the model on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import traffic
from jaxrec.nn import MLP, DisaggregatedMultiTower

pytestmark = pytest.mark.usefixtures("compiled_fast")

HOSTS, DEVICES, BATCH, OUT = 2, 4, 16, 3
# Tables with their width and pooling. Of three towers two are on the first host.
TABLES = {"user": (8, "sum"), "city": (4, "mean"), "item": (8, "mean"), "shop": (8, "sum")}
TOWERS = (("user", "city"), ("item",), ("shop",))
HOST_0 = ("user", "city", "shop")
FEATURES = {"user": ("user",), "city": ("city",), "item": ("item", "also"), "shop": ("shop",)}


def make(towers=TOWERS, **options):
    rngs = nnx.Rngs(0)
    tables = [
        jaxrec.EmbeddingBagConfig(name, 40, dim, FEATURES[name], pooling=pooling)
        for name, (dim, pooling) in TABLES.items()
    ]
    optimizer = jaxrec.optim.rowwise_adagrad(0.5, clip_norm=0.1)
    embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs, **options)

    def tower(names):
        columns = sum(TABLES[name][0] * len(FEATURES[name]) for name in names)
        return names, MLP(columns, (OUT,), rngs=rngs)

    over = MLP(OUT * len(towers), (5, 1), activation_on_last=False, rngs=rngs)
    return DisaggregatedMultiTower(embeddings, [tower(names) for names in towers], over)


def batch(kind="plain"):
    """Skewed: what the first host's tables are asked for is all on its first device."""
    rng = np.random.default_rng(0)
    features = [feature for names in FEATURES.values() for feature in names]
    skewed = kind == "skewed"
    bags = {
        f: [
            rng.integers(
                0, 10 if skewed and f in HOST_0 else 40, 4 if skewed else (k + n) % 4
            ).tolist()
            for k in range(BATCH)
        ]
        for n, f in enumerate(features)
    }
    weights = {f: [rng.random(len(bag)).tolist() for bag in rows] for f, rows in bags.items()}
    given = jaxrec.KeyedJaggedArray.from_lists(bags, weights if kind == "weighted" else None)
    return given, rng.integers(0, 2, BATCH).astype(np.float32)


def on_hosts(model, exchange="rows"):
    mesh = jax.make_mesh((HOSTS, DEVICES), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    placements = model.placements(num_hosts=HOSTS, exchange=exchange)
    return jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(placements), mesh), mesh


@nnx.jit
def step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(None, features)[:, 0], labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def train(model, features, labels):
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.5))
    return [float(step(model, optimizer, features, labels)) for _ in range(3)]


def check_same(found, expected):
    """The same parameters, rows and optimizer state."""
    for name in TABLES:
        for one, other in (
            (found.embeddings.table(name), expected.embeddings.table(name)),
            *zip(
                found.embeddings.table_state(name).values(),
                expected.embeddings.table_state(name).values(),
                strict=True,
            ),
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    parameters = zip(
        jax.tree.leaves(nnx.state(found, nnx.Param)),
        jax.tree.leaves(nnx.state(expected, nnx.Param)),
        strict=True,
    )
    for one, other in parameters:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@functools.cache
def trained_alone(kind="plain"):
    """A model after three steps on one device, and its losses."""
    model = make(is_weighted=kind == "weighted")
    return model, train(model, *batch(kind))


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [pytest.param("rows", marks=pytest.mark.slow), "pooled"])
def test_towers_at_the_samples(exchange):
    alone, losses = trained_alone()
    model, mesh = on_hosts(make(), exchange)
    found = train(model, *jaxrec.mesh.shard_batch(batch(), mesh))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    check_same(model, alone)


@pytest.mark.parametrize("kind", ["plain", "weighted", "skewed"])
def test_towers_on_their_hosts(kind):
    alone, losses = trained_alone(kind)
    model, mesh = on_hosts(make(is_weighted=kind == "weighted"))
    model.disaggregate()
    found = train(model, *jaxrec.mesh.shard_batch(batch(kind), mesh))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    check_same(model, alone)

    # Each tower's rows are on its host alone.
    homes = {name: index % HOSTS for index, names in enumerate(TOWERS) for name in names}
    tables = model.embeddings.tables.get_value()
    for name, home in homes.items():
        for _, block in tables.layout.shards(name):
            assert block.shard.device // DEVICES == home


def collectives(model, features):
    """Those of a training step, dense parameters aside."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, features):
        model = nnx.merge(graph, state)
        loss, gradients = jaxrec.value_and_grad(lambda model: model(None, features).sum())(model)
        model.embeddings.apply_gradients(gradients.tables["embeddings"], 0)
        return loss, model.embeddings.tables.get_value()

    return traffic.collectives(run.lower(state, features).compile())


@pytest.mark.slow
def test_between_hosts_travel_ids_and_compressed_outputs():
    features, _ = batch()
    model, mesh = on_hosts(make())
    features = jaxrec.mesh.shard_batch(features, mesh)
    # An all-to-all of all devices brings half of its bytes from the other host.
    of_all = [c for c in collectives(model, features) if c.kind == "all-to-all"]
    assert {c.devices for c in of_all} == {HOSTS * DEVICES}
    as_rows = sum(c.result_bytes // HOSTS for c in of_all)

    model.disaggregate()
    at_tables = [c for c in collectives(model, features) if c.kind != "all-reduce"]
    # Those of a host's devices, and those of the devices of one number on all hosts.
    assert {c.devices for c in at_tables} == {DEVICES, HOSTS}
    between = sum(c.sent_bytes for c in at_tables if c.devices == HOSTS)
    # For a device's samples the ids, factors (1 / length) and lengths of as many lanes as a host
    # has features: one of width 4, two of width 8. Back come the outputs of two towers, and their
    # gradients go out again.
    samples, (capacity, *_) = BATCH // (HOSTS * DEVICES), features.capacities
    ids, outputs = 4 * 3 * (2 * capacity + samples), 4 * 2 * OUT * samples
    assert between == ids + 2 * outputs
    assert between < 0.3 * as_rows


def test_towers_on_hosts_read_whole_parameters():
    model = make()
    plan = jaxrec.plan.ShardingPlan.from_dict(model.placements(HOSTS))
    mesh = jax.make_mesh((HOSTS, DEVICES), ("host", "device"), axis_types=(AxisType.Auto,) * 2)

    def first(path, form):
        spec = jax.sharding.PartitionSpec
        return spec("device") if form.shape[0] % DEVICES == 0 else spec()

    model = jaxrec.shard(model, plan, mesh, dense=first)
    with pytest.raises(ValueError, match=r"towers on hosts read whole parameters.* '0/"):
        model.disaggregate()


def test_dropout_stays_on_top():
    model, _ = on_hosts(make())
    model.towers[0] = nnx.Sequential(model.towers[0], nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="parameters alone"):
        model.disaggregate()


def test_tables_that_are_elsewhere():
    with pytest.raises(ValueError, match="on one device"):
        make().disaggregate()
    model, _ = on_hosts(make(), "pooled")
    with pytest.raises(ValueError, match="table 'user' is placed table_row_wise with exchange="):
        model.disaggregate()
    model = make()
    mesh = jax.make_mesh((HOSTS, DEVICES), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    apart = {name: jaxrec.mesh.table_row_wise(i % 2) for i, name in enumerate(TABLES)}
    model = jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(apart), mesh)
    with pytest.raises(ValueError, match=r"\('user', 'city'\) of one tower are on hosts \[0, 1\]"):
        model.disaggregate()


@pytest.mark.parametrize(
    "towers", [(("user", "city"), ("item", "user", "shop")), (("user",), ("item", "shop"))]
)
def test_a_table_in_two_towers_or_none(towers):
    with pytest.raises(ValueError, match="each table is in one tower"):
        make(towers)


def test_dense_features_need_layers():
    features, _ = batch()
    with pytest.raises(ValueError, match="come together"):
        make()(jnp.ones((BATCH, 3)), features)
