"""Arrays of optimizer state, stored as a row optimizer's ``state_dtype`` says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from jaxrec.embed.formats import RowFormat, TableArray, as_table
from jaxrec.embed.formats.floats import UNSIGNED, BFloat16Bits, PlainRows, ScaledFloat8Rows
from jaxrec.optim import RowOptimizer

_FLOAT32 = PlainRows("float32")

# Columns of a row of float8 state that share a scale.
_BLOCK = 128


def state_format(optimizer: RowOptimizer, name: str, num_axes: int) -> RowFormat:
    """Return the format of one array of optimizer state, ``[rows]`` or ``[rows, dim]``."""
    # One number for a whole row stays float32: it is small beside the row, and an error in it is an
    # error in each element.
    is_exact = name in optimizer.exact_state or optimizer.state_dtype == "float32"
    if num_axes == 1 or is_exact:
        return _FLOAT32
    if optimizer.state_dtype == "bfloat16":
        return BFloat16Bits()
    is_unsigned = name in optimizer.non_negative_state
    return ScaledFloat8Rows(UNSIGNED if is_unsigned else "float8_e4m3fn", _BLOCK)


def new_state(
    optimizer: RowOptimizer,
    dim: int,
    new_rows: Callable[[Shaped[np.ndarray, "..."]], Array],
) -> dict[str, TableArray]:
    """Return the optimizer state of new rows, by name.

    ``new_rows`` turns one stored row into an array whose rows all equal it.
    """
    state: dict[str, TableArray] = {}
    # A table may be made where everything is traced (`nnx.eval_shape`), but the first row has to be
    # a constant that we can pack on the host.
    with jax.ensure_compile_time_eval():
        first = {name: np.asarray(array) for name, array in optimizer.init(1, dim).items()}
    for name, array in first.items():
        row_format = state_format(optimizer, name, array.ndim)
        if row_format == _FLOAT32:  # stored in the array's own type, which may be another
            state[name] = new_rows(np.asarray(array[0]))
            continue
        with jax.ensure_compile_time_eval():
            packed = np.asarray(row_format.pack(jnp.asarray(array)))
        state[name] = as_table(new_rows(packed[0]), row_format, dim)
    return state


@functools.cache
def state_bytes(optimizer: RowOptimizer, dim: int) -> int:
    """Return the bytes of the optimizer state of one row of ``dim`` columns."""
    first = jax.eval_shape(lambda: optimizer.init(1, dim))
    return sum(
        state_format(optimizer, name, len(array.shape)).row_bytes(
            1 if len(array.shape) == 1 else array.shape[1]
        )
        for name, array in first.items()
    )
