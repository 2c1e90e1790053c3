"""Lookups where the tables are: samples go to the tables' hosts, instead of rows to the samples.

For towers as in Luo et al. 2024, "Disaggregated multi-tower: Topology-aware modeling technique for
efficient large-scale recommendation" (arXiv:2403.00877), section 3.1. On a mesh of hosts and their
devices each table lies on one host, its rows over the host's devices. Device ``d`` of a host takes
the ids that its tables have in the samples of device ``d`` of every host, which moves small
integers between hosts. Rows come from the host's own devices. What is looked up then stays there,
for a tower to make less of, and the tower's output goes home (`run_towers`).

All devices run one program, so the features of each host's tables are numbered as lanes, see
`jaxrec.mesh.lanes`; lane ``k`` of a host is its ``k``-th feature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.gradient_norms import table_squares
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.lookup import Residuals, Routes, flatten, lookup, pool, route
from jaxrec.embed.update import RowGradients, row_gradients, update_rows
from jaxrec.mesh.collectives import Channel, Turns
from jaxrec.mesh.exchange import (
    RowsRoute,
    fetch_rows,
    route_rows,
    squares_by_rows,
    update_by_rows,
)
from jaxrec.mesh.gradient_norms import squares_of_groups
from jaxrec.mesh.lanes import BagsRoute, Lanes, send_lookups, send_scales
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.tables import (
    ShardedTables,
    check_batch,
    first,
    route_on_devices,
    segments,
    stack,
)
from jaxrec.mesh.update import update_groups
from jaxrec.optim.hyperparameter import Step
from jaxrec.ragged import KeyedArray, KeyedJaggedArray

Tower: TypeAlias = Callable[[Any, Float[Array, "samples columns"]], Float[Array, "samples _"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerTables(ShardedTables):
    """Sharded tables, each on one host, that are looked up there.

    `lookup` gives ``[devices * hosts * batch, columns]``, where batch is a device's: on each device
    the samples of its peers, the devices of the same number on all hosts, host by host, and for
    each sample the embeddings of the features of the tables here, in `columns`.
    """

    @classmethod
    def of(cls, tables: ShardedTables) -> TowerTables:
        """The same tables, to be looked up where they are.

        Raises:
            ValueError: If the mesh is not of hosts and their devices, tables are not pooled, or one
                is not by rows over the devices of one host.
        """
        if len(tables.mesh.axis_names) != 2 or tables.replica_axis is not None:
            raise ValueError(
                f"towers lie on a mesh of two axes, hosts first, got {tables.mesh.axis_names}"
            )
        if not tables.layout.is_pooled:
            raise ValueError("towers are of pooled tables, got some that are looked up id by id")
        named = zip(tables.layout.configs, tables.layout.placements, strict=True)
        for config, placement in named:
            if placement.kind != "table_row_wise" or placement.exchange == "sums":
                raise ValueError(
                    f"table {config.name!r} is placed {placement.kind} with exchange="
                    f"{placement.exchange!r}; a tower's tables are placed table_row_wise(host)"
                )
        fields = {field.name: getattr(tables, field.name) for field in dataclasses.fields(tables)}
        return cls(**fields)

    @property
    def across(self) -> Channel:
        """What joins the devices of the same number on all hosts."""
        return self.channel_over(self.axes[:1])

    @property
    def within(self) -> Channel:
        """What joins the devices of a host."""
        return self.channel_over(self.axes[1:])

    @property
    def num_hosts(self) -> int:
        return self.layout.mesh.hosts

    def columns(self) -> dict[tuple[str, str], tuple[int, slice]]:
        """For each table and feature its host, and there its columns of what is looked up."""
        found, start = {}, 0
        for placed in self.layout.groups:
            lanes, dim = _features_of_hosts(self, placed), placed.group.dim
            name_of = {block.first_row: block.table for block in placed.blocks}
            for host, positions in enumerate(lanes):
                for lane, position in enumerate(positions):
                    feature, index = placed.group.features[position]
                    table = name_of[placed.group.row_offsets[index]]
                    first = start + lane * dim
                    found[table, feature] = host, slice(first, first + dim)
            start += max(map(len, lanes)) * dim
        return found


@dataclasses.dataclass(frozen=True)
class _HostGroup(PlacedGroup):
    """A group as the devices of one host see it, the slots of whose rows count from 0.

    Attributes:
        whole: The group on all devices.
        host: The host.
    """

    whole: PlacedGroup
    host: Int32[Array, ""]

    @classmethod
    def of(cls, tables: TowerTables, placed: PlacedGroup) -> _HostGroup:
        """The group on this device's host."""
        fields = {field.name: getattr(placed, field.name) for field in dataclasses.fields(placed)}
        fields["num_devices"] = tables.layout.mesh.devices_per_host
        return cls(**fields, whole=placed, host=tables.across.index)

    def slots(self, rows: Int32[Array, " n"]) -> Int32[Array, " n"]:
        slots = self.whole.slots(rows) - self.host * self.num_slots
        return jnp.where((slots >= 0) & (slots < self.num_slots), slots, self.num_slots)

    def tables_of(
        self, local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Int32[Array, " n"]:
        return self.whole.tables_of(local_rows, self.host * self.num_devices + device)


def _lanes(tables: TowerTables, placed: PlacedGroup, layout: BagLayout) -> Lanes:
    """The lanes of a batch."""
    features = _features_of_hosts(tables, placed)
    return Lanes.of_features(features, layout.capacities, layout.strides)


def _features_of_hosts(tables: TowerTables, placed: PlacedGroup) -> list[list[int]]:
    """For each host the features of its tables, by number, in order."""
    devices = tables.layout.mesh.devices_per_host
    host_of = {block.first_row: block.block.device // devices for block in placed.blocks}
    lanes: list[list[int]] = [[] for _ in range(tables.num_hosts)]
    for position, (_, index) in enumerate(placed.group.features):
        lanes[host_of[placed.group.row_offsets[index]]].append(position)
    return lanes


@lookup.register(TowerTables)
def lookup_at_towers(
    tables: TowerTables,
    features: KeyedJaggedArray,
    *,
    is_weighted: bool = False,
    dtype: DTypeLike = "float32",
    routes: Routes | None = None,
) -> tuple[KeyedArray, Residuals]:
    """`jaxrec.embed.lookup`, whose result lies as `TowerTables` says."""
    check_batch(tables, features, is_weighted)
    if features.inverse_indices is not None:
        raise ValueError("towers take batches in which each sample has its own bags, not shared")
    over_devices = PartitionSpec(tables.batch_axes)

    def on_device(rows: Any, features: Any, routes: Any) -> Any:
        features, turns = first(features), Turns(tables.mesh)
        weights = features.weights if is_weighted else None
        routes = _routes(tables, features, turns) if routes is None else first(routes)
        parts, lookups, layouts = [], {}, []
        for placed in tables.layout.groups:
            name = placed.group.name
            routed = routes[name].map_awaited(turns.begin)
            pooled, lookups[name], layout = _pool_here(
                tables, placed, rows[name], features, weights, routed, turns
            )
            turns.end(pooled)
            parts.append(pooled)
            layouts.append(layout)
        values = jnp.concatenate(parts, axis=1).astype(dtype)
        of_rows = {name: routed.of_rows for name, routed in routes.items()}
        return values, stack(Residuals(lookups, {}, tuple(layouts), of_rows))

    values, residuals = jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=(tables.specs(), over_devices, over_devices),
        out_specs=over_devices,
        check_vma=False,
    )(tables.rows, features, routes)
    return KeyedArray(values), residuals


@route.register(TowerTables)
def route_to_towers(tables: TowerTables, features: KeyedJaggedArray) -> Routes:
    """`jaxrec.embed.route`, to the hosts of tables and there to the devices that have the rows."""
    return route_on_devices(tables, features, _routes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerRoute:
    """What a lookup at a tower needs to know of other devices.

    Attributes:
        asked: What is looked up at this device's tower.
        of_rows: The way from there to the rows, which other devices of the host have.
    """

    asked: BagsRoute
    of_rows: RowsRoute

    @property
    def load(self) -> Float[Array, "..."]:
        """`RowsRoute.load`, among the devices of the host."""
        return self.of_rows.load

    def map_awaited(self, function: Callable[[Array], Array]) -> TowerRoute:
        """The route with a function applied to the indices that exchanges wait for."""
        return TowerRoute(self.asked.map_awaited(function), self.of_rows.map_awaited(function))


def _routes(tables: TowerTables, features: KeyedJaggedArray, turns: Turns) -> Routes:
    """This device's routes of its batch."""
    routes = {}
    for placed in tables.layout.groups:
        group = placed.group
        layout = group.bags(features)
        lengths = turns.begin(jnp.asarray(features.lengths))
        batch = dataclasses.replace(features, lengths=lengths)
        rows = flatten(batch, None, layout, group).rows
        lanes = _lanes(tables, placed, layout)
        asked = send_lookups(lanes, rows, lengths, layout, tables.across)
        here = _flatten_here(placed, lanes, asked, None)
        of_rows = _route_rows(tables, placed, here)
        turns.end(of_rows.first.rows)
        routes[group.name] = TowerRoute(asked, of_rows)
    return routes


def _route_rows(tables: TowerTables, placed: PlacedGroup, lookups: Lookups) -> RowsRoute:
    """The way from a tower's lookups to the rows of its host."""
    on_host = _HostGroup.of(tables, placed)
    room = tables.room(on_host, lookups.rows.size)
    return route_rows(on_host, lookups.rows, tables.within, room)


def _flatten_here(
    placed: PlacedGroup, lanes: Lanes, asked: BagsRoute, scales: Float[Array, " n"] | None
) -> Lookups:
    """What is looked up at a tower."""
    num_rows = placed.group.num_rows
    received = lanes.received(num_rows)
    return kernels.flatten_bags(asked.rows, asked.lengths, scales, received, num_rows)


def _pool_here(
    tables: TowerTables,
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    features: KeyedJaggedArray,
    weights: Float[Array, " capacity"] | None,
    routed: TowerRoute,
    turns: Turns,
) -> tuple[Float[Array, "samples columns"], Lookups, BagLayout]:
    """What the tables of this host have for the samples of this device's peers."""
    group = placed.group
    layout = group.bags(features)
    lanes = _lanes(tables, placed, layout)
    scales = flatten(features, None, layout, group).scales
    if weights is not None:
        weights = segments(weights, layout)
        scales = weights if scales is None else weights * scales
    if scales is not None:
        scales = send_scales(lanes, turns.begin(scales), layout, tables.across)
    constant = None if scales is None else jax.lax.stop_gradient(scales)
    here = _flatten_here(placed, lanes, routed.asked, constant)
    on_host = _HostGroup.of(tables, placed)
    found, index = fetch_rows(on_host, table, routed.of_rows, tables.within)
    received = lanes.received(group.num_rows)
    at = dataclasses.replace(received, row_counts=(len(found),) * received.num_features)
    lengths, parts = routed.asked.lengths, tables.within.parts
    bags = pool(found, index, lengths, scales, at, jnp.dtype("float32"), parts_in=parts)
    # Bags are by sender, lane and sample.
    by_sender = bags.reshape(tables.num_hosts, len(lanes.strides), -1, group.dim)
    return by_sender.swapaxes(1, 2).reshape(-1, len(lanes.strides) * group.dim), here, received


@row_gradients.register(TowerTables)
def row_gradients_at_towers(
    tables: TowerTables, residuals: Residuals, gradients: KeyedArray
) -> dict[str, RowGradients]:
    """The gradient of what was looked up as gradients of rows, on the devices of their host."""
    over_devices = PartitionSpec(tables.batch_axes)

    def on_device(residuals: Any, values: Any) -> Any:
        residuals, found, start = first(residuals), {}, 0
        for placed, layout in zip(tables.layout.groups, residuals.layouts, strict=True):
            name, dim = placed.group.name, placed.group.dim
            width = layout.num_features // tables.num_hosts * dim
            by_sample = values[:, start : start + width]
            by_sample = by_sample.reshape(tables.num_hosts, -1, width // dim, dim)
            bags = by_sample.swapaxes(1, 2).reshape(-1, dim)
            found[name] = RowGradients(residuals.lookups[name], bags, route=residuals.routes[name])
            start += width
        return stack(found)

    return jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=over_devices,
        out_specs=over_devices,
        check_vma=False,
    )(residuals, gradients.values)


@update_rows.register(TowerTables)
def update_rows_at_towers(
    tables: TowerTables,
    lookups: Sequence[dict[str, RowGradients]],
    step: Step | int,
    is_applied: Bool[Array, ""] | None = None,
) -> TowerTables:
    """Bring gradients to the rows' owners on their host, and update each row once, there."""
    return update_groups(tables, lookups, step, is_applied, _update)


def _update(
    tables: TowerTables,
    placed: PlacedGroup,
    rows: Array,
    state: dict[str, Array],
    gradient: RowGradients,
    step: Step,
) -> tuple[Array, dict[str, Array]]:
    on_host, routed = _rows_route(tables, placed, gradient)
    return update_by_rows(on_host, rows, state, gradient, step, tables.within, routed)


@table_squares.register(TowerTables)
def table_squares_at_towers(
    tables: TowerTables, calls: Sequence[dict[str, RowGradients]]
) -> dict[str, Float[Array, ""]]:
    """`jaxrec.embed.gradient_norms.table_squares`, with gradients summed on the tables' hosts."""
    return squares_of_groups(tables, calls, _squares)


def _squares(
    tables: TowerTables, placed: PlacedGroup, gradient: RowGradients
) -> Float[Array, " tables"]:
    on_host, routed = _rows_route(tables, placed, gradient)
    return squares_by_rows(on_host, gradient, tables.within, routed)


def _rows_route(
    tables: TowerTables, placed: PlacedGroup, gradient: RowGradients
) -> tuple[_HostGroup, RowsRoute]:
    """The group on this device's host, and the route of the gradient's lookups there."""
    on_host, routed = _HostGroup.of(tables, placed), gradient.route
    if not isinstance(routed, RowsRoute):
        routed = _route_rows(tables, placed, gradient.lookups)
    return on_host, routed


def run_towers(
    tables: TowerTables,
    looked_up: Float[Array, "samples columns"],
    towers: Sequence[tuple[int, Tower]],
    parameters: Any,
) -> list[Float[Array, "batch _"]]:
    """Runs each tower on its host and brings what it gives home to the samples.

    Args:
        tables: The tables.
        looked_up: What `lookup` gave.
        towers: For each its host, and a function of the parameters and of ``[samples, columns]``.
        parameters: Any pytree, the same on all devices. Its gradient is the sum over devices.

    Returns:
        For each tower what it gives, ``[batch, ...]``, over the mesh as the batch is.
    """
    hosts = tables.num_hosts
    over_devices = PartitionSpec(tables.batch_axes)

    def on_device(values: Any, parameters: Any) -> Any:
        shapes = [jax.eval_shape(tower, parameters, values) for _, tower in towers]
        starts, ends = [], [0] * hosts
        for (host, _), shape in zip(towers, shapes, strict=True):
            starts.append(ends[host])
            ends[host] += shape.shape[1]
        dtype = jnp.result_type(*shapes)

        def on_host(host: int) -> Any:
            def run(values: Array) -> Array:
                own = [tower(parameters, values) for at, tower in towers if at == host]
                wide = jnp.zeros((len(values), max(ends) - ends[host]), dtype)
                return jnp.concatenate([*(x.astype(dtype) for x in own), wide], axis=1)

            return run

        out = jax.lax.switch(tables.across.index, [on_host(h) for h in range(hosts)], values)
        home = tables.across.send_rows(out.reshape(hosts, -1, max(ends))).astype(dtype)
        return [
            home[host, :, start : start + shape.shape[1]]
            for (host, _), start, shape in zip(towers, starts, shapes, strict=True)
        ]

    return jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=(over_devices, PartitionSpec()),
        out_specs=over_devices,
        check_vma=False,
    )(looked_up, parameters)
