"""Rows gathered in the form for TPUs, beside the form for other devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.formats import FORMATS, TABLE_FORMATS, PackedRows, gather_rows
from jaxrec.embed.kernels import reference

ROWS, WIDTHS = 50, (16, 56, 57, 64, 68, 100, 128, 132, 200, 256)


@pytest.fixture
def gather_as_on_tpus(monkeypatch):
    """Make each choice by platform that of TPUs."""

    def choose(*operands, default, **special):
        return special.get("tpu", default)(*operands)

    monkeypatch.setattr(jax.lax, "platform_dependent", choose)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("width", WIDTHS)
def test_parts_have_the_bits_of_whole_rows(width, dtype, gather_as_on_tpus):
    table = jax.random.randint(jax.random.key(0), (ROWS, width), 0, 200).astype(dtype)
    rows = jnp.array([0, 3, 3, ROWS - 1, ROWS, 2 * ROWS], jnp.int32)
    for options in (
        {"mode": "clip"},
        {"mode": "fill", "fill_value": 7, "indices_are_sorted": True},
    ):
        found = gather_rows(table, rows, **options)
        np.testing.assert_array_equal(found, table.at[rows].get(**options))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["float8", "int8", "int4", "trained int8"])
def test_packed_rows_are_looked_up_with_the_same_bits(name, dim, request):
    row_format = TABLE_FORMATS["int8"] if name == "trained int8" else FORMATS[name]
    floats = jax.random.normal(jax.random.key(0), (ROWS, dim))
    table = PackedRows(row_format.pack(floats), row_format, dim)
    rows = jnp.array([5, -1, 0, ROWS, 49, 5], jnp.int32)
    expected = reference.row_lookup(table, rows)
    request.getfixturevalue("gather_as_on_tpus")
    np.testing.assert_array_equal(reference.row_lookup(table, rows), expected)
