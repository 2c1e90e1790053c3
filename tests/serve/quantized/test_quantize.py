"""Quantized models: they are called like the model, and errors say what cannot be quantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import rows as row_access
from jaxrec.serve import quantize
from tests.embed import row_oracle

TABLES = (
    jaxrec.EmbeddingBagConfig("product", 300, 16),
    jaxrec.EmbeddingBagConfig("user", 50, 16, ("user", "friends"), pooling="mean"),
    jaxrec.EmbeddingBagConfig("country", 7, 4, dtype="bfloat16", initializer="normal"),
)


class Ranker(nnx.Module):
    def __init__(self, tables: Sequence[jaxrec.EmbeddingBagConfig], rngs: nnx.Rngs):
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        self.history = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("item", 40, 8)], rngs=rngs
        )
        self.over = nnx.Linear(16 * 3 + 4 + 8, 1, rngs=rngs)

    def __call__(self, features):
        pooled = self.embeddings(features).values
        items = self.history(features)["item"].to_padded_dense(3).sum(axis=1)
        return self.over(jax.numpy.concatenate([pooled, items], axis=1))[:, 0]


BATCH = jaxrec.KeyedJaggedArray.from_lists(
    {
        "product": [[1, 2, 299], [], [7]],
        "user": [[3], [4, 4], []],
        "friends": [[1, 2], [], [49]],
        "country": [[0], [6], [2]],
        "item": [[1, 2], [39], []],
    }
)


@pytest.fixture(scope="module")
def model() -> Ranker:
    return Ranker(TABLES, nnx.Rngs(0))


def expected_table(collection, name: str, dtype: str) -> np.ndarray:
    rows = np.asarray(collection.table(name), np.float32)
    return row_oracle.unpack(row_oracle.pack(rows, dtype), dtype, rows.shape[1])


@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "float8", "float16"])
def test_a_model_with_the_unpacked_rows_gives_the_same(model, dtype):
    """The other model has float32 tables, of rows that NumPy packed and unpacked."""
    small = quantize(model, dtype)
    floats = Ranker([dataclasses.replace(table, dtype="float32") for table in TABLES], nnx.Rngs(1))
    nnx.update(floats.over, nnx.state(model.over))
    for path in ("embeddings", "history"):
        for config in getattr(model, path).configs:
            rows = expected_table(getattr(model, path), config.name, dtype)
            getattr(floats, path).load_table(config.name, rows)
            np.testing.assert_array_equal(getattr(small, path).table(config.name), rows)
    result = nnx.jit(lambda model, batch: model(batch))(small, BATCH)
    np.testing.assert_allclose(result, floats(BATCH), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(small(BATCH), result, rtol=1e-5, atol=1e-6)


def test_the_model_stays_as_it_is(model):
    before, table = np.array(model(BATCH)), np.array(model.embeddings.table("user"))
    small = quantize(model, "int2")
    small.over.kernel.set_value(small.over.kernel.get_value() * 0)
    np.testing.assert_array_equal(model(BATCH), before)
    np.testing.assert_array_equal(model.embeddings.table("user"), table)
    assert type(small) is Ranker
    assert model.embeddings.is_trainable


def test_a_donated_step_of_the_model_leaves_the_copy_alone():
    model = Ranker(TABLES, nnx.Rngs(0))
    small = quantize(model)
    expected = np.array(small(BATCH))
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer):
        _, gradients = jaxrec.value_and_grad(lambda model: model(BATCH).sum())(model)
        optimizer.update(model, gradients)

    step(model, optimizer)
    np.testing.assert_array_equal(small(BATCH), expected)


def test_formats_of_single_tables(model):
    small = quantize(model, "int8", per_table={"user": "int4", "item": "float32"})
    store = small.embeddings.tables.get_value()
    formats = {name: store.formats()[name].name for name in ("product", "user", "country")}
    assert formats == {"product": "int8", "user": "int4", "country": "int8"}
    np.testing.assert_array_equal(small.history.table("item"), model.history.table("item"))
    np.testing.assert_array_equal(
        small.embeddings.table("user"), expected_table(model.embeddings, "user", "int4")
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_output_dtype(model, dtype):
    small = quantize(model, output_dtype=dtype)
    assert small.embeddings(BATCH).values.dtype == dtype
    assert small.history(BATCH)["item"].values.dtype == dtype
    assert model.embeddings(BATCH).values.dtype == "float32"


def test_a_weighted_collection():
    config = jaxrec.EmbeddingBagConfig("user", 50, 16, pooling="mean")
    model = jaxrec.EmbeddingBagCollection([config], is_weighted=True, rngs=nnx.Rngs(0))
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {"user": [[3, 4], [], [7]]}, weights={"user": [[2.0, -1.0], [], [0.5]]}
    )
    rows = expected_table(model, "user", "int4")
    expected = [(2 * rows[3] - rows[4]) / 2, 0 * rows[0], rows[7] / 2]
    np.testing.assert_allclose(quantize(model, "int4")(batch)["user"], expected, atol=1e-7)


def test_tables_in_parts(monkeypatch):
    """Parts of four rows, and of a remainder, give the bits of the whole."""
    monkeypatch.setattr(row_access, "_PART_BYTES", 4 * 16 * 4)
    configs = [jaxrec.EmbeddingBagConfig(name, 4 * n + 3, 16) for n, name in enumerate("abc")]
    model = jaxrec.EmbeddingBagCollection(configs, rngs=nnx.Rngs(0))
    store = quantize(model, "int4").tables.get_value()
    for config in configs:
        rows = np.asarray(model.table(config.name))
        table, _, first = store.arrays(config.name)
        packed = table.stored[first : first + len(rows)]
        np.testing.assert_array_equal(packed, row_oracle.pack(rows, "int4"))


def bad_row(value: float) -> Ranker:
    model = Ranker(TABLES, nnx.Rngs(0))
    model.embeddings.load_rows("user", [17], np.full((1, 16), value))
    return model


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model: quantize(model.over), ValueError, "Linear has no tables"),
        (lambda model: quantize(model, "int1"), ValueError, "'int1' is not one of 'int8', 'int4'"),
        (lambda model: quantize(model, "fp8"), ValueError, "'fp8' is not one of"),
        (
            lambda model: quantize(model, per_table={"usr": "int4"}),
            KeyError,
            "dtype for 'usr', but no table is named so; there are 'product', 'user'",
        ),
        (
            lambda model: quantize(model, output_dtype="int8"),
            ValueError,
            "output_dtype='int8' is not one of float32, bfloat16, float16",
        ),
        (
            lambda model: quantize(quantize(model, "int4")),
            ValueError,
            r"tables 'product', 'user', 'country' are quantized already \(int4\)",
        ),
        (
            lambda model: quantize(bad_row(np.nan), "int4"),
            ValueError,
            "table 'user', row 17, column 0 is nan; int4 rows hold finite elements",
        ),
        (
            lambda model: quantize(bad_row(1e6)),
            ValueError,
            "table 'user', row 17, column 0 is 1000000.0; int8 rows",
        ),
    ],
    ids=[
        "no_tables", "format", "abbreviation", "table", "output", "twice", "nan",
        "too_large",
    ],
)  # fmt: skip
def test_errors(model, call, error, message):
    with pytest.raises(error, match=message):
        call(model)


@pytest.mark.parametrize(("dtype", "dim"), [("int4", 5), ("int2", 6)])
def test_a_width_that_does_not_fill_bytes(dtype, dim):
    config = jaxrec.EmbeddingBagConfig("odd", 9, dim)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"table 'odd' cannot be {dtype}: .* got {dim}"):
        quantize(model, dtype)
    assert quantize(model, dtype, per_table={"odd": "int8"}).table("odd").shape == (9, dim)


def test_a_model_on_a_mesh_comes_to_one_device():
    plan = jaxrec.plan.ShardingPlan.from_dict(
        {"user": jaxrec.mesh.row_wise(), "item": jaxrec.mesh.table_wise(device=1)}
    )
    configs = [jaxrec.EmbeddingBagConfig("user", 50, 16), jaxrec.EmbeddingBagConfig("item", 9, 16)]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embeddings = jaxrec.EmbeddingBagCollection(configs, rngs=rngs)
            self.deep = nnx.Linear(32, 2048, rngs=rngs)
            self.over = nnx.Linear(2048, 1, rngs=rngs)

        def __call__(self, features):
            return self.over(self.deep(self.embeddings(features).values))

    local = Model(nnx.Rngs(0))
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    sharded = jaxrec.shard(lambda: Model(nnx.Rngs(0)), plan, mesh, dense="fsdp")
    assert not sharded.deep.kernel.get_raw_value().is_fully_replicated
    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 49], [2]], "item": [[3], []]})
    small, expected = quantize(sharded, "int8"), quantize(local, "int8")
    np.testing.assert_array_equal(small(batch), expected(batch))
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(nnx.state(small))} == {1}


def test_a_table_with_an_open_vocabulary_is_refused():
    config = jaxrec.EmbeddingBagConfig("user", 50, 16)
    model = jaxrec.tier.make(
        lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
        {"user": jaxrec.tier.Dynamic()},
    )
    with pytest.raises(TypeError, match=r"tables 'user' are kept by .*, which moves rows"):
        quantize(model)
