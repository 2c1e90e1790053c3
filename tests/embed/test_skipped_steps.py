"""Steps that are not finite write nothing, are counted, and errors name the cause."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed.batch_checks import bad_id_of_batch
from jaxrec.embed.optimizer import NotFiniteError

PLACEMENTS = {
    "one device": None,
    "row_wise by rows": lambda: jaxrec.mesh.row_wise(exchange="rows"),
    "row_wise by sums": lambda: jaxrec.mesh.row_wise(exchange="pooled"),
    "table_wise": lambda: jaxrec.mesh.table_wise(1),
    "column_wise": lambda: jaxrec.mesh.column_wise((0, 1)),
    "data_parallel": jaxrec.mesh.data_parallel,
}


class Ranker(nnx.Module):
    def __init__(self, optimizer):
        tables = [
            jaxrec.EmbeddingBagConfig("user", 8, 4),
            jaxrec.EmbeddingBagConfig("product", 10, 4, pooling="mean"),
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(
            tables, optimizer=optimizer, rngs=nnx.Rngs(0)
        )
        self.norm = nnx.BatchNorm(8, use_running_average=False, rngs=nnx.Rngs(1))
        self.over = nnx.Linear(8, 1, rngs=nnx.Rngs(2))

    def __call__(self, features):
        return self.over(self.norm(self.embeddings(features).values))[:, 0]


GOOD = {"user": [[1, 2], [], [3], [1]], "product": [[4], [4, 5], [9], []]}
BAD = {"user": [[1, 2], [], [3, 8], [1]], "product": [[4], [4, 5], [9], []]}


def loss_fn(model, features, factor):
    return factor * (model(features) ** 2).mean()


@nnx.jit
def train_step(model, optimizer, features, factor):
    loss, gradients = jaxrec.value_and_grad(loss_fn)(model, features, factor)
    optimizer.update(model, gradients)
    return loss


def everything(*modules):
    """Every number of some modules but the counts of skipped steps."""
    state = nnx.to_flat_state(nnx.state(modules))
    return {
        path: [np.array(x) for x in jax.tree.leaves(variable.get_value())]
        for path, variable in state
        if not {"skipped", "skipped_in_a_row"} & set(path)
    }


@pytest.fixture(scope="module", params=PLACEMENTS.values(), ids=PLACEMENTS.keys())
def session(request):
    """A model and optimizer after one step, and what puts batches beside them."""
    model = Ranker(jaxrec.optim.adam(0.1, weight_decay=0.1))
    put = jaxrec.KeyedJaggedArray.from_lists
    if request.param is not None:
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        placements = {name: request.param() for name in ("user", "product")}
        model = jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
        put = lambda lists: jaxrec.mesh.shard_batch(  # noqa: E731
            jaxrec.KeyedJaggedArray.from_lists(lists), mesh
        )
    optimizer = jaxrec.Optimizer(model, optax.adam(0.1))
    assert np.isfinite(train_step(model, optimizer, put(GOOD), 1.0))
    return model, optimizer, put


@pytest.mark.parametrize(
    ("lists", "factor"),
    [(BAD, 1.0), (GOOD, np.nan), (GOOD, np.inf), (GOOD, 1e30)],
    ids=["id outside its table", "NaN", "infinity", "squares beyond float32"],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(session, lists, factor):
    model, optimizer, put = session
    before, skipped = everything(model, optimizer), int(optimizer.skipped[...])
    # The last is the loss of gradients that are numbers, but whose squares Adam cannot keep.
    assert np.isfinite(train_step(model, optimizer, put(lists), factor)) == (factor == 1e30)
    train_step(model, optimizer, put(lists), factor)
    after = everything(model, optimizer)
    assert set(after) == set(before)
    for path, arrays in after.items():
        if factor == 1e30 and "norm" in path and "opt_state" not in path:
            continue  # the forward pass was finite, and so are its statistics
        for array, old in zip(arrays, before[path], strict=True):
            np.testing.assert_array_equal(array, old, err_msg=str(path))
    assert int(optimizer.skipped[...]) == skipped + 2
    assert int(optimizer.skipped_in_a_row[...]) == 2

    assert np.isfinite(train_step(model, optimizer, put(GOOD), 1.0))
    assert int(optimizer.skipped_in_a_row[...]) == 0
    changed = [
        path
        for path, arrays in everything(model, optimizer).items()
        if any((new != old).any() for new, old in zip(arrays, before[path], strict=True))
    ]
    assert {str(path[1]) for path in changed} >= {"embeddings", "over", "opt_state", "step"}


def test_norms_are_those_of_one_device(session):
    model, _, put = session
    single = Ranker(jaxrec.optim.adam(0.1))
    for name in ("user", "product"):
        single.embeddings.load_table(name, np.asarray(model.embeddings.table(name)))

    def pooled(model, features):
        return (model.embeddings(features).values ** 2).sum()

    differentiate = jaxrec.value_and_grad(pooled)
    _, expected = differentiate(single, jaxrec.KeyedJaggedArray.from_lists(GOOD))
    _, gradients = nnx.jit(differentiate)(model, put(GOOD))
    expected = expected.table_norms()["embeddings"]
    norms = jax.jit(lambda gradients: gradients.table_norms())(gradients)["embeddings"]
    assert set(norms) == set(expected)
    for name, norm in norms.items():
        np.testing.assert_allclose(norm, expected[name], rtol=1e-5)
    clipped = jax.jit(lambda gradients: gradients.clip(0.5).norm())(gradients)
    np.testing.assert_allclose(clipped, 0.5, rtol=1e-5)


def test_a_loss_that_is_not_finite_is_skipped_whatever_its_gradient():
    model = Ranker(jaxrec.optim.sgd(0.1))
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    before = everything(model, optimizer)
    features = jaxrec.KeyedJaggedArray.from_lists(GOOD)
    _, gradients = jaxrec.value_and_grad(lambda model: model(features).sum() + jnp.nan)(model)
    optimizer.update(model, gradients)
    after = everything(model, optimizer)
    for path, arrays in after.items():
        for array, old in zip(arrays, before[path], strict=True):
            np.testing.assert_array_equal(array, old, err_msg=str(path))


def test_gradients_of_embeddings_alone_are_looked_at():
    model = Ranker(jaxrec.optim.sgd(0.1))
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    features = jaxrec.KeyedJaggedArray.from_lists(GOOD)

    def of_norms(model):
        # The norm of an empty bag's zeros has no gradient: NaN, though the loss is finite.
        return jnp.linalg.norm(model.embeddings(features)["user"], axis=1).sum()

    loss, gradients = jaxrec.value_and_grad(of_norms)(model)
    assert np.isfinite(loss)
    optimizer.update(model, gradients)
    assert int(optimizer.skipped[...]) == 1


@pytest.mark.parametrize("weight", [1.0, 1e30], ids=["gradient", "weight"])
def test_rows_move_on_after_a_gradient_whose_square_is_infinite(weight):
    config = jaxrec.EmbeddingBagConfig("user", 4, 2)
    model = jaxrec.EmbeddingBagCollection(
        [config], optimizer=jaxrec.optim.adagrad(0.5), is_weighted=True, rngs=nnx.Rngs(0)
    )
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))

    def step(weight, slope):
        features = jaxrec.KeyedJaggedArray.from_lists({"user": [[1]]}, {"user": [[weight]]})
        loss_fn = lambda model: slope * model(features).values.sum()  # noqa: E731
        optimizer.update(model, jaxrec.value_and_grad(loss_fn)(model)[1])
        return np.asarray(model.table("user"))[1], model.table_state("user")["accumulator"][1]

    before = np.asarray(model.table("user"))[1]
    row, state = step(weight, 1e30 / weight)
    assert int(optimizer.skipped[...]) == 1
    np.testing.assert_array_equal(row, before)
    np.testing.assert_array_equal(state, 0)
    row, _ = step(1.0, 2.0)
    np.testing.assert_allclose(row, before - 0.5, rtol=1e-6)


def finish(step, *args):
    """Runs a step to its end, checks on the host included."""
    jax.block_until_ready(step(*args))
    jax.effects_barrier()


class TestDebug:
    def test_compiled_steps_name_the_id(self):
        model = Ranker(jaxrec.optim.sgd(0.1))
        optimizer = jaxrec.Optimizer(model, optax.sgd(0.1), debug=True)
        train_step(model, optimizer, jaxrec.KeyedJaggedArray.from_lists(GOOD), 1.0)
        bad = jaxrec.KeyedJaggedArray.from_lists(BAD)
        with pytest.raises(Exception, match=r"'user', sample 2: id 8 is outside \[0, 8\)"):
            finish(train_step, model, optimizer, bad, 1.0)

    @pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
    def test_steps_name_what_is_not_finite(self, is_compiled):
        model = Ranker(jaxrec.optim.sgd(0.1))
        optimizer = jaxrec.Optimizer(model, optax.sgd(0.1), debug=True)

        def step(model, optimizer):
            loss_fn = lambda model: jnp.nan * model.over.kernel.sum()  # noqa: E731
            _, gradients = jaxrec.value_and_grad(loss_fn)(model)
            optimizer.update(model, gradients)
            return optimizer.step[...]

        names = r"after update 0 is skipped: .*the loss, the gradient of parameter over/kernel"
        with pytest.raises(Exception, match=names) as error:
            finish(nnx.jit(step) if is_compiled else step, model, optimizer)
        assert is_compiled or isinstance(error.value, NotFiniteError)

    def test_gradients_that_are_too_large_to_square_are_named(self):
        model = Ranker(jaxrec.optim.rowwise_adagrad(0.1))
        optimizer = jaxrec.Optimizer(model, optax.sgd(0.1), debug=True)
        features = jaxrec.KeyedJaggedArray.from_lists(GOOD)
        loss_fn = lambda model: 1e30 * model.embeddings(features).values.sum()  # noqa: E731
        _, gradients = jaxrec.value_and_grad(loss_fn)(model)
        names = r"of embeddings, group float32_4 \(beyond 1e\+15, too large .*rowwise_adagrad keeps"
        with pytest.raises(NotFiniteError, match=names):
            optimizer.update(model, gradients)


class TestBadIds:
    def test_a_model_called_outside_of_jit_names_the_id(self, session):
        model, _, put = session
        with pytest.raises(ValueError, match=r"'user', sample 2: id 8 is outside \[0, 8\)"):
            model(put(BAD))

    def test_the_first_bad_id_of_a_pytree_is_found(self, session):
        model, _, put = session
        assert bad_id_of_batch(model, (put(GOOD), np.ones(4))) is None
        expected = "feature 'user', sample 2: id 8 is outside [0, 8), the ids of its table (1"
        assert bad_id_of_batch(model, {"features": put(BAD)}).startswith(expected)
