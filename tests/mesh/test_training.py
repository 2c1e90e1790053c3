"""A sharded model follows the same model on one device, step by step."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec import embed
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    grid,
    row_wise,
    shard_batch,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tests.mesh.table_steps import train_tables

pytestmark = pytest.mark.jax_version

ROWS = {"a": 100, "b": 37, "c": 64, "d": 50}
BATCH = 16

PLACEMENTS = {
    "every_type": {
        "a": row_wise(),
        "b": table_wise(3),
        "c": column_wise((0, 1)),
        "d": data_parallel(),
    },
    "one_device": dict.fromkeys(ROWS, table_wise(1)),
    "rows": dict.fromkeys(ROWS, row_wise()),
    "whole_rows": {
        "a": row_wise(),
        "b": table_wise(3),
        "c": row_wise(exchange="pooled"),
        "d": data_parallel(),
    },
    "sums": {
        "a": row_wise(exchange="pooled"),
        "b": table_row_wise(1, exchange="pooled"),
        "c": row_wise((0, 2, 5), exchange="pooled"),
        "d": data_parallel(),
    },
    "sums_of_columns": {
        "a": grid(exchange="pooled"),
        "b": row_wise(exchange="pooled"),
        "c": row_wise(),
        "d": table_wise(2),
    },
    "bags": {
        "a": column_wise((0, 1)),
        "b": table_wise(5),
        "c": table_wise(0),
        "d": table_column_wise(1),
    },
    "cut": {"a": grid(), "b": column_wise((1, 6)), "c": table_column_wise(0), "d": row_wise()},
    # Every exchange that has a capacity.
    "several_rounds": {
        "a": grid(),
        "b": row_wise((0, 2, 5), exchange="pooled"),
        "c": row_wise(),
        "d": table_row_wise(1, exchange="pooled"),
    },
}
OPTIMIZERS = {
    "sgd": jaxrec.optim.sgd(0.1),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    # Those that divide a gradient by its size also multiply its rounding errors; they step shorter.
    "adam": jaxrec.optim.adam(0.01),
    "lamb": jaxrec.optim.lamb(0.01),
    "rowwise_adagrad_max_norm": jaxrec.optim.rowwise_adagrad(
        0.1, weight_decay=0.1, weight_decay_mode="l2", max_norm=0.5
    ),
    "clip_norm": jaxrec.optim.rowwise_adagrad(0.1, clip_norm=0.02),
    "counter": jaxrec.optim.rowwise_adagrad_with_counter(
        0.1, halflife=2, weight_decay=0.1, weight_decay_mode="l2", learning_rate_mode="counter_sgd"
    ),
    "ema_in_place": jaxrec.optim.ema_in_place(
        optimizer=jaxrec.optim.sgd(0.1, clip_norm=0.02), every=2
    ),
}


class Ranker(nnx.Module):
    def __init__(self, optimizer):
        rngs = nnx.Rngs(0)
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [
                jaxrec.EmbeddingBagConfig("a", ROWS["a"], 8, feature_names=("a", "d")),
                jaxrec.EmbeddingBagConfig("b", ROWS["b"], 8, pooling="mean"),
                jaxrec.EmbeddingBagConfig("c", ROWS["c"], 8),
                jaxrec.EmbeddingBagConfig("d", ROWS["d"], 6),
            ],
            optimizer=optimizer,
            rngs=rngs,
        )
        self.over = nnx.Linear(38, 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


TX = optax.sgd(0.1)  # with one object for all, programs are compiled once


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return ((model(features) - labels) ** 2).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def draw_batch(seed, same_id=False):
    rng = np.random.default_rng(seed)
    lists = {
        key: [
            ([5] * 3 if same_id else rng.integers(0, min(rows, 50), rng.integers(0, 4)).tolist())
            for _ in range(BATCH)
        ]
        for key, rows in ROWS.items()
    }
    features = jaxrec.KeyedJaggedArray.from_lists(lists, capacities=dict.fromkeys(ROWS, 48))
    return features, rng.normal(size=BATCH).astype(np.float32)


BATCHES = [draw_batch(0), draw_batch(1, same_id=True), draw_batch(2)]
LABELS = BATCHES[0][1]


def run(model, place=lambda batch: batch, batches=BATCHES):
    optimizer = jaxrec.Optimizer(model, TX)
    return [float(train_step(model, optimizer, *place(batch))) for batch in batches]


def place_on(mesh):
    """Places batches with the same capacities, so that a step is compiled once."""
    capacities = dict.fromkeys(ROWS, 48 // mesh.size + 4)
    return lambda batch: shard_batch(batch, mesh, capacities=capacities)


MESHES = {
    "one_axis": ((8,), ("data",), AxisType.Auto),
    "two_axes": ((2, 4), ("host", "device"), AxisType.Auto),
    "explicit": ((4,), ("data",), AxisType.Explicit),
}

CASES = [
    ("lamb", "cut", "two_axes"),
    ("rowwise_adagrad_max_norm", "cut", "two_axes"),
    ("clip_norm", "cut", "two_axes"),
    ("clip_norm", "every_type", "explicit"),
    ("adam", "sums_of_columns", "two_axes"),
    ("clip_norm", "sums", "two_axes"),
    ("adam", "bags", "two_axes"),
    ("clip_norm", "one_device", "one_axis"),
    ("counter", "cut", "two_axes"),
    ("ema_in_place", "whole_rows", "one_axis"),
]


@pytest.mark.parametrize(("name", "placements", "mesh"), CASES, ids=["-".join(c) for c in CASES])
def test_training_equals_one_device(name, placements, mesh):
    assert_equal_to_one_device(name, placements, mesh)


@functools.cache
def one_device(name):
    alone = Ranker(OPTIMIZERS[name])
    return run(alone), alone


def assert_equal_to_one_device(name, placements, mesh):
    expected, alone = one_device(name)
    shape, axes, kind = MESHES[mesh]
    mesh = jax.make_mesh(
        shape, axes, axis_types=(kind,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS[placements])
    model = jaxrec.shard(Ranker(OPTIMIZERS[name]), plan, mesh)
    with jax.set_mesh(mesh):
        losses = run(model, place_on(mesh))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for table in ROWS:
        assert_close(model.embeddings.table(table), alone.embeddings.table(table))
        state = model.embeddings.table_state(table)
        for key, array in alone.embeddings.table_state(table).items():
            assert_close(state[key], array)


def assert_close(array, expected):
    """Equal to 1e-6 of the size of what is in the array."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(array, expected, rtol=0, atol=max(1e-6 * scale, 1e-12))


def test_halves_of_rows_stay_together():
    mesh = jax.make_mesh((8,), ("data",))
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS["cut"])
    with pytest.raises(ValueError, match="its optimizer ema_in_place needs whole rows"):
        jaxrec.shard(Ranker(OPTIMIZERS["ema_in_place"]), plan, mesh)


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "placements"),
    [
        ("clip_norm", "several_rounds"),
        ("adam", "rows"),
        ("rowwise_adagrad", "cut"),
        ("sgd", "sums"),
    ],
)
def test_rows_that_need_several_rounds(monkeypatch, name, placements):
    """With room for one row a round, the exchange still brings every row and gradient home."""
    monkeypatch.setattr("jaxrec.mesh.store.DEFAULT_CAPACITY_FACTOR", 0.0)
    assert_equal_to_one_device(name, placements, "two_axes")


class Weighted(nnx.Module):
    """Bags whose weights are learnt: sums and means by each exchange."""

    exchanges: ClassVar = {
        "rows": row_wise(exchange="rows"),
        "pooled": row_wise(exchange="pooled"),
        "bags": table_wise(1),
    }

    def __init__(self):
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [
                jaxrec.EmbeddingBagConfig(
                    f"{key} by {name}", ROWS[key], 8, feature_names=(key,), pooling=pooling
                )
                for name in self.exchanges
                for key, pooling in (("a", "sum"), ("b", "mean"))
            ],
            optimizer=jaxrec.optim.sgd(0.1),
            is_weighted=True,
            rngs=nnx.Rngs(0),
        )
        self.of_ids = nnx.Param(jnp.linspace(0.5, 2, 100))

    def __call__(self, features):
        weights = self.of_ids[features.values]
        found = self.embeddings(dataclasses.replace(features, weights=weights)).values
        return found.sum(axis=1)


def test_weights_are_learnt():
    features, labels = draw_batch(0)
    features = features.select(("a", "b"))
    alone = Weighted()
    expected = run(alone, batches=[(features, labels)] * 2)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    placements = {
        f"{key} by {name}": exchange
        for name, exchange in Weighted.exchanges.items()
        for key in ("a", "b")
    }
    model = jaxrec.shard(Weighted(), jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
    losses = run(model, place_on(mesh), [(features, labels)] * 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(model.of_ids[...], alone.of_ids[...], rtol=1e-5)


def test_tables_that_are_looked_up_twice_are_updated_once():
    """By both lookups' gradients together, as row-wise Adagrad shows, whichever way rows travel."""
    placements = {
        "a": row_wise(),
        "b": row_wise(exchange="pooled"),
        "c": table_wise(2),
        "d": data_parallel(),
        "pieces of a": column_wise((3, 1)),
    }
    configs = [
        jaxrec.EmbeddingBagConfig(name, ROWS[name[-1]], 8, feature_names=(name[-1],))
        for name in placements
    ]

    def make():
        optimizer = jaxrec.optim.rowwise_adagrad(0.1)
        return jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=nnx.Rngs(0))

    def loss(calls):
        one, other = (found.values for found in calls)
        return (((one * other).sum(axis=1) - LABELS) ** 2).mean()

    batches = [
        (draw_batch(0)[0], draw_batch(1)[0]),
        (draw_batch(2, same_id=True)[0], draw_batch(3)[0]),
    ]
    alone = make()
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    model = jaxrec.shard(make, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
    for step, batch in enumerate(batches):
        expected = train_tables(loss, alone, batch, step)
        found = train_tables(loss, model, place_on(mesh)(batch), step)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for table in placements:
        assert_close(model.table(table), alone.table(table))


def test_ids_outside_their_table_change_no_piece_of_a_row():
    """On the device a bad id makes its bag NaN; owners add up sums of the others alone."""
    mesh = jax.make_mesh((2, 2), ("host", "device"), devices=jax.devices()[:4])
    placements = {
        "a": column_wise((3, 1)),
        "b": grid(),
        "c": row_wise(),
        "d": row_wise(exchange="pooled"),
        "e": table_wise(2),
        "f": data_parallel(),
    }
    configs = [jaxrec.EmbeddingBagConfig(name, 10, 8) for name in placements]
    model = jaxrec.EmbeddingBagCollection(
        configs, optimizer=jaxrec.optim.rowwise_adagrad(0.1), rngs=nnx.Rngs(0)
    )
    jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
    before = {name: np.asarray(model.table(name)) for name in placements}
    bags = [[1, 99], [2], [1000], [2, 2]]
    features = jaxrec.KeyedJaggedArray.from_lists(dict.fromkeys(placements, bags))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(tables, features):
        pooled, residuals = embed.lookup(tables, features)
        gradients = jax.tree.map(lambda found: jnp.where(jnp.isnan(found), 0 * found, 1), pooled)
        return pooled.values, embed.apply_gradients(tables, residuals, gradients, 0)

    with jax.set_mesh(mesh):
        found, tables = step(model.tables.get_value(), shard_batch(features, mesh))
    model.tables.set_value(tables)
    np.testing.assert_array_equal(np.isnan(found).all(axis=1), [True, False, True, False])
    for name, rows in before.items():
        changed = (np.asarray(model.table(name)) != rows).any(axis=1)
        assert set(np.flatnonzero(changed)) <= {1, 2}
        # The gradient is three times one, so the root of the mean square is 3 and the step 0.1.
        np.testing.assert_allclose(model.table(name)[2], rows[2] - 0.1, rtol=1e-5)


def test_embeddings_of_sequences():
    """Per-id lookups of a table cut by rows and one cut by columns, and their update."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))

    def collection():
        tables = [jaxrec.EmbeddingConfig("a", 40, 4), jaxrec.EmbeddingConfig("c", 40, 6)]
        return jaxrec.EmbeddingCollection(tables, optimizer=jaxrec.optim.sgd(0.1), rngs=nnx.Rngs(0))

    def step(model, features):
        def loss(model):
            found = model(features)
            total = sum((jnp.tanh(x.values) ** 2).sum() for x in found.values())
            return total, {key: x.lengths for key, x in found.items()}

        (value, lengths), gradients = jaxrec.value_and_grad(loss, has_aux=True)(model)
        model.apply_gradients(gradients.tables[""], 0)
        return value, lengths

    features, _ = draw_batch(0)
    features = features.select(("a", "c"))
    features = jax.tree.map(lambda x: x % 40 if x.ndim and x.dtype == np.int32 else x, features)
    alone, sharded = collection(), collection()
    plan = jaxrec.plan.ShardingPlan.from_dict({"a": row_wise(), "c": column_wise((0, 2))})
    jaxrec.shard(sharded, plan, mesh)
    expected, all_lengths = nnx.jit(step)(alone, features)
    value, lengths = nnx.jit(step)(sharded, shard_batch(features, mesh))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for table in ("a", "c"):
        np.testing.assert_array_equal(lengths[table].reshape(-1), all_lengths[table])
        np.testing.assert_allclose(sharded.table(table), alone.table(table), rtol=1e-5, atol=1e-7)
