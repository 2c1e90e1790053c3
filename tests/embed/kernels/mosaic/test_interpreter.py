"""Launches by JAX's interpreter of Mosaic: grids, references, updates in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrec import optim
from jaxrec.embed.kernels import mosaic, reference
from jaxrec.embed.kernels.mosaic import programs
from tests.embed.kernels.gpu_cases import Batch, backend

pytestmark = pytest.mark.jax_version

BATCH = Batch(16, ((1, 1, 0, 1, 1, 1, 2), (1, 0, 1, 1, 1, 1, 1)), outside=True)


@pytest.fixture(autouse=True)
def by_the_interpreter_of_mosaic(monkeypatch):
    backend("mosaic")
    launch = functools.partial(programs.launch, interpreter=plgpu.InterpretGPUParams())
    monkeypatch.setattr(programs, "interpret", launch)


def test_pooled_lookup():
    arguments = *BATCH.arrays(), BATCH.layout, jnp.float32
    pooled = mosaic.pooled_lookup(*arguments, interpret=True)
    np.testing.assert_allclose(pooled, reference.pooled_lookup(*arguments), rtol=1e-6)


def test_fused_update():
    table, ids, lengths, weights = BATCH.arrays()
    rule = optim.rowwise_adagrad(0.1)
    lookups = reference.flatten_bags(ids, lengths, weights, BATCH.layout, table.shape[0])
    gradients = jax.random.normal(jax.random.key(0), (BATCH.layout.num_bags, 16))
    arguments = table, rule.init(*table.shape), lookups, gradients, rule, jnp.int32(0)
    new_table, new_state = mosaic.fused_update(*arguments, interpret=True)
    expected, expected_state = reference.fused_update(*arguments)
    np.testing.assert_allclose(new_table, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new_state["accumulator"], expected_state["accumulator"], rtol=1e-6)
