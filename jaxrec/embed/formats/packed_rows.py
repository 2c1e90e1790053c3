"""Arrays of rows: plain, or stored in a row format (`PackedRows`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32, Shaped

from jaxrec.embed.formats.base import RowFormat
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.formats.row_gather import gather_rows

# Elements that `PackedRows.map_rows` unpacks at a time: 4 MiB of float32.
_BLOCK_ELEMENTS = 1 << 20

# Before JAX 0.11, XLA's CPU scatter of bfloat16 converted the whole table to float32 and back, and
# in a loop for each turn. As integers of the same bits the table is copied once there. Elsewhere
# the scatter is in place, and that copy would be a loss. float16 was never converted.
_KEEPS_BFLOAT16 = jax.__version_info__ >= (0, 11)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows stored in a `RowFormat`, ``[rows, width]``, that read like float32 ``[rows, dim]``."""

    # It has the shape, the type, the slices and the `at` of the unpacked array, so that code for
    # plain tables takes it unchanged. Only the rows that are read are unpacked.
    stored: Shaped[Array, "rows width"]
    row_format: RowFormat = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})  # columns of the unpacked rows

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape[0], self.dim

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored array."""
        return self.stored.nbytes

    @property
    def sharding(self) -> Any:
        return self.stored.sharding

    def with_stored(self, stored: Shaped[Array, "_rows width"]) -> PackedRows:
        """Return packed rows of this format with other stored bytes."""
        return dataclasses.replace(self, stored=stored)

    def map_rows(self, function: Callable[[Array], Array]) -> PackedRows:
        """Replace rows by ``function(rows)``, ``[n, dim]`` in float32, block by block; traced."""
        num_rows = self.shape[0]
        size = min(num_rows, max(1, _BLOCK_ELEMENTS // self.dim))

        def one_block(block: Array, stored: Array) -> Array:
            # Blocks have one static size, so the last one overlaps the block before. It reads the
            # old array, so that the function is applied once to each row.
            start = jnp.minimum(block * size, num_rows - size)
            old = jax.lax.dynamic_slice_in_dim(self.stored, start, size, 0)
            new = self.row_format.pack(function(self.row_format.unpack(old, self.dim)))
            return jax.lax.dynamic_update_slice_in_dim(stored, new, start, 0)

        return self.with_stored(jax.lax.fori_loop(0, -(-num_rows // size), one_block, self.stored))

    def __getitem__(self, rows: slice) -> Float[Array, "n dim"]:
        return _unpack(self.with_stored(self.stored[rows]))

    @property
    def at(self) -> _Access:
        return _Access(self)


TableArray: TypeAlias = Array | PackedRows
"""An array of rows, plain or packed."""


def as_table(stored: Shaped[Array, "rows width"], row_format: RowFormat, dim: int) -> TableArray:
    """Return stored rows as a table of ``dim`` columns, a plain array if the format is plain."""
    return stored if isinstance(row_format, PlainRows) else PackedRows(stored, row_format, dim)


@dataclasses.dataclass(frozen=True)
class _Access:
    """Result of `PackedRows.at`, to be indexed by rows."""

    rows: PackedRows

    def __getitem__(self, index: Int32[Array, "*n"]) -> _RowsAt:
        return _RowsAt(self.rows, index)


@dataclasses.dataclass(frozen=True)
class _RowsAt:
    """Result of ``packed.at[index]``; its methods are those of `jax.numpy.ndarray.at`."""

    rows: PackedRows
    index: Int32[Array, "*n"]

    def get(
        self, *, mode: str = "clip", fill_value: float = 0, indices_are_sorted: bool = False
    ) -> Float[Array, "*n dim"]:
        rows, index = self.rows, self.index
        # "clip" and a mask afterwards: stored bytes have no fill value that unpacks to any float.
        stored = gather_rows(
            rows.stored, index.reshape(-1), mode="clip", indices_are_sorted=indices_are_sorted
        )
        floats = rows.row_format.unpack(stored, rows.dim).reshape(*index.shape, rows.dim)
        if mode == "clip":
            return floats
        is_row = (index >= 0) & (index < rows.shape[0])
        return jnp.where(is_row[..., None], floats, jnp.float32(fill_value))

    def set(self, values: Float[Array, "*n dim"], *, mode: str = "drop") -> PackedRows:
        packed = self.rows.row_format.pack(values.reshape(-1, self.rows.dim))
        index = self.index.reshape(-1)
        return self.rows.with_stored(self.rows.stored.at[index].set(packed, mode=mode))


@jax.jit
def _unpack(rows: PackedRows) -> Float[Array, "n dim"]:
    return rows.row_format.unpack(rows.stored, rows.dim)


def is_packed(value: Any) -> TypeGuard[PackedRows]:
    """Return whether a value is packed rows; as ``is_leaf`` it makes them leaves of a pytree."""
    return isinstance(value, PackedRows)


def as_bits(array: Shaped[TableArray, "..."]) -> Any:
    """Return bfloat16 as uint16 of the same bits if XLA's scatter would convert it."""
    if isinstance(array, PackedRows) or array.dtype != jnp.bfloat16:
        return array
    if _KEEPS_BFLOAT16 or jax.default_backend() != "cpu":
        return array
    return jax.lax.bitcast_convert_type(array, jnp.uint16)


def of_bits(bits: Shaped[TableArray, "..."], dtype: DTypeLike) -> Any:
    """Undo `as_bits` of an array of type ``dtype``."""
    if isinstance(bits, PackedRows) or bits.dtype == dtype:
        return bits
    return jax.lax.bitcast_convert_type(bits, dtype)
