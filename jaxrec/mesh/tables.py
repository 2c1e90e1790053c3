"""Tables over the devices of a mesh: lookup and update, as `jaxrec.embed` does on one device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.layout import Group
from jaxrec.embed.lookup import (
    Activations,
    LocalRows,
    Residuals,
    RowSource,
    flatten,
    look_up,
    lookup,
    pool,
)
from jaxrec.embed.tables import TableStore
from jaxrec.embed.update import (
    RowGradients,
    group_gradients,
    merge,
    row_gradients,
    update_rows,
)
from jaxrec.mesh import exchange
from jaxrec.mesh.collectives import Channel, Turns
from jaxrec.mesh.lanes import pool_whole_bags, send_bag_gradients
from jaxrec.mesh.layout import MeshLayout, PlacedGroup
from jaxrec.mesh.pieces import update_pieces
from jaxrec.mesh.pool import pool_at_owners, update_at_owners, update_owned
from jaxrec.mesh.precision import Precision
from jaxrec.mesh.route import plan_route
from jaxrec.ragged import KeyedArray, KeyedJaggedArray

# Room for this many times the even share of a batch's rows in a round of the exchange.
_SLACK = 1.25


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedTables(TableStore):
    """Tables over a mesh; takes the place of `jaxrec.embed.Tables`.

    Attributes:
        rows: For each group of pieces ``[num_devices * local_rows, dim]``, the first axis over all
            axes of the mesh; ``[rows, dim]`` on every device where it is replicated.
        state: For each group its optimizer state, its first axis like that of the rows.
        layout: Where blocks of tables live in there.
        mesh: The devices.
        precision: The formats of what travels between them.
        replica_axis: The axis of the mesh over which there are whole copies of the tables, which
            `jaxrec.mesh.average_replicas` brings together; None: one copy over all axes. To JAX the
            arrays are replicated over this axis, though copies differ between two averages.
    """

    layout: MeshLayout = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})
    precision: Precision = dataclasses.field(default=Precision(), metadata={"static": True})
    replica_axis: str | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that tables are cut over."""
        return tuple(axis for axis in self.mesh.axis_names if axis != self.replica_axis)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that samples lie over."""
        return tuple(self.mesh.axis_names)

    @property
    def num_replicas(self) -> int:
        return 1 if self.replica_axis is None else self.mesh.shape[self.replica_axis]

    @property
    def channel(self) -> Channel:
        """What joins the devices of a copy."""
        return Channel(self.axes, self.precision)

    @property
    def channel_of_all(self) -> Channel:
        """What joins all devices."""
        return Channel(self.batch_axes, self.precision)

    def spec(self, placed: PlacedGroup) -> PartitionSpec:
        """How a group's arrays lie."""
        return PartitionSpec() if placed.is_replicated else PartitionSpec(self.axes)

    def sharding(self, placed: PlacedGroup) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(placed))

    def specs(self) -> dict[str, PartitionSpec]:
        return {placed.group.name: self.spec(placed) for placed in self.layout.groups}


Store = TypeVar("Store", bound=ShardedTables)


@dataclasses.dataclass(frozen=True)
class MeshRows(RowSource):
    """Rows that are fetched from their owners."""

    tables: dict[str, Float[Array, "local_rows dim"]]
    placed: dict[str, PlacedGroup]
    channel: Channel
    turns: Turns

    def pool(self, group, features, weights, layout, dtype):
        if self.placed[group.name].is_replicated:
            return LocalRows(self.tables).pool(group, features, weights, layout, dtype)
        lengths = self.turns.begin(features.lengths)
        features = dataclasses.replace(features, lengths=lengths)
        bags, lookups = self._pool(group, features, weights, layout, dtype)
        self.turns.end(bags)
        return bags, lookups

    def _pool(self, group, features, weights, layout, dtype):
        placed, table = self.placed[group.name], self.tables[group.name]
        if placed.exchange == "rows":
            lookups = flatten(features, weights, layout, group)
            rows, index = self._fetch(group, lookups)
            weights = None if weights is None else segments(weights, layout)
            here = _layout_at_home(layout, len(rows))
            return pool(rows, index, features.lengths, weights, here, dtype), lookups
        lookups = flatten(features, None, layout, group)
        scales = lookups.scales
        if weights is not None:
            weights = segments(weights, layout)
            scales = weights if scales is None else weights * scales
        if placed.exchange == "bags":
            bags, lookups = pool_whole_bags(
                placed, table, lookups, features.lengths, scales, layout, self.channel
            )
            return bags.astype(dtype), lookups
        room = round_capacity(lookups.rows.size, placed.num_devices)
        bags = pool_at_owners(placed, table, lookups, scales, layout.num_bags, self.channel, room)
        scales = None if scales is None else jax.lax.stop_gradient(scales)
        return bags.astype(dtype), dataclasses.replace(lookups, scales=scales)

    def rows(self, group, lookups):
        if self.placed[group.name].is_replicated:
            return LocalRows(self.tables).rows(group, lookups)
        lookups = dataclasses.replace(lookups, rows=self.turns.begin(lookups.rows))
        rows, index = self._fetch(group, lookups)
        self.turns.end(rows)
        # Of lookups without a row, padding gives zeros and bad ids give NaN.
        none = jnp.where(lookups.rows == group.num_rows, rows.shape[0], -1)
        return kernels.row_lookup(rows, jnp.where(index < 0, none, index))

    def _fetch(self, group: Group, lookups: Lookups) -> tuple[Array, Array]:
        placed = self.placed[group.name]
        route = plan_route(placed, lookups.rows)
        room = round_capacity(lookups.rows.size, placed.num_devices)
        return exchange.fetch_rows(placed, self.tables[group.name], route, self.channel, room)


def round_capacity(lookups: int, num_devices: int) -> int:
    """Rows that a round of the exchange carries between two devices."""
    return max(1, min(lookups, int(np.ceil(lookups / num_devices * _SLACK))))


def _layout_at_home(layout: BagLayout, num_rows: int) -> BagLayout:
    """The layout of a batch whose ids are rows of one array, segments in feature order."""
    return dataclasses.replace(
        layout,
        id_starts=tuple(itertools.accumulate(layout.capacities, initial=0))[:-1],
        row_offsets=(0,) * layout.num_features,
        row_counts=(num_rows,) * layout.num_features,
    )


def segments(weights: Float[Array, " capacity"], layout: BagLayout) -> Float[Array, " positions"]:
    """The weights of the layout's features, in their order."""
    pieces = zip(layout.id_starts, layout.capacities, strict=True)
    return jnp.concatenate([weights[start : start + size] for start, size in pieces])


@lookup.register(ShardedTables)
def lookup_sharded(
    tables: ShardedTables,
    features: KeyedJaggedArray,
    *,
    is_weighted: bool = False,
    dtype: DTypeLike = "float32",
) -> tuple[Activations, Residuals]:
    """`jaxrec.embed.lookup` of a batch that lies over the mesh (see `shard_batch`).

    Pooled activations are ``[batch, sum(dims)]`` with the batch over the mesh; those of per-id
    tables ``[devices, capacity, dim]``.
    """
    check_batch(tables, features, is_weighted)
    over_devices = PartitionSpec(tables.batch_axes)
    placed = {p.group.name: p for p in tables.layout.groups}
    pieces = tables.layout.pieces

    def on_device(rows, features):
        source = MeshRows(rows, placed, tables.channel, Turns(tables.mesh))
        found, residuals = look_up(source, pieces, first(features), is_weighted, dtype)
        if isinstance(found, KeyedArray):
            return found.values, stack(residuals)
        joined = {
            key: jnp.concatenate([found[piece] for piece in pieces], axis=1)
            for key, pieces in tables.layout.piece_keys().items()
        }
        return stack((joined, residuals))

    found, residuals = jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=(tables.specs(), over_devices),
        out_specs=over_devices,
        check_vma=False,
    )(tables.rows, features)
    if not tables.layout.is_pooled:
        return found, residuals
    outputs, groups = tables.layout.tables.outputs, tables.layout.tables.groups
    keys = tuple(output.key for output in outputs)
    return KeyedArray(found, keys, tuple(groups[o.group].dim for o in outputs)), residuals


@row_gradients.register(ShardedTables)
def row_gradients_sharded(
    tables: ShardedTables, residuals: Residuals, gradients: Activations
) -> dict[str, RowGradients]:
    """The gradient of the activations as gradients of rows, on each device those of its samples."""
    over_devices = PartitionSpec(tables.batch_axes)
    cotangents = gradients.values if isinstance(gradients, KeyedArray) else gradients

    def on_device(residuals, gradients):
        of_pieces: Activations = KeyedArray(gradients)
        if not tables.layout.is_pooled:
            of_pieces = _split_pieces(tables.layout, first(gradients))
        residuals = first(residuals)
        found = group_gradients(tables.layout.pieces, residuals, of_pieces)
        turns = Turns(tables.mesh)
        for placed, layout in zip(tables.layout.groups, residuals.layouts, strict=True):
            if placed.exchange == "bags":
                name = placed.group.name
                values = turns.begin_gradients(found[name].values)
                values = send_bag_gradients(placed, values, layout, tables.channel)
                turns.end(values)
                found[name] = dataclasses.replace(found[name], values=values)
        return stack(found)

    return jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=over_devices,
        out_specs=over_devices,
        check_vma=False,
    )(residuals, cotangents)


@update_rows.register(ShardedTables)
def update_rows_sharded(
    tables: ShardedTables, lookups: Sequence[dict[str, RowGradients]], step: Int[Array, ""] | int
) -> ShardedTables:
    """Brings gradients to the rows' owners, and updates each row once, there."""
    return update_groups(tables, lookups, step, _update)


def update_groups(
    tables: Store,
    lookups: Sequence[dict[str, RowGradients]],
    step: Int[Array, ""] | int,
    update: Callable[..., tuple[Array, dict[str, Array]]],
) -> Store:
    """Updates the groups one by one.

    Args:
        tables: The tables.
        lookups: For each lookup the gradients of each group's rows.
        step: Number of updates made before.
        update: Makes a device's new rows and state of a group, given the tables, the group, its
            rows and state here, their gradient and the step.
    """
    step = jnp.asarray(step, jnp.int32)
    specs = tables.specs()

    def on_device(rows, state, lookups, step):
        lookups = first(lookups)
        new, turns = {}, Turns(tables.mesh)
        for placed in tables.layout.groups:
            name = placed.group.name
            gradient = merge([gradients[name] for gradients in lookups])
            at = turns.begin(gradient.lookups.rows)
            lookups_then = dataclasses.replace(gradient.lookups, rows=at)
            # Sums gather gradients first, whatever the rows.
            is_first = placed.exchange == "sums"
            values = turns.begin_gradients(gradient.values) if is_first else gradient.values
            gradient = dataclasses.replace(gradient, lookups=lookups_then, values=values)
            new[name] = update(tables, placed, rows[name], state[name], gradient, step)
            turns.end(new[name][0])
        return {name: pair[0] for name, pair in new.items()}, {n: p[1] for n, p in new.items()}

    state_specs = {name: dict.fromkeys(tables.state[name], spec) for name, spec in specs.items()}
    rows, state = jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=(specs, state_specs, PartitionSpec(tables.batch_axes), PartitionSpec()),
        out_specs=(specs, state_specs),
        check_vma=False,
    )(tables.rows, tables.state, list(lookups), step)
    return dataclasses.replace(tables, rows=rows, state=state)


def _update(
    tables: ShardedTables, placed: PlacedGroup, *args: Any
) -> tuple[Array, dict[str, Array]]:
    update = _update_replicated if placed.is_replicated else _update_owned
    return update(tables, placed, *args)


def _update_owned(
    tables: ShardedTables,
    placed: PlacedGroup,
    rows: Array,
    state: dict[str, Array],
    gradient: RowGradients,
    step: Array,
) -> tuple[Array, dict[str, Array]]:
    """Gradients travel to the rows' owners, as rows or as bags."""
    if tables.num_replicas > 1:
        # Of the mean over a copy's own samples, not over those of all copies.
        gradient = dataclasses.replace(gradient, values=gradient.values * tables.num_replicas)
    room = round_capacity(gradient.lookups.rows.size, placed.num_devices)
    if placed.exchange == "rows":
        return exchange.update_rows(placed, rows, state, gradient, step, tables.channel, room)
    if placed.exchange == "sums":
        return update_at_owners(placed, rows, state, gradient, step, tables.channel, room)
    update = update_pieces if placed.joins_pieces else update_owned
    return update(placed, rows, state, gradient, step, tables.channel)


def _update_replicated(
    tables: ShardedTables,
    placed: PlacedGroup,
    rows: Array,
    state: dict[str, Array],
    gradient: RowGradients,
    step: Array,
) -> tuple[Array, dict[str, Array]]:
    """Every device gathers all devices' gradients of rows and makes the same update."""
    optimizer, lookups = placed.group.optimizer, gradient.lookups
    runs = kernels.build_runs(lookups.rows, placed.num_slots)
    is_row = (lookups.rows >= 0) & (lookups.rows < placed.num_slots)
    at = dataclasses.replace(lookups, rows=jnp.where(is_row, runs.inverse, -1))
    sums = kernels.sum_rows(at, gradient.values, runs.unique.size, optimizer.clip_value)
    slots = tables.channel_of_all.gather(runs.unique)
    sums = tables.channel_of_all.gather_gradients(sums)
    optimizer = dataclasses.replace(optimizer, clip_value=None)
    starts = placed.group.row_offsets
    return kernels.fused_update(
        rows, state, Lookups(slots, None, None), sums, optimizer, step, starts
    )


def _split_pieces(layout: MeshLayout, gradients: dict[str, Array]) -> dict[str, Array]:
    """The columns of each output as the outputs of its pieces."""
    dims = {o.key: layout.pieces.groups[o.group].dim for o in layout.pieces.outputs}
    split: dict[str, Array] = {}
    for key, pieces in layout.piece_keys().items():
        ends = np.cumsum([dims[piece] for piece in pieces])
        split |= dict(zip(pieces, jnp.split(gradients[key], ends[:-1], axis=1), strict=True))
    return split


def check_batch(tables: ShardedTables, features: KeyedJaggedArray, is_weighted: bool) -> None:
    """Raises where a batch does not lie over the tables' devices, or lacks weights."""
    devices = tables.mesh.size
    if features.values.ndim != 2 or features.values.shape[0] != devices:
        raise ValueError(
            f"tables over {devices} devices are looked up with a batch over them, values of "
            f"[{devices}, capacity]; got {tuple(features.values.shape)}. Put host batches on the "
            "mesh with jaxrec.mesh.shard_batch(batch, mesh)"
        )
    if is_weighted and features.weights is None:
        raise ValueError("the collection is weighted and the batch has no weights")


def first(tree: Any) -> Any:
    """A device's own part of arrays with an axis over the devices."""
    return jax.tree.map(lambda x: x[0], tree)


def stack(tree: Any) -> Any:
    """The reverse of `first`."""
    return jax.tree.map(lambda x: x[None], tree)
