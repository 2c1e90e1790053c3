"""The training surface: taps, value_and_grad, accumulation, and the transformations around them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed.taps import tapped_modules
from tests.embed import oracle

pytestmark = pytest.mark.jax_version

ROWS = {"a": 50, "b": 20}


def make_embeddings(rngs, optimizer=None):
    tables = [
        jaxrec.EmbeddingBagConfig("a", ROWS["a"], 4),
        jaxrec.EmbeddingBagConfig("b", ROWS["b"], 4, pooling="mean"),
        jaxrec.EmbeddingBagConfig("wide", ROWS["a"], 6, feature_names=("a",)),
    ]
    return jaxrec.EmbeddingBagCollection(
        tables, optimizer=optimizer or jaxrec.optim.rowwise_adagrad(0.1), rngs=rngs
    )


class Ranker(nnx.Module):
    def __init__(self, rngs, optimizer=None):
        self.embeddings = make_embeddings(rngs, optimizer)
        self.over = nnx.Linear(14, 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


class TwiceRanker(Ranker):
    """Reads its tables twice, the second time under `nnx.remat`."""

    def __call__(self, features):
        @nnx.remat
        def again(model, features):
            return model.over(jnp.tanh(model.embeddings(features).values))[:, 0]

        return super().__call__(features) + again(self, features)


def loss_of(features, labels):
    return lambda model: ((model(features) - labels) ** 2).mean()


def train_step(model, optimizer, features, labels):
    loss, gradients = jaxrec.value_and_grad(loss_of(features, labels))(model)
    optimizer.update(model, gradients)
    return loss


def make_batch(seed=0, batch=8):
    rng = np.random.default_rng(seed)
    lists = oracle.random_lists(rng, ROWS, batch)
    features = jaxrec.KeyedJaggedArray.from_lists(lists, capacities={"a": 48, "b": 48})
    return features, rng.normal(size=batch).astype(np.float32)


def tables_of(model):
    return {c.name: np.asarray(model.embeddings.table(c.name)) for c in model.embeddings.configs}


class DenseRanker(nnx.Module):
    """The same model with tables as ordinary parameters: the gradient JAX computes."""

    def __init__(self, model, twice):
        self.tables = nnx.Dict(
            {name: nnx.Param(jnp.asarray(table)) for name, table in tables_of(model).items()}
        )
        self.over = nnx.clone(model.over)
        self.twice = twice

    def __call__(self, lists):
        blocks = []
        for name, feature, mean in (("a", "a", False), ("b", "b", True), ("wide", "a", False)):
            table = self.tables[name][...]
            pools = [
                table[np.array(bag, int)].sum(0) / (max(len(bag), 1) if mean else 1)
                for bag in lists[feature]
            ]
            blocks.append(jnp.stack(pools))
        values = jnp.concatenate(blocks, axis=1)
        out = self.over(values)[:, 0]
        return out + self.over(jnp.tanh(values))[:, 0] if self.twice else out


@pytest.mark.parametrize("kind", [Ranker, TwiceRanker], ids=["once", "twice_and_remat"])
def test_gradients_equal_those_of_dense_tables(kind):
    model = kind(nnx.Rngs(0), jaxrec.optim.sgd(1.0))
    features, labels = make_batch()
    dense = DenseRanker(model, kind is TwiceRanker)
    lists = features.to_lists()
    expected_loss, expected = nnx.jit(
        nnx.value_and_grad(lambda m: ((m(lists) - labels) ** 2).mean())
    )(dense)

    loss, gradients = nnx.jit(lambda m, f, y: jaxrec.value_and_grad(loss_of(f, y))(m))(
        model, features, labels
    )
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(
        gradients.dense["over"]["kernel"].get_value(),
        expected["over"]["kernel"].get_value(),
        rtol=1e-5,
        atol=1e-6,
    )
    before = tables_of(model)
    model.embeddings.apply_gradients(gradients.tables["embeddings"], 0)
    for name, after in tables_of(model).items():
        np.testing.assert_allclose(
            before[name] - after, expected["tables"][name].get_value(), rtol=1e-4, atol=1e-6
        )


def test_taps_leave_no_trace_in_the_model():
    model = TwiceRanker(nnx.Rngs(0))
    structure = jax.tree.structure(nnx.state(model))
    gradient = nnx.jit(lambda model, *batch: jaxrec.value_and_grad(loss_of(*batch))(model)[0])
    gradient(model, *make_batch())
    assert jax.tree.structure(nnx.state(model)) == structure
    assert nnx.state(model, nnx.Param).keys() == {"over"}


def test_taps_leave_no_trace_after_an_error():
    model = Ranker(nnx.Rngs(0))

    def broken(model):
        model(make_batch()[0])
        raise RuntimeError("broken loss")

    with pytest.raises(RuntimeError, match="broken loss"):
        jaxrec.value_and_grad(broken)(model)
    assert all(len(module.taps) == 0 for module in tapped_modules(model).values())


def run_steps(step, model, optimizer, batches):
    losses = [float(step(model, optimizer, *batch)) for batch in batches]
    return losses, tables_of(model)


@pytest.fixture(scope="module")
def eager_run():
    """Losses and tables of three steps without any transformation."""
    model = TwiceRanker(nnx.Rngs(0))
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    return run_steps(train_step, model, optimizer, [make_batch(s) for s in range(3)])


def assert_same_run(run, expected):
    losses, tables = run
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    for name, table in tables.items():
        np.testing.assert_allclose(table, expected[1][name], rtol=1e-4, atol=1e-6)


def test_nnx_jit(eager_run):
    model = TwiceRanker(nnx.Rngs(0))
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    step = nnx.jit(train_step, donate_argnums=(0, 1))
    batches = [make_batch(s) for s in range(3)]
    assert_same_run(run_steps(step, model, optimizer, batches), eager_run)


def test_jax_jit_over_split_state(eager_run):
    model = TwiceRanker(nnx.Rngs(0))
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state, features, labels):
        model, optimizer = nnx.merge(graphdef, state)
        loss = train_step(model, optimizer, features, labels)
        return loss, nnx.state((model, optimizer))

    losses = []
    for seed in range(3):
        loss, state = step(state, *make_batch(seed))
        losses.append(float(loss))
    nnx.update((model, optimizer), state)
    assert_same_run((losses, tables_of(model)), eager_run)


def test_scan_over_steps(eager_run):
    model = TwiceRanker(nnx.Rngs(0))
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    graphdef, state = nnx.split((model, optimizer))
    batches = jax.tree.map(lambda *xs: np.stack(xs), *[make_batch(s) for s in range(3)])

    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        loss = train_step(model, optimizer, *batch)
        return nnx.state((model, optimizer)), loss

    state, losses = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(
        state, batches
    )
    nnx.update((model, optimizer), state)
    assert_same_run((losses, tables_of(model)), eager_run)


def test_checkpoint_over_the_functional_core():
    tables = jaxrec.embed.init_tables(
        [jaxrec.EmbeddingBagConfig("a", 50, 4)], jaxrec.optim.sgd(1.0), jax.random.key(0)
    )
    features, labels = make_batch()
    kernel = jnp.ones((4,))

    def gradient(wrap):
        def loss(activations, kernel):
            return ((jnp.tanh(activations.values) @ kernel - labels) ** 2).mean()

        activations, residuals = jaxrec.embed.lookup(tables, features)
        grads = jax.grad(wrap(loss))(activations, kernel)
        return jaxrec.embed.apply_gradients(tables, residuals, grads, 0).rows["float32_4"]

    np.testing.assert_array_equal(gradient(jax.checkpoint), gradient(lambda f: f))


def stack_gradients(model, batches):
    graphdef, state = nnx.split(model)

    def micro(state, batch):
        return state, jaxrec.value_and_grad(loss_of(*batch))(nnx.merge(graphdef, state))[1]

    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    return jax.jit(jax.lax.scan, static_argnums=0)(micro, state, stacked)[1]


def list_gradients(model, batches):
    gradient = nnx.jit(lambda model, *batch: jaxrec.value_and_grad(loss_of(*batch))(model)[1])
    return [gradient(model, *batch) for batch in batches]


@pytest.mark.parametrize("accumulate", [list_gradients, stack_gradients])
def test_micro_batches_make_one_update(accumulate):
    """Accumulated gradients update as the whole batch does, each row once."""
    whole = [make_batch(s) for s in range(3)]
    lists = {k: [bag for f, _ in whole for bag in f.to_lists()[k]] for k in ROWS}
    all_features = jaxrec.KeyedJaggedArray.from_lists(lists)
    all_labels = np.concatenate([labels for _, labels in whole])

    models = [TwiceRanker(nnx.Rngs(0), jaxrec.optim.adam(0.1)) for _ in range(2)]
    optimizers = [jaxrec.Optimizer(model, optax.sgd(0.1)) for model in models]
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    update(models[0], optimizers[0], jaxrec.mean_gradients(accumulate(models[0], whole)))
    nnx.jit(train_step)(models[1], optimizers[1], all_features, all_labels)
    for name, table in tables_of(models[0]).items():
        np.testing.assert_allclose(table, tables_of(models[1])[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(models[0].over.kernel[...], models[1].over.kernel[...], rtol=1e-5)


def test_mean_of_no_gradients():
    with pytest.raises(ValueError, match="at least one micro-batch"):
        jaxrec.mean_gradients([])


def test_evaluation_needs_no_taps_and_changes_nothing():
    model = Ranker(nnx.Rngs(0))
    features, _ = make_batch()
    before = tables_of(model)
    logits = nnx.jit(lambda model, features: model(features))(model, features)
    np.testing.assert_allclose(logits, model(features), rtol=1e-5, atol=1e-6)
    for name, table in tables_of(model).items():
        np.testing.assert_array_equal(table, before[name])


def test_a_collection_shared_by_two_parents_is_updated_once():
    class Both(nnx.Module):
        def __init__(self, rngs):
            self.left = Ranker(rngs, jaxrec.optim.adam(0.1))
            self.right = Ranker(rngs)
            self.right.embeddings = self.left.embeddings

        def __call__(self, features):
            return self.left(features) - 2 * self.right(features)

    model = Both(nnx.Rngs(0))
    assert len(tapped_modules(model)) == 1
    before = tables_of(model.left)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    nnx.jit(train_step)(model, optimizer, *make_batch())
    for name, table in tables_of(model.left).items():
        moved = np.abs(table - before[name]).max(axis=1)
        # Adam's first step is the learning rate; two of them would be more.
        assert moved.max() <= 0.1 * (1 + 1e-3)
        assert moved.max() > 0.09


def test_auxiliary_output_and_extra_arguments():
    model = Ranker(nnx.Rngs(0))
    features, labels = make_batch()

    def loss(model, features, *, labels):
        logits = model(features)
        return ((logits - labels) ** 2).mean(), logits

    (value, logits), _ = jaxrec.value_and_grad(loss, has_aux=True)(model, features, labels=labels)
    np.testing.assert_allclose(value, ((logits - labels) ** 2).mean(), rtol=1e-6)


def test_other_state_of_the_model_moves_on():
    """Batch statistics and dropout's counter advance as under `nnx.value_and_grad`."""

    class Noisy(Ranker):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(14, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, features):
            values = self.norm(self.embeddings(features).values)
            return self.over(self.dropout(values))[:, 0]

    model = Noisy(nnx.Rngs(0))
    model.train()
    count = int(model.dropout.rngs.count[...])
    jaxrec.value_and_grad(loss_of(*make_batch()))(model)
    assert int(model.dropout.rngs.count[...]) == count + 1
    assert np.abs(model.norm.mean[...]).max() > 0


def test_a_model_without_tables():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    _, gradients = jaxrec.value_and_grad(lambda m: m(jnp.ones((2, 3))).sum())(model)
    assert gradients.tables == {}
    jaxrec.Optimizer(model, optax.sgd(0.1)).update(model, gradients)


def test_a_collection_that_the_loss_does_not_use():
    model = Ranker(nnx.Rngs(0))
    before = tables_of(model)
    _, gradients = jaxrec.value_and_grad(lambda m: m.over(jnp.ones((2, 14))).sum())(model)
    jaxrec.Optimizer(model, optax.sgd(0.1)).update(model, gradients)
    for name, table in tables_of(model).items():
        np.testing.assert_array_equal(table, before[name])


def test_weights_computed_by_the_model_are_trained():
    """The gradient of per-id weights flows into whatever made them."""

    class Weighted(nnx.Module):
        def __init__(self, rngs):
            config = jaxrec.EmbeddingBagConfig("a", ROWS["a"], 4)
            self.embeddings = jaxrec.EmbeddingBagCollection([config], is_weighted=True, rngs=rngs)
            self.gain = nnx.Param(jnp.ones(()))

        def __call__(self, features):
            weights = jnp.full(features.values.shape, 2.0) * self.gain[...]
            return self.embeddings(dataclasses.replace(features, weights=weights)).values

    model = Weighted(nnx.Rngs(0))
    features, _ = make_batch()
    value, gradients = jaxrec.value_and_grad(lambda m: m(features).sum())(model)
    # The output is linear in the gain, whose value is 1.
    np.testing.assert_allclose(gradients.dense["gain"].get_value(), value, rtol=1e-5)
