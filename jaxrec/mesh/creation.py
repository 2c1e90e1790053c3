"""Tables on a mesh: new ones, and tables that move there.

With several processes, all call these functions with the same arguments. Each fills its devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxrec.embed.config import TableConfig
from jaxrec.embed.first_values import draw_and_scale, fill_rows, place_of, table_key
from jaxrec.embed.formats import TableArray
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.row_keys import KeyWords
from jaxrec.embed.store import TableStore
from jaxrec.mesh.agree import fingerprint, on_every_device, require_same
from jaxrec.mesh.channel import on_each_device
from jaxrec.mesh.layout import MeshLayout, layout_mesh
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.mesh.placement import Placement
from jaxrec.mesh.shard_access import over_devices, owners
from jaxrec.mesh.shards import MeshShape
from jaxrec.mesh.tables import ShardedTables


def mesh_shape(mesh: Mesh, replica_axis: str | None = None) -> MeshShape:
    """Return the numbers of hosts and devices of a mesh, or of one replica on it.

    The last axis numbers the devices of a host. The others number the hosts, except for
    ``replica_axis``, along which the replicas of the tables lie.
    """
    if replica_axis is not None and replica_axis not in mesh.axis_names:
        raise ValueError(
            f"replica_axis={replica_axis!r} is not one of the mesh's axes, "
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
    """Make new tables on a mesh, equal to those of `jaxrec.embed.init_tables` on one device."""
    # A first value is a function of the table's key, the row and the column. So each device makes
    # its own shards, and needs memory for one block of random numbers besides.
    layout = layout_mesh(tables, placements, mesh_shape(mesh, replica_axis))
    # Each process fills its own shards, so different keys would go unnoticed.
    require_same("model", {"random key of tables": fingerprint(key)})
    sharded = ShardedTables.zeros(layout, mesh, replica_axis)
    for config in tables.configs:
        of_table = on_every_device(table_key(key, config.name), mesh)
        draw, scale = draw_and_scale(
            config.initializer, config.num_embeddings, config.embedding_dim
        )
        for placed in layout.groups:
            if config.name not in placed.tables:
                continue
            sharding = sharded.sharding(placed)
            ranges = over_devices(_ranges(placed, config), sharding)
            rows, dim = sharded.rows[placed.name], config.embedding_dim
            sharded.rows[placed.name] = _fill_shards(
                rows, of_table, scale, ranges, draw, dim, sharding
            )
    return sharded


def shard_tables(
    tables: TableStore,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    replica_axis: str | None = None,
) -> ShardedTables:
    """Move tables and their optimizer state to a mesh.

    Rows travel from device to device if the tables are on a mesh of the same devices, else over the
    host, some at a time. Packed tables are read whole on the way.

    Raises:
        ValueError: The placements do not fit the tables or the mesh.
    """
    layout = layout_on_mesh(tables, placements, mesh, replica_axis)
    return ShardedTables.zeros(layout, mesh, replica_axis).filled(tables)


def layout_on_mesh(
    tables: TableStore,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    replica_axis: str | None = None,
) -> MeshLayout:
    """Return the layout that tables will have on a mesh. They may be on another mesh now."""
    whole = tables.layout if tables.devices.mesh is None else tables.layout.whole
    return layout_mesh(whole, placements, mesh_shape(mesh, replica_axis))


def _ranges(placed: PlacedGroup, config: TableConfig) -> np.ndarray:
    """Return the places of each device's shards of a table, ``[devices, shards, 6]``.

    A place is a result of `place_of`. Devices with fewer shards get zeros, which are empty shards.
    """
    of_device: list[list[np.ndarray]] = [[] for _ in range(placed.num_devices)]
    shards = [shard for shard in placed.shards if shard.table == config.name]
    for device, each in owners(placed, shards):
        shard = each.shard
        of_device[device].append(place_of(shard.rows, each.local_row, shard.columns))
    ranges = np.zeros((placed.num_devices, max(map(len, of_device)), 6), np.int32)
    for device, own in enumerate(of_device):
        ranges[device, : len(own)] = np.reshape(own, (-1, 6))
    return ranges


@functools.partial(jax.jit, static_argnums=(4, 5, 6), donate_argnums=0)
def _fill_shards(
    array: Float[TableArray, "rows width"],
    key: KeyWords,
    scale: Float[Array, ""],
    ranges: Int32[Array, "devices shards 6"],
    draw: Callable,
    dim: int,
    sharding: NamedSharding,
) -> Float[TableArray, "rows width"]:
    """Write the first values of a table into the shards of each device.

    ``ranges`` is the result of `_ranges`; ``draw`` and ``scale`` are that of `draw_and_scale`.
    """

    def on_device(array, key, scale, ranges):
        def fill(shard, array):
            return fill_rows(array, key, draw, scale, ranges[0, shard], dim)

        # A loop, so that the program does not grow with the number of shards.
        return jax.lax.fori_loop(0, ranges.shape[1], fill, array)

    everywhere = PartitionSpec()
    in_specs = sharding.spec, everywhere, everywhere, sharding.spec
    fill_all = on_each_device(on_device, sharding.mesh, in_specs, sharding.spec)
    return fill_all(array, key, scale, ranges)
