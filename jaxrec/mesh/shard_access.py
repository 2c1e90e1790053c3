"""Copies of rows between the host and the shards of a mesh.

Rows travel some at a time, so a device needs memory for its shards and for one step's rows. With
several processes, all call these functions with the same arguments, and each reads and writes its
devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.formats import PackedRows, RowFormat, TableArray, as_bits, of_bits
from jaxrec.embed.slots import SlotDevices
from jaxrec.embed.tables import stored
from jaxrec.mesh.agree import on_every_device
from jaxrec.mesh.channel import on_each_device
from jaxrec.mesh.placed_group import PlacedGroup, PlacedShard
from jaxrec.ragged.capacity import capacity_for

# Number of elements that travel to or from a device at a time: 4 MiB of float32.
COPY_ELEMENTS = 1 << 20


def first(tree: Any) -> Any:
    """Drop the axis over the devices from all arrays; it has length 1 inside `jax.shard_map`."""
    return jax.tree.map(lambda x: x[0], tree)


def stack(tree: Any) -> Any:
    """Add an axis over the devices to all arrays: the reverse of `first`."""
    return jax.tree.map(lambda x: x[None], tree)


@dataclasses.dataclass(frozen=True)
class MeshSlots(SlotDevices):
    """Devices of a mesh, ``over``, along whose ``axes`` the tables are sharded."""

    over: Mesh
    axes: tuple[str, ...]

    @property
    def mesh(self) -> Mesh:
        return self.over

    @property
    def has_replicas(self) -> bool:
        return self.axes != tuple(self.over.axis_names)

    def put(self, tree: Any) -> Any:
        sharding = NamedSharding(self.over, PartitionSpec(self.axes))
        return jax.tree.map(lambda array: over_devices(array, sharding), tree)

    def put_beside(self, tree: Any) -> Any:
        devices = set(self.over.devices.flat)

        def put(array: Any) -> Any:
            if isinstance(array, jax.Array) and array.sharding.device_set == devices:
                return array
            return on_every_device(array, self.over)

        return jax.tree.map(put, tree)

    def spread(self, tree: Any) -> Any:
        def on_device(tree: Any) -> Any:
            device = jax.lax.axis_index(self.axes)
            return jax.tree.map(lambda array: array[device][None], tree)

        spread = self._shard_map(on_device, PartitionSpec(), PartitionSpec(self.axes))
        return spread(jax.tree.map(jnp.asarray, tree))

    def gather(self, tree: Any) -> Any:
        if jax.process_count() == 1:
            return tree

        def on_device(tree: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.all_gather(x, self.axes, tiled=True), tree)

        return self._shard_map(on_device, PartitionSpec(self.axes), PartitionSpec())(tree)

    def map(self, function: Callable[[Any, Any], Any], per_slot: Any, shared: Any) -> Any:
        over, everywhere = PartitionSpec(self.axes), PartitionSpec()
        on_device = self._shard_map(
            lambda per_slot, shared: stack(function(first(per_slot), shared)),
            (over, everywhere),
            over,
        )
        return on_device(per_slot, shared)

    def _shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        return on_each_device(function, self.over, in_specs, out_specs)


def owners(placed: PlacedGroup, shards: list[PlacedShard]) -> Iterator[tuple[int, PlacedShard]]:
    """Iterate over (device, shard), where the device's part of the group's arrays has the shard.

    All devices have the shards of a replicated group, and the number is 0.
    """
    for shard in shards:
        yield 0 if placed.is_replicated else shard.shard.device, shard


def over_devices(values: np.ndarray, sharding: NamedSharding) -> Array:
    """Put ``values[d]`` of a host array on device ``d``."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


@functools.partial(jax.jit, static_argnums=(1, 2))
def new_rows(row: Shaped[Array, "*shape"], local_rows: int, sharding: NamedSharding) -> Array:
    """Repeat a row: return an array with ``local_rows`` equal rows on each device."""

    def on_device(row):
        return kernels.new_rows(row, local_rows)

    return on_each_device(on_device, sharding.mesh, PartitionSpec(), sharding.spec)(row)


def write_shards(
    array: TableArray,
    sharding: NamedSharding,
    placed: PlacedGroup,
    columns: tuple[int, int],
    shards: list[PlacedShard],
    values: TableArray | np.ndarray,
    first: int = 0,
) -> TableArray:
    """Write a column slice of a table to the group's rows or to its state, in place.

    Args:
        array: The group's rows, or an array of their state.
        sharding: Sharding of the array.
        placed: The group.
        columns: First column of the slice, and the column after its last.
        shards: Shards of the slice.
        values: Array that has the rows or the state of the whole table.
        first: First row of the table in ``values``.
    """
    # All devices write in one program, each some of its own rows. A device that has no rows left
    # gets a range of 0 rows. Values for the devices of other processes are not read here.
    here = {shard.index[0].start or 0 for shard in stored(array).addressable_shards}
    for steps in _steps(placed, shards, _rows_at_a_time(array)):
        # The size comes from a ladder, so that few programs compile.
        size = capacity_for(max(stop - start for _, _, start, stop in steps))
        parts = np.zeros((placed.num_devices, size, *array.shape[1:]), array.dtype)
        ranges = np.zeros((placed.num_devices, 2), np.int32)
        for device, local_row, start, stop in steps:
            ranges[device] = local_row, stop - start
            if device * placed.local_rows in here:
                rows = _host_rows(values, first + start, first + stop)
                if rows.ndim == 1:
                    parts[device, : stop - start] = rows
                else:  # zeros stay behind the columns where the group is wider
                    rows = rows[:, slice(*columns)]
                    parts[device, : stop - start, : rows.shape[1]] = rows
        array = _write_rows(
            array, over_devices(parts, sharding), over_devices(ranges, sharding), sharding
        )
    return array


def read_shards(
    array: TableArray, sharding: NamedSharding, placed: PlacedGroup, shards: list[PlacedShard]
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Read shards some rows at a time; iterate over (first row, row after the last, rows).

    Row numbers are those of the table. Packed rows come unpacked. If several processes have the
    shards, all processes must iterate.
    """
    whole = stored(array)
    if whole.is_fully_addressable or whole.is_fully_replicated:
        parts = {part.index[0].start or 0: part.data for part in whole.addressable_shards}
        for device, shard in owners(placed, shards):
            first, last = shard.shard.rows
            part = parts[device * placed.local_rows]
            rows = _host_rows(part, shard.local_row, shard.local_row + last - first)
            if isinstance(array, PackedRows):
                rows = np.asarray(array.with_stored(jnp.asarray(rows))[:])
            yield first, last, rows
        return
    # Rows on other processes' devices travel to every device, from which this process reads them.
    for steps in _steps(placed, shards, _rows_at_a_time(array)):
        for device, local_row, start, stop in steps:
            place = np.array([device, local_row], np.int32)
            rows = _send_rows(array, place, stop - start, sharding)
            yield start, stop, np.asarray(rows.addressable_data(0))


def by_device(devices: np.ndarray, num_devices: int) -> np.ndarray:
    """Return the positions of each device's number in ``devices``, padded with -1.

    For 2 devices, ``[1, 0, 1]`` gives ``[[1, -1], [0, 2]]``: ``[num_devices, n]``, where ``n`` is
    the count of the most frequent number.
    """
    order = np.argsort(devices, kind="stable")
    counts = np.bincount(devices, minlength=num_devices)
    index = np.full((num_devices, counts.max()), -1, np.int32)
    place = np.arange(devices.size) - (np.cumsum(counts) - counts)[devices[order]]
    index[devices[order], place] = order
    return index


def stored_columns(
    sources: Mapping[tuple[int, int], Array], columns: tuple[int, int], row_format: RowFormat
) -> Array | None:
    """Return some columns of a table in its row format; None if no slice has all of them.

    ``sources`` has the stored rows of each column slice of the table.
    """
    for (start, stop), rows in sources.items():
        if (start, stop) == columns:
            return rows
        if start <= columns[0] and columns[1] <= stop:
            part = columns[0] - start, columns[1] - start
            return row_format.take_columns(rows, stop - start, part)
    return None


def _rows_at_a_time(array: TableArray) -> int:
    """Return the number of an array's rows that have `COPY_ELEMENTS` elements, at least 1."""
    return max(1, COPY_ELEMENTS // max(1, int(np.prod(array.shape[1:]))))


def _steps(
    placed: PlacedGroup, shards: list[PlacedShard], num_rows: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Cut shards into ranges of up to ``num_rows`` rows; iterate over steps of one for each device.

    A range is (device, first row in its array, first row of the table, row after the last).
    """
    waiting: dict[int, list[tuple[int, int, int, int]]] = {}
    for device, shard in owners(placed, shards):
        first, last = shard.shard.rows
        for start in range(first, last, num_rows):
            local_row = shard.local_row + start - first
            step = (device, local_row, start, min(start + num_rows, last))
            waiting.setdefault(device, []).append(step)
    for turn in range(max(map(len, waiting.values()))):
        yield [steps[turn] for steps in waiting.values() if turn < len(steps)]


def _host_rows(values: TableArray | np.ndarray, start: int, stop: int) -> np.ndarray:
    """Copy the rows ``start`` to ``stop`` of an array to the host."""
    if isinstance(values, jax.Array):
        if values.is_fully_replicated:
            values = values.addressable_data(0)
        devices = np.array(list(values.devices()))
        if devices.size == 1 and devices[0].platform == "cpu":
            # No program for each shape and device. The copy is of a view of another array object:
            # a view that `values` keeps would prevent that it is donated.
            return np.asarray(values.addressable_data(0))[start:stop].copy()
        # The start is an argument of the program and the size is from a ladder, so that few
        # programs serve all ranges. The host cuts off the rows that are too many.
        size = min(capacity_for(stop - start), values.shape[0])
        first = min(start, values.shape[0] - size)
        # The caller may have set a mesh of other devices, on which JAX would refuse the array.
        with jax.set_mesh(Mesh(devices[:1], ("device",))) if devices.size == 1 else nullcontext():
            rows = np.asarray(_slice(values, np.int32(first), size))
        return rows[start - first : stop - first]
    return np.asarray(values[start:stop])


@functools.partial(jax.jit, static_argnums=2)
def _slice(values: Shaped[Array, "rows ..."], start: Int32[Array, ""], size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(values, start, size, 0)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write_rows(
    array: Shaped[TableArray, "rows ..."],
    parts: Shaped[TableArray, "devices size ..."],
    ranges: Int32[Array, "devices 2"],
    sharding: NamedSharding,
) -> Shaped[TableArray, "rows ..."]:
    """Write ``parts[d]`` to the array of device ``d``; its range is (first row, number of rows)."""

    def on_device(array, parts, ranges):
        (part,), ((start, count),) = parts, ranges
        index = jnp.arange(part.shape[0], dtype=jnp.int32)
        rows = jnp.where(index < count, start + index, array.shape[0])
        # As bits, since XLA may widen narrow floats in a scatter. A row past the array is dropped.
        written = as_bits(array).at[rows].set(as_bits(part), mode="drop")
        return of_bits(written, array.dtype)

    write = on_each_device(on_device, sharding.mesh, sharding.spec, sharding.spec)
    return write(array, parts, ranges)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _send_rows(
    array: Shaped[TableArray, "rows ..."],
    place: Int32[Array, "2"],
    size: int,
    sharding: NamedSharding,
) -> Shaped[Array, "size ..."]:
    """Return ``size`` rows of one device's array on every device.

    ``place`` is the number of the device and the first of the rows in its array.
    """
    # A sum in which all other devices give zeros: a broadcast whose sender is an argument, so one
    # program serves all senders.
    axes = sharding.spec[0]

    def on_device(array, place):
        device, start = place
        rows = array.at[start + jnp.arange(size, dtype=jnp.int32)].get(mode="clip")
        is_mine = jax.lax.axis_index(axes) == device
        return jax.lax.psum(jnp.where(is_mine, rows, jnp.zeros_like(rows)), axes)

    everywhere = PartitionSpec()
    send = on_each_device(on_device, sharding.mesh, (sharding.spec, everywhere), everywhere)
    return send(array, place)
