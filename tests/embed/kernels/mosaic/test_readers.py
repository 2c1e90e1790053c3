"""Rows of every packed format, as Mosaic's kernels read them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.embed import row_oracle
from tests.embed.kernels.gpu_cases import backend
from tests.embed.kernels.test_packed import ROW_FORMATS, packed_rows, packed_table

pytestmark = pytest.mark.jax_version


def test_row_lookup():
    module, rows = backend("mosaic"), jnp.array([3, 0, 3, 2], jnp.int32)
    for name in ROW_FORMATS:
        packed = packed_table(name, 4, 20)
        found = module.row_lookup(packed_rows(packed, name, 20), rows, interpret=True)
        expected = row_oracle.unpack(packed, name, 20)[np.array(rows)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
