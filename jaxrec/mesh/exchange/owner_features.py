"""Features by the owner that pools them, in arrays of equal shapes on all owners.

All devices run one program, so messages to all owners have one shape. Column ``k`` of a message
holds the ``k``-th feature of its owner, padded to the largest ``k``-th feature of all owners. An
owner with fewer features leaves its last columns empty.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.ragged.key_segments import starts_of, take_segments


@dataclasses.dataclass(frozen=True)
class OwnerFeatures:
    """The features that each owner pools, one in each column of its messages; static.

    Attributes:
        features: Numbers of each owner's features, in the order of the columns.
        capacities: Number of ids of each column.
        strides: Number of bags of each column.
    """

    features: tuple[tuple[int, ...], ...]
    capacities: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(
        cls, features: Sequence[Sequence[int]], capacities: Sequence[int], strides: Sequence[int]
    ) -> OwnerFeatures:
        """Give each owner's features columns; capacities and strides are those of all features."""
        columns = list(itertools.zip_longest(*features))

        def largest(sizes: Sequence[int]) -> tuple[int, ...]:
            return tuple(max(sizes[f] for f in column if f is not None) for column in columns)

        return cls(tuple(map(tuple, features)), largest(capacities), largest(strides))

    @classmethod
    def of_group(
        cls, placed: PlacedGroup, layout: BagLayout, devices_per_owner: int = 1
    ) -> OwnerFeatures:
        """Give a group's features columns, each at the owner of its table: a device, or a host."""
        owner = {each.first_row: each.shard.device // devices_per_owner for each in placed.shards}
        owners = [owner[row] for row in layout.row_offsets]
        capacities, strides = layout.capacities, layout.strides
        # Largest first: features of like size then share a column, which wastes the least padding.
        by_size = sorted(range(len(owners)), key=lambda f: (-strides[f], -capacities[f], f))
        numbers = range(placed.num_devices // devices_per_owner)
        return cls.of(
            [[f for f in by_size if owners[f] == number] for number in numbers], capacities, strides
        )

    def received(self, num_rows: int) -> BagLayout:
        """Return the layout of the lookups that an owner of ``num_rows`` rows receives."""
        return received_layout(len(self.features), self.capacities, self.strides, num_rows)

    def pack(
        self,
        values: Shaped[Array, "n ..."],
        starts: Sequence[int],
        counts: Sequence[int],
        sizes: Sequence[int],
        parts_out: int = 1,
        fill: int = 0,
    ) -> Shaped[Array, "owners positions ..."]:
        """Copy each feature's values to its owner's column, padded with ``fill``.

        Args:
            values: Values of all features.
            starts: Position of each feature's first value.
            counts: Number of each feature's values.
            sizes: Number of positions of each column.
            parts_out: Number of arrays in which the copy is made.
            fill: Value of the padding.
        """
        # An absent feature has no values, so that its column is all padding. Channels that send one
        # array per device need the copy in parts, as kernels make it.
        absent = len(starts)
        places = [
            feature
            for features in self.features
            for feature in (*features, *[absent] * (len(sizes) - len(features)))
        ]
        starts, counts, sizes = [*starts, 0], [*counts, 0], tuple(sizes) * len(self.features)
        part = len(places) // parts_out
        parts = [
            take_segments(
                values,
                [starts[feature] for feature in places[first : first + part]],
                [counts[feature] for feature in places[first : first + part]],
                sizes[first : first + part],
                fill,
            )
            for first in range(0, len(places), part)
        ]
        return jnp.concatenate(parts).reshape(len(self.features), -1, *values.shape[1:])

    def unpack(
        self,
        packed: Shaped[Array, "owners positions ..."],
        counts: Sequence[int],
        sizes: Sequence[int],
    ) -> Shaped[Array, "n ..."]:
        """Return the values of all features, feature after feature: the reverse of `pack`."""
        column_starts = starts_of(sizes)
        starts = {
            feature: owner * packed.shape[1] + column_starts[column]
            for owner, features in enumerate(self.features)
            for column, feature in enumerate(features)
        }
        values = packed.reshape(-1, *packed.shape[2:])
        return take_segments(values, [starts[feature] for feature in range(len(counts))], counts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BagsRoute:
    """Route of `Bags`: the rows and bag lengths that this owner received, by sender and column."""

    rows: Int32[Array, " received"]
    lengths: Int32[Array, " received_bags"]

    @property
    def owned_rows(self) -> Int32[Array, " received"]:
        """Rows that an update with this route writes; padding is `BAD_ROW`."""
        return self.rows

    @property
    def has_all_rows(self) -> bool:
        """True: `owned_rows` has every row that the update writes."""
        return True


def received_layout(
    senders: int, capacities: Sequence[int], strides: Sequence[int], num_rows: int
) -> BagLayout:
    """Return the layout of the lookups that an owner of ``num_rows`` rows receives.

    Each column of each sender is a feature; ``capacities`` and ``strides`` are those of columns.
    """
    sizes, bags = tuple(capacities) * senders, tuple(strides) * senders
    count = len(sizes)
    return BagLayout(
        id_starts=starts_of(sizes),
        capacities=sizes,
        length_starts=starts_of(bags),
        strides=bags,
        row_offsets=(0,) * count,
        row_counts=(num_rows,) * count,
        means=(False,) * count,  # senders have put means into the scales
        interleave=False,
    )


def send_lookups(
    owned: OwnerFeatures,
    rows: Int32[Array, " n"],
    lengths: Int32[Array, " all_bags"],
    layout: BagLayout,
    channel: Channel,
) -> BagsRoute:
    """Send this device's lookups to the owners of their features.

    ``rows`` are the lookups' rows at their owners, ``lengths`` the lengths of the batch's bags.
    """
    # Rows and bag lengths alone: the owner knows the layout, since it is static.
    rows, lengths = channel.send_together(
        owned.pack(
            rows,
            starts_of(layout.capacities),
            layout.capacities,
            owned.capacities,
            fill=kernels.BAD_ROW,
        ),
        owned.pack(lengths, layout.length_starts, layout.strides, owned.strides),
    )
    return BagsRoute(rows.reshape(-1), lengths.reshape(-1))


def received_lookups(
    owned: OwnerFeatures,
    received: BagsRoute,
    num_rows: int,
    scales: Float[Array, " received"] | None = None,
) -> Lookups:
    """Return the lookups that an owner of ``num_rows`` rows received, as flat lookups."""
    layout = owned.received(num_rows)
    return kernels.flatten_bags(received.rows, received.lengths, scales, layout, num_rows)


def send_scales(
    owned: OwnerFeatures, scales: Float[Array, " n"] | None, layout: BagLayout, channel: Channel
) -> Float[Array, " received"] | None:
    """Send the scales of this device's lookups to their owners, in the order of `send_lookups`."""
    if scales is None:
        return None
    capacities = layout.capacities
    packed = owned.pack(scales, starts_of(capacities), capacities, owned.capacities)
    return channel.send(packed).reshape(-1)


def send_bags(
    owned: OwnerFeatures, bags: Float[Array, "bags dim"], layout: BagLayout, channel: Channel
) -> Float[Array, "bags_of_group dim"]:
    """Send pooled bags from their owners to the samples' devices.

    Owners hold bags in the order of `OwnerFeatures.received`; the result is in the layout's order.
    """
    bags = bags.reshape(len(owned.features), -1, bags.shape[1])
    return unpack_bags(owned, channel.send_rows(bags), layout)


def unpack_bags(
    owned: OwnerFeatures, received: Float[Array, "owners bags dim"], layout: BagLayout
) -> Float[Array, "bags_of_group dim"]:
    """Return bags that the owners sent, in the layout's order."""
    by_feature = owned.unpack(received, layout.strides, owned.strides)
    if not layout.is_interleaved:
        return by_feature
    return _transpose(by_feature, layout.num_features, layout.strides[0])


def send_bag_gradients(
    owned: OwnerFeatures, gradient: RowGradients, channel: Channel
) -> RowGradients:
    """Send the gradient of this device's bags to their owners: the reverse of `send_bags`."""
    (layout,), values = gradient.layouts, gradient.values
    if layout.is_interleaved:
        values = _transpose(values, layout.strides[0], layout.num_features)
    starts = starts_of(layout.strides)
    packed = owned.pack(values, starts, layout.strides, owned.strides, **channel.sent)
    received = channel.send_gradients(packed)
    return dataclasses.replace(gradient, values=received.reshape(-1, values.shape[1]))


def _transpose(bags: Float[Array, "bags dim"], outer: int, inner: int) -> Float[Array, "bags dim"]:
    """Reorder bags from ``[outer, inner]`` to ``[inner, outer]``."""
    return bags.reshape(outer, inner, bags.shape[1]).swapaxes(0, 1).reshape(bags.shape)
