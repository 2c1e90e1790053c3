"""Fresh rows and optimizer state in slots that got another id."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32, UInt32

from jaxrec.embed.config import TableConfig
from jaxrec.embed.first_values import draw_and_scale, draw_rows, slice_columns, table_key
from jaxrec.embed.formats import TableArray
from jaxrec.embed.layout import Group
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import write_slots
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.mesh.store import MeshStore
from jaxrec.tier.managed_collision.policies import EvictedSlots

# Rows that are written at once. A reset needs memory for their values alone, however many slots
# are evicted.
_ROWS = 1024

# Rows and optimizer state of a group on one device.
_Arrays: TypeAlias = tuple[TableArray, dict[str, TableArray]]


def reset_rows(
    store: TableStore, tables: Sequence[str], evicted: EvictedSlots, key: Array
) -> TableStore:
    """Give the evicted slots of each table first rows and a fresh optimizer state. Traced.

    The first row of an id depends on ``key`` and the id alone.
    """
    # The row of an id is thus the same on one device, over a mesh, and when the id comes back. A
    # loop writes the rows in place. A scatter of all slots at once could take as much memory as the
    # table, since all but one of its slots may be evicted.
    if evicted.slots.shape[0] == 0:
        return store
    for name in tables:
        if store.placed is not store:
            raise TypeError(
                f"managed collisions reset rows of jaxrec's tables on one device or over a mesh, "
                f"but {name!r} is in a {type(store).__name__}"
            )
        if store.devices.mesh is not None:
            store = _reset_on_mesh(cast(MeshStore, store), name, evicted, key)
        else:
            store = _reset(store, name, evicted, key)
    return store


def _reset(store: TableStore, name: str, evicted: EvictedSlots, key: Array) -> TableStore:
    group, index = store.layout.find(name)
    config, offset = group.tables[index], group.row_offsets[index]

    # Padding must point past the group, not past the table: the next table's rows lie there.
    def write(store: TableStore, slots: Array, ids: Array) -> TableStore:
        outside = slots >= config.num_embeddings
        slots = jnp.where(outside, group.num_rows, offset + slots)
        state = _first_state(group, slots.shape[0])
        return store.write_rows(group.name, slots, _first_rows(config, ids, key), state)

    return _in_parts(write, store, evicted)


def _reset_on_mesh(store: MeshStore, name: str, evicted: EvictedSlots, key: Array) -> MeshStore:
    whole, index = store.layout.whole.find(name)
    # A table that is divided by columns lies in several groups. Each device draws whole rows and
    # keeps its columns, so that the values do not depend on the division.
    for placed, columns, shards in store.layout.column_slices(name):
        first_row = shards[0].first_row - shards[0].shard.rows[0]
        part = _Slice(whole.tables[index], placed, columns, first_row, store.axes)
        spec, everywhere = store.spec(placed), PartitionSpec()
        reset = store.shard_map(part.reset, (spec, everywhere, everywhere), spec)
        arrays = store.rows[placed.name], store.state[placed.name]
        rows, state = reset(arrays, evicted, key)
        store = dataclasses.replace(
            store, rows=store.rows | {placed.name: rows}, state=store.state | {placed.name: state}
        )
    return store


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A column slice of a table over a mesh."""

    config: TableConfig
    placed: PlacedGroup
    columns: tuple[int, int]  # the first column and the one after the last
    first_row: int  # the table's row 0 as a row of the group
    axes: tuple[str, ...]  # axes of the mesh over which tables are sharded

    def reset(self, arrays: _Arrays, evicted: EvictedSlots, key: Array) -> _Arrays:
        """Reset the group's rows and state on one device, within `jax.shard_map`."""
        group = self.placed.group

        def write(arrays: _Arrays, slots: Array, ids: Array) -> _Arrays:
            outside = slots >= self.config.num_embeddings
            rows = jnp.where(outside, group.num_rows, self.first_row + slots)
            local = self.placed.slots(rows)
            if not self.placed.is_replicated:
                local = local - jax.lax.axis_index(self.axes) * self.placed.local_rows
            whole = _first_rows(self.config, ids, key)
            new = slice_columns(whole, *self.columns, group.dim)
            # `write_slots` skips slots that are not on this device.
            return write_slots(
                arrays[0], arrays[1], local, new, _first_state(group, slots.shape[0])
            )

        return _in_parts(write, arrays, evicted)


def _in_parts(write: Callable[[Any, Array, Array], Any], arrays: Any, evicted: EvictedSlots) -> Any:
    """Apply ``write(arrays, slots, ids)`` to all evicted slots, `_ROWS` at a time."""
    size = min(_ROWS, evicted.slots.shape[0])
    more = -evicted.slots.shape[0] % size
    # Padding is a slot past all rows, which `write` skips. The loop ends after the last evicted
    # slot: often after one part, although the list has room for many.
    slots = jnp.pad(evicted.slots, (0, more), constant_values=jnp.iinfo(jnp.int32).max)
    ids = jnp.pad(evicted.ids, ((0, more), (0, 0)))

    def step(part: Int32[Array, ""], arrays: Any) -> Any:
        first = part * size
        return write(
            arrays,
            jax.lax.dynamic_slice_in_dim(slots, first, size),
            jax.lax.dynamic_slice_in_dim(ids, first, size),
        )

    return jax.lax.fori_loop(0, (evicted.count + size - 1) // size, step, arrays)


def _first_rows(
    config: TableConfig, ids: UInt32[Array, "n 2"], key: Array
) -> Float[Array, "n dim"]:
    """Return the first row of each id, ``[n, dim]``."""
    dim = config.embedding_dim
    draw, scale = draw_and_scale(config.initializer, config.num_embeddings, dim)
    return draw_rows(draw, scale, table_key(key, config.name), ids[:, 0], ids[:, 1], dim)


def _first_state(group: Group, count: int) -> dict[str, Array]:
    return dict(group.optimizer.init(count, group.dim))
