"""Tables of 8-bit rows: updates beside a NumPy oracle, reads and writes, optimizers, averages."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import init_tables
from jaxrec.embed.formats import PackedRows
from tests.embed import trained_oracle

DIM, ROWS = 8, 50
every_format = pytest.mark.parametrize("dtype", trained_oracle.NAMES)
RNG = np.random.default_rng(0)
IDS = [list(RNG.integers(0, ROWS, RNG.integers(0, 6))) for _ in range(32)]
BATCH = jaxrec.KeyedJaggedArray.from_lists({"a": IDS})
WEIGHTED = jaxrec.KeyedJaggedArray.from_lists(
    {"a": IDS}, weights={"a": [[0.5 + i for i in range(len(bag))] for bag in IDS]}
)

OPTIMIZERS = {
    "sgd": jaxrec.optim.sgd(0.1),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    "decay": jaxrec.optim.rowwise_adagrad(0.1, weight_decay=0.01, weight_decay_mode="l2"),
    "adam": jaxrec.optim.adam(0.01),
    "lamb": jaxrec.optim.lamb(0.01),
    "clip_norm": jaxrec.optim.sgd(0.1, clip_norm=0.5),
    "clip_value": jaxrec.optim.sgd(0.1, clip_value=0.01),
    "max_norm": jaxrec.optim.sgd(0.1, max_norm=0.5),
    "ema": jaxrec.optim.ema(optimizer=jaxrec.optim.sgd(0.1), decay=0.9),
    "ftrl": jaxrec.optim.ftrl(0.1),
}


def config(dtype, *, kind=jaxrec.EmbeddingBagConfig, **more):
    return kind("a", ROWS, DIM, dtype=dtype, initializer="normal", **more)


def collection(dtype, optimizer, **more) -> jaxrec.EmbeddingBagCollection:
    return jaxrec.EmbeddingBagCollection(
        [config(dtype)], optimizer=optimizer, rngs=nnx.Rngs(0), **more
    )


def stored(model) -> np.ndarray:
    """The bytes of the model's only table."""
    (rows,) = model.tables.get_value().rows.values()
    assert isinstance(rows, PackedRows)
    return np.array(rows.stored)


def train(model, batch=BATCH, steps: int = 3) -> list[float]:
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer):
        def loss(model):
            found = model(batch)
            values = found.values if hasattr(found, "values") else None
            values = found["a"].values if isinstance(found, dict) else values
            return ((values - 1) ** 2 * (values != 0)).mean()

        loss, gradients = jaxrec.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return loss

    return [float(step(model, optimizer)) for _ in range(steps)]


@every_format
@pytest.mark.parametrize("is_random", [False, True], ids=["nearest", "random"])
def test_update_is_that_of_the_oracle(dtype, is_random):
    """Rows are unpacked, changed by their whole gradient and packed once."""
    rate = 0.1
    optimizer = jaxrec.optim.sgd(rate, stochastic_rounding=is_random)
    tables = init_tables([config(dtype)], optimizer, jax.random.key(0))
    (rows,) = tables.rows.values()
    packed = np.array(rows.stored)
    ids = np.concatenate([np.array(bag, int) for bag in IDS])
    bags = np.repeat(np.arange(len(IDS)), [len(bag) for bag in IDS])
    for step in range(3):
        activations, residuals = tables.lookup(BATCH)
        gradients = np.random.default_rng(step).standard_normal((len(IDS), DIM)).astype("f4")
        cotangents = jax.tree.map(lambda _, given=gradients: jnp.asarray(given), activations)
        tables = tables.update([tables.row_gradients(residuals, cotangents)], step)
        packed = trained_oracle.sgd(
            packed, dtype, DIM, ids, gradients[bags], rate, step if is_random else None
        )
        (rows,) = tables.rows.values()
        found = np.array(rows.stored)
        floats = trained_oracle.unpack(packed, dtype, DIM)
        # Sums are float32 here: an element at the edge of two codes may take the other.
        assert np.mean(found[:, :DIM] != packed[:, :DIM]) < 5e-3
        code = np.abs(floats).max(axis=1, keepdims=True) / 8
        assert (np.abs(trained_oracle.unpack(found, dtype, DIM) - floats) <= code).all()
        packed = found


@every_format
def test_rows_that_do_not_occur_keep_their_bytes(dtype):
    model = collection(dtype, jaxrec.optim.adam(0.1))
    before = stored(model)
    train(model)
    seen = np.isin(np.arange(ROWS), np.concatenate(IDS).astype(int))
    np.testing.assert_array_equal(stored(model)[~seen], before[~seen])
    assert (stored(model)[seen] != before[seen]).any(axis=1).all()


@every_format
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains(dtype, name):
    """Losses stay near those of a float32 table that starts from the same rows."""
    model, wide = (collection(each, OPTIMIZERS[name]) for each in (dtype, "float32"))
    wide.load_table("a", model.table("a"))
    losses = train(model, steps=8)
    np.testing.assert_allclose(losses, train(wide, steps=8), rtol=0.04)


@every_format
@pytest.mark.parametrize("kind", ["weighted", "mean", "per_id", "shared_bags"])
def test_every_kind_of_lookup(dtype, kind):
    """As that of a float32 table with the unpacked rows, weights' gradients included."""
    batch, more = BATCH, {}
    if kind == "weighted":
        batch, more = WEIGHTED, {"is_weighted": True}
    models = []
    for each in (dtype, "float32"):
        if kind == "per_id":
            configs = [config(each, kind=jaxrec.EmbeddingConfig)]
            model = jaxrec.EmbeddingCollection(configs, rngs=nnx.Rngs(0))
        else:
            configs = [config(each, pooling="mean" if kind == "mean" else "sum")]
            model = jaxrec.EmbeddingBagCollection(configs, rngs=nnx.Rngs(0), **more)
        models.append(model)
    if kind == "shared_bags":
        inverse = np.array([[3, 0, 3, 31, 7]], np.int32)
        batch = dataclasses.replace(BATCH, inverse_indices=jnp.asarray(inverse))
    models[1].load_table("a", models[0].table("a"))
    results = [jax.tree.leaves(model(batch))[0] for model in models]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
    if kind == "weighted":

        def loss(weights, model):
            return (model(dataclasses.replace(batch, weights=weights)).values ** 2).sum()

        gradients = [jax.grad(loss)(jnp.asarray(batch.weights), model) for model in models]
        np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-5)


@every_format
def test_reads_and_writes(dtype):
    model = collection(dtype, jaxrec.optim.sgd(0.1))
    before, table = stored(model), np.asarray(model.table("a"))
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, trained_oracle.unpack(before, dtype, DIM))
    np.testing.assert_array_equal(model.rows("a", [3, 3, 0]), table[[3, 3, 0]])
    model.load_table("a", table)
    model.load_rows("a", [7, 2], table[[7, 2]])
    np.testing.assert_array_equal(stored(model), before)
    rows = np.random.default_rng(1).standard_normal((2, DIM)).astype(np.float32)
    model.load_rows("a", [7, 2], rows)
    packed = trained_oracle.pack(rows, dtype)
    assert np.mean(stored(model)[[7, 2]] != packed) < 0.05


@every_format
def test_numbers_that_rows_cannot_hold(dtype):
    model = collection(dtype, jaxrec.optim.sgd(0.1))
    before, table = stored(model), np.array(model.table("a"))
    table[4, 2] = np.nan
    with pytest.raises(ValueError, match="table 'a', row 4, column 2 is nan"):
        model.load_table("a", table)
    with pytest.raises(ValueError, match="table 'a', given row 1, column 2 is nan"):
        model.load_rows("a", [3, 4], table[[3, 4]])
    store = model.tables.get_value()
    logical = store.checkpoint_view("a")
    bad = dataclasses.replace(logical, rows=logical.rows.at[4, 2].set(jnp.inf))
    with pytest.raises(ValueError, match="table 'a', saved row 4, column 2 is inf"):
        store.from_checkpoint("a", bad, ROWS)
    np.testing.assert_array_equal(stored(model), before)


@every_format
def test_checkpoint_keeps_the_bytes(dtype):
    model = collection(dtype, jaxrec.optim.adam(0.01, state_dtype="float8"))
    train(model)
    store = model.tables.get_value()
    logical = store.checkpoint_view("a")
    assert logical.rows.dtype == np.float32
    fresh = collection(dtype, jaxrec.optim.adam(0.01, state_dtype="float8"))
    other = fresh.tables.get_value().from_checkpoint("a", logical, ROWS)
    for one, two in zip(jax.tree.leaves(store), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, two)


def test_small_updates_add_up():
    """A thousand updates of a hundredth of a code each: lost without stochastic rounding."""
    for is_random in (True, False):
        optimizer = jaxrec.optim.sgd(1.0, stochastic_rounding=is_random)
        model = collection("int8", optimizer)
        rows = np.tile(np.linspace(-1, 1, DIM, dtype=np.float32), (ROWS, 1))
        model.load_table("a", rows)
        tables = model.tables.get_value()
        all_rows = jaxrec.KeyedJaggedArray.from_lists({"a": [[i] for i in range(ROWS)]})

        @jax.jit
        def thousand(tables, batch):
            def one(step, tables):
                activations, residuals = tables.lookup(batch)
                # The extreme elements, which fix the scale, stay.
                push = jnp.where((jnp.arange(DIM) % (DIM - 1)) == 0, 0, 2 / 255 / 100)
                cotangents = jax.tree.map(lambda x: jnp.broadcast_to(push, x.shape), activations)
                return tables.update([tables.row_gradients(residuals, cotangents)], step)

            return jax.lax.fori_loop(0, 1000, one, tables)

        change = (rows - np.asarray(thousand(tables, all_rows).read("a")))[:, 1:-1]
        expected = 10 * 2 / 255 if is_random else 0
        assert abs(change.mean() - expected) < 0.1 * 10 * 2 / 255


def test_dense_gradient_of_a_packed_table():
    model = collection("int8", jaxrec.optim.sgd(0.1))
    before = np.asarray(model.table("a"))
    _, gradients = jaxrec.value_and_grad(lambda model: (model.table("a") ** 2).sum() / 2)(model)
    jaxrec.Optimizer(model, optax.sgd(0.1)).update(model, gradients)
    np.testing.assert_allclose(model.table("a"), 0.9 * before, atol=0.02)


def test_frozen_rows_keep_their_bytes():
    model = jaxrec.EmbeddingBagCollection([config("int8", trainable=False)], rngs=nnx.Rngs(0))
    before = stored(model)
    train(model)
    np.testing.assert_array_equal(stored(model), before)


def test_names_and_types_of_formats():
    names = {jnp.int8: "int8", jnp.float8_e4m3fn: "float8_e4m3", jnp.float8_e5m2: "float8_e5m2"}
    for given, name in names.items():
        assert config(given).dtype == name
    with pytest.raises(ValueError, match=r"table 'a': dtype is one of .*int8, float8_e4m3"):
        config("int4")


def test_table_is_a_copy():
    """Of the only table of a group, too, whose array a step donates."""
    model = collection("float32", jaxrec.optim.adagrad(0.1))
    table, state = model.table("a"), model.table_state("a")
    train(model, steps=1)
    assert np.isfinite(table).all()
    assert np.isfinite(state["accumulator"]).all()
