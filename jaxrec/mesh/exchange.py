"""The exchange of rows: each row travels once to every device that needs it, and is pooled there.

A device sorts the slots its batch needs and drops repeats. The slots of one owner then lie
together. They go out in rounds of at most ``capacity`` for each owner: shapes are static, nothing
is dropped, and how many rounds it takes is decided together by all devices. An even batch takes
one. All of this is inside `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.kernels.reference import update_unique
from jaxrec.embed.update import RowGradients
from jaxrec.mesh.collectives import Channel
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.norms import clip_factors, table_squares
from jaxrec.mesh.route import Route, places, plan_route, window
from jaxrec.optim.norm import cut_rows


def fetch_rows(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    route: Route,
    channel: Channel,
    capacity: int,
) -> tuple[Float[Array, "places dim"], Int32[Array, " n"]]:
    """The rows of a route, and for each lookup the place of its row among them; -1 for none.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        route: What this device needs.
        channel: The way to the other devices.
        capacity: Rows that go between each pair of devices in a round.
    """

    def fetch(begins, ends):
        positions, asked = window(placed, route, begins, ends, capacity)
        asked = channel.send(asked)
        found = kernels.row_lookup(table, asked.reshape(-1)).reshape(*asked.shape, -1)
        return positions, channel.send_rows(found)

    def one_round(begins, rows):
        ends = jnp.minimum(begins + capacity, route.ends)
        positions, found = fetch(begins, ends)
        return ends, rows.at[positions].set(found, mode="drop")

    def all_rounds():
        rows = jnp.zeros((max(first.shape[0], most), first.shape[1]), first.dtype)
        return channel.until_done(one_round, route.begins, rows, route.ends), route.index

    def one_is_enough():
        # Rows stay where they came in. There is room for all lookups as it is, but for a capacity
        # of less than an even share.
        rows = jnp.pad(first, ((0, max(0, most - first.shape[0])), (0, 0)))
        return rows, places(route, route.begins, route.ends, capacity)

    most = route.index.size
    first = fetch(route.begins, jnp.minimum(route.begins + capacity, route.ends))[1]
    first = first.reshape(-1, first.shape[-1])
    if capacity >= most:
        return one_is_enough()
    is_left = channel.any(jnp.any(route.ends - route.begins > capacity))
    return jax.lax.cond(is_left, all_rounds, one_is_enough)


def update_rows(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    state: dict[str, Array],
    gradient: RowGradients,
    step: Int32[Array, ""],
    channel: Channel,
    capacity: int,
) -> tuple[Float[Array, "local_rows dim"], dict[str, Array]]:
    """Brings gradients to the rows' owners, who update each row once.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        state: Their optimizer state.
        gradient: The gradient of this device's lookups.
        step: Number of updates made before.
        channel: The way to the other devices.
        capacity: Rows that go between each pair of devices in a round.
    """
    bounded = placed.group.optimizer
    optimizer = dataclasses.replace(bounded, clip_value=None, clip_norm=None)
    lookups = gradient.lookups
    route = plan_route(placed, lookups.rows)
    keys = placed.whole_rows(route.slots) if placed.joins_pieces else route.slots

    def receive(begins):
        """A round: where it ends, and the rows and gradients that come in."""
        ends = _agree(placed, route, keys, begins, channel, capacity)
        _, rows = window(placed, route, begins, ends, capacity)
        at = dataclasses.replace(lookups, rows=places(route, begins, ends, capacity))
        sums = kernels.sum_rows(at, gradient.values, rows.size, bounded.clip_value)
        received = channel.send_gradients(sums.reshape(*rows.shape, -1))
        return ends, channel.send(rows).reshape(-1), received.reshape(rows.size, -1)

    factors = None
    if bounded.clip_norm is not None:

        def add_squares(begins, squares):
            ends, rows, received = receive(begins)
            flat = Lookups(rows, None, None)
            return ends, squares + table_squares(placed, flat, received, None, channel)

        squares = jnp.zeros(len(placed.tables), jnp.float32)
        squares = channel.until_done(add_squares, route.begins, squares, route.ends)
        factors = clip_factors(squares, bounded.clip_norm, channel)

    def one_round(begins, carried):
        table, state = carried
        ends, rows, received = receive(begins)
        scales = None if factors is None else factors[placed.tables_of(rows, channel.index)]
        flat = Lookups(rows, None, scales)
        if not placed.joins_pieces:
            return ends, kernels.fused_update(table, state, flat, received, optimizer, step)
        runs = kernels.build_runs(rows, placed.local_rows)
        positions, _ = window(placed, route, begins, ends, capacity)
        whole = keys.at[positions].get(mode="fill", fill_value=placed.group.num_rows)
        total = functools.partial(_total, runs=runs, whole=whole, channel=channel)
        with cut_rows(placed.whole_dim, total):
            sums = kernels.sum_rows(Lookups(runs.inverse, None, scales), received, rows.size)
            new = update_unique(table, state, runs.unique, sums, optimizer, step, (0,))
        return ends, new

    return channel.until_done(one_round, route.begins, (table, state), route.ends)


def _agree(
    placed: PlacedGroup,
    route: Route,
    keys: Int32[Array, " n"],
    begins: Int32[Array, " devices"],
    channel: Channel,
    capacity: int,
) -> Int32[Array, " devices"]:
    """Where a round ends, so that all gradients of a row, and of its other pieces, are in it.

    Devices stop at the first row that one of them has no room for. ``keys`` number the rows that
    must come together; those of an owner ascend.
    """
    limits = jnp.minimum(begins + capacity, route.ends)
    first_left = keys.at[limits].get(mode="clip")
    stops = jnp.where(limits < route.ends, first_left, jnp.iinfo(jnp.int32).max)
    stops = jax.lax.pmin(stops, channel.axes)
    if placed.joins_pieces:
        stops = jnp.broadcast_to(stops.min(), stops.shape)
    positions = begins[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
    is_sent = keys.at[positions].get(mode="clip") < stops[:, None]
    return begins + jnp.sum(is_sent & (positions < limits[:, None]), axis=1, dtype=jnp.int32)


def _total(
    partial: Float[Array, " lines"],
    *,
    runs: kernels.Runs,
    whole: Int32[Array, "devices capacity"],
    channel: Channel,
) -> Float[Array, " lines"]:
    """Sums over parts of rows, one a run, as sums over whole rows.

    They are made where the gradients came from: that device asked for all pieces of the row. So
    partial sums go back by the way the gradients came, and totals out again.
    """
    home = channel.send(partial[runs.inverse].reshape(whole.shape)).reshape(-1)
    pieces = kernels.build_runs(whole.reshape(-1), jnp.iinfo(jnp.int32).max)
    totals = jax.ops.segment_sum(home[pieces.order], pieces.segments, home.size)
    # Every device that asked for a row has made the same total; any of them will do.
    back = channel.send(totals[pieces.inverse].reshape(whole.shape)).reshape(-1)
    return jnp.zeros(back.shape, back.dtype).at[runs.inverse].set(back)
