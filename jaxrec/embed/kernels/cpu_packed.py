"""Lookups of packed rows on CPUs, by the native library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32, Shaped

from jaxrec.embed.formats import RowFormat
from jaxrec.embed.formats.float8 import Float8Rows
from jaxrec.embed.formats.integers import IntegerRows
from jaxrec.embed.kernels.base import BagLayout
from jaxrec.embed.kernels.native_call import (
    MAX_DIM,
    ROW_TYPES,
    layout_numbers,
    native_function,
    optional_operand,
)

# The order of enum Code in native/kernels.h.
_CODES: dict[RowFormat, int] = {
    IntegerRows(bits=8): 0,
    IntegerRows(bits=4): 1,
    IntegerRows(bits=2): 2,
    Float8Rows(): 3,
}


def refuse_packed(arguments: Mapping[str, Any]) -> str | None:
    """Return the reason why the library does not take a lookup of packed rows; None: it does."""
    row_format, dtype = arguments["row_format"], jnp.dtype(arguments["dtype"]).name
    if row_format not in _CODES:
        return f"it does not unpack {row_format.name}"
    if arguments["dim"] > MAX_DIM:
        return f"rows have at most {MAX_DIM} elements, not {arguments['dim']}"
    if 0 in arguments["packed"].shape:
        return "the table is empty"
    if dtype not in ROW_TYPES:
        return f"results are {', '.join(ROW_TYPES)}, not {dtype}"
    return None


def packed_pooled_lookup(
    packed: Shaped[Array, "rows width"],
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    row_format: RowFormat,
    dim: int,
    dtype: DTypeLike,
) -> Float[Array, "bags dim"]:
    """Return the sum or mean of each bag's rows; see `jaxrec.embed.kernels.packed`."""
    (pooled,) = native_function(
        "packed_pooled_lookup", [jax.ShapeDtypeStruct((layout.num_bags, dim), dtype)]
    )(
        ids,
        lengths,
        optional_operand(weights, jnp.float32),
        packed,
        layout=layout_numbers(layout),
        code=np.int32(_CODES[row_format]),
    )
    return pooled


def packed_row_lookup(
    packed: Shaped[Array, "rows width"],
    rows: Int32[Array, " n"],
    row_format: RowFormat,
    dim: int,
    dtype: DTypeLike,
) -> Float[Array, "n dim"]:
    """Return the rows; see `jaxrec.embed.kernels.packed`."""
    result = jax.ShapeDtypeStruct((rows.size, dim), dtype)
    (found,) = native_function("packed_row_lookup", [result])(
        rows, packed, code=np.int32(_CODES[row_format])
    )
    return found
