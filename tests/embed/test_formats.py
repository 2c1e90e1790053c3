"""Row formats: the bits of FBGEMM, and of a NumPy oracle on rows of any kind."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrec.embed.formats import FORMATS
from jaxrec.embed.formats.floats import Float8Rows
from tests import golden
from tests.embed import row_oracle

PACKED = ("int8", "int4", "int2", "float8")
FUSED = [name for name in golden.names("quant") if "sbhalf" in name]


@pytest.mark.parametrize("name", FUSED)
def test_integers_have_the_bits_of_fbgemm(name):
    arrays, row_format = golden.load("quant", name), FORMATS[name.partition("_")[0]]
    packed = row_format.pack(jnp.asarray(arrays["x"]))
    np.testing.assert_array_equal(row_format.scale_last(packed), arrays["quantized"])
    fused = jnp.asarray(arrays["quantized"])
    np.testing.assert_array_equal(row_format.scale_first(fused), packed)
    rows = row_format.unpack(packed, arrays["x"].shape[1])
    np.testing.assert_array_equal(rows, arrays["dequantized"])


@pytest.mark.parametrize("name", ["hfp8_normal", "hfp8_wide"])
def test_float8_has_the_bits_of_fbgemm(name):
    arrays, row_format = golden.load("quant", name), Float8Rows(exponent_bias=15)
    packed = row_format.pack(jnp.asarray(arrays["x"]))
    np.testing.assert_array_equal(packed, arrays["quantized"])
    np.testing.assert_array_equal(row_format.unpack(packed, 24), arrays["dequantized"])


@pytest.mark.parametrize("name", ["bf16_normal", "bf16_wide"])
def test_bfloat16_has_the_bits_of_fbgemm(name):
    arrays, row_format = golden.load("quant", name), FORMATS["bfloat16"]
    packed = row_format.pack(jnp.asarray(arrays["x"]))
    np.testing.assert_array_equal(packed.view(jnp.uint16), arrays["quantized"])
    np.testing.assert_array_equal(row_format.unpack(packed, 24), arrays["dequantized"])


@pytest.mark.parametrize("name", PACKED)
def test_every_code_unpacks_as_the_oracle_says(name):
    packed = row_oracle.random_packed(np.random.default_rng(0), 300, name, 101)
    rows = FORMATS[name].unpack(jnp.asarray(packed), 101)
    np.testing.assert_array_equal(rows, row_oracle.unpack(packed, name, 101))


ROWS = hnp.arrays(
    np.float32,
    (2, 7),
    elements=st.one_of(
        st.floats(-240, 240, width=32),
        st.sampled_from([0.0, -0.0, 1.0, 1e-3, 1 / 3]),
    ),
)
pack_by_name = jax.jit(lambda rows, name: FORMATS[name].pack(rows), static_argnames="name")


@pytest.mark.parametrize("name", PACKED)
@hypothesis.given(rows=ROWS, exponent=st.sampled_from([0, -10, -30]))
@hypothesis.settings(max_examples=60, deadline=None)
def test_rows_pack_as_the_oracle_says(name, rows, exponent):
    rows = np.ldexp(rows, exponent)
    # XLA on CPUs takes subnormal numbers for zeros.
    rows = np.where(np.abs(rows) < np.finfo(np.float32).tiny, 0, rows).astype(np.float32)
    packed = pack_by_name(rows, name)
    np.testing.assert_array_equal(packed, row_oracle.pack(rows, name))


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_a_row_is_near_its_floats(name):
    rows = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    row_format = FORMATS[name]
    found = row_format.unpack(row_format.pack(jnp.asarray(rows)), 64)
    step = (rows.max(1) - rows.min(1)) / (2**row_format.bits - 1)
    # Half a step, and the rounding of the scale to float16.
    assert (np.abs(found - rows) <= 0.5 * step[:, None] * 1.01 + 2e-3).all()


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_a_row_with_a_nan_unpacks_to_nan(name):
    rows = jnp.array([[1.0, jnp.nan, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]])
    found = FORMATS[name].unpack(FORMATS[name].pack(rows), 4)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


@pytest.mark.parametrize(
    ("name", "bound"), [("int8", 0.27), ("int4", 0.15), ("int2", 0.08), ("float8", 0.25)]
)
def test_size_at_64_columns(name, bound):
    row_format = FORMATS[name]
    packed = row_format.pack(jnp.zeros((10, 64)))
    assert packed.nbytes == 10 * row_format.row_bytes(64) <= bound * 10 * 64 * 4


@pytest.mark.parametrize(
    ("name", "dim", "reason"),
    [("int4", 3, "a multiple of 2, got 3"), ("int2", 6, "a multiple of 4, got 6")],
)
def test_widths_that_do_not_fill_bytes(name, dim, reason):
    assert reason in FORMATS[name].refuse(dim)
    assert FORMATS[name].refuse(8) is None
