"""The exchange of sums: ids go to the rows, are pooled there, and sums of bags come home.

Each device sends every id, repeats and all, to the row's owner. The owner pools what it has of each
bag of all devices; a reduce-scatter adds the owners' parts up at the bag's home. Backward, an
all-gather brings the gradients of all bags to all owners. That moves ``bags x dim`` numbers of the
whole batch however long bags are, where the exchange of rows moves ``distinct ids x dim``.

Between each pair of devices there is room for ``capacity`` ids. A batch that does not fit, which
each device says with the ids it sends, runs with room for all. Ids can be sent ahead
(`route_sums`). All of this is inside `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.config import MAX_ROWS
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.lookup import pool
from jaxrec.embed.update import RowGradients
from jaxrec.mesh.collectives import Channel, Used, run_if
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.norms import clip_tables, table_squares
from jaxrec.optim.hyperparameter import Step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SumsRoute:
    """What an exchange of sums needs to know of other devices, once they have sent each other ids.

    Attributes:
        local: For each lookup of this device the row of its owner's array; -1 at an id outside its
            table.
        order: These lookups by owner and bag; those of no owner, padding, last.
        counts: How many go to each owner.
        rows: The rows that each device looks up here; `local_rows` where there is none. Where
            some device has more lookups for an owner than there is room for, they are of no use.
        used: How many are looked up at each device, and by each.
        lengths: Lookups of each bag of each device that are of rows here.
        most: Lookups that any device has for one owner, at most.
    """

    local: Int32[Array, " n"]
    order: Int32[Array, " n"]
    counts: Int32[Array, " devices"]
    rows: Int32[Array, "devices capacity"]
    used: Used
    lengths: Int32[Array, "devices bags"]
    most: Int32[Array, ""]

    def map_awaited(self, function: Callable[[Array], Array]) -> SumsRoute:
        """The route with a function applied to the indices that exchanges wait for."""
        return dataclasses.replace(self, rows=function(self.rows), counts=function(self.counts))

    @property
    def load(self) -> Float[Array, "..."]:
        """Lookups that any device has for one owner, at most, in even shares of its lookups."""
        return self.most * (self.counts.shape[-1] / self.order.shape[-1])

    @property
    def is_over(self) -> Bool[Array, ""]:
        """Whether some device has more than there is room for."""
        return self.most > self.rows.shape[1]

    @property
    def has_room_for_all(self) -> bool:
        """Whether that cannot be."""
        return self.rows.shape[1] == self.order.size

    def send_scales(
        self, scales: Float[Array, " n"] | None, capacity: int, channel: Channel
    ) -> Float[Array, " received"] | None:
        """The scales of the lookups that come in with so much room; differentiable."""
        if scales is None:
            return None
        return channel.send(_pack(self.order, self.counts, scales, capacity, 0)).reshape(-1)

    def all_rows(self, placed: PlacedGroup, channel: Channel) -> Int32[Array, "devices n"]:
        """`rows`, with room for all."""
        every = self.order.size
        rows = _pack(self.order, self.counts, self.local, every, placed.local_rows)
        return channel.send_lists(rows, self.counts, fill=placed.local_rows)[0]


def route_sums(
    placed: PlacedGroup, lookups: Lookups, num_bags: int, channel: Channel, capacity: int
) -> SumsRoute:
    """Has all devices send each other the ids that they look up.

    Args:
        placed: Where the group lies.
        lookups: This device's lookups; their scales are not looked at.
        num_bags: Bags of this device.
        channel: The way to the other devices.
        capacity: Ids that go between each pair of devices.
    """
    devices = placed.num_devices
    if devices * num_bags > MAX_ROWS:
        raise ValueError(
            f"tables {', '.join(placed.tables)}: {num_bags} bags of each of {devices} devices "
            f"are more than int32 can number ({MAX_ROWS}); use smaller batches"
        )
    assert lookups.bags is not None
    slots = placed.slots(lookups.rows)
    has_row = slots < placed.num_slots
    # An id outside its table has no owner; the first device makes its bag NaN.
    is_padding = lookups.rows == placed.group.num_rows
    owners = jnp.where(has_row, slots // placed.local_rows, jnp.where(is_padding, devices, 0))
    local = jnp.where(has_row, slots - owners * placed.local_rows, -1)
    keys = jnp.where(is_padding, devices * num_bags, owners * num_bags + lookups.bags)
    buckets = kernels.bucket(keys, devices * num_bags)
    lengths = buckets.counts.reshape(devices, num_bags)
    counts = lengths.sum(axis=1, dtype=jnp.int32)
    capacity = min(capacity, local.size)
    rows = _pack(buckets.order, counts, local, capacity, placed.local_rows)
    rows, used, (lengths, mosts) = channel.send_lists(
        rows,
        jnp.minimum(counts, capacity),
        lengths,
        jnp.broadcast_to(counts.max(), (devices, 1)),
        fill=placed.local_rows,
    )
    return SumsRoute(local, buckets.order, counts, rows, used, lengths, mosts.max())


def _pack(
    order: Int32[Array, " n"],
    counts: Int32[Array, " devices"],
    values: Shaped[Array, " n"],
    capacity: int,
    fill: int,
) -> Shaped[Array, "devices capacity"]:
    begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
    places = jnp.arange(capacity, dtype=jnp.int32)[None]
    lookups = order.at[begins[:, None] + places].get(mode="clip")
    lookups = jnp.where(places < counts[:, None], lookups, order.size)
    return values.at[lookups].get(mode="fill", fill_value=fill)


def pool_at_owners(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    scales: Float[Array, " n"] | None,
    channel: Channel,
    routed: SumsRoute,
) -> Float[Array, "bags dim"]:
    """The pooled rows of this device's bags, float32; differentiable in ``scales``.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        scales: The scales of this device's lookups.
        channel: The way to the other devices.
        routed: What devices look up here.
    """
    devices, num_bags = routed.lengths.shape

    def pooled(rows: Int32[Array, "devices _"]) -> Float[Array, "devices bags dim"]:
        room = rows.shape[1]
        factors = routed.send_scales(scales, room, channel)
        layout = _received_layout(placed, num_bags, room)
        lengths = routed.lengths.reshape(-1)
        sums = pool(table, rows.reshape(-1), lengths, factors, layout, jnp.dtype("float32"))
        return sums.reshape(devices, num_bags, -1)

    if routed.has_room_for_all:
        return channel.sum_rows(pooled(routed.rows))
    sums = jax.lax.cond(
        routed.is_over,
        lambda: pooled(routed.all_rows(placed, channel)),
        lambda: pooled(routed.rows),
    )
    return channel.sum_rows(sums)


def update_at_owners(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    state: dict[str, Array],
    gradient: RowGradients,
    step: Step,
    channel: Channel,
    routed: SumsRoute,
) -> tuple[Float[Array, "local_rows dim"], dict[str, Array]]:
    """Brings the gradients of all bags to all devices, which update each of their rows once.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        state: Their optimizer state.
        gradient: The gradient of this device's lookups.
        step: Number of updates made before.
        channel: The way to the other devices.
        routed: What devices looked up here, of these lookups.
    """
    received = _received_gradients(placed, gradient, channel, routed)

    def update(carried: Any, rows: Int32[Array, "devices _"]) -> Any:
        table, state = carried
        return update_owned(placed, table, state, received(rows), step, channel)

    if routed.has_room_for_all:
        return update((table, state), routed.rows)
    # Loops of one step at most, and no `cond`: that would copy the table.
    new = run_if(~routed.is_over, lambda carried: update(carried, routed.rows), (table, state))
    return run_if(
        routed.is_over, lambda carried: update(carried, routed.all_rows(placed, channel)), new
    )


def squares_at_owners(
    placed: PlacedGroup, gradient: RowGradients, channel: Channel, routed: SumsRoute
) -> Float[Array, " tables"]:
    """Return the sum of squares of the gradients of this device's rows, table by table.

    Args:
        placed: Where the group lies.
        gradient: The gradient of this device's lookups.
        channel: The way to the other devices.
        routed: What devices looked up here, of these lookups.
    """
    received = _received_gradients(placed, gradient, channel, routed)

    def squares(rows: Int32[Array, "devices _"]) -> Float[Array, " tables"]:
        here = received(rows)
        return table_squares(placed, here.lookups, here.values, None, channel)

    if routed.has_room_for_all:
        return squares(routed.rows)
    return jax.lax.cond(
        routed.is_over,
        lambda: squares(routed.all_rows(placed, channel)),
        lambda: squares(routed.rows),
    )


def _received_gradients(
    placed: PlacedGroup, gradient: RowGradients, channel: Channel, routed: SumsRoute
) -> Callable[[Int32[Array, "devices _"]], RowGradients]:
    """Bring the gradients of all bags to all devices.

    Returns:
        A function of the rows that devices looked up here, which gives their gradient.
    """
    gradients = channel.gather_gradients(gradient.values)
    scales, num_bags = gradient.lookups.scales, routed.lengths.shape[1]

    def received(rows: Int32[Array, "devices _"]) -> RowGradients:
        room = rows.shape[1]
        factors = routed.send_scales(scales, room, channel)
        layout = _received_layout(placed, num_bags, room)
        lookups = kernels.flatten_bags(
            rows.reshape(-1), routed.lengths.reshape(-1), factors, layout, placed.local_rows
        )
        return RowGradients(lookups, gradients, is_applied=gradient.is_applied)

    return received


def update_owned(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    state: dict[str, Array],
    gradient: RowGradients,
    step: Step,
    channel: Channel,
    parts: int = 1,
) -> tuple[Float[Array, "local_rows dim"], dict[str, Array]]:
    """Updates each of this device's rows once, by all gradients that there are of them.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        state: Their optimizer state.
        gradient: The gradient of all devices' lookups of these rows.
        step: Number of updates made before.
        channel: The way to the other devices.
        parts: In how many equal parts the gradients were received.
    """
    gradient = clip_tables(placed, gradient, channel)
    optimizer = dataclasses.replace(placed.group.optimizer, clip_norm=None)
    rows = gradient.rows_to_write(gradient.lookups.rows, placed.local_rows)
    lookups = dataclasses.replace(gradient.lookups, rows=rows)
    return kernels.fused_update(
        table, state, lookups, gradient.values, optimizer, step, parts_in=parts
    )


def _received_layout(placed: PlacedGroup, num_bags: int, capacity: int) -> BagLayout:
    """What comes in from all devices, as a batch with a feature for each."""
    devices = placed.num_devices
    return BagLayout(
        id_starts=tuple(range(0, devices * capacity, capacity)),
        capacities=(capacity,) * devices,
        length_starts=tuple(range(0, devices * num_bags, num_bags)),
        strides=(num_bags,) * devices,
        row_offsets=(0,) * devices,
        row_counts=(placed.local_rows,) * devices,
        means=(False,) * devices,
        interleave=False,
    )
