"""16-bit floats as integers, so that XLA sets rows of a table in place on CPUs.

XLA's scatter of 16-bit floats on CPUs converts the whole table to float32 and back, in a loop each
time around.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike, Shaped

from jaxrec.embed.formats.packed_rows import PackedRows, TableArray


def as_bits(array: Shaped[TableArray, "..."]) -> Any:
    """Return 16-bit floats as uint16 of the same bits, and other arrays as they are.

    Example:
        >>> import jax.numpy as jnp
        >>> as_bits(jnp.array([1.0], jnp.bfloat16))
        Array([16256], dtype=uint16)
    """
    if isinstance(array, PackedRows) or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if array.dtype.itemsize != 2:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.uint16)


def of_bits(bits: Shaped[TableArray, "..."], dtype: DTypeLike) -> Any:
    """Return the array of a type that `as_bits` took."""
    if isinstance(bits, PackedRows) or bits.dtype == dtype:
        return bits
    return jax.lax.bitcast_convert_type(bits, dtype)
