"""Row formats by name, and functions that pack and unpack arrays of rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxrec.embed.config import TableConfig
from jaxrec.embed.formats import FORMATS, RowFormat, check_rows
from jaxrec.embed.formats.integers import Fused8Rows, IntegerRows

ROW_FORMATS: Mapping[str, RowFormat] = {**FORMATS, Fused8Rows().name: Fused8Rows()}
"""Formats of `pack_rows` and `unpack_rows` by name: those of tables, and one of FBGEMM's."""


def find_format(name: str, formats: Mapping[str, RowFormat] = FORMATS) -> RowFormat:
    """Return the row format of a name; a ValueError lists the names."""
    if name not in formats:
        raise ValueError(f"dtype={name!r} is not one of {', '.join(map(repr, formats))}")
    return formats[name]


def table_formats(
    tables: Sequence[TableConfig], dtype: str, per_table: Mapping[str, str]
) -> dict[str, RowFormat]:
    """Return each table's row format by the table's name: its entry in ``per_table``, or ``dtype``.

    Raises a KeyError for an unknown table, and a ValueError for a format that cannot store a
    table's width.
    """
    names = [table.name for table in tables]
    for name in per_table:
        if name not in names:
            raise KeyError(
                f"per_table has a dtype for {name!r}, but no table is named so; there are "
                f"{', '.join(map(repr, names))}"
            )
    formats = {name: find_format(per_table.get(name, dtype)) for name in names}
    for table in tables:
        reason = formats[table.name].refuse(table.embedding_dim)
        if reason is not None:
            raise ValueError(
                f"table {table.name!r} cannot be {formats[table.name].name}: {reason}; give it "
                f"another format, such as per_table={{{table.name!r}: 'int8'}}"
            )
    return formats


def pack_rows(
    rows: Float[Array | np.ndarray, "n dim"], dtype: str = "int8", *, scale_last: bool = False
) -> Shaped[Array, "n width"]:
    """Return rows as a table of a row format stores them, in FBGEMM's layout.

    Under `jax.jit` values are not checked: a row with a NaN then unpacks to NaN in integer formats,
    and "float8" bounds elements by 240.

    Args:
        rows: The rows, float32, bfloat16 or float16.
        dtype: The format: "int8", "int4" or "int2" (uint8 ``[n, 4 + dim * bits / 8]``: float16
            scale, float16 offset, codes); "float8" (uint8 ``[n, dim]``: 4 bits of exponent with a
            bias of 7, 3 of fraction); "float16", "bfloat16" or "float32" (``[n, dim]`` of that
            type); or "int8_float32" (uint8 ``[n, dim + 8]``: codes, float32 scale, float32 offset),
            which FBGEMM's ``FloatToFused8BitRowwiseQuantized`` returns and which no table has.
        scale_last: Whether the scale and the offset follow the codes, as FBGEMM's
            ``FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf`` returns them; for "int8", "int4" and
            "int2".

    Raises:
        ValueError: There is no such format; the rows are not ``[n, dim]`` or hold an element that
            is not finite or too large; or ``scale_last`` is given for another format.

    Example:
        >>> pack_rows(np.float32([[0.0, 1.5, 3.0, 0.5]]), "int2")
        Array([[ 0, 60,  0,  0, 56]], dtype=uint8)
    """
    row_format = find_format(dtype, ROW_FORMATS)
    if np.ndim(rows) != 2 or np.shape(rows)[1] == 0:
        raise ValueError(f"rows have the shape [n, dim], got {np.shape(rows)}")
    if not isinstance(rows, jax.core.Tracer):
        check_rows(row_format, "", np.asarray(rows), 0)
    packed = _pack(jnp.asarray(rows), row_format)
    return with_scale(row_format).scale_last(packed) if scale_last else packed


def unpack_rows(
    packed: Shaped[Array | np.ndarray, "n width"],
    dtype: str = "int8",
    *,
    dim: int | None = None,
    scale_last: bool = False,
) -> Float[Array, "n dim"]:
    """Return stored rows in float32: the reverse of `pack_rows`.

    Args:
        packed: The rows as `pack_rows` returns them.
        dtype: Format of the rows.
        dim: Number of columns; None: as many as fit the stored width.
        scale_last: As for `pack_rows`.

    Raises:
        ValueError: There is no such format, or ``packed`` has another shape or type than the
            format.

    Example:
        >>> unpack_rows(pack_rows(np.float32([[0.0, 1.5, 3.0, 0.5]]), "int2"), "int2").tolist()
        [[0.0, 2.0, 3.0, 0.0]]
    """
    row_format = find_format(dtype, ROW_FORMATS)
    packed = jnp.asarray(packed)
    if dim is None:
        dim = _widest(row_format, packed.shape)
    wanted = (row_format.width(dim), row_format.dtype)
    if packed.ndim != 2 or (packed.shape[1], packed.dtype.name) != wanted:
        raise ValueError(
            f"{dtype} rows of {dim} columns are {wanted[1]} of [n, {wanted[0]}], got "
            f"{packed.dtype.name} of {packed.shape}"
        )
    if scale_last:
        packed = with_scale(row_format).scale_first(packed)
    return _unpack(packed, row_format, dim)


# Compiled, so that XLA fuses ``scale * code + offset`` and rounds once, as FBGEMM does.
@functools.partial(jax.jit, static_argnums=1)
def _pack(rows: Float[Array, "n dim"], row_format: RowFormat) -> Shaped[Array, "n width"]:
    return row_format.pack(rows)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unpack(
    packed: Shaped[Array, "n width"], row_format: RowFormat, dim: int
) -> Float[Array, "n dim"]:
    return row_format.unpack(packed, dim)


def with_scale(row_format: RowFormat) -> IntegerRows:
    """Return the format if its rows can have the scale behind the codes, or raise a ValueError."""
    if not isinstance(row_format, IntegerRows):
        raise ValueError(f"scale_last is for int8, int4 and int2 rows, not for {row_format.name}")
    return row_format


def _widest(row_format: RowFormat, shape: tuple[int, ...]) -> int:
    """Return the largest number of columns that rows of the stored ``shape`` can hold."""
    width = shape[-1] if shape else 0
    per_element = 8 // row_format.bits if isinstance(row_format, IntegerRows) else 1
    return max(1, (width - row_format.width(0)) * per_element)
