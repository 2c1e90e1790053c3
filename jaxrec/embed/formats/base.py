"""The interface of a row format, and the check whether a format can hold rows."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt32


class RowFormat(abc.ABC):
    """Form in which a table's rows of floats are stored: ``[n, dim]`` as ``[n, width(dim)]``."""

    # Formats are frozen dataclasses: a hashable format can be a static argument of a kernel.
    dtype: str  # type of the stored elements

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the format, such as "int8"."""

    @property
    @abc.abstractmethod
    def max_abs(self) -> float:
        """Largest absolute value that an element can have."""

    @abc.abstractmethod
    def width(self, dim: int) -> int:
        """Return the number of stored elements of a row of ``dim`` columns."""

    @abc.abstractmethod
    def pack(self, rows: Float[Array, "n dim"]) -> Shaped[Array, "n width"]:
        """Return the stored form of rows, elements rounded to nearest; traced."""

    @abc.abstractmethod
    def unpack(self, packed: Shaped[Array, "n width"], dim: int) -> Float[Array, "n dim"]:
        """Return stored rows of ``dim`` columns in float32; traced."""

    def take_columns(
        self, packed: Shaped[Array, "n width"], dim: int, columns: tuple[int, int]
    ) -> Shaped[Array, "n part_width"] | None:
        """Cut columns ``[first, stop)`` out of stored rows; None: the bytes cannot be cut there."""
        # The slice keeps the scale of the whole row, so that it unpacks to the same numbers.
        # Packing the floats would take a scale of the slice, and may round them again.
        return None

    def pack_at_random(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"]
    ) -> Shaped[Array, "n width"]:
        """Return the stored form of float32 rows, elements rounded up or down at random; traced.

        ``noise`` has 32 random bits for each element. On average an element does not change.
        Formats for inference raise a TypeError.
        """
        # Formats of tables that are trained implement this. For them, `pack(unpack(packed, dim))`
        # is `packed`, whether `pack` or `pack_at_random` made it. Checkpoints, row stores and
        # exchanges carry rows as floats, and their bytes come back unchanged.
        raise TypeError(f"{self.name} rows are for inference and cannot be trained")

    def refuse(self, dim: int) -> str | None:
        """Return why tables of ``dim`` columns cannot have this format; None: they can."""
        # Asked when a table is made. The kernels themselves take rows of every width.
        return None

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of a stored row of ``dim`` columns."""
        return self.width(dim) * jnp.dtype(self.dtype).itemsize


def check_rows(
    row_format: RowFormat, where: str, rows: Array | np.ndarray, first_row: int = 0
) -> None:
    """Raise a ValueError if a format cannot hold an element of ``rows``, ``[n, dim]``.

    ``where`` begins the message, such as "table 'user', ".
    """
    # The usual case, rows that fit, is decided on the rows' own device; NaN fails this comparison.
    if isinstance(rows, jax.Array) and jnp.all(jnp.abs(rows) <= row_format.max_abs):
        return
    floats = np.asarray(rows).astype(np.float32, copy=False)
    if floats.size == 0:
        return
    if -row_format.max_abs <= floats.min() and floats.max() <= row_format.max_abs:
        return  # with a NaN, the minimum is NaN, and the comparison is False
    row, column = np.argwhere(~(np.abs(floats) <= row_format.max_abs))[0]
    raise ValueError(
        f"{where}row {first_row + row}, column {column} is {float(floats[row, column])}; "
        f"{row_format.name} rows hold finite elements up to {row_format.max_abs:g}. Repair the row "
        "first, or leave the table in 'float32'"
    )
