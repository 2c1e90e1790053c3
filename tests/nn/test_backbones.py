"""The backbones of click models and of histories are their papers' formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrec import nn
from tests.nn import backbone_oracle as oracle
from tests.nn.cases import CASES
from tests.nn.steps import draw, forward, make, on_device, step

pytestmark = [pytest.mark.usefixtures("compiled_fast"), pytest.mark.every_case]

EVERY = pytest.mark.parametrize("kind", oracle.FORMULAS, ids=lambda kind: kind.__name__)


def drawn(kind):
    """A model in float64 with drawn values, and a batch with empty and with long histories."""
    module = make(kind, dtype=jnp.float64, param_dtype=jnp.float64)
    samples = draw(CASES[kind], np.float64)
    if kind in oracle.HISTORY_MODELS:
        samples[0]["history"][0] = list(range(7))  # more than a model reads
    return module, samples


def formula(kind, module, samples, stopped=None):
    if kind is nn.PEPNet:
        return oracle.pepnet(module, *samples, stopped)[0]
    return oracle.FORMULAS[kind](module, *samples)


@EVERY
def test_values(kind):
    with jax.enable_x64(True):
        module, samples = drawn(kind)
        found, _ = forward(kind)(module, on_device(samples))
        expected = formula(kind, module, samples)
    # Embeddings are float32, and sums of them.
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@EVERY
@pytest.mark.slow
def test_gradients(kind):
    """Those of parameters and dense inputs, along a random direction, are the formula's."""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        module, samples = drawn(kind)
        stopped = oracle.pepnet(module, *samples)[1] if kind is nn.PEPNet else None
        parameters = jax.tree.map(np.array, nnx.state(module, nnx.Param))
        direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), parameters)
        of_dense = [rng.standard_normal(x.shape) for x in samples if isinstance(x, np.ndarray)]

        def total(amount):
            """The formula's value, of parameters and inputs that moved."""
            moved = jax.tree.map(lambda x, d: jnp.asarray(x + amount * d), parameters, direction)
            nnx.update(module, moved)
            inputs = [x + amount * d for x, d in zip(samples, of_dense, strict=False)]
            inputs += samples[len(inputs) :]
            return np.sin(formula(kind, module, inputs, stopped)).sum()

        difference = (total(1e-7) - total(-1e-7)) / 2e-7
        nnx.update(module, jax.tree.map(jnp.asarray, parameters))
        _, _, of_parameters, of_inputs = step(kind)(module, on_device(samples))
    pairs = zip(
        jax.tree.leaves((of_parameters, of_inputs)),
        jax.tree.leaves((nnx.to_pure_dict(direction), of_dense)),
        strict=True,
    )
    expected = sum(np.vdot(one, other) for one, other in pairs)
    np.testing.assert_allclose(difference, expected, rtol=1e-4, atol=1e-4)
