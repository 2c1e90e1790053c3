"""Updates on SparseCores: interpreted, against NumPy float64, and lowered for a described chip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups, reference, use_kernels
from tests.embed.kernels import oracle
from tests.embed.kernels.gpu_cases import Batch, compiled_fast
from tests.embed.kernels.sparse_core.conftest import V6E

pytestmark = [pytest.mark.jax_version, pytest.mark.usefixtures("on_chip")]

# The first row has more lookups than a block of 64.
HOT = Batch(128, ((70, 60, 3, 0), (1, 9, 0, 4)), weighted=True, outside=True, hot=0.6)
OPTIMIZERS = {
    "sgd": (HOT, optim.sgd(lambda step: 0.1 / (step + 1), clip_value=0.5)),
    "adagrad": (Batch(256, ((2, 3), (1, 9))), optim.adagrad(0.1)),
    "rowwise_adagrad": (HOT, optim.rowwise_adagrad(0.1)),
    "rowwise_adagrad_l2": (
        Batch(1024, ((1, 2), (3, 0))),
        optim.rowwise_adagrad(0.1, weight_decay=0.1, weight_decay_mode="l2"),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_update(name: str):
    from jaxrec.embed.kernels import sparse_core

    batch, optimizer = OPTIMIZERS[name]
    (table, ids, lengths, weights), layout = batch.arrays(), batch.layout
    state = {key: values + 1 for key, values in optimizer.init(*table.shape).items()}
    lookups = reference.flatten_bags(ids, lengths, weights, layout, table.shape[0])
    gradients = jax.random.normal(jax.random.key(0), (layout.num_bags, batch.dim))

    def update(table, state, lookups, gradients, step):
        arguments = table, state, lookups, gradients, optimizer, step
        return sparse_core.fused_update(*arguments, interpret=True)

    new_table, new_state = compiled_fast(update)(table, state, lookups, gradients, jnp.int32(3))
    found = oracle.lookups(ids, np.asarray(lengths), weights, layout)
    slope, occurs = oracle.gradient(table.shape, found, gradients, optimizer.clip_value)
    expected_table, expected_state = oracle.updated(table, state, slope, occurs, optimizer, 3)
    np.testing.assert_allclose(new_table, expected_table, rtol=1e-5, atol=1e-5)
    for key, values in expected_state.items():
        np.testing.assert_allclose(new_state[key], values, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(new_table[~occurs], table[~occurs])


def test_a_chip_changes_tables_in_place(on_chip):
    optimizer = optim.rowwise_adagrad(0.1)
    table, rows = jnp.zeros((20, 128)), jnp.zeros(16, jnp.int32)
    arguments = table, optimizer.init(20, 128), Lookups(rows, rows, None), table, jnp.int32(0)

    def update(table, state, lookups, gradients, step):
        return kernels.fused_update(table, state, lookups, gradients, optimizer, step)

    with on_chip(V6E), use_kernels("sparse_core", "reference"):
        traced = jax.jit(update).trace(*arguments)
        program = traced.lower(lowering_platforms=("tpu",)).as_text()
    (call,) = (line for line in program.splitlines() if "tpu_custom_call" in line)
    assert call.count("#stablehlo.output_operand_alias<") == 2
