"""The exchange of bags: ids go to tables that lie whole on a device, whole bags come home.

Which device a bag is pooled on follows from its feature alone, so nothing is sorted or counted:
what goes where is known when the program is compiled. Each device sends the ids of a feature to the
owner of its table, which pools them and sends the bags back; their gradients go the same way. All
devices run one program, so each owner's features are numbered as *lanes*: lane ``k`` has as much
room as any owner's ``k``-th feature needs, and an owner of fewer features leaves lanes empty. All
of this is inside `jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.lookup import pool
from jaxrec.mesh.collectives import Channel
from jaxrec.mesh.layout import PlacedGroup


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Which feature each lane of each owner holds; all static.

    Attributes:
        features: For each owner its features, by number, lane by lane.
        capacities: Ids that a lane has room for.
        strides: Bags that it has room for.
    """

    features: tuple[tuple[int, ...], ...]
    capacities: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(
        cls, owners: Sequence[int], capacities: Sequence[int], strides: Sequence[int], devices: int
    ) -> Lanes:
        """The lanes of features of given owners, the largest features first."""
        by_size = sorted(range(len(owners)), key=lambda f: (-strides[f], -capacities[f], f))
        features = [[f for f in by_size if owners[f] == d] for d in range(devices)]
        return cls.of_features(features, capacities, strides)

    @classmethod
    def of_features(
        cls, features: Sequence[Sequence[int]], capacities: Sequence[int], strides: Sequence[int]
    ) -> Lanes:
        """The lanes of each owner's features, in the order given; sizes are those of all."""
        lanes = list(itertools.zip_longest(*features))

        def most(sizes: Sequence[int]) -> tuple[int, ...]:
            return tuple(max(sizes[f] for f in lane if f is not None) for lane in lanes)

        return cls(tuple(map(tuple, features)), most(capacities), most(strides))

    @classmethod
    def of_group(cls, placed: PlacedGroup, layout: BagLayout) -> Lanes:
        """The lanes of a group's features in a batch."""
        owner = {block.first_row: block.block.device for block in placed.blocks}
        owners = [owner[row] for row in layout.row_offsets]
        return cls.of(owners, layout.capacities, layout.strides, placed.num_devices)

    def received(self, num_rows: int) -> BagLayout:
        """What an owner of so many rows receives, as a batch of a feature a sender and lane."""
        count = len(self.features) * len(self.strides)
        sizes, bags = self.capacities * len(self.features), self.strides * len(self.features)
        return BagLayout(
            id_starts=tuple(itertools.accumulate(sizes, initial=0))[:-1],
            capacities=sizes,
            length_starts=tuple(itertools.accumulate(bags, initial=0))[:-1],
            strides=bags,
            row_offsets=(0,) * count,
            row_counts=(num_rows,) * count,
            means=(False,) * count,
            interleave=False,
        )

    def pack(
        self, parts: Sequence[Shaped[Array, "..."]], sizes: tuple[int, ...], fill: int = 0
    ) -> Shaped[Array, "owners places ..."]:
        """The part of each feature in its lane, whose size is given; the rest is filled."""

        def in_lane(part: Array | None, size: int) -> Array:
            if part is None:
                return jnp.full((size, *parts[0].shape[1:]), fill, parts[0].dtype)
            widths = [(0, size - part.shape[0])] + [(0, 0)] * (part.ndim - 1)
            return jnp.pad(part, widths, constant_values=fill)

        def of_owner(features: tuple[int, ...]) -> Array:
            found = [parts[f] for f in features] + [None] * (len(sizes) - len(features))
            return jnp.concatenate([in_lane(*pair) for pair in zip(found, sizes, strict=True)])

        # Joined and taken apart by their first axis, XLA sees that parts need neither.
        packed = jnp.concatenate([of_owner(features) for features in self.features])
        return packed.reshape(len(self.features), -1, *packed.shape[1:])

    def unpack(
        self,
        packed: Shaped[Array, "owners places ..."],
        sizes: tuple[int, ...],
        wanted: Sequence[int],
    ) -> list[Shaped[Array, "..."]]:
        """The reverse: the part of each feature, as much of it as is wanted."""
        starts = tuple(itertools.accumulate(sizes, initial=0))
        places = {
            feature: (owner, starts[lane])
            for owner, features in enumerate(self.features)
            for lane, feature in enumerate(features)
        }
        owners = jnp.split(packed.reshape(-1, *packed.shape[2:]), len(packed))
        found = [(*places[feature], size) for feature, size in enumerate(wanted)]
        return [owners[owner][start : start + size] for owner, start, size in found]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BagsRoute:
    """What all devices look up at this owner, lane by lane, once they have sent it.

    Attributes:
        rows: What each sender's lookups are of.
        lengths: The lengths of their bags.
    """

    rows: Int32[Array, " received"]
    lengths: Int32[Array, " received_bags"]

    def map_awaited(self, function: Callable[[Array], Array]) -> BagsRoute:
        """The route with a function applied to the indices that exchanges wait for."""
        return dataclasses.replace(self, rows=function(self.rows))


def send_lookups(
    lanes: Lanes,
    rows: Int32[Array, " n"],
    lengths: Int32[Array, " all_bags"],
    layout: BagLayout,
    channel: Channel,
) -> BagsRoute:
    """Sends this device's lookups to the owners of their lanes.

    Args:
        lanes: The lanes.
        rows: For each of this device's lookups what the owner is told of it.
        lengths: The lengths of all bags of its batch.
        layout: Where the group's features lie in the batch.
        channel: The way to the owners.
    """
    bag_lengths = [
        lengths[start : start + stride]
        for start, stride in zip(layout.length_starts, layout.strides, strict=True)
    ]
    rows, lengths = channel.send_together(
        lanes.pack(_split(rows, layout), lanes.capacities), lanes.pack(bag_lengths, lanes.strides)
    )
    return BagsRoute(rows.reshape(-1), lengths.reshape(-1))


def send_scales(
    lanes: Lanes, scales: Float[Array, " n"] | None, layout: BagLayout, channel: Channel
) -> Float[Array, " received"] | None:
    """`send_lookups`, of the lookups' scales; differentiable."""
    if scales is None:
        return None
    return channel.send(lanes.pack(_split(scales, layout), lanes.capacities)).reshape(-1)


def route_bags(
    placed: PlacedGroup,
    rows: Int32[Array, " n"],
    lengths: Int32[Array, " all_bags"],
    layout: BagLayout,
    channel: Channel,
) -> BagsRoute:
    """Sends ids to the owners of their tables.

    Args:
        placed: Where the group lies.
        rows: The row of each of this device's lookups.
        lengths: The lengths of all bags of its batch.
        layout: Where the group's features lie in the batch.
        channel: The way to the other devices.
    """
    slots = placed.slots(rows)
    rows = jnp.where(slots < placed.num_slots, slots % placed.local_rows, -1)
    return send_lookups(Lanes.of_group(placed, layout), rows, lengths, layout, channel)


def pool_whole_bags(
    placed: PlacedGroup,
    table: Float[Array, "local_rows dim"],
    scales: Float[Array, " n"] | None,
    layout: BagLayout,
    channel: Channel,
    routed: BagsRoute,
) -> tuple[Float[Array, "bags dim"], Lookups]:
    """The pooled rows of this device's bags, float32, and the lookups of this device's rows.

    Args:
        placed: Where the group lies.
        table: This device's rows.
        scales: The scales of this device's lookups; the result is differentiable in them.
        layout: Where the group's features lie in the batch.
        channel: The way to the other devices.
        routed: What devices look up here.
    """
    lanes = Lanes.of_group(placed, layout)
    scales = send_scales(lanes, scales, layout, channel)
    received = lanes.received(placed.local_rows)
    float32 = jnp.dtype("float32")
    ids, lengths = routed.rows, routed.lengths
    pooled = pool(table, ids, lengths, scales, received, float32, parts_out=channel.parts)
    home = channel.send_rows(pooled.reshape(len(lanes.features), -1, pooled.shape[1]))
    bags = _join(lanes.unpack(home, lanes.strides, layout.strides), layout)
    scales = None if scales is None else jax.lax.stop_gradient(scales)
    lookups = kernels.flatten_bags(routed.rows, routed.lengths, scales, received, placed.local_rows)
    return bags, lookups


def send_bag_gradients(
    placed: PlacedGroup, gradients: Float[Array, "bags dim"], layout: BagLayout, channel: Channel
) -> Float[Array, "received dim"]:
    """The gradients of all devices' bags that were pooled here, as `pool_whole_bags` numbers them.

    Args:
        placed: Where the group lies.
        gradients: The gradients of this device's bags.
        layout: Where the group's features lie in the batch.
        channel: The way to the other devices.
    """
    lanes = Lanes.of_group(placed, layout)
    by_feature = [gradients[layout.bag_rows(feature)] for feature in range(layout.num_features)]
    received = channel.send_gradients(lanes.pack(by_feature, lanes.strides))
    return received.reshape(-1, gradients.shape[1])


def _split(values: Shaped[Array, " n"], layout: BagLayout) -> list[Shaped[Array, " capacity"]]:
    """Values of lookups, feature by feature."""
    return jnp.split(values, tuple(itertools.accumulate(layout.capacities))[:-1])


def _join(parts: list[Float[Array, "stride dim"]], layout: BagLayout) -> Float[Array, "bags dim"]:
    """The pooled output of a batch from the bags of each feature."""
    if not layout.is_interleaved:
        return jnp.concatenate(parts)
    return jnp.stack(parts, axis=1).reshape(-1, parts[0].shape[1])
