"""Lookups of packed rows on CPUs, by the native library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed.formats import PackedRows, RowFormat
from jaxrec.embed.formats.floats import Float8Rows, ScaledFloat8Rows
from jaxrec.embed.formats.integers import IntegerRows, TrainedInt8Rows
from jaxrec.embed.kernels.base import BagLayout
from jaxrec.embed.kernels.native_call import layout_numbers, native_function, optional_operand

# The order of enum Code in native/kernels.h.
_CODES: dict[RowFormat, int] = {
    IntegerRows(bits=8): 0,
    IntegerRows(bits=4): 1,
    IntegerRows(bits=2): 2,
    Float8Rows(): 3,
    TrainedInt8Rows(): 4,
    ScaledFloat8Rows("float8_e4m3fn"): 5,
    ScaledFloat8Rows("float8_e5m2"): 6,
}

# Functions of the native library that `pooled_lookup` and `row_lookup` call for packed rows.
TARGETS = ("packed_pooled_lookup", "packed_row_lookup")


def refuse_packed(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why the library does not unpack a call's table; None: it does."""
    row_format = arguments["table"].row_format
    if primitive != "fused_update" and row_format not in _CODES:
        return f"it does not unpack {row_format.name}"
    return None


def packed_pooled_lookup(
    table: PackedRows,
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
) -> Float[Array, "bags dim"]:
    """`pooled_lookup` of packed rows."""
    (pooled,) = native_function(
        "packed_pooled_lookup", [jax.ShapeDtypeStruct((layout.num_bags, table.dim), dtype)]
    )(
        ids,
        lengths,
        optional_operand(weights, jnp.float32),
        table.stored,
        layout=layout_numbers(layout),
        code=np.int32(_CODES[table.row_format]),
    )
    return pooled


def packed_row_lookup(table: PackedRows, rows: Int32[Array, " n"]) -> Float[Array, "n dim"]:
    """`row_lookup` of packed rows."""
    (found,) = native_function(
        "packed_row_lookup", [jax.ShapeDtypeStruct((rows.size, table.dim), jnp.float32)]
    )(rows, table.stored, code=np.int32(_CODES[table.row_format]))
    return found
