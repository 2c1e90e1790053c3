"""Arrays of tables over the devices of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxrec.embed.checkpoint_view import LogicalTable, part_rows
from jaxrec.embed.config import TableConfig, find_config
from jaxrec.embed.formats import PackedRows, TableArray, as_table, is_packed
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.layout import Group
from jaxrec.embed.slots import RowSlots
from jaxrec.embed.state import new_state
from jaxrec.embed.store import TableStore, check_state
from jaxrec.embed.tables import Tables, read_slots, stored, write_slots
from jaxrec.embed.taps import tapped_modules
from jaxrec.mesh.agree import require_same
from jaxrec.mesh.channel import Channel, RaggedChannel, SimulatedChannel, on_each_device
from jaxrec.mesh.exchange import DEFAULT_CAPACITY_FACTOR
from jaxrec.mesh.layout import MeshLayout, warn_of_unused_memory
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.mesh.precision import ExchangePrecision
from jaxrec.mesh.row_mover import RowMover
from jaxrec.mesh.shard_access import (
    MeshSlots,
    by_device,
    first,
    new_rows,
    read_shards,
    stack,
    stored_columns,
    write_shards,
)

Store = TypeVar("Store", bound="MeshStore")


def stale_lines(group: str) -> str:
    """Return the name under which the capacity of a group's stale lines is kept."""
    return f"{group} stale"


@dataclasses.dataclass(frozen=True)
class MeshStore(TableStore):
    """A store of tables over a mesh: placement, reads and writes. `ShardedTables` adds training.

    Attributes:
        rows: Rows of each group: ``[num_devices * local_rows, dim]``, sharded along the first axis
            over `axes`; ``[rows, dim]`` on every device for a replicated group.
        state: Optimizer state of each group, with a first axis like that of the rows.
        layout: Position of each shard in the devices' arrays, and the exchange of each group.
        mesh: The devices.
        precision: Formats in which rows and gradients travel between devices.
        replica_axis: Axis of the mesh along which replicas of the sharded tables lie. Replicas
            differ until `jaxrec.mesh.average_replicas` averages them, though JAX takes the arrays
            for replicated along this axis. None: the mesh has one replica.
        is_ragged: Whether exchanges send lists without padding, by XLA's ragged all-to-all.
        capacity_factors: Pairs of a group's name and its capacity factor; see `jaxrec.mesh.ahead`.
    """

    rows: dict[str, Float[TableArray, "rows dim"]]
    state: dict[str, dict[str, TableArray]]
    layout: MeshLayout = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})
    precision: ExchangePrecision = dataclasses.field(
        default=ExchangePrecision(), metadata={"static": True}
    )
    replica_axis: str | None = dataclasses.field(default=None, metadata={"static": True})
    is_ragged: bool = dataclasses.field(default=False, metadata={"static": True})
    capacity_factors: tuple[tuple[str, float], ...] = dataclasses.field(
        default=(), metadata={"static": True}
    )

    @property
    def groups(self) -> dict[str, Group]:
        return {placed.name: placed.group for placed in self.layout.groups}

    @property
    def without_rows(self: Store) -> Store:
        return dataclasses.replace(self, rows={}, state={})

    def capacity(self, placed: PlacedGroup, lookups: int) -> int:
        """Return the capacity of a message between two devices, in rows or ids."""
        # A device never requests more of one owner than all its lookups.
        factor = dict(self.capacity_factors).get(placed.name, DEFAULT_CAPACITY_FACTOR)
        return max(1, min(lookups, math.ceil(lookups / placed.num_devices * factor)))

    def stale_capacity(self, placed: PlacedGroup) -> float:
        """Return the share of a group's lines that a message holds in `refetch`."""
        return min(1.0, dict(self.capacity_factors).get(stale_lines(placed.name), 1.0))

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh that tables are sharded over."""
        return tuple(axis for axis in self.mesh.axis_names if axis != self.replica_axis)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes of the mesh that samples are sharded over: all of them."""
        return tuple(self.mesh.axis_names)

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the sharded tables."""
        return 1 if self.replica_axis is None else self.mesh.shape[self.replica_axis]

    @property
    def devices(self) -> MeshSlots:
        return MeshSlots(self.mesh, self.axes)

    @property
    def channel(self) -> Channel:
        """Channel between the devices of a replica."""
        return self.channel_over(self.axes)

    def channel_over(self, axes: tuple[str, ...]) -> Channel:
        """Return the channel between the devices along some axes of the mesh."""
        if self.is_ragged:
            return RaggedChannel(axes, self.precision)
        if self.mesh.devices.flat[0].platform == "cpu":
            devices = math.prod(self.mesh.shape[axis] for axis in axes)
            return SimulatedChannel(axes, self.precision, devices)
        return Channel(axes, self.precision)

    def channel_of(self, placed: PlacedGroup) -> Channel:
        """Return the channel between the devices that exchange a group's rows or gradients."""
        # Replicated tables must stay equal in all replicas, so their gradients cross replicas, too.
        return self.channel_over(self.batch_axes if placed.is_replicated else self.axes)

    @property
    def _mover(self) -> RowMover:
        return RowMover(NamedSharding(self.mesh, PartitionSpec(self.axes)), self.channel)

    def spec(self, placed: PlacedGroup) -> PartitionSpec:
        """Return the partition spec of a group's arrays."""
        return PartitionSpec() if placed.is_replicated else PartitionSpec(self.axes)

    def sharding(self, placed: PlacedGroup) -> NamedSharding:
        """Return the sharding of a group's arrays."""
        return NamedSharding(self.mesh, self.spec(placed))

    def specs(self) -> dict[str, PartitionSpec]:
        """Return the partition spec of each group's arrays, by the name of the group."""
        return {placed.name: self.spec(placed) for placed in self.layout.groups}

    def shard_map(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return a function that runs on each device's parts of its arguments."""
        return on_each_device(function, self.mesh, in_specs, out_specs)

    # Rows.

    def row_slots(self, name: str, rows: np.ndarray) -> list[RowSlots]:
        result = []
        for placed, columns, shards in self.layout.column_slices(name):
            shards = [each for each in shards if each.shard.num_rows]
            shards.sort(key=lambda each: each.shard.rows[0])
            firsts = np.array([each.shard.rows[0] for each in shards])
            local_rows = np.array([each.local_row for each in shards])
            devices = np.array([each.shard.device for each in shards])
            # The shard of a row is the last one that begins at or before it.
            shard = np.searchsorted(firsts, rows, side="right") - 1
            local = (local_rows[shard] + rows - firsts[shard]).astype(np.int32)
            everywhere = math.prod(self.mesh.shape[axis] for axis in self.axes)
            if placed.is_replicated:
                index = np.tile(np.arange(rows.size, dtype=np.int32), (everywhere, 1))
            else:
                index = by_device(devices[shard], everywhere)
            slots = np.where(index < 0, np.int32(-1), local[index] if rows.size else index)
            result.append(RowSlots(placed.name, columns, slots, index))
        return result

    def read_rows(
        self, group: str, slots: Int32[Array, "devices n"]
    ) -> tuple[Float[Array, "devices n dim"], dict[str, Array]]:
        spec, over = self.specs()[group], PartitionSpec(self.axes)

        def on_device(rows, state, slots):
            return stack(read_slots(rows, state, slots[0]))

        read = self.shard_map(on_device, (spec, spec, over), over)
        return read(self.rows[group], self.state[group], slots)

    def write_rows(
        self: Store,
        group: str,
        slots: Int32[Array, "devices n"],
        rows: Float[Array, "devices n dim"],
        state: Mapping[str, Array],
    ) -> Store:
        spec, over = self.specs()[group], PartitionSpec(self.axes)

        def on_device(old_rows, old_state, slots, rows, state):
            return write_slots(old_rows, old_state, slots[0], rows[0], first(dict(state)))

        write = self.shard_map(on_device, (spec, spec, over, over, over), spec)
        new_rows, new_state = write(self.rows[group], self.state[group], slots, rows, dict(state))
        return dataclasses.replace(
            self, rows=self.rows | {group: new_rows}, state=self.state | {group: new_state}
        )

    # Whole tables, copied over the host shard by shard.

    def read(self, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
        config = find_config(self.configs, name)
        shape = config.num_embeddings, config.embedding_dim
        return self._read(name, lambda placed: self.rows[placed.name], shape)

    def write(
        self: Store, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
    ) -> Store:
        placed, _ = self.layout.shards(name)[0]
        self._check_shape(name, self.rows[placed.name], values, f"table {name!r}")
        find_config(self.configs, name).check_rows(f"table {name!r}, ", values)
        return self._written(name, values, {})

    def stored_slices(self, name: str) -> dict[tuple[int, int], Array]:
        """Return a table's rows as they are stored, ``[rows, width]``, by column slice.

        The keys are ``(first column, column after the last)``; rows of packed formats stay packed.
        """
        config, slices = find_config(self.configs, name), {}
        for placed, columns, shards in self.layout.column_slices(name):
            array = stored(self.rows[placed.name])
            width = config.row_format.width(columns[1] - columns[0])
            whole = np.zeros((config.num_embeddings, width), array.dtype)
            for start, stop, rows in read_shards(array, self.sharding(placed), placed, shards):
                whole[start:stop] = rows
            slices[columns] = jnp.asarray(whole)
        return slices

    def write_stored(
        self: Store, name: str, slices: Mapping[tuple[int, int], Array | np.ndarray]
    ) -> Store:
        """Set the rows of a table to what `stored_slices` returned."""
        new = dict(self.rows)
        for placed, columns, shards in self.layout.column_slices(name):
            array, rows = new[placed.name], slices[columns]
            written = write_shards(
                stored(array), self.sharding(placed), placed, (0, rows.shape[1]), shards, rows
            )
            if isinstance(array, PackedRows):
                written = array.with_stored(stored(written))
            new[placed.name] = written
        return dataclasses.replace(self, rows=new)

    def read_state(self, name: str) -> dict[str, Array]:
        config = find_config(self.configs, name)
        placed, _ = self.layout.shards(name)[0]

        def read(key: str, array: TableArray) -> Array:
            # State with one number per row, `[rows]`, is equal in all column slices.
            shape = (config.num_embeddings, config.embedding_dim)[: array.ndim]
            return self._read(name, lambda placed: self.state[placed.name][key], shape)

        return {key: read(key, array) for key, array in self.state[placed.name].items()}

    def write_state(self: Store, name: str, state: Mapping[str, Array | np.ndarray]) -> Store:
        # All of a table's slices have state of the same names and numbers of axes.
        placed, _ = self.layout.shards(name)[0]
        arrays = self.state[placed.name]
        check_state(name, arrays, state)
        for key, array in arrays.items():
            self._check_shape(name, array, state[key], f"state {key!r} of table {name!r}")
        return self._written(name, None, {key: state[key] for key in arrays})

    def _read(
        self, name: str, array_of: Callable[[PlacedGroup], TableArray], shape: tuple[int, ...]
    ) -> Array:
        """Join a table's rows or state, of ``shape``, from the arrays of its slices' groups."""
        whole: np.ndarray | None = None
        for placed, columns, shards in self.layout.column_slices(name):
            array = array_of(placed)
            whole = np.zeros(shape, array.dtype) if whole is None else whole
            target = whole if whole.ndim == 1 else whole[:, slice(*columns)]
            for start, stop, rows in read_shards(array, self.sharding(placed), placed, shards):
                # A slice may be stored wider than its columns, with padding behind them.
                target[start:stop] = rows if rows.ndim == 1 else rows[:, : target.shape[1]]
        return jnp.asarray(whole)

    def _check_shape(
        self, name: str, array: TableArray, values: Array | np.ndarray, what: str
    ) -> None:
        """Raise a ValueError if ``values`` of a table have not the shape that ``array`` needs."""
        config = find_config(self.configs, name)
        expected = (config.num_embeddings, config.embedding_dim)[: array.ndim]
        if np.shape(values) != expected:
            raise ValueError(f"{what} has shape {expected}, got {np.shape(values)}")

    # Moves between devices.

    @classmethod
    def zeros(
        cls: type[Store], layout: MeshLayout, mesh: Mesh, replica_axis: str | None = None
    ) -> Store:
        """Make tables of zeros with each optimizer's initial state."""
        sizes = {
            f"table {table.name!r}": f"{table.num_embeddings} x {table.embedding_dim} {table.dtype}"
            for table in layout.configs
        }
        # Processes with different models would otherwise wait for ever in their first collective.
        require_same("model", sizes)
        warn_of_unused_memory(layout)
        tables = cls({}, {}, layout, mesh, replica_axis=replica_axis)
        for placed in layout.groups:
            group, sharding = placed.group, tables.sharding(placed)
            # One packed row of zeros fills the array. It has to be a value here, even if a jitted
            # function makes the model.
            with jax.ensure_compile_time_eval():
                zeros = np.asarray(group.row_format.pack(jnp.zeros((1, group.dim))))[0]
            bits = new_rows(zeros, placed.local_rows, sharding)
            tables.rows[group.name] = as_table(bits, group.row_format, group.dim)
            tables.state[group.name] = new_state(
                group.optimizer,
                group.dim,
                functools.partial(new_rows, local_rows=placed.local_rows, sharding=sharding),
            )
        return tables

    def to_one_device(self) -> Tables:
        if jax.process_count() > 1:
            raise TypeError(
                "the tables lie over several processes; give the model before jaxrec.shard, such "
                "as the one that jaxrec.serve.quantize returned"
            )
        tables = Tables({}, {}, self.layout.whole).zeros()
        for config in self.layout.configs:
            name, slices = config.name, self.stored_slices(config.name)
            if len(slices) == 1:
                tables = tables.write_stored(name, next(iter(slices.values())))
            elif isinstance(config.row_format, PlainRows):
                tables = tables.write(name, self.read(name))
            else:
                raise TypeError(
                    f"table {name!r} is cut by columns over the mesh, where each part of a row "
                    "has a scale of its own; give the model before jaxrec.shard, such as the one "
                    "that jaxrec.serve.quantize returned, or place the table by rows"
                )
            tables = tables.write_state(name, self.read_state(name))
        return tables

    def like(self: Store, other: TableStore) -> Store:
        if (reason := other.refuse_shard()) is not None:
            raise TypeError(reason)
        theirs = {config.name: config for config in other.configs}
        if not all(config.stores_like(theirs[config.name]) for config in self.configs):
            other = Tables({}, {}, self.layout.whole).like(other)  # packed on one device meanwhile
        tables = self.zeros(self.layout, self.mesh, self.replica_axis).filled(other)
        return dataclasses.replace(self, rows=tables.rows, state=tables.state)

    def filled(self: Store, other: TableStore) -> Store:
        """Return these tables with the rows and state of ``other``; this store is donated.

        Rows travel from device to device if ``other`` is on a mesh of the same devices, else over
        the host, some at a time. Packed tables, and tables of a store that has no
        `TableStore.arrays`, are read whole on the way.
        """
        tables = self
        for config in self.layout.configs:
            name, placed = config.name, other.placed
            if config.inference_format is not None or not isinstance(config.row_format, PlainRows):
                tables = tables._copied(other, config)
            elif isinstance(placed, MeshStore) and tables._shares_devices(placed):
                tables = tables._moved(placed, config)
            elif (arrays := other.arrays(name)) is not None:
                tables = tables._written(name, *arrays)
            else:
                tables = tables.write(name, other.read(name))
                tables = tables.write_state(name, other.read_state(name))
        return tables

    def _shares_devices(self, other: MeshStore) -> bool:
        """Return whether neither store has replicas, and both have the same devices in order."""
        devices = [list(store.mesh.devices.flat) for store in (self, other)]
        return (self.replica_axis, other.replica_axis) == (None, None) and devices[0] == devices[1]

    def _moved(self: Store, other: MeshStore, config: TableConfig) -> Store:
        """Copy a table from a store on the same devices, through its `checkpoint_view`."""
        shapes = self.checkpoint_shapes(config.name)
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        logical = jax.device_put(other.checkpoint_view(config.name), shardings)
        return self.from_checkpoint(config.name, logical, config.num_embeddings)

    def _copied(self: Store, other: TableStore, config: TableConfig) -> Store:
        """Copy a packed table from another store, as it is stored if that is possible."""
        # Packing rows again would round them again. A column slice keeps the scale of the whole
        # row. Only a slice that joins several slices of the other store is packed anew.
        name, placed = config.name, other.placed
        sources: dict[tuple[int, int], Array] = {}
        if isinstance(placed, MeshStore):
            sources = placed.stored_slices(name)
        elif (arrays := other.arrays(name)) is not None:
            rows, _, start = arrays
            whole = stored(rows)[start : start + config.num_embeddings]
            sources = {(0, config.embedding_dim): whole}
        slices = {
            columns: stored_columns(sources, columns, config.row_format)
            for _, columns, _ in self.layout.column_slices(name)
        }
        known = {columns: rows for columns, rows in slices.items() if rows is not None}
        if len(known) < len(slices):
            tables = self.write(name, other.read(name))
        else:
            tables = self.write_stored(name, known)
        return tables.write_state(name, other.read_state(name))

    def _written(
        self: Store,
        name: str,
        rows: TableArray | np.ndarray | None,
        state: Mapping[str, TableArray | np.ndarray],
        first: int = 0,
    ) -> Store:
        """Return these tables with new rows (None: as before) and some new state of one table.

        The table begins at row ``first`` of the given arrays.
        """
        new, new_state = dict(self.rows), {key: dict(x) for key, x in self.state.items()}
        for placed, columns, shards in self.layout.column_slices(name):
            write = functools.partial(
                write_shards,
                sharding=self.sharding(placed),
                placed=placed,
                columns=columns,
                shards=shards,
                first=first,
            )
            if rows is not None:
                new[placed.name] = write(new[placed.name], values=rows)
            of_group = new_state[placed.name]
            for key, array in state.items():
                of_group[key] = write(of_group[key], values=array)
        return dataclasses.replace(self, rows=new, state=new_state)

    # Checkpoints. The logical arrays have rows in table order, evenly over the devices, at any
    # placement. Rows move between them and the shards from device to device.

    def checkpoint_shapes(self, name: str) -> LogicalTable:
        config, mover = find_config(self.configs, name), self._mover
        padded_rows = mover.devices * part_rows(config.num_embeddings, mover.devices)
        placed, _ = self.layout.shards(name)[0]

        def shape(array: TableArray) -> jax.ShapeDtypeStruct:
            # State may have one number per row, `[rows]`.
            sizes = (padded_rows, config.embedding_dim)[: array.ndim]
            return jax.ShapeDtypeStruct(sizes, array.dtype, sharding=mover.sharding)

        arrays = LogicalTable(self.rows[placed.name], self.state[placed.name])
        return jax.tree.map(shape, arrays, is_leaf=is_packed)

    def checkpoint_view(self, name: str) -> LogicalTable:
        shapes, mover = self.checkpoint_shapes(name), self._mover
        part = shapes.rows.shape[0] // mover.devices
        logical = jax.tree.map(
            lambda shape: new_rows(np.zeros(shape.shape[1:], shape.dtype), part, mover.sharding),
            shapes,
        )
        rows, state = logical.rows, dict(logical.state)
        for placed, columns, shards in self.layout.column_slices(name):
            moves = list(mover.moves(placed, shards, part))
            rows = mover.move(self.rows[placed.name], rows, moves, into=columns)
            for key, array in self.state[placed.name].items():
                state[key] = mover.move(array, state[key], moves, into=columns)
        return LogicalTable(rows, state)

    def from_checkpoint(self: Store, name: str, logical: LogicalTable, num_rows: int) -> Store:
        rows = dict(self.rows)
        state = {group: dict(arrays) for group, arrays in self.state.items()}
        find_config(self.configs, name).check_rows(f"table {name!r}, saved ", logical.rows)
        mover = self._mover
        part = logical.rows.shape[0] // mover.devices
        for placed, columns, shards in self.layout.column_slices(name):
            group = placed.name
            # Every device needs all rows of a replicated table; each is the target in turn.
            moves = [
                move.reversed()
                for replica in range(mover.devices if placed.is_replicated else 1)
                for move in mover.moves(placed, shards, part, num_rows, replica)
            ]
            rows[group] = mover.move(logical.rows, rows[group], moves, out_of=columns)
            for key, array in logical.state.items():
                state[group][key] = mover.move(array, state[group][key], moves, out_of=columns)
        return dataclasses.replace(self, rows=rows, state=state)


def mesh_stores(model: nnx.Module) -> dict[str, MeshStore]:
    """Return a model's stores that lie over a mesh, by the paths of their collections."""
    placed = {path: each.tables.get_value().placed for path, each in tapped_modules(model).items()}
    return {path: store for path, store in placed.items() if isinstance(store, MeshStore)}
