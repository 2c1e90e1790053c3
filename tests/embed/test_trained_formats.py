"""The formats of rows that are trained: bytes, means, and rows that keep their bytes as floats."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.config import TableConfig
from jaxrec.embed.formats import TABLE_FORMATS, PackedRows, check_rows
from jaxrec.embed.formats.floats import UNSIGNED, BFloat16Bits, ScaledFloat8Rows
from tests.embed import trained_oracle

FORMATS = {name: TABLE_FORMATS[name] for name in trained_oracle.NAMES}
STATE_FORMATS = {
    "state_float8": ScaledFloat8Rows("float8_e4m3fn", block=16),
    "state_unsigned": ScaledFloat8Rows(UNSIGNED, block=16),
    "state_bfloat16": BFloat16Bits(),
}
every_table_format = pytest.mark.parametrize("name", FORMATS)
every_format = pytest.mark.parametrize("name", FORMATS | STATE_FORMATS)


def format_of(name: str):
    return (FORMATS | STATE_FORMATS)[name]


def rows_of(kind: str, num_rows: int, dim: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, dim))
    normal = rng.standard_normal((num_rows, dim))
    column = rng.standard_normal((num_rows, 1))
    scale = rng.uniform(-20, 20, (num_rows, 1))
    match kind:
        case "normal":
            rows = normal * np.exp(scale / 4)
        case "narrow":  # About an offset that is much larger than their differences.
            rows = column + normal * np.exp(-np.abs(scale))
        case "last_bits":
            steps = rng.integers(0, 300, (num_rows, dim)).astype(np.int32)
            return (np.repeat(column, dim, 1).astype(np.float32).view(np.int32) + steps).view("f4")
        case "equal":
            rows = np.repeat(column, dim, 1)
        case "mostly_zero":
            rows = np.where(rng.random((num_rows, dim)) < 0.9, 0, normal) * np.sign(scale)
        case "tiny":
            rows = normal * np.exp(-60 - np.abs(scale))
        case _:
            rows = np.clip(normal * 1e38, -1.6e38, 1.6e38)
    return rows.astype(np.float32)


KINDS = ("normal", "narrow", "last_bits", "equal", "mostly_zero", "tiny", "huge")


@functools.partial(jax.jit, static_argnums=(1, 2))
def packed_thrice(rows, row_format, dim, noise):
    """Rows packed, at random, and both again as floats."""
    nearest = row_format.pack(rows)
    at_random = row_format.pack_at_random(rows, noise)
    again = [row_format.pack(row_format.unpack(each, dim)) for each in (nearest, at_random)]
    return nearest, at_random, *again


@every_format
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_floats_determine_the_bytes(name, kind, dim):
    """Rows keep their bytes through checkpoints and stores, which hold them as floats."""
    row_format = format_of(name)
    rows = rows_of(kind, 2000, dim)
    if name == "state_unsigned":
        rows = np.abs(rows)
    noise = np.random.default_rng(1).integers(0, 2**32, rows.shape, dtype=np.uint32)
    nearest, at_random, *again = packed_thrice(rows, row_format, dim, noise)
    np.testing.assert_array_equal(again[0], nearest)
    np.testing.assert_array_equal(again[1], at_random)
    assert nearest.shape == (2000, row_format.width(dim))


@every_table_format
@pytest.mark.parametrize("kind", ["normal", "narrow", "mostly_zero", "equal"])
@pytest.mark.parametrize("rounding", ["nearest", "random"])
def test_bytes_are_those_of_the_oracle(name, kind, rounding):
    rows = rows_of(kind, 200, 16, seed=3)
    noise = np.random.default_rng(1).integers(0, 2**32, rows.shape, dtype=np.uint32)
    row_format = FORMATS[name]
    if rounding == "nearest":
        packed, expected = row_format.pack(jnp.asarray(rows)), trained_oracle.pack(rows, name)
    else:
        packed = row_format.pack_at_random(jnp.asarray(rows), jnp.asarray(noise))
        expected = trained_oracle.pack(rows, name, noise)
    packed = np.asarray(packed)
    np.testing.assert_array_equal(packed[:, 16:], expected[:, 16:])  # Scales and offsets.
    # The oracle divides in another precision: an element at the edge of two codes may differ.
    assert np.mean(packed != expected) < 2e-3
    floats = row_format.unpack(jnp.asarray(packed), 16)
    # Without fused multiply-add a product is rounded, too.
    np.testing.assert_allclose(floats, trained_oracle.unpack(packed, name, 16), rtol=3e-7)


@every_format
def test_rounding_at_random_keeps_the_mean(name):
    """Also of the largest element, which is as exact as the scale."""
    row_format = format_of(name)
    row = np.array([0.1, 0.35, 0.777, 0.0123, 1.2345678, 0.9, 0.5001, 0.25], np.float32)
    rows = np.broadcast_to(row, (1 << 16, 8))
    noise = np.random.default_rng(0).integers(0, 2**32, rows.shape, dtype=np.uint32)
    packed = jax.jit(row_format.pack_at_random)(jnp.asarray(rows), jnp.asarray(noise))
    floats = np.asarray(row_format.unpack(packed, 8), np.float64)
    error = np.abs(floats.mean(axis=0) - row)
    deviation = floats.std(axis=0) / np.sqrt(len(rows))
    assert (error <= 5 * deviation + 2e-7 * row.max()).all()


@every_table_format
def test_bytes_of_a_row(name):
    assert FORMATS[name].row_bytes(64) == {"int8": 72}.get(name, 68)


def test_squares_above_zero_stay_above_zero():
    row_format = STATE_FORMATS["state_unsigned"]
    rows = jnp.array([[1.0, 1e-20, 0.0, 1e-9]])
    for packed in (row_format.pack(rows), row_format.pack_at_random(rows, jnp.zeros((1, 4), "u4"))):
        floats = row_format.unpack(packed, 4)
        assert (floats > 0).tolist() == [[True, True, False, True]]


@every_table_format
def test_numbers_that_a_row_cannot_hold(name):
    rows = np.zeros((3, 2), np.float32)
    for bad in (np.nan, np.inf, 3e38):
        rows[1, 1] = bad
        with pytest.raises(ValueError, match="table 'a', row 6, column 1 is"):
            check_rows(FORMATS[name], "table 'a', ", rows, first_row=5)
        with pytest.raises(ValueError, match="row 1, column 1"):
            check_rows(FORMATS[name], "", jnp.asarray(rows))
        TableConfig("a", 3, 2, dtype="float32").check_rows("", rows)


def test_formats_of_inference_are_not_trained():
    from jaxrec.embed.formats import FORMATS as INFERENCE

    with pytest.raises(TypeError, match="int4 rows are for inference"):
        INFERENCE["int4"].pack_at_random(jnp.zeros((1, 2)), jnp.zeros((1, 2), "uint32"))


@every_table_format
def test_packed_rows_are_read_like_an_array(name):
    values = rows_of("normal", 10, 8)
    row_format = FORMATS[name]
    rows = PackedRows(row_format.pack(jnp.asarray(values)), row_format, 8)
    floats = np.asarray(row_format.unpack(rows.stored, 8))
    assert (rows.shape, rows.ndim, rows.dtype) == ((10, 8), 2, np.float32)
    np.testing.assert_array_equal(rows[2:5], floats[2:5])
    index = jnp.array([[9, 0], [3, 12]])
    np.testing.assert_array_equal(rows.at[index].get(mode="clip")[0], floats[[9, 0]])
    filled = rows.at[index].get(mode="fill", fill_value=-1)
    np.testing.assert_array_equal(filled[1], np.stack([floats[3], np.full(8, -1)]))
    new = rows.at[jnp.array([4, 10])].set(jnp.ones((2, 8)))
    np.testing.assert_allclose(new[4:5], np.ones((1, 8)), rtol=1e-6)
    np.testing.assert_array_equal(new[5:], floats[5:])
    np.testing.assert_array_equal(rows.map_rows(lambda x: x)[:], floats)
    doubled = rows.map_rows(lambda x: 2 * x)
    np.testing.assert_allclose(doubled[:], 2 * floats, rtol=1e-5)
