"""Packed rows over a mesh: trained ones train as on one device, quantized ones are looked up."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.mesh import (
    average_replicas,
    column_wise,
    data_parallel,
    grid,
    row_wise,
    shard_batch,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from jaxrec.plan import Planner, ShardingPlan, TableCache, Topology
from jaxrec.serve import by_norm, quantize, save_quantized

pytestmark = pytest.mark.jax_version

DIM, BATCH = 8, 16
WHOLE = {
    "row_wise": row_wise(),
    "row_wise_sums": row_wise(exchange="pooled"),
    "table_wise": table_wise(3),
    "data_parallel": data_parallel(),
    "table_row_wise": table_row_wise(1),
}
CUT = {
    "column_wise": column_wise((0, 1)),
    "table_column_wise": table_column_wise(0),
    "grid": grid(),
}
PLACEMENTS = WHOLE | CUT
TOPOLOGY = Topology.named("h100", devices=8)
PLAN = ShardingPlan.from_dict(PLACEMENTS)
CACHES = ShardingPlan.from_dict(PLACEMENTS, {"row_wise": TableCache(rows=20)})
RNG = np.random.default_rng(0)
IDS = {name: [list(RNG.integers(0, 40, 1 + i % 4)) for i in range(BATCH)] for name in PLACEMENTS}
FEATURES = jaxrec.KeyedJaggedArray.from_lists(IDS)


def make_mesh():
    return jax.make_mesh((2, 4), ("host", "data"))


def make(dtype: str, optimizer=None) -> jaxrec.EmbeddingBagCollection:
    """A table for each placement."""
    configs = [jaxrec.EmbeddingBagConfig(name, 40, DIM, dtype=dtype) for name in PLACEMENTS]
    optimizer = optimizer or jaxrec.optim.rowwise_adagrad(0.1, stochastic_rounding=False)
    return jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=nnx.Rngs(0))


def sharded(model):
    return jaxrec.shard(model, PLAN, make_mesh())


def train(model, features, steps: int = 3) -> list[float]:
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, features):
        def loss(model):
            return ((model(features).values - 1) ** 2).mean()

        loss, gradients = jaxrec.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return loss

    return [float(step(model, optimizer, features)) for _ in range(steps)]


@functools.cache
def trained(dtype: str):
    """A model on one device and one over a mesh after the same steps."""
    alone, spread = make(dtype), sharded(functools.partial(make, dtype))
    losses = [train(alone, FEATURES), train(spread, shard_batch(FEATURES, make_mesh()))]
    return alone, spread, losses


def largest_step(rows: np.ndarray, dtype: str) -> np.ndarray:
    """The largest distance of two neighbouring codes of each row."""
    if dtype == "int8":
        return np.ptp(rows, axis=1, keepdims=True) / 255
    return np.abs(rows).max(axis=1, keepdims=True) * (32 / 448)  # 448 is the largest e4m3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3", marks=pytest.mark.slow)])
def test_training_is_that_of_one_device(dtype):
    alone, spread, losses = trained(dtype)
    np.testing.assert_allclose(*losses, rtol=1e-3)
    for name in WHOLE:
        rows, expected = np.asarray(spread.table(name)), np.asarray(alone.table(name))
        # Gradients are summed in another order, which changes the last bits of the scales and
        # offsets. An element takes the next code only where it lay between two codes, to the bit.
        difference, step = np.abs(rows - expected), largest_step(expected, dtype)
        is_next_code = difference > 1e-3 * step
        assert np.mean(is_next_code) < 0.005
        assert (difference <= 1.001 * step).all()
        last_bit = np.abs(expected).max(axis=1, keepdims=True) * 2.0**-23
        assert (difference <= 4 * last_bit)[~is_next_code].all()
    for name in CUT:  # Each part of a row has a scale of its own.
        np.testing.assert_allclose(spread.table(name), alone.table(name), atol=0.05)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        pytest.param("float8_e4m3", marks=pytest.mark.slow),
        pytest.param("float8_e5m2", marks=pytest.mark.slow),
    ],
)
def test_trained_rows_are_cut_as_they_are(dtype):
    """Parts of a row keep its scale: on the mesh the model is the same, to the bit."""
    model = make(dtype)
    train(model, FEATURES, steps=1)
    before = {name: np.asarray(model.table(name)) for name in PLACEMENTS}
    expected = np.asarray(model(FEATURES).values)
    model = sharded(model)
    for name, rows in before.items():
        np.testing.assert_array_equal(model.table(name), rows, err_msg=name)
    # The same cuts on other devices, and finer ones.
    others = {
        "column_wise": column_wise((5, 2)),
        "table_column_wise": column_wise((1, 2, 3, 4, 5, 6, 7, 0)),
        "grid": grid((1, 0)),
    }
    plan = ShardingPlan.from_dict(dict.fromkeys(WHOLE, column_wise((7, 6, 5, 4))) | others)
    model = jaxrec.shard(model, plan, make_mesh())
    for name, rows in before.items():
        np.testing.assert_array_equal(model.table(name), rows, err_msg=name)
    look_up = nnx.jit(lambda model, features: model(features).values)
    found = look_up(model, shard_batch(FEATURES, make_mesh()))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # Coarser ones take columns of several parts, each of which may have a scale of its own.
    model = sharded(model)
    for name in WHOLE:
        difference = np.abs(np.asarray(model.table(name)) - before[name])
        assert (difference <= largest_step(before[name], dtype)).all()


@pytest.mark.slow
def test_rows_keep_their_bits():
    """In reads and writes of tables, of some rows, and in a checkpoint."""
    _, spread, _ = trained("int8")
    before = jax.tree.map(np.asarray, spread.tables.get_value().rows)
    store = spread.tables.get_value()
    for name in PLACEMENTS:
        table = np.asarray(spread.table(name))
        spread.load_table(name, table)
        spread.load_rows(name, [5, 1, 39], spread.rows(name, [5, 1, 39]))
        store = spread.tables.get_value()
        logical = store.checkpoint_view(name)
        spread.tables.set_value(store.from_checkpoint(name, logical, 40))
        np.testing.assert_array_equal(logical.rows[:40], table)
    after = jax.tree.map(np.asarray, spread.tables.get_value().rows)
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.slow
def test_numbers_that_rows_cannot_hold():
    _, spread, _ = trained("int8")
    table = np.array(spread.table("row_wise"))
    table[3, 1] = np.nan
    with pytest.raises(ValueError, match="table 'row_wise', row 3, column 1 is nan"):
        spread.load_table("row_wise", table)
    with pytest.raises(ValueError, match="table 'row_wise', given row 0, column 1 is nan"):
        spread.load_rows("row_wise", [3], table[3:4])


def test_replicas_are_averaged():
    mesh = jax.make_mesh((2, 4), ("replica", "data"))
    plan = ShardingPlan.from_dict(dict.fromkeys(PLACEMENTS, row_wise()))
    model = jaxrec.shard(functools.partial(make, "int8"), plan, mesh, replica_axis="replica")
    before = np.asarray(model.table("row_wise"))
    average_replicas(model)
    np.testing.assert_array_equal(model.table("row_wise"), before)
    train(model, shard_batch(FEATURES, mesh))
    average_replicas(model)
    (rows, *_) = model.tables.get_value().rows.values()
    parts = {}
    for part in rows.stored.addressable_shards:
        parts.setdefault(part.index[0].start, []).append(np.asarray(part.data))
    assert all((one == two).all() for one, two in parts.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8", "float16"])
def test_quantized_model_over_a_mesh(dtype):
    """The packed rows are copied, and looked up by every exchange."""
    small = quantize(make("float32"), dtype)
    spread = sharded(quantize(make("float32"), dtype))
    look_up = nnx.jit(lambda model, features: model(features))
    pooled = look_up(spread, shard_batch(FEATURES, make_mesh()))
    expected = small(FEATURES)
    for name in WHOLE:
        np.testing.assert_array_equal(spread.table(name), small.table(name))
        np.testing.assert_allclose(pooled[name], expected[name], rtol=1e-5, atol=1e-6)
    for name in CUT:
        np.testing.assert_array_equal(spread.table(name), small.table(name))
        np.testing.assert_allclose(pooled[name], expected[name], rtol=1e-5, atol=1e-6)
    itemsize = {"float16": 2}.get(dtype, 1)
    assert all(
        a.dtype.itemsize == itemsize for a in jax.tree.leaves(spread.tables.get_value().rows)
    )


def test_a_function_makes_a_quantized_model():
    """Its float table is made on the mesh, and the packed rows are moved there."""

    def make_small():
        config = jaxrec.EmbeddingBagConfig("row_wise", 40, DIM)
        return quantize(jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)), "int4")

    spread, small = sharded(make_small), make_small()
    np.testing.assert_array_equal(spread.table("row_wise"), small.table("row_wise"))
    (rows,) = spread.tables.get_value().rows.values()
    assert rows.stored.shape == (40, 4 + DIM // 2)


@pytest.mark.parametrize(
    ("use", "kind", "message"),
    [
        (lambda model: quantize(sharded(model)), ValueError, r"quantized already \(int8\)"),
        (
            lambda model: save_quantized(sharded(model), "x"),
            TypeError,
            "'column_wise' is cut by columns",
        ),
        (
            lambda model: jaxrec.shard(lambda: model, CACHES, make_mesh()),
            TypeError,
            r"'row_wise' is quantized \(int8\) .* give jaxrec.tier.Cached to",
        ),
        (
            lambda model: Planner(TOPOLOGY, storages=("host",)).plan(model, batch_size=16),
            ValueError,
            r"quantized \(int8\), and quantized tables lie on the devices; got storages=\('host'",
        ),
        (
            lambda _: Planner(TOPOLOGY).plan(lambda: quantize(make("float32")), batch_size=16),
            TypeError,
            "are abstract, and quantize packs their rows",
        ),
        (
            lambda _: sharded(quantize(make("float32"), prune={"grid": by_norm(share=0.5)})),
            TypeError,
            "tables 'grid' are pruned, and pruned tables lie on one device",
        ),
    ],
    ids=["quantized_twice", "saved", "cached", "on_hosts", "abstract", "pruned"],
)
def test_what_quantized_models_cannot_do(use, kind, message):
    with pytest.raises(kind, match=message):
        use(quantize(make("float32"), "int8"))


def test_quantized_tables_stay_on_the_devices():
    """Where other tables may have caches."""
    planner = Planner(TOPOLOGY, storages=("device", "host"))
    plan = planner.plan(quantize(make("float32"), "int8"), batch_size=16)
    assert plan.caches == ()


def test_quantized_model_over_a_mesh_is_not_trained():
    spread = sharded(quantize(make("float32"), "int8"))
    with pytest.raises(TypeError, match=r"'row_wise' \(int8\).* quantized for inference"):
        train(spread, shard_batch(FEATURES, make_mesh()))


def test_plan_counts_the_bytes_of_packed_rows():
    rows = {}
    for dtype in ("float32", "int8", "float8_e4m3"):
        config = jaxrec.EmbeddingBagConfig("a", 1000, 64, dtype=dtype, trainable=False)
        plan = Planner(TOPOLOGY).evaluate(
            [config], ShardingPlan.from_dict({"a": table_wise(0)}), batch_size=64
        )
        rows[dtype] = plan.estimate.tables[0].bytes
    assert rows["float32"] - rows["int8"] == 1000 * (256 - 72)
    assert rows["float32"] - rows["float8_e4m3"] == 1000 * (256 - 68)
