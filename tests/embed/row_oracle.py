"""What row formats store and read, element by element in NumPy: independent of `jaxrec`."""

from __future__ import annotations

import ml_dtypes
import numpy as np

# The formats of tables that are trained; "fused_int8" is that of ``dtype="int8"``.
FLOAT8 = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def pack(rows, name: str) -> np.ndarray:
    """Rows of float32 as a format stores them."""
    rows = np.asarray(rows, np.float32)
    if name == "float8":
        return pack_float8(rows)
    if not name.startswith("int"):
        return rows.astype(name)
    return np.stack([_pack_integers(row, int(name[3:])) for row in rows])


def unpack(packed: np.ndarray, name: str, dim: int) -> np.ndarray:
    """Stored rows in float32."""
    if name == "float8":
        return unpack_float8(packed)
    if name == "fused_int8":
        trailer = packed[:, dim:].copy().view(np.float32).astype(np.float64)
        return (packed[:, :dim] * trailer[:, :1] + trailer[:, 1:]).astype(np.float32)
    if name in FLOAT8:
        scale = packed[:, dim:].copy().view(np.float32).astype(np.float64)
        return (packed[:, :dim].copy().view(FLOAT8[name]) * scale).astype(np.float32)
    if not name.startswith("int"):
        return packed.astype(np.float32)
    bits = int(name[3:])
    halves = packed[:, :4].copy().view(np.float16).astype(np.float64)
    columns = np.arange(dim)
    codes = packed[:, 4 + columns * bits // 8] >> (columns * bits % 8) & (2**bits - 1)
    return (codes * halves[:, :1] + halves[:, 1:]).astype(np.float32)


def random_packed(rng: np.random.Generator, num_rows: int, name: str, dim: int) -> np.ndarray:
    """Stored rows of arbitrary codes, with scales of any sign."""
    if name == "float8":
        return rng.integers(0, 256, (num_rows, dim)).astype(np.uint8)
    if name in ("fused_int8", *FLOAT8):
        codes = rng.integers(0, 256, (num_rows, dim)).astype(np.uint8)
        if name in FLOAT8:
            is_finite = np.isfinite(codes.view(FLOAT8[name]).astype(np.float32))
            codes = np.where(is_finite, codes, 0).astype(np.uint8)
        count = 2 if name == "fused_int8" else 1
        scales = (rng.standard_normal((num_rows, count)) * 2.0**-8).astype(np.float32)
        return np.concatenate([codes, scales.view(np.uint8)], axis=1)
    codes = rng.integers(0, 256, (num_rows, -(-dim * int(name[3:]) // 8))).astype(np.uint8)
    scales = rng.standard_normal((num_rows, 2)) * [2.0 ** rng.integers(-20, 2), 1]
    return np.concatenate([scales.astype(np.float16).view(np.uint8), codes], axis=1)


def _pack_integers(row: np.ndarray, bits: int) -> np.ndarray:
    one, top = np.float32(1), np.float32(2**bits - 1)
    offset = row.min().astype(np.float16)
    low = offset.astype(np.float32)
    span = row.max() - low
    scale = (one if span == 0 else span / top).astype(np.float16)
    if scale == 0:
        scale = np.float16(1)
    with np.errstate(over="ignore"):
        inverse = one / scale.astype(np.float32)
    if np.isinf(inverse):
        scale, inverse = np.float16(1), one
    codes = np.clip(np.rint((row - low) * inverse), 0, top).astype(np.uint8)
    stored = np.zeros(-(-row.size * bits // 8), np.uint8)
    for column, code in enumerate(codes):
        stored[column * bits // 8] |= code << (column * bits % 8)
    return np.concatenate([np.array([scale, offset]).view(np.uint8), stored])


def pack_float8(rows: np.ndarray, bias: int = 7) -> np.ndarray:
    """The nearest of all 8-bit floats; of two equally near ones that with the even code."""
    values = unpack_float8(np.arange(120, dtype=np.uint8), bias).astype(np.float64)
    size = np.abs(rows).astype(np.float64)[..., None]
    distance = np.abs(values - size)
    nearest = distance == distance.min(-1, keepdims=True)
    odd = np.arange(120) % 2
    codes = np.where(nearest, odd, 2).argmin(-1).astype(np.uint8)
    return codes | (np.signbit(rows).astype(np.uint8) << 7)


def unpack_float8(codes: np.ndarray, bias: int = 7) -> np.ndarray:
    exponent, fraction = (codes >> 3 & 15).astype(int), (codes & 7).astype(np.float64)
    size = np.where(
        exponent == 0,
        np.ldexp(fraction / 8, 1 - bias),
        np.ldexp(1 + fraction / 8, exponent - bias),
    )
    return np.where(codes & 128, -size, size).astype(np.float32)
