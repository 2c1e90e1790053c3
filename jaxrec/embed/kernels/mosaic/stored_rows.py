"""How an update reads and writes the rows of one array: floats, or packed rows in their bytes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped, UInt32

from jaxrec.embed.formats import PackedRows, RowFormat
from jaxrec.embed.formats.floats import (
    UNSIGNED,
    BFloat16Bits,
    PlainRows,
    ScaledFloat8Rows,
    UnscaledRows,
)
from jaxrec.embed.formats.integers import TrainedInt8Rows
from jaxrec.embed.formats.rounding import FloatGrid, random_bits
from jaxrec.embed.kernels.mosaic.indexing import load, load_words, store, store_words
from jaxrec.embed.kernels.mosaic.lanes import Lanes
from jaxrec.embed.kernels.mosaic.row_functions import RowShape, evaluate

_FORMATS = (PlainRows, BFloat16Bits, TrainedInt8Rows, ScaledFloat8Rows)


def refuse_format(row_format: RowFormat) -> str | None:
    """Return why the kernels do not update rows of a format; None: they do."""
    # Not `isinstance`: a format derived from one of these may store rows in another way.
    if type(row_format) in _FORMATS:
        return None
    return f"it does not pack {row_format.name}"


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Rows of a table, or of an array of its state.

    Attributes:
        array: A reference ``[rows]`` or ``[rows, dim]``, or packed rows with a reference.
        lanes: Lanes of the update's rows, ``[groups, columns]``.
        groups: Rows of its tile.
        salt: Number of the array; it makes the random bits of its rounding differ from others'.
    """

    array: Any
    lanes: Lanes
    groups: int
    salt: int

    @property
    def stored(self) -> Any:
        return self.array.stored if isinstance(self.array, PackedRows) else self.array

    @property
    def row_format(self) -> RowFormat:
        if isinstance(self.array, PackedRows):
            return self.array.row_format
        return PlainRows(jnp.dtype(self.array.dtype).name)

    @property
    def has_numbers(self) -> bool:
        """Whether rows have numbers that all of their threads load, and that one thread stores."""
        return self.stored.ndim == 1 or isinstance(self.array, PackedRows)

    def load(
        self, row: Int32[Array, " groups"], is_used: Bool[Array, " groups"]
    ) -> Float[Array, "groups *columns"]:
        """Load rows in float32; unused ones are zeros, or any number if they are packed."""
        values = load(self.stored, row, is_used, self.lanes)
        if values.ndim == 1:
            return values.astype(jnp.float32)
        dim = self.array.shape[1]
        count = (self.row_format.width(dim) - dim) // 4  # of float32 numbers behind the codes
        words = load_words(self.stored, row, is_used, self.lanes, dim, count) if count else []
        numbers = [jax.lax.bitcast_convert_type(word, jnp.float32) for word in words]
        numbers = list(map(self.lanes.spread, numbers))
        if isinstance(self.row_format, ScaledFloat8Rows):
            numbers = [self._join(numbers)]
        return self._evaluate(functools.partial(_unpack, self.row_format), values, *numbers)

    def store(
        self,
        row: Int32[Array, " groups"],
        is_used: Bool[Array, " groups"],
        values: Float[Array, "groups *columns"],
        step: Int32[Array, ""] | None,
    ) -> None:
        """Store rows; ``step`` rounds them at random, and None to nearest."""
        row_format, lanes = self.row_format, self.lanes
        if values.ndim == 1:
            store(self.stored, row, is_used, lanes, lanes.cast(values))
            return
        noise = None
        if step is not None and row_format != PlainRows("float32"):
            bits = functools.partial(random_bits, dim=self.array.shape[1], salt=self.salt)
            noise = self._evaluate(bits, row, step)
        if isinstance(row_format, UnscaledRows):
            codes = self._evaluate(functools.partial(_pack, row_format), values, noise)
            store(self.stored, row, is_used, lanes, codes)
            return
        assert isinstance(row_format, TrainedInt8Rows | ScaledFloat8Rows)
        quantize = functools.partial(_quantize, row_format)
        blocks = [evaluate(quantize, shape, values, noise) for shape in self._blocks]
        codes = self._join([codes for codes, *_ in blocks])
        codes = self._evaluate(functools.partial(_encode, row_format), codes)
        store(self.stored, row, is_used, lanes, codes.astype(jnp.uint8))
        numbers = [number for _, *of_block in blocks for number in of_block]
        words = [jax.lax.bitcast_convert_type(number, jnp.int32) for number in numbers]
        store_words(self.stored, row, is_used, lanes, self.array.shape[1], words)

    @functools.cached_property
    def shape(self) -> RowShape:
        """The update's whole rows, as `evaluate` takes them."""
        return RowShape(self.lanes, self.groups, 0, self.array.shape[1])

    def _evaluate(self, function: Any, *arguments: Any) -> Any:
        return evaluate(function, self.shape, *arguments)

    @property
    def _blocks(self) -> list[RowShape]:
        """Blocks of columns that share a scale."""
        dim = self.array.shape[1]
        size = getattr(self.row_format, "block", None) or dim
        return [
            dataclasses.replace(self.shape, first=first, dim=min(size, dim - first))
            for first in range(0, dim, size)
        ]

    def _join(self, blocks: list[Array]) -> Array:
        """Return a full array that has the numbers of each block in the block's columns."""
        joined, *others = blocks
        for shape, each in zip(self._blocks[1:], others, strict=True):
            joined = jnp.where(shape.column_ids() < shape.first, joined, each)
        return joined


def _unpack(
    row_format: RowFormat, codes: Shaped[Array, "n dim"], *numbers: Float[Array, "n dim"]
) -> Float[Array, "n dim"]:
    """Return rows, given their codes, and the scale and the offset of each code if it has any."""
    match row_format:
        case UnscaledRows():
            return row_format.unpack(codes, codes.shape[-1])
        case TrainedInt8Rows():
            scale, offset = numbers
            return codes.astype(jnp.int32).astype(jnp.float32) * scale + offset
        case ScaledFloat8Rows():
            (scale,), codes = numbers, codes.astype(jnp.uint32)
            if row_format.code == UNSIGNED:
                return row_format.grid.decode(codes) * scale
            sizes = row_format.grid.decode(codes & 0x7F)
            return jnp.where((codes & 0x80) != 0, -sizes, sizes) * scale
    raise TypeError(refuse_format(row_format))


def _pack(
    row_format: RowFormat, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"] | None
) -> Shaped[Array, "n dim"]:
    """Return rows in an unscaled format, rounded at random if there is noise."""
    if noise is None or row_format == PlainRows("float32"):
        return row_format.pack(rows)
    if isinstance(row_format, PlainRows):
        return row_format.pack(FloatGrid.of(row_format.dtype).round(rows, noise))
    return row_format.pack_at_random(rows, noise)


def _quantize(
    row_format: TrainedInt8Rows | ScaledFloat8Rows,
    rows: Float[Array, "n dim"],
    noise: UInt32[Array, "n dim"] | None,
) -> tuple[Array, ...]:
    """Return codes as numbers ``[n, dim]``, and the numbers of each row, ``[n]``."""
    codes, *numbers = row_format.quantize(rows, noise)
    return codes, *(number[:, 0] for number in numbers)


def _encode(
    row_format: TrainedInt8Rows | ScaledFloat8Rows, codes: Float[Array, "n dim"]
) -> Shaped[Array, "n dim"]:
    """Convert codes from numbers to integers of the format."""
    if isinstance(row_format, TrainedInt8Rows):
        return codes.astype(jnp.int32)
    sizes = row_format.grid.encode(jnp.abs(codes))
    if row_format.code == UNSIGNED:
        return sizes
    return sizes | ((jax.lax.bitcast_convert_type(codes, jnp.uint32) >> 24) & 0x80)
