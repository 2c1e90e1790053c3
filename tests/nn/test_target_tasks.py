"""Tasks and last norms are those of the authors' code, forward and backward."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec.nn import TargetNorm, TargetTask, TargetTasks, sum_in_chunks
from tests.nn import ranker_cases
from tests.nn.ranker_cases import CASES, assert_gradients, differentiate, fill, load

pytestmark = [pytest.mark.usefixtures("compiled_fast"), pytest.mark.every_case]


def tasks_of(meta, dim, **options):
    # A binary task's ``weight`` there is its bit; all losses have one factor.
    tasks = [
        TargetTask(
            task["name"],
            bit=task["weight"] if task["type"] == "BINARY_CLASSIFICATION" else 0,
            weight=meta["causal_multitask_weights"],
        )
        for task in meta["tasks"]
    ]
    return TargetTasks(tasks, dim, rngs=nnx.Rngs(0), **options)


def weights_of(arrays, tasks):
    columns = [
        arrays.get(f"weight_{task.name}", np.ones(len(arrays["mask"]), np.float32))
        for task in tasks
    ]
    return jnp.stack([jnp.asarray(column) for column in columns], axis=-1)


@pytest.mark.jax_version
@pytest.mark.parametrize("name", ranker_cases.names("tasks"))
def test_tasks(name):
    arrays, case = load(name), CASES[name]
    tolerance = case["tolerance"]
    module = tasks_of(case["meta"], arrays["user"].shape[1], hidden_sizes=())
    layer = module.mlp.layers[0]
    places = {
        "_prediction_module__weight": (layer.kernel, np.transpose),
        "_prediction_module__bias": (layer.bias, np.array),
    }
    fill(places, arrays)
    labels = module.labels(arrays["mask"], arrays["watchtimes"])
    weights = weights_of(arrays, module.tasks)
    logits = module(arrays["user"], arrays["item"])
    found = {
        "labels": labels.T,
        "weights": weights.T,
        "predictions": module.predictions(logits).T,
        "losses": module.losses(logits, labels, weights),
    }
    for key, array in found.items():
        np.testing.assert_allclose(array, arrays[key], err_msg=key, **tolerance)

    def call(module, user, item):
        return module.losses(module(user, item), labels, weights).sum()

    _, gradients, of_inputs = differentiate(module, call, 1.0, arrays["user"], arrays["item"])
    for key, gradient in zip(("user", "item"), of_inputs, strict=True):
        np.testing.assert_allclose(gradient, arrays[f"grad__{key}"], err_msg=key, **tolerance)
    assert_gradients(places, gradients, module, arrays, tolerance)


@pytest.mark.slow
def test_losses_in_chunks_are_the_losses():
    rng = np.random.default_rng(0)
    module = TargetTasks([TargetTask("click", bit=1), TargetTask("seconds")], 6, rngs=nnx.Rngs(0))
    user, item = jnp.asarray(rng.standard_normal((2, 8, 6), np.float32))
    labels = module.labels(rng.integers(0, 4, 8), rng.integers(0, 9, 8))
    weights = jnp.asarray(rng.integers(0, 2, (8, 2)), jnp.float32)

    def whole(module):
        return module.losses(module(user, item), labels, weights).sum()

    def chunks(module):
        shares = module.shares(weights)

        def losses(module, user, item, labels, shares):
            return module.target_losses(module(user, item), labels, shares).sum(-1)

        return sum_in_chunks(losses, module, user, item, labels, shares, samples=2)[0]

    expected, found = (nnx.value_and_grad(f)(module) for f in (whole, chunks))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    for one, other in zip(nnx.to_flat_state(found[1]), nnx.to_flat_state(expected[1]), strict=True):
        np.testing.assert_allclose(one[1][...], other[1][...], rtol=1e-5, atol=1e-6)


def test_padding_is_not_read():
    module = TargetTasks([TargetTask("click", bit=1)], 2, rngs=nnx.Rngs(0))
    logits, labels = jnp.array([[0.5], [jnp.nan]]), jnp.array([[1.0], [jnp.nan]])
    found = module.losses(logits, labels, jnp.array([[1.0], [0.0]]))
    np.testing.assert_allclose(found, np.log1p(np.exp(-0.5)), rtol=1e-6)


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("name", "kind"),
    [("output_l2", "l2"), ("output_layer_norm", "layer_norm"), ("output_time_layer_norm", "time")],
)
def test_outputs(name, kind):
    arrays, case = load(name), CASES[name]
    module = TargetNorm(arrays["x"].shape[1], kind, rngs=nnx.Rngs(0))
    places = ranker_cases.output(module)
    fill(places, arrays)

    def call(module, x):
        return module(x, jnp.asarray(arrays["timestamps"]))

    out, gradients, (of_x,) = differentiate(module, call, arrays["grad_out"], arrays["x"])
    np.testing.assert_allclose(out, arrays["out"], **case["tolerance"])
    np.testing.assert_allclose(of_x, arrays["grad__x"], **case["tolerance"])
    assert_gradients(places, gradients, module, arrays, case["tolerance"])


def test_a_zero_state_has_a_finite_gradient():
    norm = TargetNorm(3, "l2", rngs=nnx.Rngs(0))
    out, _, (gradient,) = differentiate(
        norm, TargetNorm.__call__, np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32)
    )
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_allclose(gradient, 1e6, rtol=1e-5)


def test_refusals():
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match="each with a name of its own"):
        TargetTasks([TargetTask("click"), TargetTask("click", bit=1)], 4, rngs=rngs)
    with pytest.raises(ValueError, match="bit and weight are not negative"):
        TargetTasks([TargetTask("click", bit=-1)], 4, rngs=rngs)
    tasks = TargetTasks([TargetTask("seconds")], 4, rngs=rngs)
    with pytest.raises(ValueError, match="'seconds' is a regression, which needs watch_times"):
        tasks.labels(jnp.array([1]))
    binary = TargetTasks([TargetTask("click", bit=1)], 4, rngs=rngs)
    with pytest.raises(ValueError, match="'click' is binary, which needs actions"):
        binary.labels(None, jnp.array([1]))
    with pytest.raises(ValueError, match="'l2', 'layer_norm' or 'time'"):
        TargetNorm(4, "rms", rngs=rngs)
    with pytest.raises(ValueError, match="needs times"):
        TargetNorm(4, "time", rngs=rngs)(jnp.ones((1, 4)))
