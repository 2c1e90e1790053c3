"""Steps that route the next batch: the same bits, and the routing waits for nothing."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import ahead, column_wise, data_parallel, grid, row_wise, table_wise
from jaxrec.mesh.channel import OneByOne
from jaxrec.mesh.tables import ShardedTables
from jaxrec.train import RoutedSteps, compile_step
from jaxrec.train.train_steps import SemiSynchronousSteps
from tests.users_xla import AS_USERS_DO

DEVICES, BATCH, STEPS = 8, 16, 8
CALLS = 3  # of a ranker's collections
ROWS = {"a": 100, "b": 40, "c": 64}
PLACEMENTS = {
    "rows": {"a": row_wise(), "b": row_wise(), "c": grid()},
    "pooled": {"a": row_wise(exchange="pooled"), "b": row_wise(), "c": table_wise(1)},
    "bags": {"a": column_wise((0, 1)), "b": table_wise(2), "c": data_parallel()},
    "copies": dict.fromkeys(ROWS, data_parallel()),
}


class Ranker(nnx.Module):
    """Two collections, of which one is called twice."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.bags = jaxrec.EmbeddingBagCollection(
            [
                jaxrec.EmbeddingBagConfig("a", ROWS["a"], 8),
                jaxrec.EmbeddingBagConfig("c", ROWS["c"], 16, pooling="mean"),
            ],
            rngs=rngs,
        )
        self.items = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("b", ROWS["b"], 8)], optimizer=jaxrec.optim.adam(), rngs=rngs
        )
        self.over = nnx.Linear(24, 1, rngs=rngs)

    def __call__(self, batch):
        first, second = batch["first"], batch["second"]
        pooled = self.bags(first).values + self.bags(second).values
        items = self.items(first)["b"].values
        return self.over(pooled)[:, 0] + jnp.square(items).mean()


def train_step(model, optimizer, batch):
    def loss_fn(model):
        return jnp.square(model(batch) - 1).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def make(placements):
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    placed = dict(placements)
    if placed["b"].exchange == "pooled" or placed["b"].kind in ("table_wise", "column_wise"):
        placed["b"] = row_wise()  # single rows are not pooled
    plan = jaxrec.plan.ShardingPlan.from_dict(placed)
    model = jaxrec.shard(Ranker(), plan, mesh)
    return model, jaxrec.Optimizer(model, optax.adam(1e-2)), mesh


def batches(mesh, steps=STEPS):
    """Even ones, ones of a single owner's rows, and ones of a single row.

    A device's even batch asks an owner for one row of a table at most, which default capacities
    have space for. So capacities grow with the second batch, and only then.
    """
    random = np.random.default_rng(0)
    capacities = dict.fromkeys(ROWS, 8)
    owners = np.arange(BATCH * 3).reshape(BATCH, 3) % (BATCH * 3 // DEVICES)
    for step in range(steps):

        def ids(kind=step % 3):
            lists = {}
            for name, rows in ROWS.items():
                even = (2 * owners + 1) * rows // (2 * DEVICES)  # in the middle of owners' rows
                first, bound = ((even, 2), (0, 5), (0, 1))[kind]
                lists[name] = (first + random.integers(0, bound, (BATCH, 3))).tolist()
            return jaxrec.KeyedJaggedArray.from_lists(lists)

        host = {"first": ids(), "second": ids()}
        yield jaxrec.mesh.shard_batch(host, mesh, capacities=capacities)


def contents(model, optimizer):
    return jax.tree.map(np.asarray, jax.tree.leaves(nnx.state((model, optimizer))))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("pooled", "rows") else ())
        for name in PLACEMENTS
    ],
)
def test_the_same_bits_as_steps_one_by_one(name, monkeypatch):
    if name in ("pooled", "copies"):  # between them every exchange
        as_users_do = functools.partial(jax.jit, compiler_options=AS_USERS_DO)
        jax_as_users_do = types.SimpleNamespace(**vars(jax) | {"jit": as_users_do})
        monkeypatch.setattr("jaxrec.train.step.jax", jax_as_users_do)
    monkeypatch.setattr(ahead, "WINDOW", 2)
    model, optimizer, mesh = make(PLACEMENTS[name])
    plain = compile_step(train_step, model, optimizer)
    expected = [float(plain(batch)) for batch in batches(mesh)]
    tables = contents(model, optimizer)
    model, optimizer, mesh = make(PLACEMENTS[name])
    steps = RoutedSteps(train_step, lambda model, batch: model(batch), model, optimizer)
    given = list(batches(mesh))
    found = list(steps(given[:2])) + list(steps(given[2:]))
    assert [batch for batch, _ in found] == given
    assert [float(loss) for _, loss in found] == expected
    for got, wanted in zip(contents(model, optimizer), tables, strict=True):
        np.testing.assert_array_equal(got, wanted)
    factors = dict(model.bags.tables.get_value().capacity_factors)
    assert bool(factors) == (name in ("rows", "pooled"))


def test_routing_waits_for_nothing_but_its_batch(monkeypatch):
    """Where collectives have an order of their own, that is: simulated devices take turns."""
    monkeypatch.setattr(OneByOne, "_record", lambda self, result: None)
    model, optimizer, mesh = make(PLACEMENTS["rows"])
    steps = RoutedSteps(train_step, lambda model, batch: model(batch), model, optimizer)
    batch = next(batches(mesh))
    graph, state = nnx.split((model, optimizer))
    steps._route(batch)
    ahead = steps._ahead.get_value()

    def ahead_of_next(state, ahead, batch, following):
        model, optimizer = nnx.merge(graph, state)
        held = nnx.Variable(ahead)
        steps._step_and_route(model, optimizer, held, batch, following)
        return held.get_value()

    traced = jax.make_jaxpr(ahead_of_next)(state, ahead, batch, batch)
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    ends = np.cumsum([len(jax.tree.leaves(each)) for each in (state, ahead, batch, batch)])
    assert not any(used[: ends[2]])
    assert any(used[ends[2] :])


def test_no_batches():
    model, optimizer, _ = make(PLACEMENTS["rows"])
    steps = RoutedSteps(train_step, lambda model, batch: model(batch), model, optimizer)
    assert list(steps([])) == []


@pytest.mark.slow
def test_several_parts_of_a_step_take_what_was_found_in_turn():
    """Gradients of two batches in one step: each has the routes of its own."""

    def of_both(model, optimizer, pair):
        parts = [
            jaxrec.value_and_grad(lambda model, part=part: jnp.square(model(part) - 1).mean())(
                model
            )
            for part in pair
        ]
        optimizer.update(model, jaxrec.embed.gradients.mean_gradients([g for _, g in parts]))
        return sum(loss for loss, _ in parts)

    def forward(model, pair):
        return [model(part) for part in pair]

    model, optimizer, mesh = make(PLACEMENTS["pooled"])
    given = list(batches(mesh, 6))
    pairs = list(zip(given[::2], given[1::2], strict=True))
    plain = compile_step(of_both, model, optimizer)
    expected = [float(plain(pair)) for pair in pairs]
    model, optimizer, _ = make(PLACEMENTS["pooled"])
    steps = RoutedSteps(of_both, forward, model, optimizer)
    assert [float(loss) for _, loss in steps(pairs)] == expected


def loss_of(model, batch):
    losses = jnp.square(model(batch) - 1)
    return losses.mean(), {"p": losses, "y": losses}


def semi_synchronous(name):
    model, optimizer, mesh = make(PLACEMENTS[name])
    state = nnx.Variable(None)
    return SemiSynchronousSteps(model, optimizer, loss_of, None, state, False), mesh


@pytest.mark.slow
def test_semi_synchronous_steps_have_the_same_bits_unrouted(monkeypatch):
    """Also where capacities change between a lookup and the step that uses its embeddings."""
    monkeypatch.setattr(ahead, "WINDOW", 2)
    plain, mesh = semi_synchronous("pooled")
    given = list(batches(mesh, 5))
    embeddings = nnx.Variable(plain._first_lookup(plain.model, given[0]))
    step = compile_step(plain._step, plain.model, plain.optimizer, plain.metric_state, embeddings)
    pairs = zip(given, [*given[1:], given[-1]], strict=True)
    expected = [float(step(pair).loss) for pair in pairs]
    steps, _ = semi_synchronous("pooled")
    found = list(steps(iter(given)))
    assert [batch for (batch,), _ in found] == given
    assert [float(result.loss) for _, result in found] == expected
    for got, wanted in zip(
        contents(steps.model, steps.optimizer), contents(plain.model, plain.optimizer), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    assert ahead.capacity_factors(steps.model) != {}


def test_a_semi_synchronous_step_looks_up_along_the_routes_of_the_step_before(monkeypatch):
    steps, mesh = semi_synchronous("pooled")
    one, other = batches(mesh, 2)
    steps._embeddings.set_value(steps._first_lookup(steps.model, one))
    steps._steps._route((one, other))
    taken, lookup, by_probe = [], ShardedTables.lookup, ahead.LookupProbe.lookup

    def recorded(tables, *args, routes=None, **options):
        taken.append(routes)
        return lookup(tables, *args, routes=routes, **options)

    def of_probe(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(ShardedTables, "lookup", recorded)
            return by_probe(*args, **options)

    monkeypatch.setattr(ahead.LookupProbe, "lookup", of_probe)
    steps._steps._routed.lower((one, other), (other, one))
    assert len(taken) == CALLS
    assert None not in taken


class Shifted(Ranker):
    """A ranker whose ids follow from a variable that each call changes."""

    changes_ids = True

    def __init__(self):
        super().__init__()
        self.shift = nnx.Variable(jnp.int32(0))

    def __call__(self, batch):
        self.shift.set_value(self.shift.get_value() + 1)
        shift = self.shift.get_value()
        shifted = jax.tree.map(lambda ids: (ids + shift) % 40, batch["first"])
        batch = batch | {"first": dataclasses.replace(shifted, lengths=batch["first"].lengths)}
        return super().__call__(batch)


def test_ids_that_calls_change_are_not_routed_two_steps_ahead():
    model, _, mesh = make(PLACEMENTS["rows"])
    assert not ahead.changes_ids(model)
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS["rows"])
    model = jaxrec.shard(Shifted(), plan, mesh)
    assert ahead.changes_ids(model)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    steps = SemiSynchronousSteps(model, optimizer, loss_of, None, nnx.Variable(None), False)
    batch = next(batches(mesh))
    steps._steps._route((batch, batch))
    assert steps._steps._ahead.get_value() is None


@pytest.mark.parametrize("fetch_ahead", [False, True], ids=["routed", "fetched"])
def test_a_map_of_ids_that_changed_between_steps(fetch_ahead):
    """The next batch was routed with the map before."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": row_wise()})

    def make_pruned():
        config = jaxrec.EmbeddingBagConfig("user", 16, 4)
        embeddings = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        model = jaxrec.shard(jaxrec.nn.PrunedEmbeddings(embeddings, {"user": 100}), plan, mesh)
        return model, jaxrec.Optimizer(model, optax.sgd(0.1))

    def pruned_step(model, optimizer, batch):
        loss_fn = lambda model: jnp.square(model(batch).values - 1).sum()  # noqa: E731
        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    def run(steps, model):
        losses = []
        for step, loss in enumerate(steps):
            losses.append(float(loss))
            if step == 1:
                assert model.prune()["user"] > 0
        return losses, np.asarray(model.embeddings.table("user"))

    ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[k % 5 + 50] for k in range(BATCH)]})
    given = [jaxrec.mesh.shard_batch(ids, mesh)] * 4
    model, optimizer = make_pruned()
    plain = compile_step(pruned_step, model, optimizer)
    expected, table = run(map(plain, given), model)
    model, optimizer = make_pruned()
    steps = RoutedSteps(
        pruned_step, lambda model, batch: model(batch), model, optimizer, fetch_ahead=fetch_ahead
    )
    losses, found = run((loss for _, loss in steps(given)), model)
    assert losses == expected
    np.testing.assert_array_equal(found, table)


def test_arguments_of_other_kinds():
    model, forward = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), lambda model, x: model(x)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    with pytest.raises(TypeError, match="needs its modules"):
        RoutedSteps(train_step, forward)
    with pytest.raises(TypeError, match="the first module must be the model, got a Optimizer"):
        RoutedSteps(train_step, forward, optimizer, model)
    with pytest.raises(TypeError, match=r"forward must be a function forward\(model, batch\)"):
        RoutedSteps(train_step, model, optimizer)
    steps = RoutedSteps(train_step, forward, model, optimizer)
    with pytest.raises(TypeError, match=r"an iterable of batches, .* got a ndarray"):
        next(steps(np.ones((4, 1), np.float32)))
