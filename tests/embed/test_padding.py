"""Padding ids and max pooling, against PyTorch's embedding bags and plain NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed.padding import padding_ids, without_padding_ids
from jaxrec.ragged.wide_ids import widen
from tests import golden

Bag, PAD = jaxrec.EmbeddingBagConfig, 2
CASES = dict(golden.cases("embedding_bag"))
ARRAYS = {name: golden.load("embedding_bag", name) for name in CASES}


class Recorded(nnx.Module):
    """A table for each recorded case, all in one model."""

    def __init__(self):
        def config(name, kind=Bag, **more):
            meta = CASES[name]["meta"]
            return kind(name, 9, 5, padding_id=meta["padding_id"], **more)

        def bags(names, is_weighted):
            tables = [config(name, pooling=CASES[name]["meta"]["pooling"]) for name in names]
            return jaxrec.EmbeddingBagCollection(
                tables, optimizer=optimizer, is_weighted=is_weighted, rngs=nnx.Rngs(0)
            )

        optimizer = jaxrec.optim.sgd(1.0)  # changes a table by minus its gradient
        pooled = [name for name in CASES if name.startswith("bag_")]
        self.plain = bags([each for each in pooled if "weighted" not in each], False)
        self.weighted = bags([each for each in pooled if "weighted" in each], True)
        self.single = jaxrec.EmbeddingCollection(
            [config("embedding_padding", jaxrec.EmbeddingConfig)],
            optimizer=optimizer,
            rngs=nnx.Rngs(0),
        )

    @property
    def collections(self):
        return {"plain": self.plain, "weighted": self.weighted, "single": self.single}

    def tables(self):
        return {
            config.name: np.asarray(collection.table(config.name))
            for collection in self.collections.values()
            for config in collection.configs
        }


def batch_of(names):
    def column(key):
        return np.concatenate([ARRAYS[name][key] for name in names])

    weights = column("weights") if all("weights" in ARRAYS[name] for name in names) else None
    return jaxrec.KeyedJaggedArray.from_lengths(
        keys=list(names), values=column("values"), lengths=column("lengths"), weights=weights
    )


@nnx.jit
def step(model, batches, gradients):
    def loss(model):
        found = {
            "plain": model.plain(batches["plain"]).to_dict(),
            "weighted": model.weighted(batches["weighted"]).to_dict(),
            "single": {key: each.values for key, each in model.single(batches["single"]).items()},
        }
        outputs = {key: rows for each in found.values() for key, rows in each.items()}
        return sum(jnp.vdot(outputs[k][: len(g)], g) for k, g in gradients.items()), outputs

    (_, outputs), changes = jaxrec.value_and_grad(loss, has_aux=True)(model)
    for path, collection in model.collections.items():
        collection.apply_gradients(changes.tables[path], 0)

    def of_weights(weights):
        batch = dataclasses.replace(batches["weighted"], weights=weights)
        pooled, _ = jaxrec.embed.lookup(rows, batch, is_weighted=True)
        return jnp.vdot(pooled.values, gradients["bag_sum_padding_weighted"])

    rows = model.weighted.tables.get_value()
    return outputs, jax.grad(of_weights)(batches["weighted"].weights)


@pytest.fixture(scope="module")
def recorded():
    model = Recorded()
    for collection in model.collections.values():
        for config in collection.configs:
            collection.load_table(config.name, ARRAYS[config.name]["table_t"])
    before = model.tables()
    batches = {
        path: batch_of([config.name for config in collection.configs])
        for path, collection in model.collections.items()
    }
    outputs, of_weights = step(model, batches, {k: a["grad_out"] for k, a in ARRAYS.items()})
    after = model.tables()
    return outputs, {name: before[name] - after[name] for name in before}, of_weights


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch(recorded, name):
    outputs, gradients, of_weights = recorded
    arrays, tolerance = ARRAYS[name], CASES[name]["tolerance"]
    found = outputs[name][: len(arrays["out"])]
    np.testing.assert_allclose(found, arrays["out"], **tolerance)
    np.testing.assert_allclose(gradients[name], arrays["grad_table_t"], **tolerance)
    if "grad_weights" in arrays:
        # The weights' gradient is taken after the step, whose rows are others: by their change.
        rows = arrays["table_t"] - arrays["grad_table_t"]
        bags = np.repeat(arrays["grad_out"], arrays["lengths"], axis=0)
        expected = np.where(arrays["values"] == PAD, 0, (rows[arrays["values"]] * bags).sum(1))
        np.testing.assert_allclose(of_weights[: len(expected)], expected, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "adagrad": jaxrec.optim.adagrad(0.1),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(
        0.1, weight_decay=0.1, weight_decay_mode="decoupled"
    ),
    "rmsprop": jaxrec.optim.rmsprop(0.1),
    "rowwise_rmsprop": jaxrec.optim.rowwise_rmsprop(0.1),
    "adam": jaxrec.optim.adam(0.1, weight_decay=0.1),
    "partial_rowwise_adam": jaxrec.optim.partial_rowwise_adam(0.1, weight_decay=0.1),
    "lamb": jaxrec.optim.lamb(0.1, weight_decay=0.1),
    "partial_rowwise_lamb": jaxrec.optim.partial_rowwise_lamb(0.1, weight_decay=0.1),
    "momentum_sgd": jaxrec.optim.momentum_sgd(0.1),
    "lars_sgd": jaxrec.optim.lars_sgd(0.1, weight_decay=0.1),
    "ftrl": jaxrec.optim.ftrl(0.1),
    "ema": jaxrec.optim.ema(optimizer=jaxrec.optim.adam(0.1), decay=0.9),
}


@nnx.jit
def train(model, batch, number):
    _, gradients = jaxrec.value_and_grad(lambda model: (model(batch).values ** 2).sum())(model)
    model.apply_gradients(gradients.tables[""], number)


@pytest.mark.slow
def test_no_optimizer_touches_the_row_or_its_state():
    tables = [
        Bag(name, 6, 4, padding_id=PAD, optimizer=each, pooling=("sum", "mean", "max")[i % 3])
        for i, (name, each) in enumerate(OPTIMIZERS.items())
    ]
    model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    rng, states = np.random.default_rng(0), {}
    for name in OPTIMIZERS:
        state = {k: rng.random(x.shape).astype("f4") for k, x in model.table_state(name).items()}
        model.load_table_state(name, state)
        states[name] = state
    before = {name: np.asarray(model.table(name)) for name in OPTIMIZERS}
    for number in range(2):
        lists = [[PAD, 1, PAD], [PAD], [3, 4, PAD], []]
        batch = jaxrec.KeyedJaggedArray.from_lists(dict.fromkeys(OPTIMIZERS, lists))
        train(model, batch, number)
    for name, state in states.items():
        row, after = np.asarray(model.table(name)), model.table_state(name)
        np.testing.assert_array_equal(row[PAD], 0, err_msg=name)
        assert (row[1] != before[name][1]).any(), name
        for key, array in state.items():
            np.testing.assert_array_equal(after[key][PAD], array[PAD], err_msg=f"{name} {key}")


def test_ids_are_dropped_where_samples_share_bags_and_in_wide_batches():
    """As from a batch that was packed without them; a feature without a padding id stays."""
    lists = {"a": [[PAD, 1, PAD], [], [PAD], [3, PAD, 0]], "b": [[PAD], [PAD, 4]]}
    weights = {key: [[0.5 * i for i in bag] for bag in bags] for key, bags in lists.items()}
    tables = [Bag("a", 9, 2, padding_id=PAD), Bag("b", 9, 2)]
    batch = jaxrec.KeyedJaggedArray.from_lists(
        lists, weights=weights, inverse_indices=[[3, 0, 1, 2], [1, 0, 0, 1]]
    )
    found = without_padding_ids(batch, tables)
    assert found["a"].to_lists() == [[1], [], [], [3, 0]]
    assert found["b"].to_lists() == lists["b"]
    np.testing.assert_array_equal(found.weights[:3], [0.5, 1.5, 0.0])
    assert found.inverse_indices is batch.inverse_indices
    wide = without_padding_ids(batch._with(values=widen(batch.values)), tables)
    np.testing.assert_array_equal(np.asarray(wide.values)[:3], [1, 3, 0])
    np.testing.assert_array_equal(wide.lengths, found.lengths)
    assert without_padding_ids(batch, tables[1:]) is batch


def test_rows_stay_zero_and_say_so():
    config = Bag("a", 4, 2, padding_id=PAD, initializer="ones")
    # A compiled function makes it, as `nnx.eval_shape` does for a planner.
    model = nnx.jit(lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)))()
    np.testing.assert_array_equal(model.table("a")[:, 0], [1, 1, 0, 1])
    model.load_table("a", np.full((4, 2), 7.0))
    np.testing.assert_array_equal(model.table("a")[:, 0], [7, 7, 0, 7])
    model.load_rows("a", [0, PAD], np.array([[5.0, 5.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="padding_id=2, whose row stays zeros, got other values"):
        model.load_rows("a", [PAD], np.array([[0.0, 1.0]]))
    # A loss that reads the whole table gives the row no gradient either.
    _, gradients = jaxrec.value_and_grad(lambda model: model.table("a").sum())(model)
    model.apply_gradients(gradients.tables[""], 0)
    assert (np.asarray(model.table("a")[:, 0]) == [5, 7, 0, 7]).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("value", [-1, 4, 1.0, True], ids=str)
def test_a_padding_id_is_one_of_the_tables_ids(value):
    with pytest.raises(
        ValueError, match=r"table 'a': padding_id is one of the table's ids, 0 to 3"
    ):
        Bag("a", 4, 2, padding_id=value)


def test_tables_that_read_a_feature_agree():
    tables = [Bag("a", 4, 2, ("f",), padding_id=1), Bag("b", 4, 2, ("f",))]
    with pytest.raises(ValueError, match="'a' and 'b' read feature 'f', but have padding_id=1 and"):
        jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    assert padding_ids([tables[0]]) == {"f": 1}


def test_weights_are_refused_where_rows_are_compared():
    tables = [Bag("a", 4, 2, pooling="max")]
    with pytest.raises(ValueError, match="table 'a' has pooling='max', which takes no weights"):
        jaxrec.EmbeddingBagCollection(tables, is_weighted=True, rngs=nnx.Rngs(0))
    model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    batch = jaxrec.KeyedJaggedArray.from_lists({"a": [[1]]}, weights={"a": [[2.0]]})
    with pytest.raises(ValueError, match="'a' has pooling='max'"):
        jaxrec.embed.lookup(model.tables.get_value(), batch, is_weighted=True)


SHARED = jaxrec.KeyedJaggedArray.from_lists(
    {"a": [[1, PAD, 4], [], [3, 0, 1]]}, inverse_indices=[[2, 0, 2, 1, 0]]
)


@pytest.mark.slow
def test_samples_that_share_bags_train_as_if_each_had_its_own():
    changes = []
    for batch in (SHARED, SHARED.expanded()):
        optimizer = jaxrec.optim.adagrad(0.1)
        table = Bag("a", 5, 3, pooling="max", padding_id=PAD, optimizer=optimizer)
        model = jaxrec.EmbeddingBagCollection([table], rngs=nnx.Rngs(0))
        factors = np.arange(15, dtype=np.float32).reshape(5, 3)

        def loss(model, batch=batch, factors=factors):
            return jnp.vdot(model(batch).values, factors)

        _, gradients = jaxrec.value_and_grad(loss)(model)
        model.apply_gradients(gradients.tables[""], 0)
        changes.append(np.asarray(model.table("a")))
    np.testing.assert_allclose(*changes, rtol=1e-6)


def test_a_bound_for_samples_is_refused_where_they_share_maxima():
    optimizer = jaxrec.optim.sgd(0.1, clip_value=1.0)
    table = Bag("a", 5, 3, pooling="max", optimizer=optimizer)
    model = jaxrec.EmbeddingBagCollection([table], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="'a' have pooling='max' and an optimizer with clip_value"):
        jax.eval_shape(lambda: jaxrec.value_and_grad(lambda m: m(SHARED).values.sum())(model)[0])
