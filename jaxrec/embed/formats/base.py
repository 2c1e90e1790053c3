"""The interface of a row format, and the check of rows that are to be stored in one."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt32


class RowFormat(abc.ABC):
    """How rows of a table are stored.

    A format is hashable: kernels take it as a static argument. Formats are frozen dataclasses.

    Attributes:
        dtype: Type of the stored array's elements.
    """

    dtype: str

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the format, such as "int8"."""

    @property
    @abc.abstractmethod
    def max_abs(self) -> float:
        """Largest absolute value of an element that a row can hold."""

    @abc.abstractmethod
    def width(self, dim: int) -> int:
        """Return the number of stored elements of a row of ``dim`` columns."""

    @abc.abstractmethod
    def pack(self, rows: Float[Array, "n dim"]) -> Shaped[Array, "n width"]:
        """Return rows as they are stored, each element rounded to nearest; traced."""

    @abc.abstractmethod
    def unpack(self, packed: Shaped[Array, "n width"], dim: int) -> Float[Array, "n dim"]:
        """Return stored rows of ``dim`` columns in float32; traced."""

    def take_columns(
        self, packed: Shaped[Array, "n width"], dim: int, columns: tuple[int, int]
    ) -> Shaped[Array, "n part_width"] | None:
        """Return some columns of stored rows as they are stored; traced.

        They unpack to the same numbers, with the scale of the whole row: packing them again may
        round them. None, the default: they have to be packed anew.

        Args:
            packed: The stored rows.
            dim: Number of columns of the whole rows.
            columns: The first of the columns and the one after the last.
        """
        return None

    def pack_at_random(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"]
    ) -> Shaped[Array, "n width"]:
        """Return rows as they are stored, rounded so that their mean is the input; traced.

        The formats of tables that are trained implement this. For them
        ``pack(unpack(packed, dim))`` is ``packed``, whether ``pack`` or ``pack_at_random`` made
        it: rows keep their bytes on their way through checkpoints, stores and other devices.

        Args:
            rows: The rows, float32.
            noise: Random bits of each element.

        Raises:
            TypeError: The format is for inference alone.
        """
        raise TypeError(f"{self.name} rows are for inference and cannot be trained")

    def refuse(self, dim: int) -> str | None:
        """Return the reason why tables of ``dim`` columns cannot have this format; None: they can.

        The kernels themselves take rows of every width.
        """
        return None

    def row_bytes(self, dim: int) -> int:
        """Return the number of bytes of a stored row of ``dim`` columns."""
        return self.width(dim) * jnp.dtype(self.dtype).itemsize


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
