"""How Triton kernels read rows: plain ones, and packed ones from their stored bytes.

A program reads a packed row's codes, scale and offset and computes the floats in registers: no
unpacked row is written to memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed.formats import PackedRows, RowFormat, TableArray
from jaxrec.embed.formats.floats import Float8Rows, ScaledFloat8Rows
from jaxrec.embed.formats.integers import HEADER_BYTES, Fused8Rows, IntegerRows
from jaxrec.embed.kernels.triton.tile import ELEMENTS, Tile

Terms: TypeAlias = tuple[Array, ...]

# Up to this many rows on average, groups are short, or middling.
SHORT, MIDDLING = 8, 32


@dataclasses.dataclass(frozen=True)
class PlainReader:
    """Reader of rows of floats."""

    width: int  # elements of a row
    vector: int  # elements that a lane loads at once
    element_bytes: int
    planes = 1  # columns of an element

    @classmethod
    def of(cls, table: Float[Array, "rows dim"]) -> PlainReader:
        """Return the reader of a table's rows."""
        # A lane may load 16 bytes at once if each row begins at a multiple of as many.
        size = table.dtype.itemsize
        return cls(table.shape[1], max(math.gcd(16, table.shape[1] * size) // size, 1), size)

    def tile(self, mean_length: float, elements: int | None, warps: int | None) -> Tile:
        """Return the tile that sums groups of a mean length; see `Tile.of`."""
        # The fastest tiles on an H200 (docs/internals/gpu.md). With one row of each group at a
        # time, a lane needs few registers and many programs are resident. A batch may have few
        # long groups, so several rows of each are on their way at once.
        columns = pl.next_power_of_2(self.width)
        if mean_length <= MIDDLING:
            warps = warps or (2 if columns <= 512 else None)
            return Tile.of(self.width, mean_length, elements or ELEMENTS // 2, warps, depth=1)
        warps = warps or (1 if columns <= 256 else None)
        if columns * self.element_bytes > 256:
            return Tile.of(self.width, mean_length, elements or ELEMENTS, warps, depth=8)
        tile = Tile.of(self.width, mean_length, elements or 2 * ELEMENTS, warps, depth=8)
        return tile.folded(self.vector)

    def zeros(self, tile: Tile) -> Terms:
        """Return zeros in the shapes of the sums of terms."""
        return (jnp.zeros((tile.groups, tile.depth // tile.fold, tile.columns), jnp.float32),)

    def load(
        self,
        tile: Tile,
        stored: Any,
        rows: Int32[Array, "*n"],
        is_row: Bool[Array, "*n"],
        is_bad: Bool[Array, "*n"],
        weight: Float[Array, "*n"] | None,
    ) -> Terms:
        """Load rows as terms. The kernel adds them per bag; `finish` turns the totals into rows.

        Rows without ``is_row`` are zeros, and those with ``is_bad`` are NaN.
        """
        values = tile.load_rows(stored, rows, is_row)
        values = jnp.where(is_bad[..., None], jnp.nan, values)
        return (values if weight is None else values * weight[..., None],)

    def finish(self, sums: Terms) -> Float[Array, "groups columns"]:
        """Return the sums of rows, given the sums of their terms."""
        return sums[0]  # a plain row is its only term


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Position and type of a packed row's scale and optional offset."""

    first: int  # position of the first byte; a number's bytes are in little-endian order
    dtype: str  # "float16" or "float32"
    count: int  # 2, or 1 without an offset

    def load(
        self, stored: Any, rows: Int32[Array, "*n"], is_row: Bool[Array, "*n"]
    ) -> list[Float[Array, "*n"]]:
        """Load each row's scale and offset in float32, their bytes by one load."""
        size = jnp.dtype(self.dtype).itemsize
        shape = (*rows.shape, self.count * size)
        place = self.first + jax.lax.broadcasted_iota(jnp.int32, shape, rows.ndim)
        row = jnp.broadcast_to(rows[..., None], shape)
        mask = jnp.broadcast_to(is_row[..., None], shape)
        octets = pltriton.load(stored.at[row, place], mask=mask, other=0)
        integer = jnp.uint16 if size == 2 else jnp.uint32
        return [
            jax.lax.bitcast_convert_type(bits.astype(integer), self.dtype).astype(jnp.float32)
            for bits in _join(octets.astype(jnp.uint32), size)
        ]


def _join(octets: Array, size: int) -> list[Array]:
    """Join each ``size`` bytes of the last axis into a number, pair by pair as Triton wants it."""
    *shape, count = octets.shape
    bits = 8
    while bits < 8 * size:
        count //= 2
        low, high = jnp.unstack(octets.reshape(*shape, count, 2), axis=-1)
        octets, bits = low | (high << bits), 2 * bits
    return [octets.reshape(shape)] if count == 1 else list(jnp.unstack(octets, axis=-1))


@dataclasses.dataclass(frozen=True)
class PackedReader:
    """Reader of packed rows, whose elements are ``scale * code + offset``."""

    # The terms of a row: for each plane (the columns at one position of their byte) an array of
    # scaled codes, and the offset. A bag's offsets are added as one number, not once a column.
    stride: int  # bytes of a stored row
    first: int  # position of its first byte of codes
    width: int  # bytes of codes
    planes: int  # columns of a byte, the first one in its lowest bits
    numbers: Numbers | None  # the scale and the offset; None: 1 and 0
    # Turns int32 codes into float32, too small by the factor `unit`: the scale makes up for it, and
    # decoding takes fewer instructions.
    decode: Callable[[Int32[Array, "*n"]], Float[Array, "*n"]]
    unit: float = 1.0

    @classmethod
    def of(cls, row_format: RowFormat, dim: int) -> PackedReader | None:
        """Return the reader of a format's rows of ``dim`` columns; None: no kernel reads them."""
        stride = row_format.width(dim)
        match row_format:
            case IntegerRows():
                planes = row_format.codes_per_byte
                numbers, width = Numbers(0, "float16", 2), -(-dim // planes)
                return cls(stride, HEADER_BYTES, width, planes, numbers, _integers)
            case Fused8Rows():
                return cls(stride, 0, dim, 1, Numbers(dim, "float32", 2), _integers)
            case ScaledFloat8Rows("float8_e4m3fn", block=None):
                return cls(stride, 0, dim, 1, Numbers(dim, "float32", 1), _e4m3, 2.0**8)
            case ScaledFloat8Rows("float8_e5m2", block=None):
                return cls(stride, 0, dim, 1, Numbers(dim, "float32", 1), _e5m2)
            case Float8Rows():
                return cls(stride, 0, dim, 1, None, _e4m3, 2.0 ** (15 - row_format.exponent_bias))
        return None

    @property
    def vector(self) -> int:
        """Bytes that a lane loads at once; the codes of each row begin at a multiple of it."""
        return math.gcd(16, self.stride, self.first)

    @property
    def has_offset(self) -> bool:
        return self.numbers is not None and self.numbers.count == 2

    def tile(self, mean_length: float, elements: int | None, warps: int | None) -> Tile:
        """Return the tile that sums groups of packed rows; see `Tile.of_bytes`."""
        # For groups of middling length, one row of each at a time, by programs of one warp, is
        # fastest on an H200: 0.75 to 0.83 of the time (docs/internals/gpu.md).
        if SHORT < mean_length <= MIDDLING:
            loaded = max((elements or ELEMENTS // 2) // self.planes, self.vector)
            return Tile.of(self.width, mean_length, loaded, warps or 1, depth=1)
        elements = elements or ELEMENTS
        return Tile.of_bytes(self.width, mean_length, self.planes, self.vector, elements, warps)

    def zeros(self, tile: Tile) -> Terms:
        """Return zeros in the shapes of the sums of terms."""
        rows = tile.groups, tile.depth // tile.fold
        codes = jnp.zeros((*rows, tile.columns), jnp.float32)
        offset = (jnp.zeros(rows, jnp.float32),) * self.has_offset
        return (codes,) * self.planes + offset

    def load(
        self,
        tile: Tile,
        stored: Any,
        rows: Int32[Array, "*n"],
        is_row: Bool[Array, "*n"],
        is_bad: Bool[Array, "*n"],
        weight: Float[Array, "*n"] | None,
    ) -> Terms:
        """Load rows as terms; see `PlainReader.load`."""
        row, column, mask = tile.elements(rows, is_row, tile.dim, tile.columns)
        octets = pltriton.load(stored.at[row, self.first + column], mask=mask, other=0)
        numbers = [] if self.numbers is None else self.numbers.load(stored, rows, is_row)
        scale, *offset = numbers or [jnp.ones(rows.shape, jnp.float32)]
        scale = scale * self.unit
        if weight is not None:
            scale, offset = scale * weight, [each * weight for each in offset]
        # A bad row's codes were not loaded and are zeros. The NaN of its scale makes it NaN.
        scale = jnp.where(is_bad, jnp.nan, scale)[..., None]
        codes, bits = octets.astype(jnp.int32), 8 // self.planes
        planes = [(codes >> i) & (2**bits - 1) for i in range(0, 8, bits)] if bits < 8 else [codes]
        return (*(self.decode(plane) * scale for plane in planes), *offset)

    def finish(self, sums: Terms) -> Float[Array, "groups columns"]:
        """Return the sums of rows, given the sums of their terms."""
        rows = _interleave(sums[: self.planes])
        return rows + sums[self.planes][:, None] if self.has_offset else rows


Reader: TypeAlias = PlainReader | PackedReader


def reader_of(table: TableArray) -> tuple[Array, Reader]:
    """Return a table's stored rows and their reader, if `refuse_packed` has no objection."""
    if isinstance(table, PackedRows):
        reader = PackedReader.of(table.row_format, table.dim)
        assert reader is not None
        return table.stored, reader
    return table, PlainReader.of(table)


def refuse_packed(table: PackedRows) -> str | None:
    """Return why the kernels do not read these packed rows; None: they do."""
    if PackedReader.of(table.row_format, table.dim) is None:
        return f"it does not unpack {table.row_format.name}"
    if 2**31 < table.stored.size <= 2**32:
        # In arrays of up to 4 GiB, Pallas computes offsets in 32 bits, and signed: those above 2
        # GiB come out negative. Larger arrays have offsets of 64 bits.
        return "its offsets of 32 bits are too short for stored rows of 2 to 4 GiB"
    return None


def _interleave(planes: Terms) -> Float[Array, "*n columns"]:
    """Return the first column of each plane, then the second column of each, and so on."""
    if len(planes) == 1:
        return planes[0]
    pairs = jnp.stack([_interleave(planes[::2]), _interleave(planes[1::2])], axis=-1)
    return pairs.reshape(*pairs.shape[:-2], -1)


def _integers(codes: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    return codes.astype(jnp.float32)


def _e5m2(codes: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    """Return float8_e5m2 codes as floats: a code is the first byte of a float16."""
    return _float16(codes << 8)


def _e4m3(codes: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    """Return float8_e4m3 codes as floats divided by 2**8 (bias 7)."""
    # A code is a float16 without its last bits, and with another bias of the exponent. The code
    # that means NaN in some formats is a number here: a row with a NaN has a scale of NaN.
    bits = codes << 7
    return _float16(bits + (bits & 0x4000))  # The sign lies one bit further up.


def _float16(bits: Int32[Array, "*n"]) -> Float[Array, "*n"]:
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
