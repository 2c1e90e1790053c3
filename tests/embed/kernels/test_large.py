"""A group of more than 2^31 elements, whose offsets no 32-bit integer holds.

Takes 10 GiB of memory: it runs where JAXREC_TEST_LARGE=1 asks for it.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups

pytestmark = pytest.mark.skipif(
    os.environ.get("JAXREC_TEST_LARGE") != "1", reason="takes 10 GiB: set JAXREC_TEST_LARGE=1"
)

DIM = 64
NUM_ROWS = 2**31 // DIM + 1000


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_rows_beyond_the_31st_bit(implementation):
    rows = np.array([0, 2**31 // DIM - 1, 2**31 // DIM, NUM_ROWS - 1], np.int32)
    first = np.arange(1, 5, dtype=np.float32)[:, None] * np.ones(DIM, np.float32)
    layout = BagLayout((0,), (4,), (0,), (2,), (0,), (NUM_ROWS,), (False,))
    with kernels.use_kernels(implementation):
        table = kernels.new_rows(jnp.zeros(DIM), NUM_ROWS)
        lookups = Lookups(jnp.asarray(rows), None, None)
        add = jax.jit(
            lambda table, values: kernels.fused_update(
                table, {}, lookups, -values, optim.sgd(1.0), jnp.int32(0)
            )[0],
            donate_argnums=0,
        )
        table = add(table, jnp.asarray(first))
        found = kernels.row_lookup(table, jnp.asarray(rows))
        sums = kernels.pooled_lookup(
            table, jnp.asarray(rows), jnp.array([1, 3]), None, layout, "float32"
        )
    np.testing.assert_array_equal(found, first)
    np.testing.assert_array_equal(sums, [first[0], first[1:].sum(axis=0)])
