"""The packing and the update of 8-bit rows in NumPy: independent of `jaxrec`."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLOAT8 = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
NAMES = ("int8", *FLOAT8)
_SMALLEST_SCALE = np.float32(2.0**-100)


def pack(rows: np.ndarray, name: str, noise: np.ndarray | None = None) -> np.ndarray:
    """Stored rows, row by row; rounded to nearest, or by 32 random bits for each element."""
    rows = np.asarray(rows, np.float32)
    noise = [None] * len(rows) if noise is None else noise
    pack_row = _pack_int8 if name == "int8" else _pack_float8(FLOAT8[name])
    return np.stack([pack_row(row, bits) for row, bits in zip(rows, noise, strict=True)])


def unpack(packed: np.ndarray, name: str, dim: int) -> np.ndarray:
    codes, trailer = packed[:, :dim], packed[:, dim:].copy().view(np.float32).astype(np.float64)
    if name == "int8":
        return (codes * trailer[:, :1] + trailer[:, 1:]).astype(np.float32)
    return (codes.copy().view(FLOAT8[name]).astype(np.float64) * trailer).astype(np.float32)


def noise_of(rows: np.ndarray, step: int, dim: int, salt: int = 0) -> np.ndarray:
    """The random bits of rows' elements in a step: uint32 ``[rows, dim]``."""
    with np.errstate(over="ignore"):
        row = rows.astype(np.uint32)[:, None] * np.uint32(0x9E3779B1)
        column = np.arange(dim, dtype=np.uint32)[None] * np.uint32(0x85EBCA77)
        return _mix(_mix(row ^ _mix(np.array([[step ^ salt]], np.uint32))) + column)


def sgd(packed, name, dim, ids, gradients, rate, step=None) -> np.ndarray:
    """Rows after one update: the gradients of each id are added up; ``step``: rounded at random."""
    packed = packed.copy()
    unique, inverse = np.unique(ids, return_inverse=True)
    sums = np.zeros((unique.size, dim))
    np.add.at(sums, inverse, gradients.astype(np.float64))
    rows = unpack(packed[unique], name, dim).astype(np.float64) - rate * sums
    noise = None if step is None else noise_of(unique, step, dim)
    packed[unique] = pack(rows.astype(np.float32), name, noise)
    return packed


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _cut(value: np.float32, kept: int, noise: int | None) -> np.float32:
    """The number with ``kept`` significant bits; of equally near ones that with a last bit of 0."""
    if value == 0:
        return value
    unit = 2.0 ** (np.frexp(np.float64(value))[1] - kept)
    units = np.float64(value) / unit
    if noise is None:
        return np.float32(np.rint(units) * unit)
    # The noise is a fraction of a unit, in steps of what is cut.
    return np.float32(np.floor(units + noise / 2.0 ** (24 - kept)) * unit)


def _pack_int8(row: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
    offset, largest = row.min() + np.float32(0), row.max()  # Zeros have one sign.
    exact = np.float32(largest - offset) / np.float32(255)
    scale = _cut(exact, 16, None if noise is None else int(noise[0] & 0xFF))
    if np.float64(scale) * 255 < abs(np.float64(offset)) / 64:
        scale = exact
    scale = max(scale, _SMALLEST_SCALE)
    codes = ((row - offset) / scale).astype(np.float64)
    if noise is None:
        codes = np.rint(codes)
    else:
        whole = np.floor(codes)
        codes = whole + ((noise >> 8) * 2.0**-24 < codes - whole)
    if scale > _SMALLEST_SCALE:
        codes[row == largest] = 255
    codes = np.clip(codes, 0, 255)
    if noise is not None:
        floats = (codes * np.float64(scale) + offset).astype(np.float32)
        codes = np.rint((floats - offset) / scale)  # Of the codes of a float, the middle one.
    codes = codes.astype(np.uint8)
    return np.concatenate([codes, np.array([scale, offset], np.float32).view(np.uint8)])


def _pack_float8(dtype):
    info = ml_dtypes.finfo(dtype)
    top, bits, small = float(info.max), info.nmant, float(info.smallest_normal)

    def pack_row(row: np.ndarray, noise: np.ndarray | None) -> np.ndarray:
        largest = np.abs(row).max()
        exact = np.float32(largest) / np.float32(top)
        scale = max(
            _cut(exact, 20, None if noise is None else int(noise[0] & 0xF)), _SMALLEST_SCALE
        )
        codes = np.clip((row / scale).astype(np.float64), -top, top)
        exponent = np.maximum(np.frexp(np.where(codes == 0, small, codes))[1] - 1, np.log2(small))
        unit = 2.0 ** (exponent - bits)
        units = np.abs(codes) / unit
        if noise is None:
            units = np.rint(units)
        else:
            whole = np.floor(units)
            subnormal = whole + ((noise >> 8) * 2.0**-24 < units - whole)
            dropped = 23 - bits  # Bits of a float32 that a code lacks.
            normal = np.floor(units + (noise >> (32 - dropped)) / 2.0**dropped)
            units = np.where(np.abs(codes) < small, subnormal, normal)
        codes = np.copysign(units * unit, codes)
        if scale > _SMALLEST_SCALE:
            codes = np.where(np.abs(row) == largest, np.copysign(top, row), codes)
        stored = codes.astype(dtype).view(np.uint8)
        return np.concatenate([stored, np.array([scale], np.float32).view(np.uint8)])

    return pack_row
