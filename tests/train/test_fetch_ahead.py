"""Steps that fetch rows of the next batch before their update: the same bits as plain steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed import WrappingStore
from jaxrec.mesh import ahead, data_parallel, row_wise, table_wise
from jaxrec.mesh.channel import OneByOne
from jaxrec.train import RoutedSteps, compile_step
from jaxrec.train.routing import alike_pairs_of
from tests.copies import find_copies

pytestmark = pytest.mark.jax_version

ROWS, BATCH, STEPS = 100, 32, 10
SGD, ADAGRAD = jaxrec.optim.sgd(0.1), jaxrec.optim.rowwise_adagrad(0.1)
PLACEMENTS = {
    "rows": {"sum": row_wise(), "mean": row_wise()},
    "bags": {"sum": table_wise(2), "mean": table_wise(5)},
    "pooled": {"sum": row_wise(exchange="pooled"), "mean": data_parallel()},
}


class Ranker(nnx.Module):
    """A collection that is called twice."""

    def __init__(self, optimizer):
        rngs = nnx.Rngs(0)
        configs = [
            jaxrec.EmbeddingBagConfig(name, ROWS, 8, pooling=name) for name in PLACEMENTS["rows"]
        ]
        self.bags = jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=rngs)
        self.hidden, self.over = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, batch):
        pooled = self.bags(batch[0]).values + self.bags(batch[1]).values
        return self.over(jax.nn.relu(self.hidden(pooled)))[:, 0]


def train_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.square(model(batch) - 1).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def train_twice(model, optimizer, batch):
    return train_step(model, optimizer, batch[:2]) + train_step(model, optimizer, batch[2:])


def forward_twice(model, batch):
    return model(batch[:2]), model(batch[2:])


def make(exchange, optimizer=SGD, axes=AxisType.Auto):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axes,))
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS[exchange])
    model = jaxrec.shard(Ranker(optimizer), plan, mesh)
    return model, jaxrec.Optimizer(model, optax.adam(1e-2)), mesh


def batches(mesh, parts=2):
    """Batches whose ids follow a power law, so that most rows come again in the next batch."""
    random = np.random.default_rng(0)

    def features():
        lists = {
            name: [(random.zipf(1.2, random.integers(0, 5)) % ROWS).tolist() for _ in range(BATCH)]
            for name in PLACEMENTS["rows"]
        }
        return jaxrec.KeyedJaggedArray.from_lists(lists)

    capacities = dict.fromkeys(PLACEMENTS["rows"], 32)
    return [
        jaxrec.mesh.shard_batch([features() for _ in range(parts)], mesh, capacities=capacities)
        for _ in range(STEPS)
    ]


def contents(model, optimizer):
    return jax.tree.map(np.asarray, jax.tree.leaves(nnx.state((model, optimizer))))


def load(model, step):
    """Load a table between two steps, as users may."""
    if step == 5:
        model.bags.load_table("sum", np.full((ROWS, 8), 0.5, np.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WritesRowZero(WrappingStore):
    """Its update writes a row that no gradient reached."""

    def update(self, calls, step, is_applied=None):
        inner = self.inner.update(calls, step, is_applied)
        (group,) = inner.groups
        slots = jnp.zeros((8, 1), jnp.int32)
        rows, state = inner.read_rows(group, slots)
        return self.with_inner(inner.write_rows(group, slots, rows + 1, state))


@pytest.mark.slow
def test_a_store_that_writes_more_rows_is_not_fetched():
    losses = []
    for is_ahead in (False, True):
        model, dense, mesh = make("rows")
        model.bags.tables.set_value(WritesRowZero(model.bags.tables.get_value()))
        steps = RoutedSteps(
            train_step, lambda model, batch: model(batch), model, dense, fetch_ahead=is_ahead
        )
        losses.append([float(loss) for _, loss in steps(batches(mesh)[:4])])
    assert losses[0] == losses[1]
    assert fetched_groups(steps) == set()


def fetched_of(steps):
    """Return the lines of the next batch, by the collection's path and the group."""
    return {
        (path, name): route.fetched
        for path, calls in steps._fetching._first.get_value().items()
        for call in calls
        for name, route in call.routes.items()
        if route.fetched is not None
    }


def fetched_groups(steps):
    return {name for _, name in fetched_of(steps)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "optimizer", "axes"),
    [("rows", ADAGRAD, AxisType.Explicit), ("bags", SGD, AxisType.Auto)],
    ids=["rows", "bags"],
)
def test_the_same_bits_as_plain_steps(exchange, optimizer, axes, monkeypatch):
    """Also with several rounds, more stale rows than a message holds, and a loaded table."""
    monkeypatch.setattr(ahead, "WINDOW", 2)
    model, dense, mesh = make(exchange, optimizer, axes)
    plain, expected = compile_step(train_step, model, dense), []
    for step, batch in enumerate(batches(mesh)):
        expected.append(float(plain(batch)))
        load(model, step)
    state = contents(model, dense)

    model, dense, mesh = make(exchange, optimizer, axes)
    (group,) = model.bags.tables.get_value().groups
    ahead.set_capacity_factors(model, {("bags", group): 0.3, ("bags", f"{group} stale"): 0.1})
    steps = RoutedSteps(
        train_step, lambda model, batch: model(batch), model, dense, fetch_ahead=True
    )
    given, losses = batches(mesh), []
    for step, (batch, loss) in enumerate(steps(given)):
        assert batch is given[step]
        losses.append(float(loss))
        load(model, step)
    assert losses == expected
    for found, wanted in zip(contents(model, dense), state, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert fetched_groups(steps) == {group}
    tables = model.bags.tables.get_value()
    assert dict(tables.capacity_factors)[f"{group} stale"] > 0.1
    # The rows are read before the update writes them in place, and not from a copy.
    pair = given[0], given[1]
    compiled = steps._fetching._routed.lower(pair, pair).compile()
    assert not find_copies(compiled, tables.rows[group].addressable_shards[0].data.shape)


@pytest.mark.slow
def test_two_updates_in_a_step():
    """The first one makes the rows of the second lookup stale."""
    model, dense, mesh = make("rows")
    plain = compile_step(train_twice, model, dense)
    given = batches(mesh, parts=4)[:3]
    expected = [float(plain(batch)) for batch in given]
    model, dense, mesh = make("rows")
    steps = RoutedSteps(train_twice, forward_twice, model, dense, fetch_ahead=True)
    assert [float(loss) for _, loss in steps(batches(mesh, parts=4)[:3])] == expected


def test_a_loss_waits_for_neither_tables_nor_the_next_batch(monkeypatch):
    """Where collectives have an order of their own, that is: simulated devices take turns."""
    monkeypatch.setattr(OneByOne, "_record", lambda self, result: None)
    model, dense, mesh = make("bags")
    steps = RoutedSteps(
        train_step, lambda model, batch: model(batch), model, dense, fetch_ahead=True
    )
    fetching, batch = steps._fetching, batches(mesh)[0]
    graph, state = nnx.split((model, dense))
    fetching._route((batch, batch))
    first, routes = fetching._first.get_value(), fetching._ahead.get_value()

    def loss(state, first, routes, batch, following):
        model, dense = nnx.merge(graph, state)
        variables, pair = (nnx.Variable(first), nnx.Variable(routes)), (batch, following)
        return fetching._step_and_route(model, dense, *variables, pair, pair)[0]

    arguments = (state, first, routes, batch, batch)
    traced = jax.make_jaxpr(loss)(*arguments)
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    paths = [path for path, _ in jax.tree.leaves_with_path(arguments)]
    used_paths = [
        jax.tree_util.keystr(path) for path, is_used in zip(paths, used, strict=True) if is_used
    ]
    assert any("lines" in path for path in used_paths)
    assert not any("tables" in path or path.startswith(("[2]", "[4]")) for path in used_paths)


def test_sums_of_owners_and_replicated_rows_are_not_fetched():
    model, dense, mesh = make("pooled")
    steps = RoutedSteps(
        train_step, lambda model, batch: model(batch), model, dense, fetch_ahead=True
    )
    batch = batches(mesh)[0]
    steps._fetching._route((batch, batch))
    assert fetched_groups(steps) == set()


class Mixed(nnx.Module):
    """Single rows, weighted bags, and a frozen table."""

    def __init__(self):
        rngs, bag = nnx.Rngs(0), jaxrec.EmbeddingBagConfig
        self.items = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("items", 2000, 4)], optimizer=SGD, rngs=rngs
        )
        self.weighted = jaxrec.EmbeddingBagCollection(
            [bag("weighted", 2000, 4)], is_weighted=True, optimizer=SGD, rngs=rngs
        )
        self.frozen = jaxrec.EmbeddingBagCollection(
            [bag("frozen", 2000, 4, trainable=False)], rngs=rngs
        )

    def __call__(self, batch):
        unweighted = dataclasses.replace(batch, weights=None)
        items = self.items(unweighted)["items"].values
        pooled = self.weighted(batch).values * (1 + self.frozen(unweighted).values)
        return pooled.sum(axis=1) + jnp.square(items).mean()


MIXED = {"items": row_wise(), "weighted": row_wise(), "frozen": table_wise(3)}


def make_mixed():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = jaxrec.shard(Mixed(), jaxrec.plan.ShardingPlan.from_dict(MIXED), mesh)
    return model, jaxrec.Optimizer(model, optax.sgd(0.1)), mesh


def mixed_batches(mesh):
    """Batches that share some of their rows; the last one is smaller."""
    random = np.random.default_rng(0)
    for size in (64, 64, 64, 64, 32):
        ids = {name: random.integers(0, 2000, (size, 4)).tolist() for name in MIXED}
        weights = {name: random.uniform(size=(size, 4)).tolist() for name in MIXED}
        batch = jaxrec.KeyedJaggedArray.from_lists(ids, weights=weights)
        yield jaxrec.mesh.shard_batch(batch, mesh, capacities=dict.fromkeys(MIXED, size // 2))


@pytest.mark.slow
def test_rows_weights_and_frozen_tables(monkeypatch):
    """Few rows come again, so that most of the lines stay as they were fetched."""
    model, dense, mesh = make_mixed()
    plain = compile_step(train_step, model, dense)
    expected = [float(plain(batch)) for batch in mixed_batches(mesh)]
    state = contents(model, dense)

    model, dense, mesh = make_mixed()
    steps = RoutedSteps(
        train_step, lambda model, batch: model(batch), model, dense, fetch_ahead=True
    )
    # One round brings all rows, so that no capacity changes.
    groups = {
        (path, name): 8.0
        for path in MIXED
        for name in getattr(model, path).tables.get_value().groups
    }
    ahead.set_capacity_factors(model, groups)
    routed, route = [], steps._fetching._route
    monkeypatch.setattr(steps._fetching, "_route", lambda pair: routed.append(pair) or route(pair))
    losses, shares = [], []
    for _, loss in steps(mixed_batches(mesh)):
        losses.append(float(loss))
        shares.append({path: lines.demand for (path, _), lines in fetched_of(steps).items()})
    assert losses == expected
    for found, wanted in zip(contents(model, dense), state, strict=True):
        np.testing.assert_array_equal(found, wanted)
    # Only the first batch, and the last one, of another shape, are routed outside of a step.
    assert len(routed) == 2
    for share in shares[:3]:
        assert set(share) == set(MIXED)
        assert share["frozen"] is None
        assert 0 < float(share["items"].max()) < 0.9
        assert 0 < float(share["weighted"].max()) < 0.9


def test_shapes_of_batches_compile_a_program_each():
    """Not each pair of shapes: a smaller last batch costs one program."""
    shapes = np.array([8, 16, 24])
    given = [np.zeros(shapes[k]) for k in (0, 0, 1, 1, 0, 2, 1, 0, 2)]
    pairs = list(alike_pairs_of(given))
    assert [batch for batch, _ in pairs] == given
    assert {(one.size, other.size) for one, other in pairs} == {(size, size) for size in shapes}


def test_rows_that_a_tier_moves_are_not_fetched():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS["rows"])
    vocabularies = {"sum": jaxrec.tier.Dynamic()}
    model = jaxrec.shard(jaxrec.tier.make(lambda: Ranker(SGD), vocabularies), plan, mesh)
    dense = jaxrec.Optimizer(model, optax.sgd(0.1))
    steps = RoutedSteps(
        train_step, lambda model, batch: model(batch), model, dense, fetch_ahead=True
    )
    assert steps._fetching is None


def test_a_forward_without_lookups_fetches_nothing():
    model, dense, mesh = make("rows")
    plain, given = compile_step(train_step, model, dense), batches(mesh)[:2]
    expected = [float(plain(batch)) for batch in given]
    model, dense, _ = make("rows")
    steps = RoutedSteps(train_step, lambda model, batch: None, model, dense, fetch_ahead=True)
    assert [float(loss) for _, loss in steps(given)] == expected
