"""Learning rates and decays that are set between steps; frozen tables; averages of rows."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.optim import hyperparameter

RATE = hyperparameter("rate", 0.5)
DECAY = hyperparameter("decay", 0.0)
LISTS = {"user": [[1, 2], [], [3], [1]]}
# By row: how often the batch has it, which is its gradient under a loss that sums the embeddings.
COUNTS = np.array([0, 2, 1, 1, 0, 0, 0, 0])[:, None]


def make(optimizer, mesh=None, **options):
    config = jaxrec.EmbeddingBagConfig("user", 8, 4, **options)
    model = jaxrec.EmbeddingBagCollection([config], optimizer=optimizer, rngs=nnx.Rngs(0))
    features = jaxrec.KeyedJaggedArray.from_lists(LISTS)
    if mesh is not None:
        plan = jaxrec.plan.ShardingPlan.from_dict({"user": jaxrec.mesh.row_wise()})
        model = jaxrec.shard(model, plan, mesh)
        features = jaxrec.mesh.shard_batch(features, mesh)
    return model, features


@pytest.fixture(params=[1, 2], ids=["one device", "two devices"])
def mesh(request):
    if request.param == 1:
        return None
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((2,), ("data",), axis_types=auto, devices=jax.devices()[:2])


@nnx.jit
def train_step(model, optimizer, features):
    loss_fn = lambda model: model(features).values.sum()  # noqa: E731
    _, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)


class TestSetting:
    def test_a_rate_is_set_between_steps_of_one_compiled_program(self, mesh):
        model, features = make(jaxrec.optim.sgd(RATE), mesh)
        optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        traces = 0

        @nnx.jit
        def step(model, optimizer, features):
            nonlocal traces
            traces += 1
            train_step(model, optimizer, features)

        expected = np.asarray(model.table("user"), np.float64)
        for rate in (None, 0.25, 0.0, np.float32(2.0)):
            if rate is not None:
                optimizer.set_hyperparameters(rate=rate)
            step(model, optimizer, features)
            expected = expected - (0.5 if rate is None else rate) * COUNTS
            np.testing.assert_allclose(model.table("user"), expected, atol=1e-5)
        assert traces == 1
        assert optimizer.hyperparameters() == {"rate": 2.0}

    @pytest.mark.parametrize(
        "make_optimizer",
        [
            lambda rate, decay: jaxrec.optim.adam(rate, weight_decay=decay),
            lambda rate, decay: jaxrec.optim.partial_rowwise_adam(rate, weight_decay=decay),
            lambda rate, decay: jaxrec.optim.lamb(rate, weight_decay=decay),
            lambda rate, decay: jaxrec.optim.lars_sgd(rate, weight_decay=decay),
            lambda rate, decay: jaxrec.optim.rowwise_adagrad(
                rate, weight_decay=decay, weight_decay_mode="l2"
            ),
            lambda rate, decay: jaxrec.optim.ema(
                optimizer=jaxrec.optim.rowwise_adagrad(
                    rate, weight_decay=decay, weight_decay_mode="decoupled"
                )
            ),
        ],
        ids=["adam", "partial_rowwise_adam", "lamb", "lars_sgd", "rowwise_adagrad", "ema"],
    )
    def test_values_that_are_set_act_as_constants_do(self, make_optimizer):
        constant, features = make(make_optimizer(0.25, 0.125))
        model, _ = make(make_optimizer(RATE, DECAY))
        optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        optimizer.set_hyperparameters(rate=0.25, decay=0.125)
        train_step(model, optimizer, features)
        train_step(constant, jaxrec.Optimizer(constant, optax.sgd(0.1)), features)
        np.testing.assert_allclose(model.table("user"), constant.table("user"), atol=1e-6)

    def test_errors_name_the_hyperparameter(self):
        model, _ = make(jaxrec.optim.sgd(RATE))
        optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        with pytest.raises(KeyError, match="no row optimizer has a hyperparameter 'speed'"):
            optimizer.set_hyperparameters(speed=1.0)
        with pytest.raises(ValueError, match="value must be a number >= 0, got -1"):
            optimizer.set_hyperparameters(rate=-1.0)
        with pytest.raises(ValueError, match="value must be a number >= 0, got nan"):
            optimizer.set_hyperparameters(rate=np.nan)
        assert optimizer.hyperparameters() == {"rate": 0.5}

    def test_one_name_has_one_value(self):
        tables = [
            jaxrec.EmbeddingBagConfig("a", 8, 4, optimizer=jaxrec.optim.sgd(RATE)),
            jaxrec.EmbeddingBagConfig(
                "b", 8, 4, optimizer=jaxrec.optim.adam(hyperparameter("rate", 0.1))
            ),
        ]
        model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"'rate' with different values, 0\.5 and 0\.1"):
            jaxrec.Optimizer(model, optax.sgd(0.1))

    def test_other_fields_take_numbers(self):
        with pytest.raises(ValueError, match="eps must be a number > 0, got hyperparameter"):
            jaxrec.optim.adam(eps=RATE)


class TestFrozenRates:
    def test_a_function_that_ignores_the_step_is_refused(self):
        now = {"rate": 0.1}
        with pytest.raises(ValueError, match=r"does not depend on the step.*hyperparameter"):
            jaxrec.optim.sgd(learning_rate=lambda step: now["rate"])

    @pytest.mark.parametrize(
        "rate",
        [
            optax.constant_schedule(0.1),
            optax.linear_schedule(0.1, 0.0, 10),
            jaxrec.optim.warmup(0.1, stages=(jaxrec.optim.WarmupStage(max_iters=3),)),
            lambda step: 0.1 * 0.9**step,
            RATE,
        ],
        ids=["optax constant", "optax linear", "warmup", "own", "hyperparameter"],
    )
    def test_schedules_are_taken(self, rate):
        assert jaxrec.optim.sgd(rate).rate(jax.numpy.int32(0)) > 0


class TestFrozenTables:
    def test_the_rows_of_a_frozen_table_keep_their_bits(self, mesh):
        tables = [
            jaxrec.EmbeddingBagConfig("user", 8, 4),
            jaxrec.EmbeddingBagConfig("kept", 8, 4, feature_names=("user",), trainable=False),
        ]
        optimizer = jaxrec.optim.adam(0.1, weight_decay=0.1)
        model = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=nnx.Rngs(0))
        features = jaxrec.KeyedJaggedArray.from_lists(LISTS)
        if mesh is not None:
            placements = {"user": jaxrec.mesh.row_wise(), "kept": jaxrec.mesh.table_wise(1)}
            model = jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
            features = jaxrec.mesh.shard_batch(features, mesh)
        before = {name: np.asarray(model.table(name)) for name in ("user", "kept")}
        train_step(model, jaxrec.Optimizer(model, optax.sgd(0.1)), features)
        np.testing.assert_array_equal(model.table("kept"), before["kept"])
        assert model.table_state("kept") == {}
        assert (np.asarray(model.table("user")) != before["user"]).any(axis=1).tolist() == (
            (COUNTS > 0)[:, 0].tolist()
        )

    def test_frozen_takes_no_rate(self):
        with pytest.raises(ValueError, match="no learning rate"):
            jaxrec.optim.frozen(0.1)

    def test_trainable_is_a_boolean(self, unchecked):
        with pytest.raises(TypeError, match="'user': trainable is True or False, got 'no'"):
            jaxrec.EmbeddingBagConfig("user", 8, 4, trainable="no")


class TestAverages:
    @pytest.mark.parametrize("inner", [jaxrec.optim.sgd(0.5), jaxrec.optim.adam(0.1)], ids=repr)
    def test_averages_follow_their_formula(self, mesh, inner):
        model, features = make(jaxrec.optim.ema(optimizer=inner, decay=0.75), mesh)
        plain, _ = make(inner, mesh)
        optimizers = [jaxrec.Optimizer(each, optax.sgd(0.1)) for each in (model, plain)]
        average = np.asarray(model.table("user"), np.float64)
        for _ in range(3):
            train_step(model, optimizers[0], features)
            train_step(plain, optimizers[1], features)
            rows = np.asarray(model.table("user"), np.float64)
            average = np.where(COUNTS > 0, 0.75 * average + 0.25 * rows, average)
        np.testing.assert_allclose(rows, plain.table("user"), atol=1e-6)
        np.testing.assert_allclose(model.table_average("user"), average, atol=1e-6)

    def test_bounds_are_those_of_the_optimizer(self):
        bounds = {"clip_value": 0.5, "clip_norm": 0.75, "max_norm": 0.5}
        inner = jaxrec.optim.sgd(0.5, **bounds)
        model, features = make(jaxrec.optim.ema(optimizer=inner))
        plain, _ = make(inner)
        for each in (model, plain):
            train_step(each, jaxrec.Optimizer(each, optax.sgd(0.1)), features)
        np.testing.assert_allclose(model.table("user"), plain.table("user"), atol=1e-6)

    def test_errors(self, unchecked):
        model, _ = make(jaxrec.optim.sgd(0.1))
        with pytest.raises(ValueError, match=r"'user' has no averages.*jaxrec\.optim\.ema"):
            model.table_average("user")
        with pytest.raises(TypeError, match="ema: optimizer is a row optimizer"):
            jaxrec.optim.ema(optimizer=optax.sgd(0.1))
        with pytest.raises(ValueError, match="give the learning rate to its optimizer"):
            jaxrec.optim.ema(optimizer=jaxrec.optim.sgd(0.1), learning_rate=0.2)
