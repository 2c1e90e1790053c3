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
from tests.embed.kernels.gpu_cases import Batch, backend, compiled_fast

pytestmark = pytest.mark.jax_version

BATCH = Batch(16, ((1, 1, 0, 1, 1, 1, 2), (1, 0, 1, 1, 1, 1, 1)), outside=True)


@pytest.fixture(autouse=True)
def by_the_interpreter_of_mosaic(monkeypatch):
    backend("mosaic")
    launch = functools.partial(programs.launch, interpreter=plgpu.InterpretGPUParams())
    monkeypatch.setattr(programs, "interpret", launch)


def test_pooled_lookup():
    options = {"layout": BATCH.layout, "dtype": jnp.float32}
    pool = functools.partial(mosaic.pooled_lookup, **options, interpret=True)
    expected = compiled_fast(functools.partial(reference.pooled_lookup, **options))
    pooled = compiled_fast(pool)(*BATCH.arrays())
    np.testing.assert_allclose(pooled, expected(*BATCH.arrays()), rtol=1e-6)


def test_fused_update():
    table, ids, lengths, weights = BATCH.arrays()
    rule = optim.rowwise_adagrad(0.1)
    flatten = compiled_fast(reference.flatten_bags, static_argnums=(3, 4))
    lookups = flatten(ids, lengths, weights, BATCH.layout, table.shape[0])
    gradients = jax.random.normal(jax.random.key(0), (BATCH.layout.num_bags, 16))
    arguments = table, rule.init(*table.shape), lookups, gradients, rule, jnp.int32(0)
    update = functools.partial(mosaic.fused_update, interpret=True)
    (new_table, new_state), (expected, expected_state) = (
        compiled_fast(function, static_argnums=4)(*arguments)
        for function in (update, reference.fused_update)
    )
    np.testing.assert_allclose(new_table, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new_state["accumulator"], expected_state["accumulator"], rtol=1e-6)
