"""The two collections against sums taken sample by sample in NumPy."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from tests.embed import oracle
from tests.embed.test_golden import UNIT_SGD

pytestmark = pytest.mark.jax_version

Bag = jaxrec.EmbeddingBagConfig

ROWS = {"f": 13, "g": 7, "h": 5}
TABLES = (
    Bag("t0", 13, 5, feature_names=("f",)),
    Bag("t1", 7, 3, feature_names=("g", "h"), pooling="mean"),
    Bag("t2", 13, 5, feature_names=("g", "f"), pooling="mean"),
    Bag("t3", 5, 1, feature_names=("h",)),
)
EXPECTED_KEYS = ("f@t0", "g@t1", "h@t1", "g@t2", "f@t2", "h@t3")


def expected_pooled(collection, lists, weights=None):
    blocks = [
        oracle.pooled(
            collection.table(table.name),
            lists[feature],
            weights and weights[feature],
            table.pooling == "mean",
        )
        for table in collection.configs
        for feature in table.feature_names
    ]
    return np.concatenate(blocks, axis=1)


@pytest.fixture(scope="module")
def collections():
    return {
        is_weighted: jaxrec.EmbeddingBagCollection(
            [dataclasses.replace(t, num_embeddings=max(t.num_embeddings, 13)) for t in TABLES],
            optimizer=UNIT_SGD,
            is_weighted=is_weighted,
            rngs=nnx.Rngs(0),
        )
        for is_weighted in (False, True)
    }


look_up = nnx.jit(lambda collection, batch: collection(batch))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_pooled_lookup(collections, is_weighted, data):
    bags = st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=3, max_size=3)
    lists = {feature: data.draw(bags, label=feature) for feature in ("h", "f", "g")}
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    weights = oracle.random_weights(rng, lists) if is_weighted else None
    batch = jaxrec.KeyedJaggedArray.from_lists(
        lists, weights=weights, capacities=dict.fromkeys(lists, 12)
    )
    pooled = look_up(collections[is_weighted], batch)
    expected = expected_pooled(collections[is_weighted], lists, weights)
    assert pooled.keys == EXPECTED_KEYS
    np.testing.assert_allclose(pooled.values, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(pooled["h@t3"], pooled.values[:, -1:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_weights_of_other_types(dtype):
    """Kernels take them in float32; their gradient is of their own type."""
    with jax.enable_x64(dtype == "float64"):
        collection = jaxrec.EmbeddingBagCollection(
            [Bag("a", 8, 4)], optimizer=UNIT_SGD, is_weighted=True, rngs=nnx.Rngs(0)
        )
        weights = jnp.asarray([0.5, 2, 0, 0, 0, 0, 0, 0], dtype)
        batch = jaxrec.KeyedJaggedArray.from_lengths(["a"], [1, 2], [1, 1], weights=[0.5, 2])

        def loss(weights):
            return collection(dataclasses.replace(batch, weights=weights)).values.sum()

        sums = np.asarray(collection.table("a")[jnp.array([1, 2])], np.float64).sum(axis=1)
        value, slope = jax.value_and_grad(loss)(weights)
        assert (value.dtype, slope.dtype) == ("float32", dtype)
        np.testing.assert_allclose(value, [0.5, 2] @ sums, rtol=1e-5)
        precision = max(1e-6, float(jnp.finfo(dtype).eps))
        np.testing.assert_allclose(np.asarray(slope[:2], np.float64), sums, rtol=precision)

        def step(model):
            return model(dataclasses.replace(batch, weights=weights)).values.sum()

        before = np.asarray(collection.table("a"))
        _, gradients = jaxrec.value_and_grad(step)(collection)
        collection.apply_gradients(gradients.tables[""], 0)
        change = before - np.asarray(collection.table("a"))
        np.testing.assert_allclose(change[[1, 2], 0], [0.5, 2], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_table_types_and_output_type(dtype):
    collection = jaxrec.EmbeddingBagCollection(
        [Bag("a", 10, 4, dtype=dtype)], dtype="bfloat16", rngs=nnx.Rngs(0)
    )
    assert collection.table("a").dtype == dtype
    lists = {"a": [[1, 2, 3], [], [4]]}
    pooled = collection(oracle.keyed(lists))
    assert pooled.values.dtype == jnp.bfloat16
    expected = oracle.pooled(collection.table("a"), lists["a"])
    np.testing.assert_allclose(
        np.asarray(pooled.values, np.float64), expected, rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("shared", [False, True], ids=["own_bags", "shared_bags"])
def test_a_batch_without_samples(is_weighted, shared):
    optimizer = jaxrec.optim.rowwise_adagrad(0.1, clip_value=0.5)
    collection = jaxrec.EmbeddingBagCollection(
        [Bag("a", 4, 2), Bag("b", 4, 2, pooling="mean")],
        optimizer=optimizer,
        is_weighted=is_weighted,
        rngs=nnx.Rngs(0),
    )
    lists: dict[str, list] = {"a": [], "b": []}
    batch = jaxrec.KeyedJaggedArray.from_lists(
        lists,
        weights=lists if is_weighted else None,
        inverse_indices=np.zeros((2, 0), np.int32) if shared else None,
    )
    before = {name: np.asarray(collection.table(name)) for name in "ab"}

    def loss(model, weights):
        pooled = model(dataclasses.replace(batch, weights=weights)).values
        assert pooled.shape == (0, 4)
        return pooled.sum()

    value, gradients = jaxrec.value_and_grad(loss)(collection, batch.weights)
    collection.apply_gradients(gradients.tables[""], 0)
    assert value == 0
    for name, rows in before.items():
        np.testing.assert_array_equal(collection.table(name), rows)
    if is_weighted:
        slope = jax.grad(loss, argnums=1)(collection, jnp.asarray(batch.weights))
        np.testing.assert_array_equal(slope, np.zeros(batch.weights.shape))


def test_a_batch_without_samples_of_sequences():
    collection = jaxrec.EmbeddingCollection(
        [jaxrec.EmbeddingConfig("a", 4, 2)], optimizer=UNIT_SGD, rngs=nnx.Rngs(0)
    )
    batch, before = jaxrec.KeyedJaggedArray.from_lists({"a": []}), np.asarray(collection.table("a"))
    value, gradients = jaxrec.value_and_grad(lambda m: m(batch)["a"].values.sum())(collection)
    collection.apply_gradients(gradients.tables[""], 0)
    assert value == 0
    np.testing.assert_array_equal(collection.table("a"), before)


class TestWeightsThatAreNotUsed:
    MESSAGE = r"the batch has weights, .* the tables 'a' is not weighted: the bags of 'a', 'b' are"

    def collection(self, **options):
        return jaxrec.EmbeddingBagCollection(
            [Bag("a", 6, 2, feature_names=("a", "b"))], rngs=nnx.Rngs(0), **options
        )

    def batch(self):
        both = {"a": [[1, 2]], "b": [[3]]}
        return jaxrec.KeyedJaggedArray.from_lists(both, {"a": [[0.5, 2.0]], "b": [[1.0]]})

    def test_a_collection_says_so_when_it_is_traced(self):
        model, batch = self.collection(), self.batch()
        look_up = nnx.jit(lambda model, batch: model(batch).values)
        with pytest.warns(UserWarning, match=self.MESSAGE):
            pooled = look_up(model, batch)
        without = dataclasses.replace(batch, weights=None)
        np.testing.assert_array_equal(pooled, look_up(model, without))
        look_up(self.collection(is_weighted=True), batch)

    def test_the_functional_core_says_so(self):
        tables = self.collection().tables.get_value()
        with pytest.warns(UserWarning, match=self.MESSAGE):
            jaxrec.embed.lookup(tables, self.batch())
        jaxrec.embed.lookup(tables, self.batch(), is_weighted=True)

    def test_sequences_leave_weights_to_the_model(self):
        config = jaxrec.EmbeddingConfig("a", 6, 2)
        jaxrec.EmbeddingCollection([config], rngs=nnx.Rngs(0))(self.batch())


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1], ids=["negative", "first_beyond", "largest"])
class TestIdsOutsideTheTable:
    """No id reaches memory outside of its table, and none passes unseen."""

    def batch(self, bad):
        good = jaxrec.KeyedJaggedArray.from_lists({"a": [[3], [1, 2]], "b": [[1], [2]]})
        values = np.asarray(good.values).copy()
        values[1] = bad
        return jax.tree.unflatten(jax.tree.structure(good), [values, good.lengths])  # unchecked

    def collection(self):
        tables = [Bag("a", 10, 2), Bag("b", 10, 2)]
        return jaxrec.EmbeddingBagCollection(tables, optimizer=UNIT_SGD, rngs=nnx.Rngs(0))

    def test_error_outside_of_jit(self, bad):
        message = f"feature 'a', sample 1: id {bad} is outside [0, 10), the ids of its table"
        with pytest.raises(ValueError, match=re.escape(message)):
            self.collection()(self.batch(bad))

    def test_nan_inside_of_jit(self, bad):
        pooled = look_up(self.collection(), self.batch(bad))
        assert np.isnan(pooled["a"][1]).all()
        assert np.isfinite(pooled["a"][0]).all()
        assert np.isfinite(pooled["b"]).all()

    def test_other_rows_alone_are_updated(self, bad):
        collection = self.collection()
        before = {name: np.asarray(collection.table(name)) for name in "ab"}
        step = nnx.jit(
            jaxrec.value_and_grad(lambda m, batch: jnp.nan_to_num(m(batch).values).sum())
        )
        _, gradients = step(collection, self.batch(bad))
        collection.apply_gradients(gradients.tables[""], 0)
        changed = {n: np.flatnonzero((before[n] != collection.table(n)).any(1)) for n in "ab"}
        assert changed["a"].tolist() == [3]
        assert changed["b"].tolist() == [1, 2]


def test_missing_feature_and_missing_weights():
    collection = jaxrec.EmbeddingBagCollection(
        [Bag("a", 10, 2, feature_names=("clicks",))], is_weighted=True, rngs=nnx.Rngs(0)
    )
    with pytest.raises(KeyError, match=r"table 'a' reads feature 'clicks', which the batch lacks"):
        collection(oracle.keyed({"views": [[1]]}, {"views": [[1.0]]}))
    with pytest.raises(ValueError, match="the batch has no weights"):
        collection(oracle.keyed({"clicks": [[1]]}))


def test_tables_of_the_wrong_kind():
    with pytest.raises(TypeError, match="EmbeddingCollection takes EmbeddingConfigs"):
        jaxrec.EmbeddingCollection([Bag("a", 1, 1)], rngs=nnx.Rngs(0))


ONE = Bag("a", 6, 2)

# Each: what the constructor is given, and what the error must say.
WRONG_TYPES = {
    "one_config": ({"tables": ONE}, r"takes a sequence of EmbeddingBagConfigs, such as \[Embedd"),
    "names": ({"tables": "a"}, "takes a sequence of EmbeddingBagConfigs.* got 'a'"),
    "by_name": ({"tables": {"a": ONE}}, "takes a sequence of EmbeddingBagConfigs"),
    "number": ({"tables": 3}, "takes a sequence of EmbeddingBagConfigs.* got 3"),
    "optax": (
        {"optimizer": optax.adam(0.1)},
        r"such as jaxrec\.optim\.rowwise_adagrad\(\), got Grad",
    ),
    "named_optimizer": ({"optimizer": "adam"}, r"jaxrec\.optim\..* got 'adam'"),
    "seed": ({"rngs": 0}, r"rngs is a flax\.nnx\.Rngs such as nnx\.Rngs\(0\), got 0"),
    "key": (
        {"rngs": jax.random.key(0)},
        r"rngs is a flax\.nnx\.Rngs such as nnx\.Rngs\(0\), got Arr",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_a_wrong_type_is_named(unchecked, arguments, message):
    with pytest.raises(TypeError, match=message):
        jaxrec.EmbeddingBagCollection(**{"tables": [ONE], "rngs": nnx.Rngs(0)} | arguments)


@pytest.mark.parametrize(
    "batch", [{"a": [[1]]}, np.zeros((2, 1), np.int32), [[1]]], ids=lambda b: type(b).__name__
)
def test_only_keyed_batches_are_looked_up(unchecked, batch):
    collection = jaxrec.EmbeddingBagCollection(iter([ONE]), rngs=nnx.Rngs(0))
    message = f"KeyedJaggedArray, got {type(batch).__name__}; make one by KeyedJaggedArray.from"
    with pytest.raises(TypeError, match=message):
        collection(batch)


def test_bounds_name_the_smallest_table_of_each_feature():
    tables = [Bag("a", 10, 2, feature_names=("f", "g")), Bag("b", 5, 2, feature_names=("g",))]
    collection = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    assert collection.bounds == {"f": 10, "g": 5}
    with pytest.raises(ValueError, match="id 7 is outside"):
        jaxrec.KeyedJaggedArray.from_lists({"f": [[7]], "g": [[7]]}, bounds=collection.bounds)


def test_embedding_collection_with_tables_of_different_widths():
    tables = [jaxrec.EmbeddingConfig("a", 9, 3), jaxrec.EmbeddingConfig("b", 9, 5)]
    collection = jaxrec.EmbeddingCollection(tables, rngs=nnx.Rngs(0))
    lists = {"a": [[1, 2], [], [3]], "b": [[4], [5], [6]]}
    embeddings = collection(oracle.keyed(lists))
    for name, bags in lists.items():
        rows = np.asarray(collection.table(name))[np.concatenate(bags).astype(int)]
        np.testing.assert_array_equal(embeddings[name].values[: len(rows)], rows)
        assert embeddings[name].lengths.tolist() == [len(bag) for bag in bags]


def test_one_batch_size_compiles_once():
    collection = jaxrec.EmbeddingBagCollection([Bag("a", 50, 2)], rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    step = nnx.jit(lambda collection, batch: collection(batch).values)
    for _ in range(5):
        lists = oracle.random_lists(rng, {"a": 50}, 8)
        step(collection, jaxrec.KeyedJaggedArray.from_lists(lists, capacities={"a": 48}))
    assert step.jitted_fn._cache_size() == 1


class TestOptimizer:
    def model(self):
        return jaxrec.EmbeddingBagCollection([Bag("a", 6, 2)], optimizer=UNIT_SGD, rngs=nnx.Rngs(0))

    def test_plain_gradients_are_refused(self, unchecked):
        model = self.model()
        with pytest.raises(TypeError, match=r"gradients come from jaxrec\.value_and_grad"):
            jaxrec.Optimizer(model, optax.sgd(0.1)).update(model, nnx.State({}))

    def test_gradients_of_another_model_are_refused(self):
        model = self.model()
        batch = oracle.keyed({"a": [[1]]})
        _, gradients = jaxrec.value_and_grad(lambda m: m(batch).values.sum())(model)
        other = nnx.Dict({"inner": self.model()})
        with pytest.raises(ValueError, match=r"collections at \[''\], but the model has"):
            jaxrec.Optimizer(other, optax.sgd(0.1)).update(other, gradients)

    def test_learning_rate_schedules_see_the_step(self):
        schedule = optax.piecewise_constant_schedule(1.0, {1: 0.1})
        model = jaxrec.EmbeddingBagCollection(
            [Bag("a", 6, 1)], optimizer=jaxrec.optim.sgd(schedule), rngs=nnx.Rngs(0)
        )
        optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        batch = oracle.keyed({"a": [[1]]})

        @nnx.jit
        def step(model, optimizer):
            _, gradients = jaxrec.value_and_grad(lambda m: m(batch).values.sum())(model)
            optimizer.update(model, gradients)

        values = [float(model.table("a")[1, 0])]
        for _ in range(3):
            step(model, optimizer)
            values.append(float(model.table("a")[1, 0]))
        np.testing.assert_allclose(-np.diff(values), [1.0, 0.1, 0.1], rtol=1e-5)


def test_state_passes_through_a_pytree_round_trip():
    collection = jaxrec.EmbeddingBagCollection([Bag("a", 6, 2)], rngs=nnx.Rngs(0))
    leaves, structure = jax.tree.flatten(nnx.state(collection))
    nnx.update(collection, jax.tree.unflatten(structure, [leaf * 0 + 1 for leaf in leaves]))
    np.testing.assert_array_equal(collection.table("a"), np.ones((6, 2)))
