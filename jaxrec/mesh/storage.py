"""Tables on and off a mesh, block by block: no device ever holds more than its own part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, DTypeLike, Int

from jaxrec.embed.tables import Tables, read_state, read_table, write_state, write_table
from jaxrec.mesh.layout import MeshLayout, PlacedBlock, PlacedGroup, layout_mesh
from jaxrec.mesh.placement import MeshShape, Placement
from jaxrec.mesh.tables import ShardedTables


def mesh_shape(mesh: Mesh) -> MeshShape:
    """A mesh as hosts of devices: the last axis is within a host, the others are over hosts."""
    return MeshShape(mesh.devices.size // mesh.devices.shape[-1], mesh.devices.shape[-1])


def shard_tables(tables: Tables, placements: Mapping[str, Placement], mesh: Mesh) -> ShardedTables:
    """The same tables and optimizer state over a mesh.

    Raises:
        ValueError: If the placements do not fit the tables or the mesh.
    """
    layout = layout_mesh(tables.layout, placements, mesh_shape(mesh))
    sharded = ShardedTables({}, {}, layout, mesh)
    for placed in layout.groups:
        name, group = placed.group.name, placed.group
        rows = _zeros(sharded, placed, (group.dim,), group.dtype)
        state = {
            key: _zeros(sharded, placed, array.shape[1:], array.dtype)
            for key, array in jax.eval_shape(lambda g=group: g.optimizer.init(1, g.dim)).items()
        }
        sharded.rows[name], sharded.state[name] = rows, state
    for table in tables.layout.tables:
        sharded = write_table_sharded(sharded, table.name, read_table(tables, table.name))
        sharded = write_state_sharded(sharded, table.name, read_state(tables, table.name))
    return sharded


def _zeros(
    tables: ShardedTables, placed: PlacedGroup, shape: tuple[int, ...], dtype: DTypeLike
) -> Array:
    return jnp.zeros((placed.num_slots, *shape), dtype, device=tables.sharding(placed))


@read_table.register(ShardedTables)
def read_table_sharded(tables: ShardedTables, name: str) -> Array:
    """`jaxrec.embed.read_table`: the rows of one table, gathered from all its blocks."""
    return _read(tables.layout, name, lambda placed: tables.rows[placed.group.name])


@read_state.register(ShardedTables)
def read_state_sharded(tables: ShardedTables, name: str) -> dict[str, Array]:
    """`jaxrec.embed.read_state`: the state of one table's rows, gathered from all its blocks."""
    placed, _ = tables.layout.places(name)[0]

    def read(key: str) -> Array:
        return _read(tables.layout, name, lambda placed: tables.state[placed.group.name][key])

    return {key: read(key) for key in tables.state[placed.group.name]}


@write_table.register(ShardedTables)
def write_table_sharded(
    tables: ShardedTables, name: str, values: Array | np.ndarray
) -> ShardedTables:
    """`jaxrec.embed.write_table`: each device writes its own blocks, in place."""
    rows = dict(tables.rows)
    for placed, block in tables.layout.places(name):
        group = placed.group.name
        rows[group] = _write(rows[group], placed, block, values, f"table {name!r}", tables)
    return dataclasses.replace(tables, rows=rows)


@write_state.register(ShardedTables)
def write_state_sharded(
    tables: ShardedTables, name: str, state: Mapping[str, Array | np.ndarray]
) -> ShardedTables:
    """`jaxrec.embed.write_state`: each device writes its own blocks, in place."""
    new = {group: dict(arrays) for group, arrays in tables.state.items()}
    for placed, block in tables.layout.places(name):
        arrays = new[placed.group.name]
        if set(state) != set(arrays):
            raise ValueError(
                f"table {name!r}: its optimizer keeps {sorted(arrays)}, got {sorted(state)}"
            )
        for key in arrays:
            what = f"state {key!r} of table {name!r}"
            arrays[key] = _write(arrays[key], placed, block, state[key], what, tables)
    return dataclasses.replace(tables, state=new)


def _read(layout: MeshLayout, name: str, array_of: Callable[[PlacedGroup], Array]) -> Array:
    by_columns: dict[int, list[np.ndarray]] = {}
    for placed, block in layout.places(name):
        local = _shard_of(array_of(placed), placed, block)
        rows = slice(block.local_row, block.local_row + block.block.rows[1] - block.block.rows[0])
        by_columns.setdefault(block.block.columns[0], []).append(np.asarray(local[rows]))
    columns = [np.concatenate(by_columns[start]) for start in sorted(by_columns)]
    # State of one number a row is the same for all columns of the row.
    return jnp.asarray(columns[0] if columns[0].ndim == 1 else np.concatenate(columns, axis=1))


def _shard_of(array: Array, placed: PlacedGroup, block: PlacedBlock) -> Array:
    """The part of a group's array on the block's device."""
    for shard in array.addressable_shards:
        if placed.is_replicated or _owner(shard, placed) == block.block.device:
            return shard.data
    raise ValueError(
        f"rows {block.block.rows} of table {block.table!r} are on device {block.block.device} of "
        "the mesh, which belongs to another process"
    )


def _owner(shard: jax.Shard, placed: PlacedGroup) -> int:
    return (shard.index[0].start or 0) // placed.local_rows


def _write(
    array: Array,
    placed: PlacedGroup,
    block: PlacedBlock,
    values: Array | np.ndarray,
    what: str,
    tables: ShardedTables,
) -> Array:
    table = tables.layout.tables.find(block.table)[0].tables
    config = next(config for config in table if config.name == block.table)
    expected = (config.num_embeddings, config.embedding_dim)[: array.ndim]
    if np.shape(values) != expected:
        raise ValueError(f"{what} has shape {expected}, got {np.shape(values)}")
    (first, last), (left, right) = block.block.rows, block.block.columns
    part = values[first:last] if array.ndim == 1 else values[first:last, left:right]
    shards = []
    for shard in array.addressable_shards:
        local = shard.data
        if placed.is_replicated or _owner(shard, placed) == block.block.device:
            piece = jax.device_put(jnp.asarray(part, array.dtype), shard.device)
            local = _put(local, piece, jnp.int32(block.local_row))
        shards.append(local)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@jax.jit
def _put(local: Array, piece: Array, row: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(local, piece, row, 0)
