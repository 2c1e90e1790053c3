"""Tables over the devices of a mesh: lookups and updates of a training step.

`ShardedTables` runs the exchange of each group inside `jax.shard_map`. Arrays of one device's batch
have an axis over the devices outside of it: `first` takes that axis away inside, `stack` adds it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from jaxrec.embed.config import refuse_training
from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.kernels.updates import sweep_rows
from jaxrec.embed.outputs import (
    flatten,
    join_pooled,
    lookup_weights,
    require_weights,
    shares_bags,
    split_rows,
)
from jaxrec.embed.padding import without_padding_ids
from jaxrec.embed.row_gradients import (
    Activations,
    Residuals,
    Routes,
    RowGradients,
    bound_samples,
    group_gradients,
    group_parts,
    merge,
)
from jaxrec.mesh.call_checks import batch_facts, check_call
from jaxrec.mesh.channel import Turns, is_known
from jaxrec.mesh.exchange import Exchange, Request
from jaxrec.mesh.exchange.lines import WrittenRows
from jaxrec.mesh.group_route import Fetched, GroupRoute
from jaxrec.mesh.placed_group import PlacedGroup, flatten_large
from jaxrec.mesh.shard_access import first, stack
from jaxrec.mesh.store import MeshStore
from jaxrec.optim.hyperparameters import Step, as_step
from jaxrec.ragged import KeyedArray, KeyedJaggedArray
from jaxrec.ragged.shared_bags import with_known_capacities
from jaxrec.ragged.wide_ids import WideIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedTables(MeshStore):
    """Tables over a mesh; the store that `jaxrec.shard` puts in the place of `jaxrec.embed.Tables`.

    Each group of tables has an exchange, which its placements name. The methods pass each device's
    part of a batch to the exchanges.
    """

    def route(self, features: KeyedJaggedArray) -> Routes:
        check_batch(self, features)

        def on_device(rows, features):
            turns = self.channel.turns
            # Waits for the exchanges of the update that wrote these rows, if turns are in order.
            turns.run(lambda rows: rows, rows)
            return stack(self._routes(self._own_part(features), turns))

        over_batch = PartitionSpec(self.batch_axes)
        route = self.shard_map(on_device, (self.specs(), over_batch), over_batch)
        return route(self.rows, features)

    def lookup(
        self,
        features: KeyedJaggedArray,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
        routes: Routes | None = None,
    ) -> tuple[Activations, Residuals]:
        check_batch(self, features, is_weighted)
        # A lookup is traced once for each program, so this compares the programs of processes that
        # run a training loop of their own.
        tables = ", ".join(config.name for config in self.layout.configs)
        check_call("steps", f"traces a lookup in tables {tables}", lambda: batch_facts(features))
        # Capacities of samples that share bags may depend on the batch's values, which are traced
        # inside `jax.shard_map`.
        features = with_known_capacities(features)

        def on_device(rows, features, routes):
            features, turns = self._own_part(features), self.channel.turns
            routes = self._routes(features, turns) if routes is None else first(routes)
            outputs, residuals = self._lookup(rows, features, routes, is_weighted, dtype, turns)
            values = outputs.values if isinstance(outputs, KeyedArray) else stack(outputs)
            return values, stack(residuals)

        over_batch = PartitionSpec(self.batch_axes)
        lookup = self.shard_map(on_device, (self.specs(), over_batch, over_batch), over_batch)
        outputs, residuals = lookup(self.rows, features, routes)
        if self.layout.is_pooled:
            outputs = KeyedArray(outputs, *self._output_names())
        return outputs, residuals

    def fetch(
        self,
        features: KeyedJaggedArray,
        routes: Routes,
        waiting: Any,
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
    ) -> tuple[Routes, Any, Bool[Array, ""]]:
        features = with_known_capacities(features)

        def on_device(rows, features, routes, waiting):
            features, routes, turns = self._own_part(features), first(routes), self.channel.turns

            def fetch(
                placed: PlacedGroup, exchange: Exchange, awaited: Any, table: TableArray
            ) -> Any:
                request, route = awaited
                with jax.named_scope("fetch"):
                    return exchange.fetch(placed, table, request, route, self.channel_of(placed))

            is_read = jnp.array(True)
            for placed, exchange in self.layout:
                # A sweep may change any row.
                if placed.group.optimizer.sweeps:
                    continue
                name = placed.name
                request = self._request(placed, features, routes[name], is_weighted)
                lines = turns.run(
                    functools.partial(fetch, placed, exchange),
                    (request, routes[name].route),
                    rows[name],
                )
                if lines is not None:
                    fetched = Fetched(lines, jnp.float32(0) if placed.is_trained else None)
                    routes[name] = dataclasses.replace(routes[name], fetched=fetched)
                    is_read &= is_known(lines)
            return stack(routes), turns.run(lambda waiting: waiting, waiting), is_read

        over_batch = PartitionSpec(self.batch_axes)
        return self.shard_map(
            on_device,
            (self.specs(), over_batch, over_batch, over_batch),
            (over_batch, over_batch, PartitionSpec()),
        )(self.rows, features, routes, waiting)

    def refetch(
        self,
        features: KeyedJaggedArray,
        routes: Routes,
        updated: Sequence[Routes],
        *,
        is_weighted: bool = False,
        dtype: DTypeLike = "float32",
    ) -> Routes:
        features = with_known_capacities(features)

        def on_device(rows, features, routes, updated):
            features, turns = self._own_part(features), self.channel.turns
            routes, updated = first(routes), first(updated)
            turns.run(lambda rows: rows, rows)

            def refetch(
                placed: PlacedGroup, exchange: Exchange, awaited: Any, table: TableArray
            ) -> Any:
                request, route, updated = awaited
                written = WrittenRows.of(updated, placed.local_rows)
                capacity, channel = self.stale_capacity(placed), self.channel_of(placed)
                with jax.named_scope("refetch"):
                    return exchange.refetch(
                        placed, table, request, route, channel, written, capacity
                    )

            for placed, exchange in self.layout:
                name = placed.name
                if routes[name].fetched is None or not placed.is_trained:
                    continue
                request = self._request(placed, features, routes[name], is_weighted)
                lines, demand = turns.run(
                    functools.partial(refetch, placed, exchange),
                    (request, routes[name].route, [each[name].route for each in updated]),
                    rows[name],
                )
                routes[name] = dataclasses.replace(routes[name], fetched=Fetched(lines, demand))
            return stack(routes)

        over_batch = PartitionSpec(self.batch_axes)
        return self.shard_map(
            on_device, (self.specs(), over_batch, over_batch, over_batch), over_batch
        )(self.rows, features, routes, updated)

    def row_gradients(
        self, residuals: Residuals, cotangents: Activations
    ) -> dict[str, RowGradients]:
        refuse_training(self.configs)

        def on_device(residuals, cotangents):
            residuals = first(residuals)
            routes = {name: each.route for name, each in residuals.routes.items()}
            residuals = dataclasses.replace(residuals, routes=routes)
            if self.layout.is_pooled:
                of_slices: Activations = KeyedArray(cotangents)
            else:
                of_slices = self._split_columns(first(cotangents))
            gradients = group_gradients(self.layout.slices, residuals, of_slices)
            turns = self.channel.turns
            for placed, exchange in self.layout:
                gradient = gradients[placed.name]
                # If samples share bags and have a bound (`clip_value`), `_merge` bounds their
                # gradients, adds them up and sends the sum.
                if gradient.bag_of_line is None:
                    gradients[placed.name] = self._send(placed, exchange, gradient, turns)
            return stack(gradients)

        over_batch = PartitionSpec(self.batch_axes)
        values = cotangents.values if isinstance(cotangents, KeyedArray) else cotangents
        return self.shard_map(on_device, over_batch, over_batch)(residuals, values)

    def update(
        self,
        calls: Sequence[dict[str, RowGradients]],
        step: Step | int,
        is_applied: Bool[Array, ""] | None = None,
    ) -> ShardedTables:
        refuse_training(self.configs)
        groups = [(placed, exchange) for placed, exchange in self.layout if placed.is_trained]
        names = [placed.name for placed, _ in groups]
        specs = {placed.name: self.spec(placed) for placed, _ in groups}
        both_specs = specs, {name: dict.fromkeys(self.state[name], specs[name]) for name in names}

        def on_device(rows, state, calls, step, is_applied):
            parts, turns = group_parts(first(calls)), self.channel.turns
            new: tuple[dict[str, TableArray], dict[str, dict[str, TableArray]]] = {}, {}
            for placed, exchange in groups:
                name = placed.name
                placed, gradient = self._merge(placed, exchange, parts[name], turns)
                gradient = dataclasses.replace(gradient, is_applied=is_applied)
                updated, new[1][name] = turns.run(
                    functools.partial(self._update, placed, exchange),
                    gradient,
                    rows[name],
                    state[name],
                    step,
                    floats=exchange.sends_gradients_first,
                )
                new[0][name] = sweep_rows(updated, placed.group.optimizer, step, is_applied)
            return new

        over_batch, everywhere = PartitionSpec(self.batch_axes), PartitionSpec()
        rows, state = self.shard_map(
            on_device, (*both_specs, over_batch, everywhere, everywhere), both_specs
        )(
            {name: self.rows[name] for name in names},
            {name: self.state[name] for name in names},
            [{name: call[name] for name in names} for call in calls],
            as_step(step),
            is_applied,
        )
        return dataclasses.replace(self, rows=self.rows | rows, state=self.state | state)

    def table_squares(
        self, calls: Sequence[dict[str, RowGradients]]
    ) -> dict[str, Float[Array, ""]]:
        groups = [
            (placed.without_bound, exchange)
            for placed, exchange in self.layout
            if placed.is_trained
        ]

        def on_device(calls):
            parts, turns = group_parts(first(calls)), self.channel.turns
            squares: dict[str, Array] = {}
            for placed, exchange in groups:
                placed, gradient = self._merge(placed, exchange, parts[placed.name], turns)
                by_table = turns.run(
                    functools.partial(self._squares, placed, exchange),
                    gradient,
                    floats=exchange.sends_gradients_first,
                )
                for name, square in zip(placed.tables, by_table, strict=True):
                    squares[name] = squares.get(name, 0) + square
            return squares

        names = [placed.name for placed, _ in groups]
        calls = [{name: call[name] for name in names} for call in calls]
        return self.shard_map(on_device, PartitionSpec(self.batch_axes), PartitionSpec())(calls)

    def _output_names(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.layout.whole.output_keys, self.layout.whole.output_dims

    # The methods below run on each device, inside `jax.shard_map`.

    def _own_part(self, features: KeyedJaggedArray) -> KeyedJaggedArray:
        """Return this device's part of a batch, without padding ids if bags are pooled."""
        part = first(features)
        return without_padding_ids(part, self.configs) if self.layout.is_pooled else part

    def _routes(self, features: KeyedJaggedArray, turns: Turns) -> Routes:
        """Route the lookups of each group, in turn."""

        def route(
            placed: PlacedGroup, exchange: Exchange, lengths: Int32[Array, " all_bags"]
        ) -> GroupRoute:
            batch = dataclasses.replace(features, lengths=lengths)
            layout = placed.group.bags(batch)
            if placed.is_large:
                lookups = flatten_large(batch, layout, placed)
            else:
                lookups = flatten(batch, None, layout, placed.group)
            return GroupRoute(
                lookups, self._route_lookups(placed, exchange, batch, lookups, layout)
            )

        # Each route waits for `lengths`, of which all of a group's lookups are made.
        return {
            placed.name: turns.run(functools.partial(route, placed, exchange), features.lengths)
            for placed, exchange in self.layout
        }

    def _request(
        self, placed: PlacedGroup, features: KeyedJaggedArray, route: GroupRoute, is_weighted: bool
    ) -> Request:
        """Return the request of a group's lookups."""
        weights = lookup_weights(features, is_weighted, self.configs)
        lines = None if route.fetched is None else route.fetched.lines
        return Request.of(features, route.lookups, weights, placed.group.bags(features), lines)

    def _route_lookups(
        self,
        placed: PlacedGroup,
        exchange: Exchange,
        features: KeyedJaggedArray,
        lookups: Lookups,
        layout: BagLayout,
    ) -> Any:
        """Return the result of `Exchange.route`."""
        request = Request.of(features, lookups, None, layout)
        capacity = self.capacity(placed, lookups.rows.size)
        return exchange.route(placed, request, self.channel_of(placed), capacity)

    def _lookup(
        self,
        rows: dict[str, TableArray],
        features: KeyedJaggedArray,
        routes: Routes,
        is_weighted: bool,
        dtype: DTypeLike,
        turns: Turns,
    ) -> tuple[Activations, Residuals]:
        """Return the outputs of this device's samples, and their residuals."""
        slices = self.layout.slices
        layouts = {group.name: group.bags(features) for group in slices.groups}
        looked_up, lookups = {}, {}

        def fetch(
            placed: PlacedGroup, exchange: Exchange, awaited: tuple[Request, Any], table: TableArray
        ) -> Any:
            (request, route), channel = awaited, self.channel_of(placed)
            if not slices.is_pooled:
                return exchange.rows(placed, table, request, route, channel)
            # Shared bags are pooled in float32, so that the gradients of their samples are added
            # in float32.
            wide = "float32" if shares_bags(features, request.layout) else dtype
            return exchange.pool(placed, table, request, route, channel, wide)

        for placed, exchange in self.layout:
            name, fetch_group = placed.name, functools.partial(fetch, placed, exchange)
            lookups[name] = routes[name].lookups
            request = self._request(placed, features, routes[name], is_weighted)
            looked_up[name] = turns.run(fetch_group, (request, routes[name].route), rows[name])
            if slices.is_pooled:
                looked_up[name], lookups[name] = looked_up[name]
        # The update needs no lines, and residuals would keep them.
        routes = {name: dataclasses.replace(each, fetched=None) for name, each in routes.items()}
        if slices.is_pooled:
            return join_pooled(slices, features, layouts, looked_up, lookups, dtype, routes=routes)
        outputs, residuals = split_rows(
            slices, features, layouts, looked_up, lookups, dtype, routes=routes
        )
        joined = {
            key: jnp.concatenate([outputs[each] for each in keys], axis=1)
            for key, keys in self.layout.slice_keys().items()
        }
        return joined, residuals

    def _send(
        self, placed: PlacedGroup, exchange: Exchange, gradient: RowGradients, turns: Turns
    ) -> RowGradients:
        """Run `Exchange.send_gradients`."""
        if type(exchange).send_gradients is Exchange.send_gradients:
            return gradient  # nothing is sent, so no exchange has to wait

        def send(values: Array) -> Array:
            with_values = dataclasses.replace(gradient, values=values)
            return exchange.send_gradients(placed, with_values, self.channel_of(placed)).values

        return dataclasses.replace(gradient, values=turns.run(send, gradient.values))

    def _merge(
        self, placed: PlacedGroup, exchange: Exchange, parts: Sequence[RowGradients], turns: Turns
    ) -> tuple[PlacedGroup, RowGradients]:
        """Merge the gradients of a group's calls; return the group and the gradient.

        If gradients are bounded by element here, the optimizer of the returned group has no
        ``clip_value``.
        """
        optimizer, scale = placed.group.optimizer, 1
        if self.num_replicas > 1 and not placed.is_replicated:
            # The loss is a mean over the samples of all replicas, but a replica learns from the
            # mean over its own samples.
            scale = self.num_replicas
        # `bound_samples` runs before the gradient is scaled, so its bound is divided by the scale.
        if scale > 1 and optimizer.clip_value is not None:
            bound = optimizer.clip_value / scale
            bounded, left = bound_samples(parts, dataclasses.replace(optimizer, clip_value=bound))
            left = optimizer if left.clip_value is not None else left
        else:
            bounded, left = bound_samples(parts, optimizer)
        sent = [
            after if before.bag_of_line is None else self._send(placed, exchange, after, turns)
            for before, after in zip(parts, bounded, strict=True)
        ]
        gradient = merge(sent)
        if scale > 1:
            gradient = dataclasses.replace(gradient, values=gradient.values * scale)
        group = dataclasses.replace(placed.group, optimizer=left)
        return dataclasses.replace(placed, group=group), gradient

    def _update(
        self,
        placed: PlacedGroup,
        exchange: Exchange,
        gradient: RowGradients,
        table: Float[TableArray, "local_rows dim"],
        state: dict[str, TableArray],
        step: Step,
    ) -> tuple[TableArray, dict[str, TableArray]]:
        """Run `Exchange.update`; return the group's new rows and state."""
        capacity = self.capacity(placed, gradient.lookups.rows.size)
        channel = self.channel_of(placed)
        return exchange.update(placed, table, state, gradient, step, channel, capacity)

    def _squares(
        self, placed: PlacedGroup, exchange: Exchange, gradient: RowGradients
    ) -> Float[Array, " tables"]:
        """Return the sum of squares of each table's gradient, averaged over replicas."""
        capacity = self.capacity(placed, gradient.lookups.rows.size)
        channel = self.channel_of(placed)
        parts = exchange.squares(placed, gradient, channel, capacity)
        return jax.lax.psum(parts, self.batch_axes) / (
            1 if placed.is_replicated else self.num_replicas
        )

    def _split_columns(self, cotangents: dict[str, Array]) -> dict[str, Array]:
        """Split the gradient of each output into those of its column slices' outputs."""
        slices = self.layout.slices
        dims = dict(zip(slices.output_keys, slices.output_dims, strict=True))
        split: dict[str, Array] = {}
        for key, keys in self.layout.slice_keys().items():
            ends = np.cumsum([dims[each] for each in keys])
            split |= dict(zip(keys, jnp.split(cotangents[key], ends[:-1], axis=1), strict=True))
        return split


def check_batch(
    tables: ShardedTables, features: KeyedJaggedArray, is_weighted: bool = False
) -> None:
    """Raise a ValueError if a batch is not sharded over the tables' devices, or lacks weights."""
    devices = tables.mesh.size
    ids: Any = features.values  # an array, or wide ids
    if ids.ndim != 2 or ids.shape[0] != devices:
        raise ValueError(
            f"tables over {devices} devices are looked up with a batch over them, values of "
            f"[{devices}, capacity]; got {tuple(ids.shape)}. Put host batches on the "
            "mesh with jaxrec.mesh.shard_batch(batch, mesh)"
        )
    if tables.layout.wide and not isinstance(ids, WideIds):
        raise ValueError(
            f"table {tables.layout.wide[0]!r} has more rows than int32 can number, and the batch "
            f"has ids of 32 bits; make batches with id_bits=64, say KeyedJaggedArray.from_lists("
            "lists, bounds=collection.bounds, id_bits=64), and put them on the mesh with "
            "jaxrec.mesh.shard_batch(batch, mesh, id_bits=64)"
        )
    if is_weighted:
        require_weights(features)
