"""Sums in chunks: the values and gradients of the whole batch, from some samples at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec import nn
from jaxrec.nn import chunks, sum_in_chunks

BATCH = 24
FEATURES = ("user", "item", "shop")


def bags(dim, rngs):
    tables = [jaxrec.EmbeddingBagConfig(name, 50, dim) for name in FEATURES]
    return jaxrec.EmbeddingBagCollection(tables, optimizer=jaxrec.optim.sgd(0.5), rngs=rngs)


MODELS = {
    "dlrm": lambda rngs: nn.DLRM(
        bags(4, rngs), num_dense=3, bottom_layer_sizes=(8, 4), top_layer_sizes=(8, 1), rngs=rngs
    ),
    "dcn_v2": lambda rngs: nn.DCNv2(
        bags(4, rngs), num_dense=3, cross_layers=2, deep_layer_sizes=(8,), rngs=rngs
    ),
    "deepfm": lambda rngs: nn.DeepFM(
        bags(4, rngs), bags(1, rngs), num_dense=3, deep_layer_sizes=(8, 1), rngs=rngs
    ),
    "simple_deepfm": lambda rngs: nn.SimpleDeepFMNN(
        bags(4, rngs), num_dense=3, hidden_layer_size=8, deep_fm_dimension=8, rngs=rngs
    ),
    "wide_deep": lambda rngs: nn.WideDeep(
        bags(1, rngs), bags(4, rngs), num_dense=3, deep_layer_sizes=(8, 1), rngs=rngs
    ),
}


def batch_of(samples=BATCH):
    rng = np.random.default_rng(0)
    lists = {
        name: [rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(samples)]
        for name in FEATURES
    }
    dense = rng.standard_normal((samples, 3), np.float32)
    labels = rng.integers(0, 2, samples).astype(np.int32)
    return dense, jaxrec.KeyedJaggedArray.from_lists(lists), labels


def cross_entropy(model, dense, embedded, labels):
    logits = model.logits(dense, embedded)
    return optax.sigmoid_binary_cross_entropy(logits, labels), {"logits": logits}


def train(model, batch, samples):
    """Return the loss and the logits of a step, which changes the model."""
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.5))

    @nnx.jit
    def step(model, optimizer, dense, features, labels):
        def loss_fn(model):
            if samples is None:
                losses, outputs = cross_entropy(model, dense, model.lookup(features), labels)
                return losses.mean(), outputs
            total, outputs = sum_in_chunks(
                cross_entropy, model, dense, model.lookup(features), labels, samples=samples
            )
            return total / labels.shape[0], outputs

        (loss, outputs), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, gradients)
        return loss, outputs["logits"]

    return step(model, optimizer, *batch)


@pytest.mark.parametrize("samples", [1, 4, 12, BATCH])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_whole_batch(name, samples):
    whole, cut = MODELS[name](nnx.Rngs(0)), MODELS[name](nnx.Rngs(0))
    expected = train(whole, batch_of(), None)
    found = train(cut, batch_of(), samples)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)
    for one, other in zip(
        jax.tree.leaves(nnx.state(cut, nnx.Param)),
        jax.tree.leaves(nnx.state(whole, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for table in FEATURES:
        rows = [model.embeddings.table(table) for model in (cut, whole)]
        np.testing.assert_allclose(*rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_looked_up_embeddings_are_those_of_a_call(name):
    model, (dense, features, _) = MODELS[name](nnx.Rngs(0)), batch_of()
    np.testing.assert_array_equal(
        model.logits(dense, model.lookup(features)), model(dense, features)
    )


def test_an_mmoe_is_trained_in_chunks():
    x = np.random.default_rng(0).standard_normal((BATCH, 6), np.float32)
    model = nn.MMoE(
        6, num_tasks=2, num_experts=2, expert_layer_sizes=(4,), tower_layer_sizes=(1,),
        rngs=nnx.Rngs(0),
    )  # fmt: skip

    def losses(model, x):
        return (model(x) ** 2).sum(axis=1)

    def loss(model, samples):
        return sum_in_chunks(losses, model, x, samples=samples)[0]

    expected, found = (nnx.grad(functools.partial(loss, samples=n))(model) for n in (BATCH, 3))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
                 jax.tree.leaves(found), jax.tree.leaves(expected))  # fmt: skip


def weighted(layer, x, more):
    scores = layer(x * more["scale"][:, None])[:, 0]
    losses = jnp.where(more["is_used"], scores * more["count"], 0) ** 2
    return losses, (scores, more["count"])


@settings(max_examples=20)
@given(batch=st.integers(1, 30), data=st.data())
def test_any_arrays(batch, data):
    """Floats are differentiated, integers and booleans are not, and outputs are in order."""
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    samples = data.draw(st.sampled_from(divisors))
    rng = np.random.default_rng(batch)
    layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.standard_normal((batch, 3), np.float32))
    scale = jnp.asarray(rng.standard_normal(batch, np.float32))
    more = {"is_used": rng.random(batch) < 0.7, "count": np.arange(batch, dtype=np.int32)}

    def cut(x, scale):
        total, outputs = sum_in_chunks(weighted, layer, x, more | {"scale": scale}, samples=samples)
        return 3 * total, outputs

    def whole(x, scale):
        losses, outputs = weighted(layer, x, more | {"scale": scale})
        return 3 * losses.sum(), outputs

    def evaluate(function):
        return jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(x, scale)

    (total, outputs), gradients = evaluate(cut)
    (expected, of_whole), of_all = evaluate(whole)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(outputs[0], of_whole[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outputs[1], more["count"])
    for one, other in zip(gradients, of_all, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def squares(layer, x):
    return layer(x)[:, 0] ** 2


def layer_and_rows(batch=8):
    x = np.random.default_rng(0).standard_normal((batch, 3), np.float32)
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0)), x


def test_sums_of_bfloat16_are_float32():
    """The sum of 4,096 ones, which bfloat16 cannot count beyond 256."""

    def ones(layer, x):
        return (layer.bias[...] * x).astype(jnp.bfloat16)

    layer = nnx.Linear(1, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.ones(1, jnp.bfloat16)
    x = jnp.ones(4096, jnp.bfloat16)

    def loss(layer):
        return sum_in_chunks(ones, layer, x, samples=1)[0]

    total, gradients = nnx.value_and_grad(loss)(layer)
    assert (total.dtype, float(total)) == (jnp.float32, 4096)
    assert gradients.bias[...].dtype == jnp.bfloat16
    assert float(gradients.bias[...][0]) == 4096


def test_without_a_gradient_the_sum_is_the_same():
    layer, x = layer_and_rows()
    total, outputs = sum_in_chunks(squares, layer, x, samples=2)
    np.testing.assert_allclose(total, squares(layer, x).sum(), rtol=1e-6)
    assert outputs is None


def test_variables_that_are_no_parameters_are_differentiated():
    """With respect to those that the caller asks for, such as those of an adapter."""

    class Adapter(nnx.Variable):
        pass

    layer, x = layer_and_rows()
    layer.bias = Adapter(layer.bias[...])

    def loss(layer, samples):
        return sum_in_chunks(squares, layer, x, samples=samples)[0]

    expected, found = (
        nnx.grad(functools.partial(loss, samples=n), argnums=nnx.DiffState(0, Adapter))(layer)
        for n in (8, 2)
    )
    np.testing.assert_allclose(found.bias[...], expected.bias[...], rtol=1e-5)


def test_activations_of_one_chunk_take_memory():
    wide = nn.MLP(16, (512, 512, 1), rngs=nnx.Rngs(0))
    x = jnp.ones((4096, 16))

    def temporaries(samples):
        def loss(model):
            def losses(model, x):
                return model(x)[:, 0] ** 2

            return sum_in_chunks(losses, model, x, samples=samples)[0]

        compiled = nnx.jit(nnx.grad(loss)).lower(wide).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(256) < temporaries(4096) / 4


def test_a_batch_over_eight_devices():
    """Each device has its part of each chunk, and the result is that of one device."""
    layer, x = layer_and_rows(64)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    cut = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    def loss(layer, x):
        return sum_in_chunks(squares, layer, x, samples=16)[0]

    expected = nnx.value_and_grad(loss)(layer, x)
    found = nnx.jit(nnx.value_and_grad(loss))(layer, cut)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1].kernel[...], expected[1].kernel[...], rtol=1e-5)


@pytest.fixture
def one_cpu(monkeypatch):
    """A process with one device and two cores."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(chunks, "_cores", lambda: 2)


@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize(
    ("batch", "calls"),
    [(3072, [3072]), (4096, [1024]), (5000, [1000]), (4099, [4099]), (8192, [1024])],
)
def test_usual_sizes_of_chunks(batch, calls):
    seen = set()

    def losses(layer, x):
        seen.add(x.shape[0])
        return layer(x)[:, 0] ** 2

    layer, x = layer_and_rows(batch)
    sum_in_chunks(losses, layer, x)
    assert seen - {batch} == set(calls) - {batch}


def test_several_devices_compute_a_batch_at_once():
    assert chunks._usual_chunks(8192) == 1


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


def noise(model, x):
    return model(x).sum(axis=1)


def test_a_module_that_changes_is_refused():
    _, x = layer_and_rows()
    with pytest.raises(ValueError, match=r"change 'dropout/rngs/count' .*; put the module in eval"):
        sum_in_chunks(noise, Noisy(nnx.Rngs(0)), x, samples=2)


@pytest.mark.usefixtures("one_cpu")
def test_a_module_that_changes_is_computed_at_once():
    model, (_, x) = Noisy(nnx.Rngs(0)), layer_and_rows(8192)
    sum_in_chunks(noise, model, x)
    assert int(model.dropout.rngs.count[...]) == 1


@pytest.mark.parametrize(
    ("losses", "arrays", "samples", "message"),
    [
        (squares, [np.ones((8, 3))], 3, r"samples=3 .* do not divide the batch's 8"),
        (squares, [np.ones((8, 3))], 0, r"samples=0 .* give a divisor"),
        (squares, [np.ones((8, 3)), np.ones(7)], 2, r"have a row for each sample.*\(8, 3\), \(7,"),
        (squares, [np.float32(1)], None, r"have a row for each sample"),
        (squares, [], None, r"have a row for each sample"),
        (lambda m, x: m(x), [np.ones((8, 3))], 2, r"losses of 2 samples have shape \(2, 1\)"),
        (lambda m, x: m(x).mean(), [np.ones((8, 3))], None, r"losses of 8 samples have shape \(\)"),
        (lambda m, x: (m(x)[:, 0], {"mean": m(x).mean()}), [np.ones((8, 3))], 4,
         r"outputs\['mean'\] of 4 samples have shape \(\)"),
    ],
    ids=["no divisor", "zero", "other sizes", "scalar", "nothing", "columns", "mean", "output"],
)  # fmt: skip
def test_wrong_arguments_are_refused(losses, arrays, samples, message):
    with pytest.raises(ValueError, match=message):
        sum_in_chunks(losses, layer_and_rows()[0], *arrays, samples=samples)


@pytest.mark.parametrize("samples", [None, 2, 8])
def test_outputs_are_not_differentiated(samples):
    x = np.random.default_rng(0).standard_normal((8, 3), np.float32)
    layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def with_scores(layer, x):
        scores = layer(x)[:, 0]
        return scores**2, scores

    def loss(layer):
        total, scores = sum_in_chunks(with_scores, layer, x, samples=samples)
        return total + scores.sum()

    gradient = nnx.grad(loss)(layer)["kernel"][...]
    expected = nnx.grad(lambda layer: (layer(x)[:, 0] ** 2).sum())(layer)["kernel"][...]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
