"""Rows that a step reads and sets by index, on one device or in equal shards over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Int32, Shaped

from jaxrec.mesh.agree import put_on_mesh
from jaxrec.mesh.channel import Channel, on_each_device
from jaxrec.mesh.precision import ExchangePrecision


class RowsVariable(nnx.Variable):
    """Holds the rows of `PoolRows`, ``[num_rows, width]``, in row order."""


class PoolRows(nnx.Module):
    """Rows ``[num_rows, width]`` that a compiled step reads and sets by index, without gradients.

    Over a mesh each device stores an equal shard of consecutive rows. Row indices and new rows are
    sharded over the devices as samples are. Elements have 1, 2 or 4 bytes. With ``mesh=None`` the
    rows are on one device until `place`, which `jaxrec.shard` calls.
    """

    # A read sends all indices to all devices, and each row back to its reader. A write sends all
    # indices and rows to all devices, and owners keep theirs. So shapes are static and no index is
    # left out, however many have one owner.

    def __init__(
        self, num_rows: int, width: int, dtype: DTypeLike = "float32", *, mesh: Mesh | None = None
    ):
        for name, size in (("num_rows", num_rows), ("width", width)):
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
                raise ValueError(f"{name} is an integer of 1 or more, got {size!r}")
        if num_rows >= 2**31:
            raise ValueError(f"int32 numbers rows: num_rows is below 2**31, got {num_rows}")
        if jnp.dtype(dtype).itemsize > 4:
            raise TypeError(f"elements have 1, 2 or 4 bytes, got {jnp.dtype(dtype).name}")
        self.mesh = mesh
        _check_divides(num_rows, mesh)
        make = jax.jit(
            lambda: jnp.zeros((num_rows, width), dtype),
            out_shardings=None if mesh is None else _sharding(mesh),
        )
        self.rows = RowsVariable(make())

    @property
    def shape(self) -> tuple[int, int]:
        """``(num_rows, width)``."""
        return self.rows.get_value().shape

    def place(self, mesh: Mesh) -> None:
        """Put the rows on a mesh, in equal shards; they may be on another mesh now."""
        _check_divides(self.shape[0], mesh)
        rows, sharding = self.rows.get_value(), _sharding(mesh)
        put = put_on_mesh if rows.is_fully_addressable else jax.device_put
        self.rows.set_value(put(rows, sharding))
        self.mesh = mesh

    def read(self, index: Any, unpack: Callable[[Array], Any] | None = None) -> Any:
        """Return the rows of ``index``, ``[batch, width]``; zeros for an index out of range.

        Over a mesh the ``[batch]`` indices are in equal parts on the devices. With ``unpack``,
        each device returns that function of its rows instead, with an axis over the devices in
        front.
        """
        index = self._checked(index)
        rows = self.rows.get_value()
        if self.mesh is None:
            taken = _take(rows, index)
            return taken if unpack is None else unpack(taken)

        channel = _channel(self.mesh)

        def on_device(rows: Array, index: Array) -> Any:
            everywhere = channel.gather(index)
            taken = _take(rows, _local(everywhere, rows.shape[0], channel))
            by_reader = channel.send(taken.reshape(-1, index.shape[0], rows.shape[1]))
            owner = jnp.clip(index // rows.shape[0], 0, by_reader.shape[0] - 1)
            own = by_reader[owner, jnp.arange(index.shape[0])]
            return own if unpack is None else jax.tree.map(lambda x: x[None], unpack(own))

        return _over_devices(on_device, self.mesh)(rows, index)

    def write(self, index: Any, values: Any, pack: Callable[[Any], Array] | None = None) -> None:
        """Set the rows of ``index`` to ``values``, ``[batch, width]``.

        The last of several equal indices counts; an index out of range is skipped. With ``pack``,
        each device makes its rows by that function of its values, which then have an axis over the
        devices in front, over a mesh.
        """
        index = self._checked(index)
        rows = self.rows.get_value()
        if self.mesh is None:
            new = values if pack is None else pack(values)
            self.rows.set_value(_set(rows, index, new))
            return

        channel = _channel(self.mesh)

        def on_device(rows: Array, index: Array, values: Any) -> Array:
            own = values if pack is None else pack(jax.tree.map(lambda x: x[0], values))
            everywhere = channel.gather(index)
            # Every index is -1 or more, which the compiler cannot know. So the second gather waits
            # for the first: two at once can make simulated devices wait for each other.
            own = jnp.where(everywhere[0] < -1, jnp.zeros_like(own), own)
            return _set(rows, _local(everywhere, rows.shape[0], channel), channel.gather(own))

        self.rows.set_value(_over_devices(on_device, self.mesh)(rows, index, values))

    def _checked(self, index: Any) -> Int32[Array, " batch"]:
        """Return row indices as int32; -1 replaces an index out of range."""
        index = index if isinstance(index, jax.Array) else np.asarray(index)
        if index.ndim != 1 or not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(
                f"row indices are integers [batch], got {index.dtype}{list(index.shape)}"
            )
        devices = 1 if self.mesh is None else self.mesh.size
        if index.shape[0] % devices:
            raise ValueError(
                f"{index.shape[0]} row indices do not divide by the {devices} devices of the mesh"
            )
        is_row = (index >= 0) & (index < self.shape[0])
        if isinstance(index, np.ndarray):
            return jnp.asarray(np.where(is_row, index, -1), jnp.int32)
        return jnp.where(is_row, index, -1).astype(jnp.int32)


def _over_devices(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    over = PartitionSpec(tuple(mesh.axis_names))
    return on_each_device(function, mesh, over, over)


def _sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))


def _channel(mesh: Mesh) -> Channel:
    return Channel(tuple(mesh.axis_names), ExchangePrecision())


def _check_divides(num_rows: int, mesh: Mesh | None) -> None:
    if mesh is not None and num_rows % mesh.size:
        raise ValueError(
            f"{num_rows} rows do not divide by the {mesh.size} devices of the mesh; take "
            f"{-(-num_rows // mesh.size) * mesh.size}"
        )


def _local(index: Int32[Array, " n"], local_rows: int, channel: Channel) -> Int32[Array, " n"]:
    """Turn row indices into rows of this device's shard; -1 for rows of other devices."""
    local = index - channel.index.astype(jnp.int32) * local_rows
    return jnp.where((index >= 0) & (local >= 0) & (local < local_rows), local, -1)


def _take(rows: Shaped[Array, "rows width"], index: Int32[Array, " n"]) -> Array:
    """Return ``rows[index]``; zeros for the index -1."""
    return rows.at[jnp.where(index < 0, rows.shape[0], index)].get(mode="fill", fill_value=0)


def _set(
    rows: Shaped[Array, "rows width"], index: Int32[Array, " n"], values: Shaped[Array, "n width"]
) -> Array:
    """Set ``rows[index]`` to ``values``; the last of equal indices counts, and -1 is skipped."""
    # A scatter with repeated indices has no order. Sorted by index and then position, the last of
    # equal indices is the one to keep.
    positions = jnp.arange(index.shape[0], dtype=jnp.int32)
    ordered, order = jax.lax.sort((index, positions), num_keys=2)
    is_last = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones(1, bool)])
    target = jnp.where(is_last & (ordered >= 0), ordered, rows.shape[0])
    # Skipped entries get different indices past the rows, so that all are unique, as promised.
    target = jnp.where(target == rows.shape[0], rows.shape[0] + positions, target)
    return rows.at[target].set(values[order].astype(rows.dtype), mode="drop", unique_indices=True)
