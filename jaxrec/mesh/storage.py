"""Tables on and off a mesh, block by block: no device ever holds more than its own part.

With several processes each calls these functions with the same arguments, and touches its own
devices alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.config import TableConfig
from jaxrec.embed.initialize import draw_and_scale, fill_rows, table_key
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.tables import (
    TableStore,
    put_beside,
    read_state,
    read_table,
    write_state,
    write_table,
)
from jaxrec.mesh.agree import fingerprint, on_every_device, require_same
from jaxrec.mesh.balance import warn_of_unused_memory
from jaxrec.mesh.layout import MeshLayout, PlacedBlock, PlacedGroup, layout_mesh
from jaxrec.mesh.placement import MeshShape, Placement
from jaxrec.mesh.tables import ShardedTables
from jaxrec.ragged.capacity import rung

# Tables travel in pieces of about this many elements to or from a device.
PIECE_ELEMENTS = 1 << 20


def mesh_shape(mesh: Mesh, replica_axis: str | None = None) -> MeshShape:
    """A mesh as hosts of devices: the last axis is within a host, the others are over hosts.

    Of a mesh with whole copies of the tables over one of its axes: the devices of a copy.

    Raises:
        ValueError: If the mesh lacks the axis, or has no other.
    """
    if replica_axis is not None and replica_axis not in mesh.axis_names:
        raise ValueError(
            f"replica_axis={replica_axis!r} is none of the mesh's axes, "
            f"{', '.join(map(repr, mesh.axis_names))}; make the mesh with it, say "
            f"jax.make_mesh((2, 4), ({replica_axis!r}, 'data'))"
        )
    sizes = [size for axis, size in mesh.shape.items() if axis != replica_axis]
    if not sizes:
        raise ValueError(
            f"the mesh has no axis but replica_axis={replica_axis!r}; tables are cut over others"
        )
    return MeshShape(math.prod(sizes[:-1]), sizes[-1])


def init_on_mesh(
    tables: TableLayout,
    key: Array,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    replica_axis: str | None = None,
) -> ShardedTables:
    """Fresh tables on a mesh, the same as `jaxrec.embed.init_tables` makes on one device.

    Each device makes its own blocks: beyond them it holds one block of random numbers at most.

    Raises:
        ValueError: If the placements do not fit the tables or the mesh.
    """
    layout = layout_mesh(tables, placements, mesh_shape(mesh, replica_axis))
    require_same("model", {"random key of tables": fingerprint(key)})
    sharded = _new_tables(layout, mesh, replica_axis)
    for config in tables.tables:
        of_table = on_every_device(table_key(key, config.name), mesh)
        draw, scale = draw_and_scale(
            config.initializer, config.num_embeddings, config.embedding_dim
        )
        for placed in layout.groups:
            if config.name not in placed.tables:
                continue
            group = placed.group.name
            sharded.rows[group] = _fill_blocks(
                sharded.rows[group],
                of_table,
                scale,
                _over_devices(sharded, placed, _places(placed, config.name)),
                draw,
                config.embedding_dim,
                sharded.sharding(placed),
            )
    return sharded


def shard_tables(
    tables: TableStore,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    replica_axis: str | None = None,
) -> ShardedTables:
    """The same tables and optimizer state over a mesh.

    Raises:
        ValueError: If the placements do not fit the tables or the mesh.
    """
    layout = layout_on_mesh(tables, placements, mesh, replica_axis)
    sharded = _new_tables(layout, mesh, replica_axis)
    for table in layout.tables.tables:
        sharded = write_table_sharded(sharded, table.name, read_table(tables, table.name))
        sharded = write_state_sharded(sharded, table.name, read_state(tables, table.name))
    return sharded


def layout_on_mesh(
    tables: TableStore,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    replica_axis: str | None = None,
) -> MeshLayout:
    """Where the blocks of tables, which may be on a mesh already, would go."""
    layout = tables.layout.tables if isinstance(tables, ShardedTables) else tables.layout
    return layout_mesh(layout, placements, mesh_shape(mesh, replica_axis))


def _new_tables(layout: MeshLayout, mesh: Mesh, replica_axis: str | None) -> ShardedTables:
    """Zeros, and each optimizer's first state."""
    require_same(
        "model",
        {
            f"table {table.name!r}": f"{table.num_embeddings} x {table.embedding_dim} {table.dtype}"
            for table in layout.tables.tables
        },
    )
    warn_of_unused_memory(layout)
    sharded = ShardedTables({}, {}, layout, mesh, replica_axis=replica_axis)
    for placed in layout.groups:
        group, sharding = placed.group, sharded.sharding(placed)
        first = group.optimizer.init(1, group.dim)
        zeros = np.zeros(group.dim, jnp.dtype(group.dtype))
        sharded.rows[group.name] = new_rows(zeros, placed.local_rows, sharding)
        sharded.state[group.name] = {
            key: new_rows(np.asarray(array[0]), placed.local_rows, sharding)
            for key, array in first.items()
        }
    return sharded


@put_beside.register(ShardedTables)
def put_beside_sharded(tables: ShardedTables, tree: Any) -> Any:
    """`jaxrec.embed.tables.put_beside`: every device gets what is not on the mesh yet."""

    def put(array: Any) -> Any:
        if isinstance(array, jax.Array) and array.sharding.device_set == set(
            tables.mesh.devices.flat
        ):
            return array
        return on_every_device(array, tables.mesh)

    return jax.tree.map(put, tree)


@read_table.register(ShardedTables)
def read_table_sharded(tables: ShardedTables, name: str) -> Array:
    """`jaxrec.embed.read_table`: the rows of one table, gathered from all its blocks.

    With several processes all of them call it, and each gets the whole table.
    """
    config = find_config(tables, name)
    shape = (config.num_embeddings, config.embedding_dim)
    return _read(tables, name, lambda placed: tables.rows[placed.group.name], shape)


@read_state.register(ShardedTables)
def read_state_sharded(tables: ShardedTables, name: str) -> dict[str, Array]:
    """`jaxrec.embed.read_state`: the state of one table's rows, gathered from all its blocks.

    With several processes all of them call it, and each gets the whole state.
    """
    config = find_config(tables, name)
    placed, _ = tables.layout.places(name)[0]

    def read(key: str, array: Array) -> Array:
        # State of one number a row is the same for all columns of the row.
        shape = (config.num_embeddings, config.embedding_dim)[: array.ndim]
        return _read(tables, name, lambda placed: tables.state[placed.group.name][key], shape)

    return {key: read(key, array) for key, array in tables.state[placed.group.name].items()}


@write_table.register(ShardedTables)
def write_table_sharded(
    tables: ShardedTables, name: str, values: Array | np.ndarray
) -> ShardedTables:
    """`jaxrec.embed.write_table`: each device writes its own blocks, in place."""
    rows = dict(tables.rows)
    for placed, columns, blocks in pieces_of(tables.layout, name):
        group = placed.group.name
        _check_shape(tables, rows[group], name, values, f"table {name!r}")
        rows[group] = _write(tables, rows[group], placed, columns, blocks, values)
    return dataclasses.replace(tables, rows=rows)


@write_state.register(ShardedTables)
def write_state_sharded(
    tables: ShardedTables, name: str, state: Mapping[str, Array | np.ndarray]
) -> ShardedTables:
    """`jaxrec.embed.write_state`: each device writes its own blocks, in place."""
    new = {group: dict(arrays) for group, arrays in tables.state.items()}
    pieces = list(pieces_of(tables.layout, name))
    for placed, _, _ in pieces:
        arrays = new[placed.group.name]
        if set(state) != set(arrays):
            raise ValueError(
                f"table {name!r}: its optimizer keeps {sorted(arrays)}, got {sorted(state)}"
            )
        for key, array in arrays.items():
            _check_shape(tables, array, name, state[key], f"state {key!r} of table {name!r}")
    for placed, columns, blocks in pieces:
        arrays = new[placed.group.name]
        for key in arrays:
            arrays[key] = _write(tables, arrays[key], placed, columns, blocks, state[key])
    return dataclasses.replace(tables, state=new)


def find_config(tables: ShardedTables, name: str) -> TableConfig:
    group, index = tables.layout.tables.find(name)
    return group.tables[index]


def pieces_of(
    layout: MeshLayout, name: str
) -> Iterator[tuple[PlacedGroup, tuple[int, int], list[PlacedBlock]]]:
    """The parts that a table's columns are cut into: their group, columns, and blocks by row."""
    pieces: dict[tuple[int, int], tuple[PlacedGroup, list[PlacedBlock]]] = {}
    for placed, block in layout.places(name):
        pieces.setdefault(block.block.columns, (placed, []))[1].append(block)
    for columns, (placed, blocks) in pieces.items():
        yield placed, columns, blocks


def by_device(placed: PlacedGroup, blocks: list[PlacedBlock]) -> Iterator[tuple[int, PlacedBlock]]:
    """Each block with the index of its device's part of the group's arrays."""
    for block in blocks:
        yield 0 if placed.is_replicated else block.block.device, block


def _places(placed: PlacedGroup, table: str) -> np.ndarray:
    """``[devices, blocks, 4]``: each device's blocks of a table, as `fill_rows` takes them.

    Devices with fewer blocks have empty ones.
    """
    of_device: list[list[tuple[int, ...]]] = [[] for _ in range(placed.num_devices)]
    blocks = [block for block in placed.blocks if block.table == table]
    for device, block in by_device(placed, blocks):
        of_device[device].append((*block.block.rows, block.local_row, block.block.columns[0]))
    places = np.zeros((placed.num_devices, max(map(len, of_device)), 4), np.int32)
    for device, own in enumerate(of_device):
        places[device, : len(own)] = np.reshape(own, (-1, 4))
    return places


def _over_devices(tables: ShardedTables, placed: PlacedGroup, values: np.ndarray) -> Array:
    """Host values with an axis over the devices, in front, as the group's arrays lie."""
    return jax.make_array_from_callback(
        values.shape, tables.sharding(placed), lambda index: values[index]
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def new_rows(row: Shaped[Array, "*shape"], local_rows: int, sharding: NamedSharding) -> Array:
    """An array whose rows, ``local_rows`` on each device, are all alike."""
    return jax.shard_map(
        lambda row: kernels.new_rows(row, local_rows),
        mesh=sharding.mesh,
        in_specs=PartitionSpec(),
        out_specs=sharding.spec,
        check_vma=False,
    )(row)


@functools.partial(jax.jit, static_argnums=(4, 5, 6), donate_argnums=0)
def _fill_blocks(
    array: Float[Array, "rows width"],
    key: Array,
    scale: Float[Array, ""],
    places: Int32[Array, "devices blocks 4"],
    draw: Callable,
    dim: int,
    sharding: NamedSharding,
) -> Float[Array, "rows width"]:
    """Fills blocks of a table, each device its own; ``places`` as `_places` gives them."""

    def on_device(array, key, scale, places):
        def fill(block, array):
            return fill_rows(array, key, draw, scale, places[0, block], dim)

        return jax.lax.fori_loop(0, places.shape[1], fill, array)

    everywhere = PartitionSpec()
    return jax.shard_map(
        on_device,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, everywhere, everywhere, sharding.spec),
        out_specs=sharding.spec,
        check_vma=False,
    )(array, key, scale, places)


def _check_shape(
    tables: ShardedTables, array: Array, name: str, values: Array | np.ndarray, what: str
) -> None:
    config = find_config(tables, name)
    expected = (config.num_embeddings, config.embedding_dim)[: array.ndim]
    if np.shape(values) != expected:
        raise ValueError(f"{what} has shape {expected}, got {np.shape(values)}")


def _write(
    tables: ShardedTables,
    array: Array,
    placed: PlacedGroup,
    columns: tuple[int, int],
    blocks: list[PlacedBlock],
    values: Array | np.ndarray,
) -> Array:
    """Writes the blocks of a piece of a table, in steps that all devices take together."""
    sharding = tables.sharding(placed)
    here = {shard.index[0].start or 0 for shard in array.addressable_shards}
    for steps in _steps(placed, blocks, _piece_rows(array)):
        # On the ladder, so that few programs compile.
        room = rung(max(stop - start for _, _, start, stop in steps))
        pieces = np.zeros((placed.num_devices, room, *array.shape[1:]), array.dtype)
        places = np.zeros((placed.num_devices, 2), np.int32)
        for device, local_row, start, stop in steps:
            places[device] = local_row, stop - start
            if device * placed.local_rows in here:
                part = _rows(values, start, stop)
                pieces[device, : stop - start] = (
                    part if part.ndim == 1 else part[:, slice(*columns)]
                )
        array = _write_rows(
            array,
            _over_devices(tables, placed, pieces),
            _over_devices(tables, placed, places),
            sharding,
        )
    return array


def _piece_rows(array: Array) -> int:
    return max(1, PIECE_ELEMENTS // max(1, int(np.prod(array.shape[1:]))))


def _steps(
    placed: PlacedGroup, blocks: list[PlacedBlock], most: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Pieces of ``most`` rows of the blocks, one for each device at a time.

    Each is (device, first row on the device, first row of the table, the row after its last).
    """
    waiting: dict[int, list[tuple[int, int, int, int]]] = {}
    for device, block in by_device(placed, blocks):
        first, last = block.block.rows
        for start in range(first, last, most):
            local_row = block.local_row + start - first
            step = (device, local_row, start, min(start + most, last))
            waiting.setdefault(device, []).append(step)
    for turn in range(max(map(len, waiting.values()))):
        yield [steps[turn] for steps in waiting.values() if turn < len(steps)]


def _rows(values: Array | np.ndarray, start: int, stop: int) -> np.ndarray:
    """Rows of an array, on the host."""
    if isinstance(values, jax.Array):
        if values.is_fully_replicated:
            values = values.addressable_data(0)
        devices = np.array(list(values.devices()))
        # Whatever mesh is set. The start is no constant of the program, so that one serves all
        # pieces.
        with jax.set_mesh(Mesh(devices[:1], ("device",))) if devices.size == 1 else nullcontext():
            return np.asarray(_slice(values, np.int32(start), stop - start))
    return np.asarray(values[start:stop])


@functools.partial(jax.jit, static_argnums=2)
def _slice(values: Shaped[Array, "rows ..."], start: Int32[Array, ""], size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(values, start, size, 0)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write_rows(
    array: Shaped[Array, "rows ..."],
    pieces: Shaped[Array, "devices room ..."],
    places: Int32[Array, "devices 2"],
    sharding: NamedSharding,
) -> Shaped[Array, "rows ..."]:
    """Each device writes its piece; ``places`` say where to, and how many rows of it."""

    def on_device(array, pieces, places):
        (piece,), ((start, count),) = pieces, places
        index = jnp.arange(piece.shape[0], dtype=jnp.int32)
        rows = jnp.where(index < count, start + index, array.shape[0])
        return array.at[rows].set(piece, mode="drop")

    return jax.shard_map(
        on_device,
        mesh=sharding.mesh,
        in_specs=(sharding.spec,) * 3,
        out_specs=sharding.spec,
        check_vma=False,
    )(array, pieces, places)


def _read(
    tables: ShardedTables,
    name: str,
    array_of: Callable[[PlacedGroup], Array],
    shape: tuple[int, ...],
) -> Array:
    whole: np.ndarray | None = None
    for placed, columns, blocks in pieces_of(tables.layout, name):
        array = array_of(placed)
        whole = np.zeros(shape, array.dtype) if whole is None else whole
        target = whole if whole.ndim == 1 else whole[:, slice(*columns)]
        read = _read_here if _is_here(array) else _read_anywhere
        for start, stop, rows in read(tables, array, placed, blocks):
            target[start:stop] = rows
    return jnp.asarray(whole)


def _is_here(array: Array) -> bool:
    """Whether this process has all of an array."""
    return array.is_fully_addressable or array.is_fully_replicated


def _read_here(
    tables: ShardedTables, array: Array, placed: PlacedGroup, blocks: list[PlacedBlock]
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Blocks of a table as (first row, the row after the last, the rows)."""
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    for device, block in by_device(placed, blocks):
        first, last = block.block.rows
        local = shards[device * placed.local_rows]
        yield first, last, _rows(local, block.local_row, block.local_row + last - first)


def _read_anywhere(
    tables: ShardedTables, array: Array, placed: PlacedGroup, blocks: list[PlacedBlock]
) -> Iterator[tuple[int, int, np.ndarray]]:
    """`_read_here` where other processes have some of the blocks; all of them take part."""
    for steps in _steps(placed, blocks, _piece_rows(array)):
        for device, local_row, start, stop in steps:
            place = np.array([device, local_row], np.int32)
            rows = _send_rows(array, place, stop - start, tables.sharding(placed))
            yield start, stop, np.asarray(rows.addressable_data(0))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _send_rows(
    array: Shaped[Array, "rows ..."],
    place: Int32[Array, "2"],
    size: int,
    sharding: NamedSharding,
) -> Shaped[Array, "size ..."]:
    """Rows of one device's part of an array, for every device."""
    axes = sharding.spec[0]

    def on_device(array, place):
        device, start = place
        rows = jax.lax.dynamic_slice_in_dim(array, start, size, 0)
        is_mine = jax.lax.axis_index(axes) == device
        return jax.lax.psum(jnp.where(is_mine, rows, jnp.zeros_like(rows)), axes)

    return jax.shard_map(
        on_device,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(array, place)
