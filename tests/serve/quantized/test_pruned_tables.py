"""Pruned tables give what the same tables with zeros at pruned ids give."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import kernels
from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.serve import PrunedTables, by_norm, quantize

CONFIGS = (
    jaxrec.EmbeddingBagConfig("product", 100, 8, ("product", "seen")),
    jaxrec.EmbeddingBagConfig("twin", 100, 8, ("product",), pooling="mean"),
    jaxrec.EmbeddingBagConfig("user", 70, 8, pooling="mean"),
    jaxrec.EmbeddingBagConfig("country", 33, 4),
)
PRUNE = {"product": by_norm(share=0.3), "user": by_norm(share=0.5), "country": by_norm(share=1.0)}
KEYS = ("product", "seen", "user", "country", "other")
ROWS = (100, 100, 70, 33, 5)


def make_batch(weighted: bool = False) -> jaxrec.KeyedJaggedArray:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9, (len(KEYS), 16))
    lengths[:, 3] = 0
    lengths[0, 5] = 300
    values = [rng.integers(0, n, k.sum()) for n, k in zip(ROWS, lengths, strict=True)]
    weights = rng.standard_normal(lengths.sum()).astype(np.float32) if weighted else None
    return jaxrec.KeyedJaggedArray.from_lengths(
        keys=KEYS, values=np.concatenate(values), lengths=lengths.reshape(-1), weights=weights
    )


def with_zeros(model: jaxrec.EmbeddingBagCollection, small) -> None:
    """Give a float model the rows of the pruned one, zeros included."""
    for config in CONFIGS:
        model.load_table(config.name, np.asarray(small.table(config.name)))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float16"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_pooled_lookups(dtype, weighted, kernel):
    model = jaxrec.EmbeddingBagCollection(CONFIGS, is_weighted=weighted, rngs=nnx.Rngs(0))
    small, batch = quantize(model, dtype, prune=PRUNE), make_batch(weighted)
    with_zeros(model, small)
    expected = model(batch)
    with kernels.use_kernels(kernel, "reference"):
        found = small(batch)
    assert (found.keys, found.dims) == (expected.keys, expected.dims)
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-5, atol=1e-5)
    traced = nnx.jit(lambda model, batch: model(batch))(small, batch)
    np.testing.assert_allclose(traced.values, expected.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int4", "float16"])
def test_lookups_of_single_ids(dtype):
    configs = [
        jaxrec.EmbeddingConfig("item", 100, 8, ("item", "seen")),
        jaxrec.EmbeddingConfig("twin", 100, 4, ("item",)),
    ]
    model = jaxrec.EmbeddingCollection(configs, need_indices=True, rngs=nnx.Rngs(0))
    small = quantize(model, dtype, prune={"item": by_norm(share=0.3)})
    for config in configs:
        model.load_table(config.name, np.asarray(small.table(config.name)))
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {"item": [[1, 2, 99], [], [50, 50]], "seen": [[0], list(range(100)), []]}
    )
    found, expected = small(batch), model(batch)
    assert list(found) == list(expected) == ["item@item", "seen", "item@twin"]
    for key, column in expected.items():
        np.testing.assert_array_equal(found[key].values, column.values)
        np.testing.assert_array_equal(found[key].weights, column.weights)


def test_samples_that_share_bags():
    """TorchRec's variable batch per feature."""
    model = jaxrec.EmbeddingBagCollection(CONFIGS[2:], rngs=nnx.Rngs(0))
    small = quantize(model, "float32", prune={"user": by_norm(share=0.5)})
    model.load_table("user", np.asarray(small.table("user")))
    batch = jaxrec.KeyedJaggedArray.from_dict(
        {
            "country": jaxrec.KeyedJaggedArray.from_lists({"c": [[1], [2, 3]]})["c"],
            "user": jaxrec.KeyedJaggedArray.from_lists({"u": [list(range(70)), [3], []]})["u"],
        },
        inverse_indices=np.int32([[0, 1, 1, 0], [0, 2, 1, 0]]),
    )
    np.testing.assert_allclose(small(batch).values, model(batch).values, atol=1e-6)


def test_a_mean_counts_pruned_ids():
    config = jaxrec.EmbeddingBagConfig("user", 2, 4, pooling="mean")
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    model.load_table("user", np.float32([[4] * 4, [1] * 4]))
    small = quantize(model, "int8", prune={"user": by_norm(share=0.5)})
    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[0, 1], [1], [0]]})
    np.testing.assert_array_equal(small(batch)["user"][:, 0], [2, 0, 4])


def test_memory_shrinks():
    model = jaxrec.EmbeddingBagCollection(CONFIGS, rngs=nnx.Rngs(0))
    store = quantize(model, "int4", prune=PRUNE).tables.get_value()
    assert isinstance(store, PrunedTables)
    # 8 bytes a row of 8 columns, one row of zeros, and two words for 32 ids.
    assert store.num_bytes("product") == (70 + 1) * 8 + 4 * 8
    assert store.num_bytes("country") == 1 * 6 + 2 * 8
    assert store.num_bytes("twin") == 100 * 8
    assert store.formats()["user"].name == "int4"
    rows, _, first = store.inner.arrays("user")
    assert rows.stored[first : first + 36].shape == (36, 8)
    assert not rows.stored[first + 35].any()  # the row of zeros
    arrays = {"product", "user", "country", "twin"}
    total = sum(array.nbytes for array in jax.tree.leaves(store))
    assert total == sum(store.num_bytes(name) for name in arrays)


def pruned_model(dtype: str = "float32"):
    config = jaxrec.EmbeddingBagConfig("user", 40, 4)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    small = quantize(model, dtype, prune={"user": by_norm(share=0.25)})
    is_kept = np.asarray(small.table("user")).any(axis=1)
    assert is_kept.sum() == 30
    return small, is_kept


def new_rows() -> np.ndarray:
    return 1 + np.random.default_rng(1).random((40, 4), np.float32)


def test_a_whole_table_is_written_without_the_pruned_rows():
    small, is_kept = pruned_model()
    small.load_table("user", new_rows())
    np.testing.assert_array_equal(small.table("user"), new_rows() * is_kept[:, None])


def test_rows_are_read_and_written_by_their_ids():
    small, is_kept = pruned_model()
    kept, pruned = np.flatnonzero(is_kept)[[7, 2]], np.flatnonzero(~is_kept)[3]
    small.load_rows("user", kept, new_rows()[:2])
    np.testing.assert_array_equal(small.rows("user", [*kept, pruned])[:2], new_rows()[:2])
    assert not small.rows("user", [pruned]).any()
    with pytest.raises(ValueError, match=f"table 'user': id {pruned} is pruned and has no row"):
        small.load_rows("user", [kept[0], pruned], new_rows()[:2])


def test_a_checkpoint_of_all_rows_restores():
    small, is_kept = pruned_model()
    store = small.tables.get_value()
    view, shapes = store.checkpoint_view("user"), store.checkpoint_shapes("user")
    assert (view.rows.shape, view.rows.dtype) == (shapes.rows.shape, shapes.rows.dtype)
    np.testing.assert_array_equal(view.rows[:40], store.read("user"))
    before = np.asarray(store.read("user"))
    values = np.zeros(shapes.rows.shape, np.float32)
    values[:40] = new_rows()
    store = store.from_checkpoint("user", LogicalTable(jnp.asarray(values), {}), 20)
    expected = np.where(np.arange(40)[:, None] < 20, new_rows(), before) * is_kept[:, None]
    np.testing.assert_array_equal(store.read("user"), expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda small: small(jaxrec.KeyedJaggedArray.from_lists({"user": [[40]]})),
            ValueError,
            "feature 'user', sample 0: id 40 is outside",
        ),
        (
            lambda small: small(jaxrec.KeyedJaggedArray.from_lists({"item": [[4]]})),
            KeyError,
            "table 'user' reads feature 'user', which the batch lacks",
        ),
        (
            lambda small: small.load_table("user", new_rows()[:30]),
            ValueError,
            r"table 'user' has shape \(40, 4\), got \(30, 4\)",
        ),
        (
            lambda small: small.load_table("user", np.where(new_rows() > 1.9, np.nan, 1)),
            ValueError,
            "table 'user', given row 0, column 3 is nan",
        ),
        (
            lambda small: quantize(small),
            ValueError,
            r"tables 'user' are quantized already \(float32\)",
        ),
        (
            lambda small: jaxrec.value_and_grad(lambda model: model.table("user").sum())(small),
            TypeError,
            "quantized for inference",
        ),
        (
            lambda small: small.tables.get_value().lookup(
                jax.tree.map(lambda x: x[None], jaxrec.KeyedJaggedArray.from_lists({"user": [[1]]}))
            ),
            ValueError,
            "the tables are on one device",
        ),
    ],
    ids=["id", "feature", "shape", "nan", "twice", "training", "mesh"],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(pruned_model()[0])


def test_an_id_out_of_range_is_nan_in_compiled_code():
    small, _ = pruned_model()
    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[40], [1]]})
    pooled = nnx.jit(lambda model, batch: model(batch).values)(small, batch)
    assert np.isnan(pooled[0]).all()
    assert np.isfinite(pooled[1]).all()


def test_a_model_over_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    make = lambda: jaxrec.EmbeddingBagCollection(CONFIGS, rngs=nnx.Rngs(0))  # noqa: E731
    plan = jaxrec.plan.ShardingPlan.from_dict(
        {config.name: jaxrec.mesh.row_wise() for config in CONFIGS}
    )
    sharded = quantize(jaxrec.shard(make, plan, mesh), "int8", prune=PRUNE)
    local, batch = quantize(make(), "int8", prune=PRUNE), make_batch()
    np.testing.assert_array_equal(sharded(batch).values, local(batch).values)


def test_training_is_refused():
    config = jaxrec.EmbeddingBagConfig("user", 40, 4)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], []]})
    _, gradients = jaxrec.value_and_grad(lambda model: model(batch).values.sum())(model)
    small = quantize(model, "int4", prune={"user": by_norm(share=0.25)})
    message = r"tables 'user' \(int4\) are quantized for inference and cannot be trained"
    with pytest.raises(TypeError, match=message):
        jaxrec.Optimizer(small, optax.sgd(0.1)).update(small, gradients)
