"""The exchange of rows: each row travels once to every device that needs it, and is pooled there.

A device sorts the slots its batch needs and drops repeats. The slots of one owner then lie
together. They go out in rounds of at most ``capacity`` for each owner: shapes are static, nothing
is dropped, and how many rounds it takes is decided together by all devices. An even batch takes
one. How much a device needs travels with what it asks for. What the first round asks for follows
from ids alone, so that it can be sent ahead (`route_rows`); rows and gradients answer it. All of
this is inside `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.kernels.reference import update_unique
from jaxrec.embed.update import RowGradients
from jaxrec.mesh.collectives import Channel, Used, run_if
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.norms import clip_factors, table_squares
from jaxrec.mesh.route import Route, places, plan_route, window
from jaxrec.optim.hyperparameter import Step
from jaxrec.optim.norm import cut_rows

# Where a round ends that has room for all that is left.
_NOWHERE = jnp.iinfo(jnp.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """What devices ask of each other in a round.

    Attributes:
        begins: For each owner where the round begins, among this device's slots.
        rows: The rows that each device asks of this one; `local_rows` where there is none.
        used: How many rows are asked of each device, and by each.
        stop: The first row, or whole row where pieces are updated together, for which some device
            has no room in this round.
        most: What any device had left for one owner, at most: more than there is room for if
            another round follows.
    """

    begins: Int32[Array, " devices"]
    rows: Int32[Array, "devices capacity"]
    used: Used
    stop: Int32[Array, ""]
    most: Int32[Array, ""]

    @property
    def is_last(self) -> Bool[Array, ""]:
        return self.most <= self.rows.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsRoute:
    """What a lookup by rows needs to know of other devices, once they have asked each other.

    Attributes:
        route: What this device needs.
        first: The first round.
    """

    route: Route
    first: Round

    @property
    def rows(self) -> Int32[Array, "devices capacity"]:
        """The rows that are asked of this device first."""
        return self.first.rows

    @property
    def load(self) -> Float[Array, "..."]:
        """Rows that any device needs of one owner, at most, in even shares of its lookups."""
        return self.first.most * (self.route.begins.shape[-1] / self.route.index.shape[-1])

    def map_awaited(self, function: Callable[[Array], Array]) -> RowsRoute:
        """The route with a function applied to the indices that exchanges wait for."""
        first = dataclasses.replace(
            self.first, begins=function(self.first.begins), rows=function(self.first.rows)
        )
        return dataclasses.replace(self, first=first)


def route_rows(
    placed: PlacedGroup, rows: Int32[Array, " n"], channel: Channel, capacity: int
) -> RowsRoute:
    """Has all devices ask for the rows that they need.

    Args:
        placed: Where the group lies.
        rows: The row of each of this device's lookups.
        channel: The way to the other devices.
        capacity: Rows that go between each pair of devices in a round.
    """
    route = plan_route(placed, rows)
    return RowsRoute(route, _ask(placed, route, route.begins, channel, capacity))


def _ask(
    placed: PlacedGroup,
    route: Route,
    begins: Int32[Array, " devices"],
    channel: Channel,
    capacity: int,
) -> Round:
    """The round that begins there."""
    _, rows = window(placed, route, begins, capacity)
    stops = _stops(placed, route, begins, capacity)
    left = route.ends - begins
    rows, used, (stops, lefts) = channel.send_lists(
        rows,
        jnp.clip(left, 0, capacity),
        stops[:, None],
        jnp.broadcast_to(left.max(), (left.size, 1)),
        fill=placed.local_rows,
    )
    return Round(begins, rows, used, stops.min(), lefts.max())


def _stops(
    placed: PlacedGroup, route: Route, begins: Int32[Array, " devices"], capacity: int
) -> Int32[Array, " devices"]:
    """The first row of each owner that this device has no room for in a round."""
    limits = jnp.minimum(begins + capacity, route.ends)
    after = _keys(placed, route.slots).at[limits].get(mode="clip")
    stops = jnp.where(limits < route.ends, after, _NOWHERE)
    return jnp.broadcast_to(stops.min(), stops.shape) if placed.joins_pieces else stops


def _keys(placed: PlacedGroup, slots: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Numbers of the rows that must come together; of an owner's slots they ascend."""
    return placed.whole_rows(slots) if placed.joins_pieces else slots


def fetch_rows(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    routed: RowsRoute,
    channel: Channel,
) -> tuple[Float[Array, "places dim"], Int32[Array, " n"]]:
    """The rows of a route, and for each lookup the place of its row among them; -1 for none.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        routed: What devices need.
        channel: The way to the other devices.
    """
    route, capacity = routed.route, routed.first.rows.shape[1]

    def answer(asked: Round) -> Float[Array, "devices capacity dim"]:
        found = kernels.row_lookup(table, asked.rows.reshape(-1), parts_out=channel.parts)
        return channel.send_rows(found.reshape(*asked.rows.shape, -1), asked.used.reversed)

    def one_round(asked, rows):
        positions, _ = window(placed, route, asked.begins, capacity)
        return rows.at[positions].set(answer(asked), mode="drop")

    def next_round(asked):
        begins = jnp.minimum(asked.begins + capacity, route.ends)
        return _ask(placed, route, begins, channel, capacity)

    def all_rounds(carried):
        rows = _until_last(routed.first, one_round, next_round, jnp.concatenate(carried[0]))
        return jnp.split(rows, channel.parts), route.index

    first = answer(routed.first)
    first = first.reshape(-1, first.shape[-1])
    index = places(route, route.begins, capacity)
    if capacity >= index.size:
        return first, index
    # Where one round is enough, rows stay where they came in. There is room for all lookups as it
    # is, but for a capacity of less than an even share.
    places_missing = max(0, index.size - len(first))
    rows = jnp.pad(first, ((0, -(-places_missing // channel.parts) * channel.parts), (0, 0)))
    # They are carried in the parts that they came in.
    parts = jnp.split(rows, channel.parts)
    parts, index = run_if(~routed.first.is_last, all_rounds, (parts, index))
    return jnp.concatenate(parts), index


def update_by_rows(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    state: dict[str, Array],
    gradient: RowGradients,
    step: Step,
    channel: Channel,
    routed: RowsRoute,
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
        routed: What devices need, of these lookups.
    """
    bounded = placed.group.optimizer
    optimizer = dataclasses.replace(bounded, clip_value=None, clip_norm=None)
    rounds = _GradientRounds(placed, gradient, channel, routed, bounded.clip_value)
    factors = None
    if bounded.clip_norm is not None:
        factors = clip_factors(rounds.squares(), bounded.clip_norm, channel)

    def one_round(asked, carried):
        table, state = carried
        rows, gradients = rounds.receive(asked)
        rows = gradient.rows_to_write(rows, placed.local_rows)
        scales = None if factors is None else factors[placed.tables_of(rows, channel.index)]
        if not placed.joins_pieces:
            flat = Lookups(rows, None, scales)
            return kernels.fused_update(
                table, state, flat, gradients, optimizer, step, parts_in=channel.parts
            )
        runs = kernels.build_runs(rows, placed.local_rows)
        sums = kernels.sum_rows(Lookups(runs.inverse, None, scales), gradients, rows.size)
        positions, _ = window(placed, routed.route, asked.begins, rounds.capacity)
        keys = _keys(placed, routed.route.slots)
        wanted = keys.at[positions].get(mode="fill", fill_value=placed.group.num_rows)
        total = functools.partial(_total, runs=runs, wanted=wanted, channel=channel)
        with cut_rows(placed.whole_dim, total):
            return update_unique(table, state, runs.unique, sums, optimizer, step, (0,))

    return _until_last(routed.first, one_round, rounds.next, (table, state))


def squares_by_rows(
    placed: PlacedGroup, gradient: RowGradients, channel: Channel, routed: RowsRoute
) -> Float[Array, " tables"]:
    """Return the sum of squares of the gradients of this device's rows, table by table.

    Args:
        placed: Where the group lies.
        gradient: The gradient of this device's lookups.
        channel: The way to the other devices.
        routed: What devices need, of these lookups.
    """
    return _GradientRounds(placed, gradient, channel, routed, None).squares()


@dataclasses.dataclass(frozen=True)
class _GradientRounds:
    """The rounds in which gradients travel to the rows' owners.

    Attributes:
        placed: Where the group lies.
        gradient: The gradient of this device's lookups.
        channel: The way to the other devices.
        routed: What devices need, of these lookups.
        clip_value: Bound on an element of a lookup's gradient.
    """

    placed: PlacedGroup
    gradient: RowGradients
    channel: Channel
    routed: RowsRoute
    clip_value: float | None

    @property
    def capacity(self) -> int:
        """Rows that go between each pair of devices in a round."""
        return self.routed.first.rows.shape[1]

    def receive(self, asked: Round) -> tuple[Int32[Array, " places"], Float[Array, "places dim"]]:
        """Return the rows that all devices have gradients of in a round, and these."""
        placed, channel = self.placed, self.channel
        lines = places(self.routed.route, asked.begins, self.capacity)
        at = dataclasses.replace(self.gradient.lookups, rows=lines)
        values, size = self.gradient.values, asked.rows.size
        sums = kernels.sum_rows(at, values, size, self.clip_value, parts_out=channel.parts)
        sums = channel.send_gradients(sums.reshape(*asked.rows.shape, -1), asked.used)
        rows = asked.rows.reshape(-1)
        is_now = _keys(placed, channel.index * placed.local_rows + rows) < asked.stop
        return jnp.where(is_now, rows, placed.local_rows), sums.reshape(rows.size, -1)

    def next(self, asked: Round) -> Round:
        """Return the round after a round."""
        placed, route = self.placed, self.routed.route
        stops = _stops(placed, route, asked.begins, self.capacity)
        agreed = jax.lax.pmin(stops, self.channel.axes)
        positions = asked.begins[:, None] + jnp.arange(self.capacity, dtype=jnp.int32)[None]
        keys = _keys(placed, route.slots)
        is_done = keys.at[positions].get(mode="clip") < agreed[:, None]
        begins = asked.begins + jnp.sum(
            is_done & (positions < route.ends[:, None]), axis=1, dtype=jnp.int32
        )
        return _ask(placed, route, begins, self.channel, self.capacity)

    def squares(self) -> Float[Array, " tables"]:
        """Return the sum of squares of the gradients of this device's rows, table by table."""

        def add(asked, squares):
            rows, gradients = self.receive(asked)
            at = Lookups(rows, None, None)
            return squares + table_squares(self.placed, at, gradients, None, self.channel)

        squares = jnp.zeros(len(self.placed.tables), jnp.float32)
        return _until_last(self.routed.first, add, self.next, squares)


def _until_last(
    first: Round,
    one_round: Callable[[Round, Any], Any],
    next_round: Callable[[Round], Round],
    carried: Any,
) -> Any:
    """Runs a round, and more until no device has anything left to ask for.

    The first stands outside of the loop, where the compiler can run others beside it; an even batch
    takes no more.

    Args:
        first: The first round.
        one_round: What happens in a round, given it and what is carried: what is carried then.
        next_round: From a round to the next.
        carried: What the first is given.
    """

    def body(state):
        asked = next_round(state[0])
        return asked, one_round(asked, state[1])

    state = (first, one_round(first, carried))
    return jax.lax.while_loop(lambda state: ~state[0].is_last, body, state)[1]


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
