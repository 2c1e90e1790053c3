"""Rows as pure functions: the bits of FBGEMM, and errors that say what is wrong."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import serve
from tests import golden
from tests.embed import row_oracle

FUSED = [name for name in golden.names("quant") if "sbhalf_wide" in name]


@pytest.mark.parametrize("name", FUSED)
def test_golden_rows_both_ways(name):
    arrays, dtype = golden.load("quant", name), name.partition("_")[0]
    packed = serve.pack_rows(arrays["x"], dtype, scale_last=True)
    np.testing.assert_array_equal(packed, arrays["quantized"])
    unpacked = serve.unpack_rows(arrays["quantized"], dtype, scale_last=True)
    np.testing.assert_array_equal(unpacked, arrays["dequantized"])


WIDE_SCALES = {
    name: case["tolerance"]
    for name, case in golden.cases("quant")
    if name.startswith(("int8_float", "int8_half"))
}


@pytest.mark.parametrize(("name", "tolerance"), WIDE_SCALES.items(), ids=WIDE_SCALES)
def test_golden_rows_with_a_scale_of_32_bits(name, tolerance):
    arrays = golden.load("quant", name)
    rows = arrays["x"].astype(np.float16) if "half" in name else arrays["x"]
    packed = serve.pack_rows(rows, "int8_float32")
    np.testing.assert_array_equal(packed, arrays["quantized"])
    # FBGEMM rounds once, and XLA so only where it fuses, which programs of tests forgo.
    unpacked = serve.unpack_rows(packed, "int8_float32")
    np.testing.assert_allclose(unpacked, arrays["dequantized"], **tolerance)


@pytest.mark.parametrize("name", ["int8_to_half_normal", "int8_to_half_wide"])
def test_golden_rows_unpacked_to_float16(name):
    arrays = golden.load("quant", name)
    unpacked = serve.unpack_rows(arrays["quantized"], "int8_float32").astype(jnp.float16)
    np.testing.assert_array_equal(unpacked, arrays["dequantized"])


@pytest.mark.parametrize("table", [0, 1])
@pytest.mark.parametrize("dtype", ["int8", "int4", "int2"])
def test_golden_rows_of_tables(dtype, table):
    """FBGEMM's tables hold the scale and the offset first."""
    arrays = golden.load("quant", f"tbe_{dtype}_fp32out_sum")
    stored = np.concatenate(
        [arrays[f"scale_bias_{table}"].view(np.uint8), arrays[f"packed_{table}"]], axis=1
    )
    rows = arrays[f"float_{table}"]
    np.testing.assert_array_equal(serve.pack_rows(rows, dtype), stored)
    np.testing.assert_array_equal(
        serve.unpack_rows(stored, dtype), row_oracle.unpack(stored, dtype, rows.shape[1])
    )


@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "float8", "float16", "bfloat16"])
def test_every_format_there_and_back(dtype):
    rows = np.random.default_rng(0).standard_normal((5, 12)).astype(np.float32)
    packed = serve.pack_rows(rows, dtype)
    unpacked = serve.unpack_rows(packed, dtype)
    assert (unpacked.shape, unpacked.dtype) == (rows.shape, jnp.float32)
    steps = {"int8": 0.02, "int4": 0.4, "int2": 2, "float8": 0.3}
    assert np.abs(unpacked - rows).max() <= steps.get(dtype, 0.02) / 2 + 1e-2
    if dtype != "bfloat16":
        np.testing.assert_array_equal(packed, row_oracle.pack(rows, dtype))


def test_an_odd_number_of_columns():
    rows = np.float32([[0, 1, 3], [3, 2, 0]])
    packed = serve.pack_rows(rows, "int2")
    np.testing.assert_array_equal(serve.unpack_rows(packed, "int2", dim=3), rows)
    assert serve.unpack_rows(packed, "int2").shape == (2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: serve.pack_rows(np.ones((2, 3)), "int3"), "dtype='int3' is not one of 'int8'"),
        (
            lambda: serve.pack_rows(np.float32([[0, 1], [np.inf, 0]])),
            "row 1, column 0 is inf; int8 rows hold finite elements up to 65504",
        ),
        (lambda: serve.pack_rows(np.float32([[300]]), "float8"), "is 300.0; float8 .* up to 240"),
        (
            lambda: serve.pack_rows(np.ones((1, 2)), "float16", scale_last=True),
            "scale_last is for int8, int4 and int2 rows, not for float16",
        ),
        (
            lambda: serve.unpack_rows(np.zeros((2, 8), np.uint8), "int4", dim=10),
            r"int4 rows of 10 columns are uint8 of \[n, 9\], got uint8 of \(2, 8\)",
        ),
        (lambda: serve.unpack_rows(np.zeros((2, 8)), "int8"), "int8 rows of 4 .* got float32"),
    ],
    ids=[
        "format", "infinity", "too_large", "no_scale", "width", "type",
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
