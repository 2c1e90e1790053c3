"""Samples that share bags, looked up id by id: each sample has the rows of its own bag."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import column_wise, data_parallel, row_wise, shard_batch, table_wise
from jaxrec.serve import by_norm, quantize

BAGS = {"f": [[1], [2], [3, 1]], "g": [[4], [5, 6], [7], [9]]}
INVERSE = {"f": [2, 0, 1, 2], "g": [0, 1, 2, 1]}
OF_SAMPLES = {key: [BAGS[key][bag] for bag in INVERSE[key]] for key in BAGS}
BATCH = jaxrec.KeyedJaggedArray.from_lists(BAGS, inverse_indices=INVERSE)
LONGEST, DIM = 2, 4
ROWS, COLUMNS = {"f": row_wise(), "g": table_wise(1)}, {"f": column_wise(), "g": data_parallel()}
CASES = {
    "one device": (None, None, 0.5),
    "rows, bounded": (ROWS, AxisType.Auto, 0.5),
    "columns": (COLUMNS, AxisType.Explicit, None),
}


def make(optimizer=None) -> jaxrec.EmbeddingCollection:
    tables = [
        jaxrec.EmbeddingConfig("f", 10, DIM, ("f",)),
        jaxrec.EmbeddingConfig("g", 12, DIM, ("g",)),
    ]
    return jaxrec.EmbeddingCollection(
        tables, optimizer=optimizer, need_indices=True, rngs=nnx.Rngs(0)
    )


def padded(table: np.ndarray, bags: list[list[int]]) -> np.ndarray:
    out = np.zeros((len(bags), LONGEST, table.shape[1]), np.float32)
    for sample, bag in enumerate(bags):
        out[sample, : len(bag)] = table[bag]
    return out


@pytest.mark.every_case
@pytest.mark.parametrize(("place", "axes", "bound"), CASES.values(), ids=CASES.keys())
def test_rows_and_gradients_are_those_of_samples(place, axes, bound):
    model, batch = make(jaxrec.optim.sgd(1.0, clip_value=bound)), BATCH
    before = {name: np.asarray(model.table(name)) for name in BAGS}
    rng = np.random.default_rng(0)
    host_slopes = {key: rng.normal(size=(4, LONGEST, DIM)).astype(np.float32) for key in BAGS}
    slopes = host_slopes
    if place is not None:
        mesh = jax.make_mesh((2,), ("data",), axis_types=(axes,), devices=jax.devices()[:2])
        plan = jaxrec.plan.ShardingPlan.from_dict(place)
        model = jaxrec.shard(model, plan, mesh)
        batch, slopes = shard_batch((BATCH, slopes), mesh)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def step(model, optimizer, batch, slopes):
        def loss(model):
            dense = {key: c.to_padded_dense(LONGEST) for key, c in model(batch).items()}
            return sum((dense[key] * slopes[key]).sum() for key in BAGS), dense

        (_, dense), gradients = jaxrec.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return dense

    dense = step(model, optimizer, batch, slopes)
    for key, of_samples in host_slopes.items():
        expected = padded(before[key], OF_SAMPLES[key])
        np.testing.assert_array_equal(dense[key], expected)
        bounded = of_samples if bound is None else np.clip(of_samples, -bound, bound)
        rows = before[key].copy()
        for sample, bag in enumerate(OF_SAMPLES[key]):
            np.subtract.at(rows, bag, bounded[sample, : len(bag)])
        np.testing.assert_allclose(model.table(key), rows, rtol=1e-5, atol=1e-6)


def test_indices_are_the_ids_of_samples():
    found = nnx.jit(lambda model: model(BATCH))(make())
    for key, bags in OF_SAMPLES.items():
        column, ids = found[key], np.concatenate(bags)
        assert column.lengths.tolist() == [len(bag) for bag in bags]
        assert column.weights[: len(ids)].tolist() == ids.tolist()
        assert not np.any(column.values[len(ids) :])


def test_gradients_of_samples_are_added_in_float32():
    config = jaxrec.EmbeddingConfig("f", 4, 1)
    model = jaxrec.EmbeddingCollection(
        [config], optimizer=jaxrec.optim.sgd(1.0), dtype="bfloat16", rngs=nnx.Rngs(0)
    )
    before = np.asarray(model.table("f"))
    batch = jaxrec.KeyedJaggedArray.from_lists({"f": [[2]]}, inverse_indices=[[0] * 257])
    # 256 + 1 is no number of bfloat16.
    differentiate = jaxrec.value_and_grad(lambda m: m(batch)["f"].values.sum())
    _, gradients = nnx.jit(differentiate)(model)
    model.apply_gradients(gradients.tables[""], 0)
    np.testing.assert_allclose(before - np.asarray(model.table("f")), [[0], [0], [257], [0]])


def test_rows_of_bags_that_no_sample_has_keep_weights_and_state():
    model = make(jaxrec.optim.adam(0.1, weight_decay=0.5))
    before = np.asarray(model.table("g"))
    differentiate = jaxrec.value_and_grad(lambda m: m(BATCH)["g"].values.sum())
    _, gradients = nnx.jit(differentiate)(model)
    model.apply_gradients(gradients.tables[""], 0)
    moved = (np.asarray(model.table("g")) != before).any(axis=1)
    assert np.flatnonzero(moved).tolist() == [4, 5, 6, 7]  # no sample has the bag [9]


def test_tables_behind_a_cache():
    raw = jaxrec.KeyedJaggedArray.from_lists(BAGS, inverse_indices=INVERSE, id_bits=64)
    model = jaxrec.tier.make(make, {"f": jaxrec.tier.Cached(rows=4)})
    model.load_rows("f", np.arange(10), np.asarray(make().table("f")))
    look_up = nnx.jit(lambda model, batch: model(batch)["f"].to_padded_dense(LONGEST))
    (found,) = [look_up(model, batch) for (batch,) in jaxrec.tier.ahead(model, [(raw,)])]
    expected = padded(np.asarray(make().table("f")), OF_SAMPLES["f"])
    np.testing.assert_array_equal(found, expected)


def test_quantized_and_pruned_tables_and_the_functional_core():
    model = make()
    small = quantize(model, "float16", prune={"g": by_norm(share=0.3)})
    look_up = nnx.jit(lambda m: {key: c.to_padded_dense(LONGEST) for key, c in m(BATCH).items()})
    for key, found in look_up(small).items():
        expected = padded(np.asarray(small.table(key)), OF_SAMPLES[key])
        np.testing.assert_array_equal(found, expected)
    tables = model.tables.get_value()
    rows, residuals = jaxrec.embed.lookup(tables, BATCH)
    lengths = BATCH.expanded()["f"].lengths
    column = jaxrec.JaggedArray(rows["f"], lengths)
    before = np.asarray(model.table("f"))
    np.testing.assert_array_equal(column.to_padded_dense(2), padded(before, OF_SAMPLES["f"]))
    ones = jax.tree.map(jnp.ones_like, rows)
    changed = jaxrec.embed.apply_gradients(tables, residuals, ones, 0).read("f")
    moved = (np.asarray(changed) != before).any(axis=1)
    assert np.flatnonzero(moved).tolist() == [1, 2, 3]
