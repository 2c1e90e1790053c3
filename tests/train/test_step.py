from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.train import compile_step

pytestmark = pytest.mark.jax_version


class Ranker(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        configs = [jaxrec.EmbeddingBagConfig("user", 1000, 8)]
        self.embeddings = jaxrec.EmbeddingBagCollection(configs, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.over = nnx.Linear(8, 1, rngs=rngs)
        self.over_again = self.over

    def __call__(self, features):
        x = self.dropout(self.norm(self.embeddings(features).values))
        return self.over(x)[:, 0]


def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def make():
    model = Ranker()
    return model, jaxrec.Optimizer(model, optax.adam(0.1))


def batch(seed, size=8):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, (size, 1))
    labels = rng.integers(0, 2, size).astype(np.float32)
    return jaxrec.KeyedJaggedArray.from_dense({"user": ids}), labels


def leaves(*modules):
    state = nnx.to_flat_state(nnx.state(modules))
    values = jax.tree.leaves([variable.get_raw_value() for _, variable in state])
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in values
    ]


def test_equals_nnx_jit():
    model, optimizer = make()
    expected_model, expected_optimizer = make()
    step = compile_step(train_step, model, optimizer)
    expected_step = nnx.jit(train_step, donate_argnums=(0, 1))
    for seed in range(3):
        expected = expected_step(expected_model, expected_optimizer, *batch(seed))
        np.testing.assert_allclose(step(*batch(seed)), expected, rtol=1e-6)
    for got, wanted in zip(
        leaves(model, optimizer), leaves(expected_model, expected_optimizer), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


def test_tables_stay_where_they_are():
    model, optimizer = make()
    step = compile_step(train_step, model, optimizer)

    def pointers():
        arrays = jax.tree.leaves(model.embeddings.tables.get_value())
        return [x.unsafe_buffer_pointer() for x in arrays]

    before, rows = pointers(), np.array(model.embeddings.table("user"))
    step(*batch(0))
    assert pointers() == before
    assert not np.array_equal(rows, model.embeddings.table("user"))


def test_changes_between_steps_count():
    model, optimizer = make()
    step = compile_step(train_step, model, optimizer)
    features, labels = batch(0)
    step(features, labels)
    model.embeddings.load_table("user", np.zeros((1000, 8), np.float32))
    model.over.kernel.set_value(jnp.zeros((8, 1)))
    model.over.bias.set_value(jnp.zeros(1))
    assert step(features, labels) == pytest.approx(np.log(2))


@pytest.mark.parametrize("change", ["eval", "new layer"])
def test_follows_a_new_structure(change):
    model, optimizer = make()
    step = compile_step(train_step, model, optimizer)
    features, labels = batch(0)
    step(features, labels)
    if change == "eval":
        model.eval()
        dropout_count = int(model.dropout.rngs.count.get_value())
        step(features, labels)
        assert int(model.dropout.rngs.count.get_value()) == dropout_count
    else:
        old, model.over = model.over, nnx.Linear(8, 1, rngs=nnx.Rngs(1))
        model.over_again = model.over
        before = np.array(old.kernel[...]), np.array(model.over.kernel[...])
        step(features, labels)
        np.testing.assert_array_equal(old.kernel[...], before[0])
        assert not np.array_equal(model.over.kernel[...], before[1])


def test_eager_differentiation_in_between_does_not_recompile():
    model, optimizer = make()
    traced = []

    def step_fn(model, optimizer, features, labels):
        traced.append(1)
        return train_step(model, optimizer, features, labels)

    step = compile_step(step_fn, model, optimizer)
    features, labels = batch(0)
    step(features, labels)
    jaxrec.value_and_grad(lambda model: model(features).sum())(model)
    step(features, labels)
    assert len(traced) == 1


def test_shapes_of_batches_may_differ():
    model, optimizer = make()
    step = compile_step(train_step, model, optimizer)
    assert np.isfinite([step(*batch(0, size)) for size in (8, 4, 8)]).all()
    assert int(optimizer.step.get_value()) == 3


def test_a_step_that_adds_variables():
    model, optimizer = make()

    def step_fn(model, optimizer):
        model.extra = nnx.Variable(jnp.zeros(()))

    with pytest.raises(ValueError, match=r"changed the structure.*extra"):
        compile_step(step_fn, model, optimizer)()


def test_a_step_that_changes_an_attribute():
    model, optimizer = make()

    def step_fn(model, optimizer):
        model.eval()

    with pytest.raises(ValueError, match="attributes that are not variables"):
        compile_step(step_fn, model, optimizer)()


def test_bare_arrays():
    class Bare(nnx.Module):
        def __init__(self):
            self.mask = nnx.data(jnp.ones(3))

    with pytest.raises(TypeError, match=r"1 bare arrays.*wrap them in nnx\.Variable"):
        compile_step(lambda model: None, Bare())


def test_lower_shows_the_program():
    model, optimizer = make()
    assert "func" in compile_step(train_step, model, optimizer).lower(*batch(0)).as_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((train_step,), r"needs its modules, compile_step\(step, model, optimizer\)"),
        ((nnx.Dropout(0.5), nnx.Rngs(0)), r"must be a function step\(\*modules.*got a Dropout"),
        ((None, nnx.Rngs(0)), "must be a function.*got a NoneType"),
        ((train_step, nnx.Linear), "keeps what it changes in modules.*Linear"),
    ],
    ids=["no modules", "module first", "none", "class"],
)
def test_arguments_of_other_kinds(unchecked, arguments, message):
    with pytest.raises(TypeError, match=message):
        compile_step(*arguments)
