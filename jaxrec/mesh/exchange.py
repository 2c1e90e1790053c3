"""The exchange of rows: each row travels once to every device that needs it, and is pooled there.

A device sorts the slots its batch needs and drops repeats. The slots of one owner then lie
together. They go out in rounds of at most ``capacity`` for each owner: shapes are static, nothing
is dropped, and how many rounds it takes is decided together by all devices. An even batch takes
one. Whether there is room for all travels with what is asked for. All of this is inside
`jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.kernels.reference import update_unique
from jaxrec.embed.update import RowGradients
from jaxrec.mesh.collectives import Channel
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.norms import clip_factors, table_squares
from jaxrec.mesh.route import Route, places, plan_route, window
from jaxrec.optim.norm import cut_rows

# Where a round ends that has room for all that is left.
_NOWHERE = jnp.iinfo(jnp.int32).max


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

    def fetch(begins):
        """A round: its positions, the rows that come in, and whether any device needs more."""
        ends = jnp.minimum(begins + capacity, route.ends)
        positions, asked = window(placed, route, begins, ends, capacity)
        is_left, (asked,) = channel.send_with_flag(jnp.any(ends < route.ends), asked)
        found = kernels.row_lookup(table, asked.reshape(-1)).reshape(*asked.shape, -1)
        return positions, channel.send_rows(found), is_left

    def one_round(begins, rows):
        positions, found, is_left = fetch(begins)
        return rows.at[positions].set(found, mode="drop"), is_left

    def advance(begins):
        return jnp.minimum(begins + capacity, route.ends)

    def all_rounds():
        rows = jnp.zeros((max(first.shape[0], most), first.shape[1]), first.dtype)
        return channel.until_done(one_round, advance, route.begins, rows), route.index

    def one_is_enough():
        # Rows stay where they came in. There is room for all lookups as it is, but for a capacity
        # of less than an even share.
        rows = jnp.pad(first, ((0, max(0, most - first.shape[0])), (0, 0)))
        return rows, places(route, route.begins, route.ends, capacity)

    most = route.index.size
    _, first, is_left = fetch(route.begins)
    first = first.reshape(-1, first.shape[-1])
    if capacity >= most:
        return one_is_enough()
    return jax.lax.cond(is_left, all_rounds, one_is_enough)


@dataclasses.dataclass(frozen=True)
class _Received:
    """What comes to an owner in a round of the update.

    Attributes:
        rows: The rows, of all devices one after the other; `local_rows` where there is none, or
            where some device has no room for the row in this round.
        gradients: Their gradients.
        wanted: For each place of what this device sent the number of its whole row.
        is_left: Whether any device has something left.
    """

    rows: Int32[Array, " places"]
    gradients: Float[Array, "places dim"]
    wanted: Int32[Array, "devices capacity"]
    is_left: Bool[Array, ""]


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

    All gradients of a row, and of its other pieces if those are updated together, must come in the
    same round. So in each an owner stops at the first row that some device has no room for, and
    what came of later rows counts in the next.

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
    # What numbers the rows that must come together; of an owner's the numbers ascend.
    keys_of = placed.whole_rows if placed.joins_pieces else lambda slots: slots
    keys = keys_of(route.slots)

    def stops(begins):
        """The first row of each owner that this device has no room for."""
        limits = jnp.minimum(begins + capacity, route.ends)
        stops = jnp.where(limits < route.ends, keys.at[limits].get(mode="clip"), _NOWHERE)
        return jnp.broadcast_to(stops.min(), stops.shape) if placed.joins_pieces else stops

    def receive(begins):
        ends = jnp.minimum(begins + capacity, route.ends)
        positions, rows = window(placed, route, begins, ends, capacity)
        at = dataclasses.replace(lookups, rows=places(route, begins, ends, capacity))
        sums = kernels.sum_rows(at, gradient.values, rows.size, bounded.clip_value)
        wanted = keys.at[positions].get(mode="fill", fill_value=placed.group.num_rows)
        is_left, (asked, stop) = channel.send_with_flag(
            jnp.any(ends < route.ends), rows, stops(begins)[:, None]
        )
        asked = asked.reshape(-1)
        is_now = keys_of(channel.index * placed.local_rows + asked) < stop.min()
        return _Received(
            jnp.where(is_now, asked, placed.local_rows),
            channel.send_gradients(sums.reshape(*rows.shape, -1)).reshape(rows.size, -1),
            wanted,
            is_left,
        )

    def advance(begins):
        agreed = jax.lax.pmin(stops(begins), channel.axes)
        positions = begins[:, None] + jnp.arange(capacity, dtype=jnp.int32)[None]
        is_done = keys.at[positions].get(mode="clip") < agreed[:, None]
        return begins + jnp.sum(
            is_done & (positions < route.ends[:, None]), axis=1, dtype=jnp.int32
        )

    factors = None
    if bounded.clip_norm is not None:

        def add_squares(begins, squares):
            got = receive(begins)
            flat = Lookups(got.rows, None, None)
            squares = squares + table_squares(placed, flat, got.gradients, None, channel)
            return squares, got.is_left

        squares = jnp.zeros(len(placed.tables), jnp.float32)
        squares = channel.until_done(add_squares, advance, route.begins, squares)
        factors = clip_factors(squares, bounded.clip_norm, channel)

    def one_round(begins, carried):
        table, state = carried
        got = receive(begins)
        scales = None if factors is None else factors[placed.tables_of(got.rows, channel.index)]
        if not placed.joins_pieces:
            flat = Lookups(got.rows, None, scales)
            new = kernels.fused_update(table, state, flat, got.gradients, optimizer, step)
            return new, got.is_left
        runs = kernels.build_runs(got.rows, placed.local_rows)
        at = Lookups(runs.inverse, None, scales)
        sums = kernels.sum_rows(at, got.gradients, got.rows.size)
        total = functools.partial(_total, runs=runs, wanted=got.wanted, channel=channel)
        with cut_rows(placed.whole_dim, total):
            new = update_unique(table, state, runs.unique, sums, optimizer, step, (0,))
        return new, got.is_left

    return channel.until_done(one_round, advance, route.begins, (table, state))


def _total(
    partial: Float[Array, " lines"],
    *,
    runs: kernels.Runs,
    wanted: Int32[Array, "devices capacity"],
    channel: Channel,
) -> Float[Array, " lines"]:
    """Sums over parts of rows, one a run, as sums over whole rows.

    They are made where the gradients came from: that device asked for all pieces of the row. So
    partial sums go back by the way the gradients came, and totals out again.
    """
    home = channel.send(partial[runs.inverse].reshape(wanted.shape)).reshape(-1)
    pieces = kernels.build_runs(wanted.reshape(-1), jnp.iinfo(jnp.int32).max)
    totals = jax.ops.segment_sum(home[pieces.order], pieces.segments, home.size)
    # Every device that asked for a row has made the same total; any of them will do.
    back = channel.send(totals[pieces.inverse].reshape(wanted.shape)).reshape(-1)
    return jnp.zeros(back.shape, back.dtype).at[runs.inverse].set(back)
