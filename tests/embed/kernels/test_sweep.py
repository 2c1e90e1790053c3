"""Changes of all rows between steps: FBGEMM's recorded lookups, formats, memory, refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed.formats import TABLE_FORMATS, as_table
from jaxrec.embed.kernels.updates import sweep_rows
from jaxrec.optim import ema_in_place, rowwise_adagrad, sgd
from tests import golden
from tests.copies import find_copies
from tests.embed.test_compiled import DIM, ROWS, SMALL, compile_step, make_batch, square_loss

NAME = "emainplace_rowwise_adagrad"


def recorded_optimizer(hyper):
    return ema_in_place(
        optimizer=rowwise_adagrad(hyper["lr"], eps=hyper["eps"]),
        every=hyper["step_ema"],
        start=hyper["step_start"],
        coefficient=hyper["step_ema_coef"],
    )


def test_lookups_and_rows_are_fbgemms():
    arrays, case = golden.load("optim", NAME), dict(golden.cases("optim"))[NAME]
    meta, hyper = case["meta"], case["meta"]["hyper"]
    features = [f"f{i}" for i in range(len(meta["feature_table_map"]))]
    configs = [
        jaxrec.EmbeddingBagConfig(
            f"t{table}",
            rows,
            dim,
            feature_names=[
                feature
                for feature, its in zip(features, meta["feature_table_map"], strict=True)
                if its == table
            ],
        )
        for table, (rows, dim) in enumerate(zip(meta["rows"], meta["dims"], strict=True))
    ]
    model = jaxrec.EmbeddingBagCollection(
        configs, optimizer=recorded_optimizer(hyper), rngs=nnx.Rngs(0)
    )
    for table, config in enumerate(configs):
        model.load_table(config.name, arrays[f"w0_{table}"])
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, batch, cotangent):
        def loss_fn(model):
            pooled = model(batch).values
            return (pooled * cotangent).sum(), pooled

        (_, pooled), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        return pooled

    for step in range(1, meta["steps"] + 1):
        batch = jaxrec.KeyedJaggedArray.from_offsets(
            features,
            arrays[f"ids_{step}"],
            arrays[f"offsets_{step}"],
            capacities=(64,) * len(features),
        )
        pooled = train_step(model, optimizer, batch, jnp.asarray(arrays[f"grad_{step}"]))
        np.testing.assert_allclose(pooled, arrays[f"out_{step}"], **case["tolerance"])
        for table, config in enumerate(configs):
            expected = arrays[f"w_{table}_{step}"]
            if (step + 1) % hyper["step_ema"] == 0 and step + 1 >= hyper["step_start"]:
                fast, slow = np.split(expected, 2, axis=1)
                slow = slow + hyper["step_ema_coef"] * (fast - slow)
                expected = np.concatenate([fast, slow], axis=1)
            np.testing.assert_allclose(model.table(config.name), expected, **case["tolerance"])


@pytest.mark.parametrize(
    ("dtype", "block"),
    [(dtype, 24) for dtype in TABLE_FORMATS] + [("float32", 1), ("float32", 10**6)],
)
def test_each_row_once_whatever_the_blocks(monkeypatch, dtype, block):
    monkeypatch.setattr("jaxrec.embed.kernels.updates._BLOCK_ELEMENTS", block)
    row_format = TABLE_FORMATS[dtype]
    values = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
    table = as_table(row_format.pack(jnp.asarray(values)), row_format, 6)
    rule = ema_in_place(optimizer=sgd(0.1, stochastic_rounding=False), every=2, coefficient=0.5)
    before = np.asarray(table[slice(None)], np.float32)
    sweep = jax.jit(lambda table, step, applied: sweep_rows(table, rule, step, applied))
    after = sweep(table, jnp.int32(0), jnp.array(True))
    expected = row_format.unpack(row_format.pack(rule.sweep(jnp.asarray(before))), 6)
    np.testing.assert_array_equal(np.asarray(after[slice(None)], np.float32), expected)
    for untouched in (
        sweep(table, jnp.int32(1), jnp.array(True)),
        sweep(table, jnp.int32(0), jnp.array(False)),
    ):
        np.testing.assert_array_equal(np.asarray(untouched[slice(None)], np.float32), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_stochastic_rounding_keeps_the_mean(dtype):
    row_format = TABLE_FORMATS[dtype]
    values = np.tile(np.array([[1.0, -1.0, 0.9, 0.1]], np.float32), (4096, 1))
    table = as_table(row_format.pack(jnp.asarray(values)), row_format, 4)
    stored = np.asarray(table[slice(None)], np.float64)[0]
    rule = ema_in_place(optimizer=sgd(0.1), every=1, coefficient=0.001)
    after = np.asarray(sweep_rows(table, rule, jnp.int32(0))[slice(None)], np.float64)
    expected = stored[2:] + 0.001 * (stored[:2] - stored[2:])
    assert np.abs(after[:, 2:].mean(axis=0) - expected).max() < 3e-4
    assert np.unique(after[:, 2]).size > 1


def test_tables_stay_where_they_are(monkeypatch):
    # A table of one block is copied, as any block is.
    monkeypatch.setattr("jaxrec.embed.kernels.updates._BLOCK_ELEMENTS", 1 << 14)
    rule = ema_in_place(optimizer=rowwise_adagrad(0.1), every=2)
    state, compiled = compile_step(rule, square_loss)
    assert find_copies(compiled, (ROWS + SMALL, DIM)) == []
    state, loss = compiled(state, make_batch())
    assert np.isfinite(loss)


def test_an_odd_width_names_the_table():
    config = jaxrec.EmbeddingBagConfig("user", 10, 5)
    rule = ema_in_place(optimizer=sgd(0.1))
    with pytest.raises(ValueError, match=r"table 'user': ema_in_place needs an even .* got 5"):
        jaxrec.EmbeddingBagCollection([config], optimizer=rule, rngs=nnx.Rngs(0))


def model_of(rule):
    config = jaxrec.EmbeddingBagConfig("user", 10, 4)
    return jaxrec.EmbeddingBagCollection([config], optimizer=rule, rngs=nnx.Rngs(0))


def test_rows_in_a_store_are_refused():
    model = model_of(ema_in_place(optimizer=sgd(0.1)))
    with pytest.raises(ValueError, match=r"table 'user' has the optimizer ema_in_place, which"):
        jaxrec.tier.make(model, {"user": jaxrec.tier.Dynamic()})


def test_change_trackers_refuse():
    model = model_of(ema_in_place(optimizer=sgd(0.1)))
    with pytest.raises(ValueError, match=r"table 'user' has the optimizer ema_in_place, which"):
        jaxrec.tier.ChangeTracker(model, consumers=("publisher",))
