"""What a loss may do with tables: read them whole, call them in transformations, be forgotten."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import tables
from jaxrec.embed.taps import Ahead, AheadVariable

pytestmark = pytest.mark.jax_version

RATE = 0.5


def make(config=jaxrec.EmbeddingBagConfig, collection=jaxrec.EmbeddingBagCollection, **options):
    tables = [config("user", 8, 4, **options), config("product", 10, 4)]
    return collection(tables, optimizer=jaxrec.optim.sgd(RATE), rngs=nnx.Rngs(0))


class Ranker(nnx.Module):
    def __init__(self, **options):
        self.embeddings = make(**options)
        self.norm = nnx.BatchNorm(8, use_running_average=False, rngs=nnx.Rngs(1))
        self.over = nnx.Linear(8, 1, rngs=nnx.Rngs(2))

    def __call__(self, features):
        return self.over(self.norm(self.embeddings(features).values))[:, 0]


def batch(user=((1, 2), (), (3,)), product=((4,), (4, 5), (9,))):
    return jaxrec.KeyedJaggedArray.from_lists(
        {"user": list(map(list, user)), "product": list(map(list, product))}
    )


def sum_of(model):
    return model(batch()).values.sum()


def step(model, loss_fn):
    """The new tables after one step of SGD."""
    _, gradients = jaxrec.value_and_grad(loss_fn)(model)
    jaxrec.Optimizer(model, optax.sgd(RATE)).update(model, gradients)
    return {name: np.asarray(model.table(name)) for name in ("user", "product")}


class TestWholeTables:
    def test_a_tied_softmax_trains_the_table_as_a_parameter_would_be(self):
        model = make(jaxrec.EmbeddingConfig, jaxrec.EmbeddingCollection)
        items = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 2]], "product": [[3]]})
        before = {name: model.table(name) for name in ("user", "product")}

        def loss(queries, table):
            return -jax.nn.log_softmax(queries @ table.T)[jnp.arange(2), jnp.array([5, 6])].sum()

        def of_model(model):
            return loss(model(items)["user"].values[:2], model.table("user"))

        def of_arrays(table):
            return loss(table[jnp.array([1, 2])], table)

        value, gradient = jax.value_and_grad(of_arrays)(before["user"])
        np.testing.assert_allclose(jaxrec.value_and_grad(of_model)(model)[0], value, rtol=1e-6)
        after = step(model, of_model)
        np.testing.assert_allclose(after["user"], before["user"] - RATE * gradient, atol=1e-6)
        np.testing.assert_array_equal(after["product"], before["product"])

    @pytest.mark.parametrize("reads", [1, 2], ids=["once", "twice"])
    def test_a_penalty_on_a_table_joins_the_update_of_its_lookups(self, reads):
        model = make()
        before = np.asarray(model.table("user"))
        after = step(
            model,
            lambda model: (
                sum_of(model) + sum((model.table("user") ** 2).sum() for _ in range(reads))
            ),
        )
        expected = before - RATE * 2 * reads * before
        np.add.at(expected, [1, 2, 3], -RATE)
        np.testing.assert_allclose(after["user"], expected, atol=1e-6)

    def test_a_loss_without_lookups_trains(self):
        model = make()
        before = np.asarray(model.table("product"))
        after = step(model, lambda model: (model.table("product") ** 2).sum())
        np.testing.assert_allclose(after["product"], (1 - 2 * RATE) * before, atol=1e-6)

    def test_a_large_table_is_refused_with_the_remedy(self, monkeypatch):
        monkeypatch.setattr(tables, "MAX_DENSE_GRADIENT_BYTES", 8 * 4 * 4 - 1)
        with pytest.raises(TypeError, match="'user', whose gradient takes 128 bytes"):
            jaxrec.value_and_grad(lambda model: model.table("user").sum())(make())

    def test_a_table_over_a_mesh_is_refused_with_the_remedy(self):
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        plan = jaxrec.plan.ShardingPlan.from_dict(
            {name: jaxrec.mesh.row_wise() for name in ("user", "product")}
        )
        model = jaxrec.shard(make(), plan, mesh)
        with pytest.raises(TypeError, match="'user', whose rows do not lie on one device"):
            jaxrec.value_and_grad(lambda model: model.table("user").sum())(model)
        assert model.table("user").shape == (8, 4)

    def test_an_unknown_table_is_named(self):
        with pytest.raises(KeyError, match="no table is named 'users'"):
            jaxrec.value_and_grad(lambda model: model.table("users").sum())(make())


class TestOtherDifferentiation:
    @pytest.mark.parametrize(
        "differentiate",
        [
            nnx.value_and_grad(lambda model: model(batch()).sum()),
            nnx.jit(nnx.grad(lambda model: model(batch()).sum())),
            lambda model: jax.grad(
                lambda state: nnx.merge(nnx.graphdef(model), state)(batch()).sum(),
                allow_int=True,
            )(nnx.state(model)),
        ],
        ids=["nnx.value_and_grad", "nnx.jit(nnx.grad)", "jax.grad"],
    )
    def test_it_names_value_and_grad(self, differentiate):
        with pytest.raises(TypeError, match=r"use jaxrec\.value_and_grad and jaxrec\.Optimizer"):
            differentiate(Ranker())

    def test_a_model_in_evaluation_mode_may_be_differentiated(self):
        model = Ranker()
        model.eval()
        _, gradients = nnx.value_and_grad(lambda model: model(batch()).sum())(model)
        assert float(jnp.abs(gradients["over"]["kernel"][...]).sum()) > 0
        model.train()
        with pytest.raises(TypeError, match="value_and_grad"):
            nnx.grad(lambda model: model(batch()).sum())(model)

    def test_frozen_tables_may_be_differentiated_around(self):
        config = jaxrec.EmbeddingBagConfig("user", 8, 4, trainable=False)
        model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        nnx.value_and_grad(lambda model: model(batch()).values.sum())(model)

    def test_a_teacher_in_the_loss_stays_as_it_is(self):
        student, teacher = Ranker(), Ranker()
        before = np.asarray(teacher.embeddings.table("user"))

        def loss_fn(student, teacher):
            return ((student(batch()) - teacher(batch())) ** 2).mean()

        _, gradients = jaxrec.value_and_grad(loss_fn)(student, teacher)
        jaxrec.Optimizer(student, optax.sgd(0.1)).update(student, gradients)
        np.testing.assert_array_equal(teacher.embeddings.table("user"), before)

    def test_a_first_argument_that_is_no_model_is_named(self, unchecked):
        with pytest.raises(TypeError, match="the first argument of the loss; got dict"):
            jaxrec.value_and_grad(lambda state: 0.0)({"a": 1})


class TestTransformationsInTheLoss:
    @pytest.mark.parametrize(
        "loss_fn",
        [
            lambda model: jax.checkpoint(lambda: sum_of(model))(),
            lambda model: jax.jit(lambda: sum_of(model))(),
            lambda model: jax.vmap(lambda x: x * sum_of(model))(jnp.ones(2)).sum(),
            lambda model: jax.lax.scan(
                lambda total, x: (total + x * sum_of(model), None), 0.0, jnp.ones(2)
            )[0],
            lambda model: jax.lax.cond(jnp.array(True), lambda: sum_of(model), lambda: 0.0),
            lambda model: sum_of(nnx.clone(model)),
            lambda model: nnx.cond(jnp.array(True), sum_of, lambda model: 0.0, model),
            lambda model: nnx.scan(
                lambda model, x: (model, x * sum_of(model)),
                in_axes=(nnx.Carry, 0),
                out_axes=(nnx.Carry, 0),
            )(model, jnp.ones(2))[1].sum(),
        ],
        ids=["checkpoint", "jit", "vmap", "scan", "cond", "nnx.clone", "nnx.cond", "nnx.scan"],
    )
    def test_a_lost_gradient_is_one_error_with_the_remedy(self, loss_fn):
        model = make()
        with pytest.raises(RuntimeError, match=r"Look the ids up outside .* use nnx\.remat"):
            jaxrec.value_and_grad(loss_fn)(model)
        # The model is as good as before.
        assert float(jaxrec.value_and_grad(sum_of)(model)[1].norm()) > 0

    @pytest.mark.parametrize(
        "loss_fn",
        [
            lambda model: nnx.remat(sum_of)(model),
            lambda model: nnx.jit(sum_of)(model),
            lambda model: jax.lax.cond(jnp.array(True), lambda x: x, lambda x: 0.0, sum_of(model)),
        ],
        ids=["nnx.remat", "nnx.jit", "cond around the result"],
    )
    def test_others_work(self, loss_fn):
        expected = step(make(), sum_of)
        for name, rows in step(make(), loss_fn).items():
            np.testing.assert_allclose(rows, expected[name], atol=1e-6)

    def test_micro_batches_by_scan_equal_one_batch(self):
        model = make()
        batches = [batch(), batch(((7,), (1,), ()), ((0,), (), (4,)))]
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *batches)

        @jax.jit
        def accumulate(stacked):
            def body(carry, features):
                loss_fn = lambda model: (model(features).values ** 2).sum()  # noqa: E731
                return carry, jaxrec.value_and_grad(loss_fn)(model)

            return jax.lax.scan(body, None, stacked)[1]

        losses, gradients = accumulate(stacked)
        mean = jaxrec.mean_gradients(gradients)

        def both(model):
            return sum((model(features).values ** 2).sum() for features in batches) / 2

        loss, expected = jaxrec.value_and_grad(both)(model)
        assert float(losses.mean()) == pytest.approx(float(loss), rel=1e-6)
        assert float(mean.norm()) == pytest.approx(float(expected.norm()), rel=1e-6)

    def test_a_change_that_scan_would_lose_is_an_error(self):
        model = Ranker()  # whose BatchNorm changes its statistics

        def body(carry, _):
            return carry, jaxrec.value_and_grad(lambda model: model(batch()).sum())(model)[0]

        with pytest.raises(RuntimeError, match=r"changes a BatchStat .* nnx\.scan"):
            jax.lax.scan(body, None, jnp.arange(2))


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_derivative_waits_for_rows_of_the_next_step(has_aux):
    """Only the derivative: False, which never happens, makes it NaN."""
    model = make()

    def evaluate(flag, has_aux):
        model.is_read = nnx.List([AheadVariable(jnp.array(flag))])
        loss = (lambda model: (sum_of(model), "aux")) if has_aux else sum_of
        value, gradients = jaxrec.value_and_grad(loss, has_aux=has_aux)(model)
        (calls,) = gradients.tables.values()
        return value, [np.asarray(each.open().values) for each in calls[0].values()]

    value, without = jaxrec.value_and_grad(sum_of)(model)
    (calls,) = without.tables.values()
    expected = [np.asarray(each.open().values) for each in calls[0].values()]
    waited, gradients = evaluate(True, has_aux)
    never, nans = evaluate(False, has_aux)
    assert waited == never == ((value, "aux") if has_aux else value)
    for one, other, nan in zip(gradients, expected, nans, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isnan(nan).all()


def test_each_call_takes_the_embeddings_that_came_ahead_for_it():
    """Of three calls two were computed ahead: as ones, and as twos."""
    model = make()
    other = batch(((7,), (1,), ()), ((0,), (), (4,)))
    embeddings = model.tables.get_value().lookup(batch())[0]
    for value in (1, 2):
        filled = jax.tree.map(functools.partial(jnp.full_like, fill_value=value), embeddings)
        model.ahead.append(AheadVariable(Ahead(None, filled)))

    def loss_fn(model):
        found = [model(features).values for features in (batch(), batch(), other)]
        return sum(values.sum() for values in found), found

    (_, found), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
    np.testing.assert_array_equal(found[0], np.ones_like(found[0]))
    np.testing.assert_array_equal(found[1], np.full_like(found[1], 2))
    np.testing.assert_array_equal(found[2], make()(other).values)
    (calls,) = gradients.tables.values()
    assert len(calls) == 3
