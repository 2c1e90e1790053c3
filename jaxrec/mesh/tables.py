"""Tables over the devices of a mesh: lookup and update, as `jaxrec.embed` does on one device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout
from jaxrec.embed.lookup import (
    Activations,
    LocalRows,
    Residuals,
    Routes,
    RowSource,
    flatten,
    look_up,
    lookup,
    pool,
    route,
)
from jaxrec.embed.tables import TableStore
from jaxrec.embed.update import (
    RowGradients,
    group_gradients,
    row_gradients,
)
from jaxrec.mesh.collectives import Channel, RaggedChannel, Turns
from jaxrec.mesh.exchange import (
    RowsRoute,
    fetch_rows,
    route_rows,
)
from jaxrec.mesh.lanes import BagsRoute, pool_whole_bags, route_bags, send_bag_gradients
from jaxrec.mesh.layout import MeshLayout, PlacedGroup
from jaxrec.mesh.pool import (
    SumsRoute,
    pool_at_owners,
    route_sums,
)
from jaxrec.mesh.precision import Precision
from jaxrec.optim import RowOptimizer
from jaxrec.ragged import KeyedArray, KeyedJaggedArray

# Room for this many times the even share of a batch's rows in a round of the exchange, as long as
# nothing was measured.
SLACK = 1.25


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
        is_ragged: Whether exchanges send only what is of use, by XLA's ragged all-to-all.
        slack: Pairs of a group and the room of a round of its exchange, in even shares of a batch's
            rows; see `jaxrec.mesh.rooms`.
    """

    layout: MeshLayout = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})
    precision: Precision = dataclasses.field(default=Precision(), metadata={"static": True})
    replica_axis: str | None = dataclasses.field(default=None, metadata={"static": True})
    is_ragged: bool = dataclasses.field(default=False, metadata={"static": True})
    slack: tuple[tuple[str, float], ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def row_optimizers(self) -> tuple[RowOptimizer, ...]:
        return tuple(placed.group.optimizer for placed in self.layout.groups)

    def room(self, placed: PlacedGroup, lookups: int) -> int:
        """Rows that a round of a group's exchange carries between two devices."""
        slack = dict(self.slack).get(placed.group.name, SLACK)
        return max(1, min(lookups, math.ceil(lookups / placed.num_devices * slack)))

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
        return self.channel_over(self.axes)

    @property
    def channel_of_all(self) -> Channel:
        """What joins all devices."""
        return self.channel_over(self.batch_axes)

    def channel_over(self, axes: tuple[str, ...]) -> Channel:
        """What joins the devices along some axes of the mesh."""
        kind = RaggedChannel if self.is_ragged else Channel
        on_cpus = self.mesh.devices.flat[0].platform == "cpu"
        parts = math.prod(self.mesh.shape[axis] for axis in axes) if on_cpus else 1
        return kind(axes, self.precision, parts)

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
    """Rows that are fetched from their owners, who were asked for them."""

    tables: dict[str, Float[Array, "local_rows dim"]]
    placed: dict[str, PlacedGroup]
    routes: Routes
    channel: Channel
    turns: Turns

    def pool(self, group, features, weights, layout, dtype):
        if self.placed[group.name].is_replicated:
            return LocalRows(self.tables).pool(group, features, weights, layout, dtype)
        placed, table = self.placed[group.name], self.tables[group.name]
        routed = self.routes[group.name].map_awaited(self.turns.begin)
        if placed.exchange == "rows":
            lookups = flatten(features, weights, layout, group)
            rows, index = fetch_rows(placed, table, routed, self.channel)
            weights = None if weights is None else segments(weights, layout)
            here = _layout_at_home(layout, len(rows))
            parts = self.channel.parts
            bags = pool(rows, index, features.lengths, weights, here, dtype, parts_in=parts)
        else:
            bags, lookups = self._pool_away(group, features, weights, layout, routed)
        self.turns.end(bags)
        return bags.astype(dtype), lookups

    def _pool_away(self, group, features, weights, layout, routed):
        placed, table = self.placed[group.name], self.tables[group.name]
        lookups = flatten(features, None, layout, group)
        scales = lookups.scales
        if weights is not None:
            weights = segments(weights, layout)
            scales = weights if scales is None else weights * scales
        if scales is not None:
            scales = self.turns.begin(scales)
        if placed.exchange == "bags":
            return pool_whole_bags(placed, table, scales, layout, self.channel, routed)
        bags = pool_at_owners(placed, table, scales, self.channel, routed)
        scales = None if scales is None else jax.lax.stop_gradient(scales)
        return bags, dataclasses.replace(lookups, scales=scales)

    def rows(self, group, lookups):
        if self.placed[group.name].is_replicated:
            return LocalRows(self.tables).rows(group, lookups)
        placed, table = self.placed[group.name], self.tables[group.name]
        routed = self.routes[group.name].map_awaited(self.turns.begin)
        rows, index = fetch_rows(placed, table, routed, self.channel)
        self.turns.end(rows)
        # Of lookups without a row, padding gives zeros and bad ids give NaN.
        none = jnp.where(lookups.rows == group.num_rows, rows.shape[0], -1)
        index = jnp.where(index < 0, none, index)
        return kernels.row_lookup(rows, index, parts_in=self.channel.parts)


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


@route.register(ShardedTables)
def route_sharded(tables: ShardedTables, features: KeyedJaggedArray) -> Routes:
    """`jaxrec.embed.route` of a batch that lies over the mesh: owners are asked for their rows."""
    return route_on_devices(tables, features, _routes)


def route_on_devices(
    tables: Store,
    features: KeyedJaggedArray,
    find: Callable[[Store, KeyedJaggedArray, Turns], Routes],
) -> Routes:
    """Finds each device's routes of its part of a batch.

    Args:
        tables: The tables.
        features: The batch.
        find: Gives a device's routes; inside `jax.shard_map`.
    """
    check_batch(tables, features)
    over_devices = PartitionSpec(tables.batch_axes)

    def on_device(rows, features):
        turns = Turns(tables.mesh)
        for each in rows.values():
            turns.end(each)  # the exchanges that led to these rows are over
        return stack(find(tables, first(features), turns))

    return jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=(tables.specs(), over_devices),
        out_specs=over_devices,
        check_vma=False,
    )(tables.rows, features)


def _routes(tables: ShardedTables, features: KeyedJaggedArray, turns: Turns) -> Routes:
    """This device's routes of its batch."""
    routes, channel = {}, tables.channel
    for placed in tables.layout.groups:
        if placed.is_replicated:
            continue
        group = placed.group
        layout = group.bags(features)
        lengths = turns.begin(jnp.asarray(features.lengths))
        batch = dataclasses.replace(features, lengths=lengths)
        lookups = flatten(batch, None, layout, group)
        room = tables.room(placed, lookups.rows.size)
        routed: RowsRoute | SumsRoute | BagsRoute
        match placed.exchange:
            case "rows":
                routed = route_rows(placed, lookups.rows, channel, room)
            case "sums":
                routed = route_sums(placed, lookups, layout.num_bags, channel, room)
            case _:
                routed = route_bags(placed, lookups.rows, lengths, layout, channel)
        turns.end(routed.rows)
        routes[group.name] = routed
    return routes


@lookup.register(ShardedTables)
def lookup_sharded(
    tables: ShardedTables,
    features: KeyedJaggedArray,
    *,
    is_weighted: bool = False,
    dtype: DTypeLike = "float32",
    routes: Routes | None = None,
) -> tuple[Activations, Residuals]:
    """`jaxrec.embed.lookup` of a batch that lies over the mesh (see `shard_batch`).

    Pooled activations are ``[batch, sum(dims)]`` with the batch over the mesh; those of per-id
    tables ``[devices, capacity, dim]``.
    """
    check_batch(tables, features, is_weighted)
    over_devices = PartitionSpec(tables.batch_axes)
    placed = {p.group.name: p for p in tables.layout.groups}
    pieces = tables.layout.pieces

    def on_device(rows, features, routes):
        features, turns = first(features), Turns(tables.mesh)
        routes = _routes(tables, features, turns) if routes is None else first(routes)
        source = MeshRows(rows, placed, routes, tables.channel, turns)
        found, residuals = look_up(source, pieces, features, is_weighted, dtype)
        residuals = dataclasses.replace(residuals, routes=routes)
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
        in_specs=(tables.specs(), over_devices, over_devices),
        out_specs=over_devices,
        check_vma=False,
    )(tables.rows, features, routes)
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
            name = placed.group.name
            if placed.exchange == "bags" and found[name].bag_of_line is None:
                found[name] = send_bags(tables, placed, found[name], layout, turns)
        return stack(found)

    return jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=over_devices,
        out_specs=over_devices,
        check_vma=False,
    )(residuals, cotangents)


def send_bags(
    tables: ShardedTables,
    placed: PlacedGroup,
    gradient: RowGradients,
    layout: BagLayout,
    turns: Turns,
) -> RowGradients:
    """The gradients of all devices' bags at the device that pooled them."""
    values = turns.begin(gradient.values)
    values = send_bag_gradients(placed, values, layout, tables.channel)
    turns.end(values)
    return dataclasses.replace(gradient, values=values)


def _split_pieces(layout: MeshLayout, gradients: dict[str, Array]) -> dict[str, Array]:
    """The columns of each output as the outputs of its pieces."""
    dims = {o.key: layout.pieces.groups[o.group].dim for o in layout.pieces.outputs}
    split: dict[str, Array] = {}
    for key, pieces in layout.piece_keys().items():
        ends = np.cumsum([dims[piece] for piece in pieces])
        split |= dict(zip(pieces, jnp.split(gradients[key], ends[:-1], axis=1), strict=True))
    return split


def check_batch(
    tables: ShardedTables, features: KeyedJaggedArray, is_weighted: bool = False
) -> None:
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
