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
    """Return why no kernel updates rows of a format; None: one does."""
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
        salt: Number of the array, of which the random bits of its rounding depend.
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
        row_format = self.row_format
        if isinstance(row_format, UnscaledRows):
            return self._evaluate(lambda x: row_format.unpack(x, x.shape[-1]), values)
        match row_format:
            case TrainedInt8Rows():
                numbers = self._load_numbers(row, is_used, 2)
                scale, offset = map(self.lanes.spread, numbers)
                return values.astype(jnp.int32).astype(jnp.float32) * scale + offset
            case ScaledFloat8Rows():
                codes = self._decode(row_format, values.astype(jnp.uint32))
                scales = self._load_numbers(row, is_used, len(self._blocks(row_format)))
                return codes * self._join(scales, row_format)
        raise TypeError(refuse_format(row_format))

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
        match row_format:
            case UnscaledRows():
                codes = self._evaluate(functools.partial(_pack, row_format), values, noise)
                store(self.stored, row, is_used, lanes, codes)
                return
            case TrainedInt8Rows():
                quantize = functools.partial(_quantize, row_format)
                codes, *numbers = self._evaluate(quantize, values, noise)
                codes = codes.astype(jnp.int32)
            case ScaledFloat8Rows():
                quantize = functools.partial(_quantize, row_format)
                blocks = [
                    evaluate(quantize, shape, values, noise) for shape in self._blocks(row_format)
                ]
                numbers = [scale for _, scale in blocks]
                codes = self._encode(
                    row_format, self._join([code for code, _ in blocks], row_format)
                )
            case _:
                raise TypeError(refuse_format(row_format))
        store(self.stored, row, is_used, lanes, codes.astype(jnp.uint8))
        words = [jax.lax.bitcast_convert_type(number, jnp.int32) for number in numbers]
        store_words(self.stored, row, is_used, lanes, self.array.shape[1], words)

    @functools.cached_property
    def shape(self) -> RowShape:
        """The update's whole rows, as `evaluate` takes them."""
        return self._shape(0, self.array.shape[1])

    def _shape(self, first: int, stop: int) -> RowShape:
        lanes, groups = self.lanes, self.groups

        def is_column() -> Array:
            columns = _column_ids(lanes, groups)
            return (columns >= first) & (columns < stop)

        return RowShape(
            groups,
            lanes.columns,
            stop - first,
            functools.partial(_column_ids, lanes, groups),
            lanes.spread,
            None if (first, stop) == (0, lanes.columns) else is_column,
            first,
        )

    def _blocks(self, row_format: ScaledFloat8Rows) -> list[RowShape]:
        """Return the blocks of columns that share a scale."""
        dim = self.array.shape[1]
        size = row_format.block or dim
        return [self._shape(first, min(first + size, dim)) for first in range(0, dim, size)]

    def _join(self, blocks: list[Array], row_format: ScaledFloat8Rows) -> Array:
        """Return full arrays from numbers of each block: lines, or full arrays."""
        shapes = self._blocks(row_format)
        if blocks[0].ndim == 1:
            blocks = [self.lanes.spread(each) for each in blocks]
        joined = blocks[0]
        for shape, each in zip(shapes[1:], blocks[1:], strict=True):
            joined = jnp.where(shape.column_ids() < shape.first, joined, each)
        return joined

    def _evaluate(self, function: Any, *arguments: Any) -> Any:
        return evaluate(function, self.shape, *arguments)

    def _load_numbers(
        self, row: Array, is_used: Array, count: int
    ) -> list[Float[Array, " groups"]]:
        """Load the float32 numbers behind the codes of each row."""
        words = load_words(self.stored, row, is_used, self.lanes, self.array.shape[1], count)
        return [jax.lax.bitcast_convert_type(word, jnp.float32) for word in words]

    def _decode(self, row_format: ScaledFloat8Rows, codes: Array) -> Float[Array, "groups columns"]:
        if row_format.code == UNSIGNED:
            return self._evaluate(row_format.grid.decode, codes)
        sizes = self._evaluate(row_format.grid.decode, codes & 0x7F)
        return jnp.where((codes & 0x80) != 0, -sizes, sizes)

    def _encode(self, row_format: ScaledFloat8Rows, numbers: Array) -> Array:
        codes = self._evaluate(row_format.grid.encode, jnp.abs(numbers))
        if row_format.code == UNSIGNED:
            return codes
        sign = jax.lax.bitcast_convert_type(numbers, jnp.uint32) >> 24
        return codes | (sign & 0x80)


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


def _column_ids(lanes: Lanes, groups: int) -> Int32[Array, "groups columns"]:
    shape = groups, lanes.columns
    return lanes.cast(jax.lax.broadcasted_iota(jnp.int32, shape, 1))
