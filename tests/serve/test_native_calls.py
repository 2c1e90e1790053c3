"""Programs that `jax.export` makes of functions with calls of the native library."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export

import jaxrec
from jaxrec.embed import kernels
from jaxrec.serve import native_calls

pytestmark = pytest.mark.jax_version

CONFIG = jaxrec.EmbeddingBagConfig("user", 20, 4)
BATCH = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 2], [], [19]]})


def step(rows, accumulator, values, lengths):
    """A lookup and an update, of flat arrays."""
    batch = jaxrec.KeyedJaggedArray(
        values, lengths, keys=BATCH.keys, capacities=BATCH.capacities, strides=BATCH.strides
    )
    tables = make_tables()
    (name,) = tables.rows
    tables = type(tables)({name: rows}, {name: {"accumulator": accumulator}}, tables.layout)
    pooled, residuals = jaxrec.embed.lookup(tables, batch)
    ones = jax.tree.map(jnp.ones_like, pooled)
    tables = jaxrec.embed.apply_gradients(tables, residuals, ones, 0)
    return pooled.values, tables.rows[name]


def make_tables():
    optimizer = jaxrec.optim.rowwise_adagrad(0.1)
    return jaxrec.embed.init_tables([CONFIG], optimizer, jax.random.key(0))


def test_a_program_with_native_calls_is_exported():
    with kernels.use_kernels("cpu", "reference"):
        tables = make_tables()
        (rows,), (state,) = tables.rows.values(), tables.state.values()
        arguments = rows, state["accumulator"], BATCH.values, BATCH.lengths
        expected = jax.jit(step)(*arguments)
        with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
            jax_export.export(jax.jit(step))(*arguments)
        exported = jax_export.export(jax.jit(step), disabled_checks=native_calls())(*arguments)
    assert "jaxrec_fused_update" in exported.mlir_module()
    again = jax_export.deserialize(exported.serialize())
    jax.tree.map(np.testing.assert_array_equal, again.call(*arguments), expected)
