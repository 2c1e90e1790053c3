"""Rows by slot on the devices that own them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxrec
from jaxrec import embed
from jaxrec.mesh import row_wise, shard_tables

DEVICES = 8


def test_rows_are_read_and_written_by_their_owners():
    config = jaxrec.EmbeddingBagConfig("t", 32, 2)
    optimizer = jaxrec.optim.rowwise_adagrad(0.1)
    tables = embed.init_tables([config], optimizer, jax.random.key(0))
    before = np.array(tables.read("t"))
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    tables = shard_tables(tables, {"t": row_wise()}, mesh)
    # Each device has four rows; it sets one, and one slot is outside.
    slots = jnp.stack([jnp.arange(DEVICES) % 4, jnp.full(DEVICES, 4)], axis=1)
    rows = jnp.arange(DEVICES * 4.0).reshape(DEVICES, 2, 2)
    state = {"accumulator": jnp.arange(DEVICES * 2.0).reshape(DEVICES, 2)}
    tables = jax.jit(lambda tables: tables.write_rows("float32_2", slots, rows, state))(tables)
    got, got_state = jax.jit(lambda tables: tables.read_rows("float32_2", slots))(tables)
    np.testing.assert_array_equal(got[:, 0], rows[:, 0])
    np.testing.assert_array_equal(got[:, 1], 0)
    np.testing.assert_array_equal(got_state["accumulator"][:, 0], state["accumulator"][:, 0])
    for device in range(DEVICES):
        before[device * 4 + device % 4] = rows[device, 0]
    np.testing.assert_array_equal(tables.read("t"), before)
