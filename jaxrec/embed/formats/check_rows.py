"""The check of rows that are to be stored in a row format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrec.embed.formats.base import RowFormat


def check_rows(
    row_format: RowFormat, where: str, rows: Array | np.ndarray, first_row: int = 0
) -> None:
    """Raise a ValueError where a format cannot hold an element.

    Args:
        row_format: The format.
        where: Begins the message, such as "table 'user', ".
        rows: Rows ``[n, dim]``.
        first_row: Number of the first of them.
    """
    if isinstance(rows, jax.Array) and jnp.all(jnp.abs(rows) <= row_format.max_abs):
        return
    floats = np.asarray(rows).astype(np.float32, copy=False)
    if floats.size == 0:
        return
    if -row_format.max_abs <= floats.min() and floats.max() <= row_format.max_abs:
        return  # A NaN would be the minimum.
    row, column = np.argwhere(~(np.abs(floats) <= row_format.max_abs))[0]
    raise ValueError(
        f"{where}row {first_row + row}, column {column} is {float(floats[row, column])}; "
        f"{row_format.name} rows hold finite elements up to {row_format.max_abs:g}. Repair the row "
        "first, or leave the table in 'float32'"
    )
