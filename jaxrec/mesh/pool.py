"""The exchange of sums: ids go to the rows, are pooled there, and sums of bags come home.

Each device sends every id, repeats and all, to the row's owner. The owner pools what it has of each
bag of all devices; a reduce-scatter adds the owners' parts up at the bag's home. Backward, an
all-gather brings the gradients of all bags to all owners. That moves ``bags x dim`` numbers of the
whole batch however long bags are, where the exchange of rows moves ``distinct ids x dim``.

Between each pair of devices there is room for ``capacity`` ids. A batch that does not fit, which
each device says with the ids it sends, runs with room for all. All of this is inside
`jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.config import MAX_ROWS
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.lookup import pool
from jaxrec.embed.update import RowGradients
from jaxrec.mesh.collectives import Channel, run_if
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.norms import clip_tables


def pool_at_owners(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    lookups: Lookups,
    scales: Float[Array, " n"] | None,
    num_bags: int,
    channel: Channel,
    capacity: int,
) -> Float[Array, "bags dim"]:
    """The pooled rows of this device's bags, float32; differentiable in ``scales``.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        lookups: This device's lookups; their scales are not looked at,
        scales: but these.
        num_bags: Bags of this device.
        channel: The way to the other devices.
        capacity: Ids that go between each pair of devices.
    """
    sending = _Sending.of(placed, lookups, num_bags, channel)
    most = sending.order.size
    capacity = min(capacity, most)

    def pooled(rows: Int32[Array, "devices _"]) -> Float[Array, "bags devices dim"]:
        room = rows.shape[1]
        factors = None if scales is None else channel.send(sending.pack(scales, room)).reshape(-1)
        layout = _received_layout(placed, num_bags, room)
        sums = pool(
            table, rows.reshape(-1), lengths.reshape(-1), factors, layout, jnp.dtype("float32")
        )
        return sums.reshape(num_bags, placed.num_devices, -1)

    is_over, (rows, lengths) = channel.send_with_flag(
        sending.is_over(capacity), sending.rows(capacity), sending.lengths
    )
    if capacity == most:
        return channel.sum_rows(pooled(rows))
    sums = jax.lax.cond(
        is_over,
        lambda: pooled(channel.send(sending.rows(most))),
        lambda: pooled(rows),
    )
    return channel.sum_rows(sums)


def update_at_owners(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    state: dict[str, Array],
    gradient: RowGradients,
    step: Int32[Array, ""],
    channel: Channel,
    capacity: int,
) -> tuple[Float[Array, "local_rows dim"], dict[str, Array]]:
    """Brings the gradients of all bags to all devices, which update each of their rows once.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        state: Their optimizer state.
        gradient: The gradient of this device's lookups.
        step: Number of updates made before.
        channel: The way to the other devices.
        capacity: Ids that go between each pair of devices.
    """
    gradients = channel.gather_gradients(gradient.values)
    scales = gradient.lookups.scales
    sending = _Sending.of(placed, gradient.lookups, gradient.values.shape[0], channel)
    most = sending.order.size
    capacity = min(capacity, most)

    def update(carried: Any, rows: Array, lines: Array) -> Any:
        table, state = carried
        room = rows.shape[1]
        factors = None if scales is None else channel.send(sending.pack(scales, room)).reshape(-1)
        lookups = Lookups(rows.reshape(-1), lines.reshape(-1), factors)
        here = RowGradients(lookups, gradients)
        return update_owned(placed, table, state, here, step, channel)

    def update_all(carried: Any) -> Any:
        return update(carried, *channel.send_together(sending.rows(most), sending.lines(most)))

    is_over, (rows, lines) = channel.send_with_flag(
        sending.is_over(capacity), sending.rows(capacity), sending.lines(capacity)
    )
    if capacity == most:
        return update((table, state), rows, lines)
    # Loops of one step at most, and no `cond`: that would copy the table.
    new = run_if(~is_over, lambda carried: update(carried, rows, lines), (table, state))
    return run_if(is_over, update_all, new)


def update_owned(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    state: dict[str, Array],
    gradient: RowGradients,
    step: Int32[Array, ""],
    channel: Channel,
) -> tuple[Float[Array, "local_rows dim"], dict[str, Array]]:
    """Updates each of this device's rows once, by all gradients that there are of them.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        state: Their optimizer state.
        gradient: The gradient of all devices' lookups of these rows.
        step: Number of updates made before.
        channel: The way to the other devices.
    """
    gradient = clip_tables(placed, gradient, channel)
    optimizer = dataclasses.replace(placed.group.optimizer, clip_norm=None)
    return kernels.fused_update(table, state, gradient.lookups, gradient.values, optimizer, step)


@dataclasses.dataclass(frozen=True)
class _Sending:
    """A device's lookups as they leave it: by owner, and by bag within.

    Attributes:
        placed: Where the group lies.
        channel: The way to the other devices.
        local: For each lookup the row of its owner's array; -1 at an id outside its table.
        bags: For each lookup its bag.
        order: The lookups by owner and bag; those of no owner, padding, last.
        lengths: Lookups of each bag that go to each owner.
    """

    placed: PlacedGroup
    channel: Channel
    local: Int32[Array, " n"]
    bags: Int32[Array, " n"]
    order: Int32[Array, " n"]
    lengths: Int32[Array, "devices bags"]

    @classmethod
    def of(cls, placed: PlacedGroup, lookups: Lookups, num_bags: int, channel: Channel) -> _Sending:
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
        return cls(placed, channel, local, lookups.bags, buckets.order, lengths)

    @property
    def counts(self) -> Int32[Array, " devices"]:
        """Lookups that go to each owner."""
        return self.lengths.sum(axis=1, dtype=jnp.int32)

    def positions(self, capacity: int) -> Int32[Array, "devices capacity"]:
        """The lookup at each place of what goes to each owner; past the last where none is."""
        counts = self.counts
        begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
        places = jnp.arange(capacity, dtype=jnp.int32)[None]
        lookups = self.order.at[begins[:, None] + places].get(mode="clip")
        return jnp.where(places < counts[:, None], lookups, self.order.size)

    def pack(
        self, values: Shaped[Array, " n"], capacity: int, fill: int = 0
    ) -> Shaped[Array, "devices capacity"]:
        """What goes to each owner, of a value for each lookup."""
        return values.at[self.positions(capacity)].get(mode="fill", fill_value=fill)

    def rows(self, capacity: int) -> Int32[Array, "devices capacity"]:
        """The rows that are looked up at each owner."""
        return self.pack(self.local, capacity, self.placed.local_rows)

    def lines(self, capacity: int) -> Int32[Array, "devices capacity"]:
        """Their bags, numbered over all devices."""
        return self.pack(self.channel.index * self.lengths.shape[1] + self.bags, capacity)

    def is_over(self, capacity: int) -> Bool[Array, ""]:
        """Whether there is less room than this device needs."""
        return jnp.any(self.counts > capacity)


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
    )
