"""The exchange of rows: each row travels once to every device that needs it, and is pooled there.

A device sorts the slots that its batch needs and drops repeats, so the slots of one owner lie
together. It requests them in rounds of up to ``capacity`` rows per owner. Shapes are static, no
request is dropped, and all devices agree on the number of rounds: an even batch takes one.

Each device sends its demand with its requests. The first round follows from ids alone, so it can be
sent ahead of the step. Rows answer the requests, and gradients take the opposite way. For each
device's batch the exchange moves ``distinct ids x dim`` numbers in both directions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.kernels.stretches import sum_stretches
from jaxrec.embed.kernels.updates import update_unique
from jaxrec.embed.outputs import pool_lookups
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel, ListLengths, run_if
from jaxrec.mesh.exchange.base import Cut, Exchange, clip_factors, table_squares
from jaxrec.mesh.exchange.lines import Lines, replace_lines, take_lines
from jaxrec.mesh.exchange.row_requests import ABSENT, RowRequests
from jaxrec.mesh.placed_group import PlacedGroup, layout_of_rows
from jaxrec.optim.norm import cut_rows

# Stop of a round that has space for all requests; larger than any row number.
_NOWHERE = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Rows(Exchange):
    """Exchange that sends each row once to every device whose batch needs it."""

    name: ClassVar[str] = "rows"
    takes_large_groups: ClassVar[bool] = True
    pools_max: ClassVar[bool] = True

    def refuse(self, cut: Cut) -> str | None:
        if cut.shares_devices and cut.optimizer.needs_whole_rows:
            return (
                f"its optimizer {type(cut.optimizer).__name__} with these settings needs whole "
                "rows, and a device has two parts of its columns; name each place once"
            )
        return None

    def traffic(self, work):
        # A row costs its request, its values and its gradient. The 3 numbers for each device are
        # the length of the list, its stop and the demand.
        row = 4 + 2 * 4 * work.dim
        return {"all-to-all": work.devices * (work.capacity * row + 3 * 4)}

    def route(self, placed, request, channel, capacity):
        return route_rows(placed, request.lookups, channel, capacity)

    def fetch(self, placed, table, request, route, channel):
        return _answer(table, route.first, channel)

    def refetch(self, placed, table, request, route, channel, written, capacity):
        asked = route.first

        def read(positions):
            rows = take_lines(asked.rows, positions, placed.local_rows)
            return _read_rows(table, rows, channel)

        return replace_lines(
            request.lines,
            written.contain(asked.rows),
            read,
            lambda: _answer(table, asked, channel),
            written,
            channel,
            math.ceil(capacity * asked.capacity),
        )

    def pool(self, placed, table, request, route, channel, dtype):
        rows, index = fetch_rows(placed, table, route, channel, request.lines)
        layout = layout_of_rows(request.layout, len(rows))
        weights, lengths = request.lookup_weights, request.lengths
        lookups, is_trained = request.scaled_lookups, placed.is_trained
        return pool_lookups(
            rows, index, lengths, weights, layout, dtype, lookups, is_trained, **channel.received
        )

    def rows(self, placed, table, request, route, channel):
        rows, index = fetch_rows(placed, table, route, channel, request.lines)
        # Padding and bad ids are both `ABSENT`, but padding reads as zeros (its index is the number
        # of rows) and a bad id as NaN.
        is_padding = request.lookups.rows == placed.padding
        without = jnp.where(is_padding, rows.shape[0], kernels.BAD_ROW)
        index = jnp.where(index == ABSENT, without, index)
        return kernels.row_lookup(rows, index, **channel.received)

    def update(self, placed, table, state, gradient, step, channel, capacity):
        return _rounds(placed, gradient, channel, capacity).update(table, state, step)

    def squares(self, placed, gradient, channel, capacity):
        return _rounds(placed, gradient, channel, capacity).squares()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """Row requests of one exchange round.

    Attributes:
        begins: Position in `RowRequests.slots` of the round's first slot of each owner.
        rows: Rows of this device's array that each device requests, padded with
            `PlacedGroup.local_rows`.
        lengths: Number of rows requested of each device, and by each device.
        stop: First row of this device, by its number, that some device leaves to a later round.
            Gradients of this row and of later ones wait.
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
        """Largest number of rows that a device can request of one owner in the round."""
        return self.rows.shape[1]

    @property
    def is_last(self) -> Bool[Array, ""]:
        """Whether no other round follows."""
        return self.demand <= self.capacity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowsRoute:
    """Route of `Rows`.

    Attributes:
        requests: Slots that this device needs, without repeats.
        first: Requests of the first round.
    """

    requests: RowRequests
    first: Round

    @property
    def demand(self) -> Float[Array, "..."]:
        """Capacity factor that the batch needs: the first demand over an even share of lookups."""
        shares = self.requests.begins.shape[-1] / self.requests.index.shape[-1]
        return self.first.demand * shares

    @property
    def owned_rows(self) -> Int32[Array, "devices capacity"]:
        """Rows of this device that an update with this route writes; see `Exchange.fetch`."""
        return self.first.rows

    @property
    def has_all_rows(self) -> Bool[Array, ""]:
        """Whether `owned_rows` has every row that the update writes: if one round is enough."""
        return self.first.is_last


def route_rows(placed: PlacedGroup, lookups: Lookups, channel: Channel, capacity: int) -> RowsRoute:
    """Sort the slots that a group's lookups need, and send the requests of the first round."""
    requests = RowRequests.of(placed, lookups)
    return RowsRoute(requests, _request(placed, requests, requests.begins, channel, capacity))


def _request(
    placed: PlacedGroup,
    requests: RowRequests,
    begins: Int32[Array, " devices"],
    channel: Channel,
    capacity: int,
) -> Round:
    """Send the requests of the round that begins at the positions ``begins`` of the slots."""
    rows = requests.local_rows(placed, requests.positions(begins, capacity))
    stops = _stops(placed, requests, begins, capacity)
    left = requests.ends - begins
    # Every owner learns every device's demand, so all of them count the same rounds. It travels
    # with the requests: a collective of its own would cost a launch and a wait.
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
    """Return, by owner, the first row that this device leaves to a later round.

    A row is given by its number (`_row_numbers`). It is `_NOWHERE` for an owner whose requested
    rows are all in this round.
    """
    limits = jnp.minimum(begins + capacity, requests.ends)
    after = _row_numbers(placed, requests.slots).at[limits].get(mode="clip")
    stops = jnp.where(limits < requests.ends, after, _NOWHERE)
    # Slices of a row lie at several owners, which must all stop at the same row.
    return jnp.broadcast_to(stops.min(), stops.shape) if placed.joins_slices else stops


def _row_numbers(placed: PlacedGroup, slots: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Number the rows of slots; slots that are updated together have one number.

    On each device the numbers ascend with the slots.
    """
    return placed.whole_rows(slots) if placed.joins_slices else slots


def fetch_rows(
    placed: PlacedGroup,
    table: Float[TableArray, "local_rows dim"],
    route: RowsRoute,
    channel: Channel,
    lines: Lines | None = None,
) -> tuple[Float[Array, "fetched dim"], Int32[Array, " n"]]:
    """Fetch the rows of a route; return them, and each lookup's index among them, or `ABSENT`.

    ``lines`` are the rows of the first round, if they came ahead.
    """
    requests, capacity = route.requests, route.first.capacity

    def one_round(asked, rows):
        # A gather: XLA sorts the indices of a scatter of rows on TPUs.
        answers = _answer(table, asked, channel)
        index = requests.slots_in_round(asked.begins, capacity)
        index = jnp.pad(index, (0, len(rows) - index.size), constant_values=ABSENT)
        new = answers.reshape(-1, answers.shape[-1]).at[index].get(mode="clip")
        return jnp.where((index == ABSENT)[:, None], rows, new)

    def next_round(asked):
        begins = jnp.minimum(asked.begins + capacity, requests.ends)
        return _request(placed, requests, begins, channel, capacity)

    def all_rounds(carried):
        rows = _until_last(route.first, one_round, next_round, jnp.concatenate(carried[0]))
        return channel.split(rows), requests.index

    first = _answer(table, route.first, channel) if lines is None else lines
    first = first.reshape(-1, first.shape[-1])
    index = requests.index_in_round(requests.begins, capacity)
    if capacity >= index.size:
        return first, index  # one round is enough for any batch
    # If one round was enough, rows stay where they came in, [devices * capacity]. Otherwise all
    # rounds run from the start and store rows in the order of `slots`, in the same array. So it
    # needs a row for each lookup, which it has unless the capacity is below an even share.
    missing = max(0, index.size - len(first))
    in_arrays = len(channel.split(first))
    rows = jnp.pad(first, ((0, -(-missing // in_arrays) * in_arrays), (0, 0)))
    arrays = channel.split(rows)
    arrays, index = run_if(~route.first.is_last, all_rounds, (arrays, index))
    return jnp.concatenate(arrays), index


def _answer(table: Float[TableArray, "local_rows dim"], asked: Round, channel: Channel) -> Lines:
    """Send each device the rows that it requested in a round."""
    return channel.send_rows(_read_rows(table, asked.rows, channel), asked.lengths.reversed)


def _read_rows(
    table: Float[TableArray, "local_rows dim"], rows: Int32[Array, "devices n"], channel: Channel
) -> Float[Array, "devices n dim"]:
    """Read rows that will be sent."""
    lines = kernels.row_lookup(table, rows.reshape(-1), **channel.sent)
    return lines.reshape(*rows.shape, -1)


def _rounds(
    placed: PlacedGroup, gradient: RowGradients, channel: Channel, capacity: int
) -> GradientRounds:
    """Return the rounds of a gradient; one of merged lookups has no route, and is routed now."""
    route = gradient.route
    if route is None:
        route = route_rows(placed, gradient.lookups, channel, capacity)
    return GradientRounds(placed, gradient, channel, route)


@dataclasses.dataclass(frozen=True)
class GradientRounds:
    """Rounds in which the gradients of this device's lookups travel to the rows' owners."""

    # A row is updated once, so all its gradients must arrive in the same round, and so must those
    # of its other column slices if the optimizer needs whole rows. An owner therefore stops at the
    # first row that some device had to leave out (`Round.stop`). Gradients of that row and of later
    # ones that did arrive are ignored, and are sent again in the next round.

    placed: PlacedGroup
    gradient: RowGradients
    channel: Channel
    route: RowsRoute

    def update(
        self, table: Float[TableArray, "local_rows dim"], state: dict[str, TableArray], step: Any
    ) -> tuple[Float[TableArray, "local_rows dim"], dict[str, TableArray]]:
        """Update each of this device's rows once."""
        placed, channel, route = self.placed, self.channel, self.route
        bounded = placed.group.optimizer.of_batch
        # Both bounds are applied here: elements by the sender, before it sums them by row, and
        # norms by factors from all rounds of all devices, in a pass of their own.
        optimizer = dataclasses.replace(bounded, clip_value=None, clip_norm=None)
        factors = None
        if bounded.clip_norm is not None:
            factors = clip_factors(self.squares(bounded.clip_value), bounded.clip_norm, channel)

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

    def squares(self, clip_value: float | None = None) -> Float[Array, " tables"]:
        """Return the sum of squares of each table's gradient, over this device's rows.

        ``clip_value`` bounds the elements of gradients before they are squared.
        """

        def add(asked, squares):
            rows, gradients = self._receive(asked, clip_value)
            owned = RowGradients(Lookups(rows, None, None), gradients)
            return squares + table_squares(self.placed, owned, None, self.channel)

        squares = jnp.zeros(len(self.placed.tables), jnp.float32)
        return _until_last(self.route.first, add, self._next, squares)

    def _receive(
        self, asked: Round, clip_value: float | None
    ) -> tuple[Int32[Array, " received"], Float[Array, "received dim"]]:
        """Send a round's gradients; return the gradients that this device receives, and their rows.

        A row that must wait for a later round is replaced by `PlacedGroup.local_rows`, which no
        update writes.
        """
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
        """Send the requests of the next round, which begins where each owner had to stop."""
        placed, requests = self.placed, self.route.requests
        # `Round.stop` is the minimum at this owner; a requester needs that of each owner it asked.
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
    """Return ``carried`` after ``one_round(asked, carried)`` of each round, including the last."""
    # The first round stands outside of the loop, where XLA can run other work beside it. An even
    # batch takes no other. All devices agree on `is_last`, so none waits in a collective of the
    # loop's body that another has left.

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
    """Turn each run's sum over this device's columns of a row into the sum over the whole row.

    ``wanted`` has the numbers of the rows that this device requested in the round.
    """
    # No owner has all slices of a row, but a device that sent a gradient requested all of them. So
    # the partial sums go back to it, it adds them up, and the totals go out to the owners.
    home = channel.send(partial[runs.inverse].reshape(wanted.shape)).reshape(-1)
    slices = kernels.build_runs(wanted.reshape(-1), jnp.iinfo(jnp.int32).max)
    ordered, column = home[slices.order], lambda values: values[:, None]
    totals = sum_stretches(column, ordered, slices.segments, home.size, 1)[:, 0]
    # All devices that requested a row made the same total, so it does not matter which is kept.
    back = channel.send(totals[slices.inverse].reshape(wanted.shape)).reshape(-1)
    return jnp.zeros(back.shape, back.dtype).at[runs.inverse].set(back)
