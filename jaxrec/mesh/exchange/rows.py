"""The exchange of rows: each row travels once to every device that needs it, and is pooled there.

A device sorts the slots that its batch needs and drops repeats. The slots of one owner then lie
together. They are requested in rounds of at most ``capacity`` rows of each owner: shapes are
static, nothing is dropped, and all devices agree on the number of rounds. An even batch takes one.
Each device sends its demand with its requests. The first round follows from ids alone, so that it
can be sent ahead; rows and gradients answer it.

An exchange of this kind moves ``distinct ids x dim`` numbers of each device's batch, there and
back.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.kernels.stretches import sum_stretches
from jaxrec.embed.kernels.updates import update_unique
from jaxrec.embed.outputs import pool
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel, ListLengths, run_if
from jaxrec.mesh.exchange.base import Cut, Exchange, clip_factors, table_squares
from jaxrec.mesh.exchange.row_requests import ABSENT, RowRequests
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.optim.norm import cut_rows

# Where a round ends that has space for all requests.
_NOWHERE = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Rows(Exchange):
    """Rows travel to the samples, once for each device that needs them."""

    name: ClassVar[str] = "rows"
    takes_large_groups: ClassVar[bool] = True

    def refuse(self, cut: Cut) -> str | None:
        if cut.shares_devices and cut.optimizer.needs_whole_rows:
            return (
                f"its optimizer {type(cut.optimizer).__name__} with these settings needs whole "
                "rows, and a device has two parts of its columns; name each place once"
            )
        return None

    def traffic(self, work):
        # Requests, rows and gradients; and the length of each list, its stop and the demand.
        row = 4 + 2 * 4 * work.dim
        return {"all-to-all": work.devices * (work.capacity * row + 3 * 4)}

    def route(self, placed, request, channel, capacity):
        return route_rows(placed, request.lookups, channel, capacity)

    def pool(self, placed, table, request, route, channel, dtype):
        rows, index = fetch_rows(placed, table, route, channel)
        layout = _layout_of_rows(request.layout, len(rows))
        weights, lengths = request.lookup_weights, request.lengths
        pooled = pool(rows, index, lengths, weights, layout, dtype, **channel.received)
        return pooled, request.scaled_lookups

    def rows(self, placed, table, request, route, channel):
        rows, index = fetch_rows(placed, table, route, channel)
        # A lookup without a row gives zeros if it is padding, and NaN if its id is bad.
        is_padding = request.lookups.rows == placed.padding
        without = jnp.where(is_padding, rows.shape[0], kernels.BAD_ROW)
        index = jnp.where(index == ABSENT, without, index)
        return kernels.row_lookup(rows, index, **channel.received)

    def update(self, placed, table, state, gradient, step, channel, capacity):
        rounds = _rounds(placed, gradient, channel, capacity)
        return rounds.update(table, state, step)

    def squares(self, placed, gradient, channel, capacity):
        return _rounds(placed, gradient, channel, capacity).squares()


def _layout_of_rows(layout: BagLayout, num_rows: int) -> BagLayout:
    """Return the layout of a batch whose ids are rows of one array, features one by one."""
    return dataclasses.replace(
        layout,
        id_starts=tuple(itertools.accumulate(layout.capacities, initial=0))[:-1],
        row_offsets=(0,) * layout.num_features,
        row_counts=(num_rows,) * layout.num_features,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """Row requests of one exchange round.

    Attributes:
        begins: Position of the round's first slot of each owner, among this device's slots.
        rows: The rows that each device requests of this one; padded with `local_rows`.
        lengths: Numbers of rows that are requested of each device, and by each.
        stop: The first row for which some device has no space in this round; the whole row where
            column slices are updated together.
        demand: Largest number of rows that a device still has to request from one owner. Another
            round follows if it exceeds the capacity.
    """

    begins: Int32[Array, " devices"]
    rows: Int32[Array, "devices capacity"]
    lengths: ListLengths
    stop: Int32[Array, ""]
    demand: Int32[Array, ""]

    @property
    def capacity(self) -> int:
        """Number of rows of each owner that the round has space for."""
        return self.rows.shape[1]

    @property
    def is_last(self) -> Bool[Array, ""]:
        """Whether no other round follows."""
        return self.demand <= self.capacity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsRoute:
    """Route of an exchange of rows.

    Attributes:
        requests: The rows that this device needs.
        first: The first round.
    """

    requests: RowRequests
    first: Round

    @property
    def demand(self) -> Float[Array, "..."]:
        """Largest number of rows that a device needs of one owner, in even shares."""
        shares = self.requests.begins.shape[-1] / self.requests.index.shape[-1]
        return self.first.demand * shares


def route_rows(placed: PlacedGroup, lookups: Lookups, channel: Channel, capacity: int) -> RowsRoute:
    """Request the rows of the first round.

    Args:
        placed: The group.
        lookups: This device's lookups.
        channel: Channel to the other devices.
        capacity: Number of rows that a round carries between two devices.
    """
    requests = RowRequests.of(placed, lookups)
    return RowsRoute(requests, _request(placed, requests, requests.begins, channel, capacity))


def _request(
    placed: PlacedGroup,
    requests: RowRequests,
    begins: Int32[Array, " devices"],
    channel: Channel,
    capacity: int,
) -> Round:
    """Return the round that begins at the positions."""
    rows = requests.local_rows(placed, requests.positions(begins, capacity))
    stops = _stops(placed, requests, begins, capacity)
    left = requests.ends - begins
    rows, lengths, (stops, demands) = channel.send_lists(
        rows,
        jnp.clip(left, 0, capacity),
        stops[:, None],
        jnp.broadcast_to(left.max(), (left.size, 1)),
        fill=placed.local_rows,
    )
    return Round(begins, rows, lengths, stops.min(), demands.max())


def _stops(
    placed: PlacedGroup, requests: RowRequests, begins: Int32[Array, " devices"], capacity: int
) -> Int32[Array, " devices"]:
    """Return the first row of each owner for which this device has no space in a round."""
    limits = jnp.minimum(begins + capacity, requests.ends)
    after = _row_numbers(placed, requests.slots).at[limits].get(mode="clip")
    stops = jnp.where(limits < requests.ends, after, _NOWHERE)
    return jnp.broadcast_to(stops.min(), stops.shape) if placed.joins_slices else stops


def _row_numbers(placed: PlacedGroup, slots: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Return the numbers of the rows that are updated together; they ascend with the slots."""
    return placed.whole_rows(slots) if placed.joins_slices else slots


def fetch_rows(
    placed: PlacedGroup,
    table: Float[TableArray, "local_rows dim"],
    route: RowsRoute,
    channel: Channel,
) -> tuple[Float[Array, "fetched dim"], Int32[Array, " n"]]:
    """Return the rows of a route, and the index of each lookup's row among them, or `ABSENT`.

    Args:
        placed: The group.
        table: This device's rows.
        route: The route of this device's lookups.
        channel: Channel to the other devices.
    """
    requests, capacity = route.requests, route.first.capacity

    def answer(asked: Round) -> Float[Array, "devices capacity dim"]:
        rows = kernels.row_lookup(table, asked.rows.reshape(-1), **channel.sent)
        return channel.send_rows(rows.reshape(*asked.rows.shape, -1), asked.lengths.reversed)

    def one_round(asked, rows):
        return rows.at[requests.positions(asked.begins, capacity)].set(answer(asked), mode="drop")

    def next_round(asked):
        begins = jnp.minimum(asked.begins + capacity, requests.ends)
        return _request(placed, requests, begins, channel, capacity)

    def all_rounds(carried):
        rows = _until_last(route.first, one_round, next_round, jnp.concatenate(carried[0]))
        return channel.split(rows), requests.index

    first = answer(route.first)
    first = first.reshape(-1, first.shape[-1])
    index = requests.index_in_round(requests.begins, capacity)
    if capacity >= index.size:
        return first, index
    # Where one round is enough, rows stay where they came in. Their array holds a row for each
    # lookup, unless the capacity is below an even share.
    missing = max(0, index.size - len(first))
    in_arrays = len(channel.split(first))
    rows = jnp.pad(first, ((0, -(-missing // in_arrays) * in_arrays), (0, 0)))
    arrays = channel.split(rows)
    arrays, index = run_if(~route.first.is_last, all_rounds, (arrays, index))
    return jnp.concatenate(arrays), index


def _rounds(
    placed: PlacedGroup, gradient: RowGradients, channel: Channel, capacity: int
) -> GradientRounds:
    route = gradient.route
    if route is None:
        route = route_rows(placed, gradient.lookups, channel, capacity)
    return GradientRounds(placed, gradient, channel, route)


@dataclasses.dataclass(frozen=True)
class GradientRounds:
    """Rounds in which gradients travel to the rows' owners.

    All gradients of a row, and of its other column slices if those are updated together, must
    arrive in the same round. So in each round an owner stops at the first row for which some device
    has no space, and the gradients of later rows count in the next.

    Attributes:
        placed: The group.
        gradient: The gradient of this device's lookups.
        channel: Channel to the other devices.
        route: The route of these lookups.
    """

    placed: PlacedGroup
    gradient: RowGradients
    channel: Channel
    route: RowsRoute

    def update(
        self, table: Float[TableArray, "local_rows dim"], state: dict[str, TableArray], step: Any
    ) -> tuple[Float[TableArray, "local_rows dim"], dict[str, TableArray]]:
        """Update each of this device's rows once; see `Exchange.update`."""
        placed, channel, route = self.placed, self.channel, self.route
        bounded = placed.group.optimizer.of_batch
        optimizer = dataclasses.replace(bounded, clip_value=None, clip_norm=None)
        factors = None
        if bounded.clip_norm is not None:
            factors = clip_factors(self._squares(bounded.clip_value), bounded.clip_norm, channel)

        def one_round(asked, carried):
            table, state = carried
            rows, gradients = self._receive(asked, bounded.clip_value)
            rows = self.gradient.rows_to_write(rows, placed.local_rows)
            scales = None if factors is None else factors[placed.tables_of(rows, channel.index)]
            lookups = Lookups(rows, None, scales)
            if not placed.joins_slices:
                return kernels.fused_update(
                    table, state, lookups, gradients, optimizer, step, (0,), **channel.received
                )
            runs, sums = RowGradients(lookups, gradients).sum_by_row(placed.local_rows)
            positions = route.requests.positions(asked.begins, asked.capacity)
            numbers = _row_numbers(placed, route.requests.slots)
            wanted = numbers.at[positions].get(mode="fill", fill_value=placed.group.num_rows)
            total = functools.partial(_total, runs=runs, wanted=wanted, channel=channel)
            is_column = placed.is_column(runs.unique, channel.index)
            with cut_rows(placed.whole_dim, total, is_column):
                return update_unique(table, state, runs.unique, sums, optimizer, step, (0,))

        return _until_last(route.first, one_round, self._next, (table, state))

    def squares(self) -> Float[Array, " tables"]:
        """Return the sum of squares of the gradients of this device's rows, table by table."""
        return self._squares(None)

    def _squares(self, clip_value: float | None) -> Float[Array, " tables"]:
        def add(asked, squares):
            rows, gradients = self._receive(asked, clip_value)
            owned = RowGradients(Lookups(rows, None, None), gradients)
            return squares + table_squares(self.placed, owned, None, self.channel)

        squares = jnp.zeros(len(self.placed.tables), jnp.float32)
        return _until_last(self.route.first, add, self._next, squares)

    def _receive(
        self, asked: Round, clip_value: float | None
    ) -> tuple[Int32[Array, " received"], Float[Array, "received dim"]]:
        """Return the rows that devices have gradients of in a round, and the gradients."""
        placed, channel = self.placed, self.channel
        index = self.route.requests.index_in_round(asked.begins, asked.capacity)
        lookups = dataclasses.replace(self.gradient.lookups, rows=index)
        values, size = self.gradient.values, asked.rows.size
        sums = kernels.sum_rows(lookups, values, size, clip_value, **channel.sent)
        sums = channel.send_gradients(sums.reshape(*asked.rows.shape, -1), asked.lengths)
        rows = asked.rows.reshape(-1)
        numbers = _row_numbers(placed, placed.device_slots(channel.index, rows))
        rows = jnp.where(numbers < asked.stop, rows, placed.local_rows)
        return rows, sums.reshape(rows.size, -1)

    def _next(self, asked: Round) -> Round:
        """Return the round after a round."""
        placed, requests = self.placed, self.route.requests
        stops = _stops(placed, requests, asked.begins, asked.capacity)
        agreed = jax.lax.pmin(stops, self.channel.axes)
        positions = asked.begins[:, None] + jnp.arange(asked.capacity, dtype=jnp.int32)[None]
        numbers = _row_numbers(placed, requests.slots)
        is_done = numbers.at[positions].get(mode="clip") < agreed[:, None]
        begins = asked.begins + jnp.sum(
            is_done & (positions < requests.ends[:, None]), axis=1, dtype=jnp.int32
        )
        return _request(placed, requests, begins, self.channel, asked.capacity)


def _until_last(
    first: Round,
    one_round: Callable[[Round, Any], Any],
    next_round: Callable[[Round], Round],
    carried: Any,
) -> Any:
    """Run rounds until no device has anything left to request.

    The first stands outside of the loop, where the compiler can run other work beside it; an even
    batch takes no more.

    Args:
        first: The first round.
        one_round: Runs a round, given it and what is carried, and returns what is carried on.
        next_round: Returns the round after a round.
        carried: Input of the first round.
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
    """Return sums over column slices of rows, one a run, as sums over whole rows.

    The device that a gradient came from adds up: it requested all slices of the row. So partial
    sums go back the way the gradients came, and totals out again.
    """
    home = channel.send(partial[runs.inverse].reshape(wanted.shape)).reshape(-1)
    slices = kernels.build_runs(wanted.reshape(-1), jnp.iinfo(jnp.int32).max)
    ordered, column = home[slices.order], lambda values: values[:, None]
    totals = sum_stretches(column, ordered, slices.segments, home.size, 1)[:, 0]
    # Every device that requested a row has made the same total; any of them will do.
    back = channel.send(totals[slices.inverse].reshape(wanted.shape)).reshape(-1)
    return jnp.zeros(back.shape, back.dtype).at[runs.inverse].set(back)
