"""Lookups on the tables' hosts: samples travel to the hosts, instead of embeddings to the samples.

This is for towers as in Luo et al. 2024, "Disaggregated multi-tower: Topology-aware modeling
technique for efficient large-scale recommendation" (arXiv:2403.00877), section 3.1. Each table lies
on one host, its rows over the host's devices.

1. Device ``d`` of a host receives the ids of the host's tables from device ``d`` of every host, its
   *peers*. Only small integers travel between hosts.
2. It fetches the rows from the devices of its own host and pools them.
3. A tower makes a smaller output of the embeddings on the host, and this output travels back to the
   samples (`run_towers`).

The owners of `jaxrec.mesh.exchange.owner_features` are hosts here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, DTypeLike, Float

from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.outputs import lookup_weights, pool
from jaxrec.embed.row_gradients import Activations, Residuals, Routes, RowGradients
from jaxrec.embed.store import TableStore
from jaxrec.mesh.channel import Channel, Turns
from jaxrec.mesh.exchange import POOLED, POOLED_BY_HOST, ROWS, Exchange, Request, find_exchange
from jaxrec.mesh.exchange.bags import HostGroup
from jaxrec.mesh.exchange.base import constant
from jaxrec.mesh.exchange.owner_features import (
    BagsRoute,
    OwnerFeatures,
    received_lookups,
    send_lookups,
    send_scales,
)
from jaxrec.mesh.exchange.rows import RowsRoute, fetch_rows, route_rows
from jaxrec.mesh.placed_group import PlacedGroup, layout_of_rows
from jaxrec.mesh.shard_access import first, stack
from jaxrec.mesh.tables import ShardedTables
from jaxrec.optim.hyperparameters import Step
from jaxrec.ragged import KeyedArray, KeyedJaggedArray

Tower: TypeAlias = Callable[[Any, Float[Array, "samples columns"]], Float[Array, "samples _"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerRoute:
    """Route of one group's lookups at a tower.

    Attributes:
        received: Lookups of this host's tables that this device received from its peers.
        of_rows: Route of these lookups to the rows' owners on this host.
    """

    received: BagsRoute
    of_rows: RowsRoute

    @property
    def demand(self) -> Float[Array, "..."]:
        """Capacity factor that the batch needs within the host; see `RowsRoute.demand`."""
        return self.of_rows.demand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerTables(ShardedTables):
    """Sharded tables, each on one host, whose lookups run there.

    `lookup` returns ``[devices * hosts * batch, columns]``, where a device has ``batch`` samples.
    Each device gets a line for each sample of its peers, host by host. The line has the embeddings
    of the host's tables, at the columns that `columns` returns.
    """

    @classmethod
    def of(cls, tables: TableStore) -> TowerTables:
        """Return the same tables as `TowerTables`, or raise a ValueError that says why not."""
        if tables.devices.mesh is None:
            raise ValueError("the model is on one device; put it on a mesh with jaxrec.shard first")
        tables = cast(ShardedTables, tables)
        if len(tables.mesh.axis_names) != 2 or tables.replica_axis is not None:
            raise ValueError(
                f"towers lie on a mesh of two axes, hosts first, got {tables.mesh.axis_names}"
            )
        if not tables.layout.is_pooled:
            raise ValueError("towers are of pooled tables, got some that are looked up id by id")
        for placed in tables.layout.groups:
            if placed.group.takes_max:
                raise ValueError(
                    f"table {placed.tables[0]!r} has pooling='max', and towers add up the rows of "
                    "bags; leave it out of the towers"
                )
            if placed.is_large:
                raise ValueError(
                    f"table {placed.tables[0]!r} has more rows or slots over the mesh than int32 "
                    "can number, which towers do not look up; leave it out of the towers"
                )
        named = zip(tables.layout.configs, tables.layout.placements, strict=True)
        for config, placement in named:
            exchange = None if placement.exchange is None else find_exchange(placement.exchange)
            if placement.kind != "table_row_wise" or exchange in (POOLED, POOLED_BY_HOST):
                raise ValueError(
                    f"table {config.name!r} is placed {placement.kind} with exchange="
                    f"{placement.exchange!r}; a tower's tables are placed table_row_wise(host)"
                )
        fields = {field.name: getattr(tables, field.name) for field in dataclasses.fields(tables)}
        return cls(**fields)

    @property
    def across(self) -> Channel:
        """Channel between this device and its peers on the other hosts."""
        return self.channel.across

    @property
    def within(self) -> Channel:
        """Channel between the devices of a host."""
        return self.channel.within

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.layout.mesh.hosts

    def columns(self) -> dict[tuple[str, str], tuple[int, slice]]:
        """Return the host of each (table, feature), and its columns in the host's embeddings."""
        # Hosts run one program, so each group has as many columns as its fullest host.
        columns, start = {}, 0
        for placed in self.layout.groups:
            features, dim = self._features_of_hosts(placed), placed.group.dim
            table_of = {shard.first_row: shard.table for shard in placed.shards}
            for host, positions in enumerate(features):
                for column, position in enumerate(positions):
                    feature, index = placed.group.features[position]
                    table = table_of[placed.group.row_offsets[index]]
                    begin = start + column * dim
                    columns[table, feature] = host, slice(begin, begin + dim)
            start += max(map(len, features)) * dim
        return columns

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        if features.inverse_indices is not None:
            raise ValueError(
                "towers take batches in which each sample has its own bags, not shared; "
                "batch.expanded() makes such a batch"
            )
        return super().lookup(features, is_weighted=is_weighted, dtype=dtype, routes=routes)

    def fetch(
        self, features: KeyedJaggedArray, routes: Routes, waiting: Any, **options: Any
    ) -> tuple[Routes, Any, Bool[Array, ""]]:
        return TableStore.fetch(self, features, routes, waiting, **options)

    def row_gradients(
        self, residuals: Residuals, cotangents: Activations
    ) -> dict[str, RowGradients]:
        assert isinstance(cotangents, KeyedArray)
        over_batch = PartitionSpec(self.batch_axes)
        row_gradients = self.shard_map(self._row_gradients, over_batch, over_batch)
        return row_gradients(residuals, cotangents.values)

    def _output_names(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return (), ()  # the same column is another feature on another host

    def _route_lookups(
        self,
        placed: PlacedGroup,
        exchange: Exchange,
        features: KeyedJaggedArray,
        lookups: Lookups,
        layout: BagLayout,
    ) -> TowerRoute:
        owned, lengths = self._owned(placed, layout), jnp.asarray(features.lengths)
        received = send_lookups(owned, lookups.rows, lengths, layout, self.across)
        of_rows = self._route_rows(placed, received_lookups(owned, received, placed.group.num_rows))
        return TowerRoute(received, of_rows)

    def _route_rows(self, placed: PlacedGroup, lookups: Lookups) -> RowsRoute:
        """Return the route of received lookups to the rows of the host."""
        on_host = HostGroup.of(placed, self.channel)
        capacity = self.capacity(on_host, lookups.rows.size)
        return route_rows(on_host, lookups, self.within, capacity)

    def _lookup(
        self,
        rows: dict[str, TableArray],
        features: KeyedJaggedArray,
        routes: Routes,
        is_weighted: bool,
        dtype: DTypeLike,
        turns: Turns,
    ) -> tuple[Activations, Residuals]:
        """Return the embeddings of this host's tables for the peers' samples."""
        weights = lookup_weights(features, is_weighted, self.configs)
        blocks, lookups, layouts = [], {}, []
        for placed in self.layout.groups:
            layout, name = placed.group.bags(features), placed.name
            request = Request.of(features, routes[name].lookups, weights, layout)
            pooled, lookups[name] = turns.run(
                lambda awaited, table, placed=placed: self._pool_here(placed, table, *awaited),
                (request, routes[name].route),
                rows[name],
            )
            blocks.append(pooled)
            layouts.append(self._owned(placed, layout).received(placed.group.num_rows))
        values = jnp.concatenate(blocks, axis=1).astype(dtype)
        return KeyedArray(values), Residuals(lookups, {}, tuple(layouts), routes)

    def _pool_here(
        self,
        placed: PlacedGroup,
        table: Float[TableArray, "local_rows dim"],
        request: Request,
        route: TowerRoute,
    ) -> tuple[Float[Array, "samples columns"], Lookups]:
        """Pool one group's rows for the peers' samples; return them, and the peers' lookups."""
        dim, num_rows = placed.group.dim, placed.group.num_rows
        owned = self._owned(placed, request.layout)
        scales = send_scales(owned, request.scales, request.layout, self.across)
        lookups = received_lookups(owned, route.received, num_rows, constant(scales))
        on_host = HostGroup.of(placed, self.channel)
        rows, index = fetch_rows(on_host, table, route.of_rows, self.within)

        layout = layout_of_rows(owned.received(num_rows), len(rows))
        lengths, float32 = route.received.lengths, jnp.dtype("float32")
        bags = pool(rows, index, lengths, scales, layout, float32, **self.within.received)
        # Bags are ordered by sender, column and sample; a line has a sample's columns.
        by_sender = bags.reshape(self.num_hosts, len(owned.strides), -1, dim)
        return by_sender.swapaxes(1, 2).reshape(-1, len(owned.strides) * dim), lookups

    def _row_gradients(
        self, residuals: Residuals, values: Float[Array, "samples columns"]
    ) -> dict[str, RowGradients]:
        """Cut a device's gradient into the groups' columns, in the order of the peers' lookups."""
        residuals, gradients, start = first(residuals), {}, 0
        for placed, layout in zip(self.layout.groups, residuals.layouts, strict=True):
            name, dim = placed.name, placed.group.dim
            width = layout.num_features // self.num_hosts * dim
            by_sample = values[:, start : start + width]
            by_sample = by_sample.reshape(self.num_hosts, -1, width // dim, dim)
            bags = by_sample.swapaxes(1, 2).reshape(-1, dim)
            route = residuals.routes[name].route.of_rows
            gradients[name] = RowGradients(residuals.lookups[name], bags, route=route)
            start += width
        return stack(gradients)

    def _update(
        self,
        placed: PlacedGroup,
        exchange: Exchange,
        gradient: RowGradients,
        table: Float[TableArray, "local_rows dim"],
        state: dict[str, TableArray],
        step: Step,
    ) -> tuple[TableArray, dict[str, TableArray]]:
        on_host, gradient = self._on_host(placed, gradient)
        # `_on_host` gave the gradient a route, so the exchange needs no capacity to make one.
        return ROWS.update(on_host, table, state, gradient, step, self.within, 0)

    def _squares(
        self, placed: PlacedGroup, exchange: Exchange, gradient: RowGradients
    ) -> Float[Array, " tables"]:
        on_host, gradient = self._on_host(placed, gradient)
        return jax.lax.psum(ROWS.squares(on_host, gradient, self.within, 0), self.batch_axes)

    def _on_host(
        self, placed: PlacedGroup, gradient: RowGradients
    ) -> tuple[HostGroup, RowGradients]:
        """Return the group as this device's host sees it, and the gradient with a route there."""
        if gradient.route is None:
            route = self._route_rows(placed, gradient.lookups)
            gradient = dataclasses.replace(gradient, route=route)
        return HostGroup.of(placed, self.channel), gradient

    def _owned(self, placed: PlacedGroup, layout: BagLayout) -> OwnerFeatures:
        """Return the columns of each host's features in a batch."""
        features = self._features_of_hosts(placed)
        return OwnerFeatures.of(features, layout.capacities, layout.strides)

    def _features_of_hosts(self, placed: PlacedGroup) -> list[list[int]]:
        """Return, for each host, the positions of the group's features that read its tables."""
        devices = self.layout.mesh.devices_per_host
        host_of = {each.first_row: each.shard.device // devices for each in placed.shards}
        features: list[list[int]] = [[] for _ in range(self.num_hosts)]
        for position, (_, index) in enumerate(placed.group.features):
            features[host_of[placed.group.row_offsets[index]]].append(position)
        return features


def towers_of(store: TableStore) -> TowerTables | None:
    """Return a store's `TowerTables`, or None if its tables are of another class."""
    return store.placed if isinstance(store.placed, TowerTables) else None


def run_towers(
    tables: TowerTables,
    embeddings: Float[Array, "samples columns"],
    towers: Sequence[tuple[int, Tower]],
    parameters: Any,
) -> list[Float[Array, "batch _"]]:
    """Run each tower on its host, and send its output back to the samples.

    Args:
        tables: The tables.
        embeddings: Values that `TowerTables.lookup` returned.
        towers: Host and function of each tower. The function takes the parameters and the host's
            embeddings, ``[samples, columns]``.
        parameters: Any pytree, equal on all devices. Its gradient is the sum over devices.

    Returns:
        The output of each tower, ``[batch, ...]``, sharded over the mesh as the batch is.
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
                # The branches of a switch return one shape: as wide as the host with most outputs.
                wide = jnp.zeros((len(values), max(ends) - ends[host]), dtype)
                return jnp.concatenate([*(x.astype(dtype) for x in own), wide], axis=1)

            return run

        # The host is a traced number, so all hosts' towers are in the program and one runs.
        out = jax.lax.switch(tables.across.index, [on_host(h) for h in range(hosts)], values)
        home = tables.across.send_rows(out.reshape(hosts, -1, max(ends))).astype(dtype)
        return [
            home[host, :, start : start + shape.shape[1]]
            for (host, _), start, shape in zip(towers, starts, shapes, strict=True)
        ]

    run = tables.shard_map(on_device, (over_devices, PartitionSpec()), over_devices)
    return run(embeddings, parameters)
