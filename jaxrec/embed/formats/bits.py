"""bfloat16 as integers where XLA would not set rows of a table in place.

XLA's scatter of bfloat16 on CPUs converted the whole table to float32 and back, in a loop each time
around, until JAX 0.11. Integers of the same bits cost one copy of the table there, and would cost
it everywhere else too, where the scatter is in place; float16 never was converted.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike, Shaped

from jaxrec.embed.formats.packed_rows import PackedRows, TableArray

# Whether XLA sets rows of bfloat16 on CPUs as they are.
_KEEPS_BFLOAT16 = jax.__version_info__ >= (0, 11)


def as_bits(array: Shaped[TableArray, "..."]) -> Any:
    """Return bfloat16 as uint16 of the same bits where XLA converts it, else the array as it is."""
    if isinstance(array, PackedRows) or array.dtype != jnp.bfloat16:
        return array
    if _KEEPS_BFLOAT16 or jax.default_backend() != "cpu":
        return array
    return jax.lax.bitcast_convert_type(array, jnp.uint16)


def of_bits(bits: Shaped[TableArray, "..."], dtype: DTypeLike) -> Any:
    """Return the array of a type that `as_bits` took."""
    if isinstance(bits, PackedRows) or bits.dtype == dtype:
        return bits
    return jax.lax.bitcast_convert_type(bits, dtype)
