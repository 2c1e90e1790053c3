"""Features by the owner that pools them, in arrays of equal shapes on all owners."""

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
from jaxrec.ragged.key_segments import take_segments


@dataclasses.dataclass(frozen=True)
class OwnerFeatures:
    """The features that each owner pools; all static.

    All devices run one program, so each owner's features are numbered: column ``k`` holds the
    ``k``-th feature of every owner and has the largest size of these. An owner with fewer features
    leaves columns empty.

    Attributes:
        features: Features of each owner, by number, column by column.
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
        """Return the columns of each owner's features, in the order given.

        Args:
            features: Features of each owner, by number.
            capacities: Number of ids of each feature.
            strides: Number of bags of each feature.
        """
        columns = list(itertools.zip_longest(*features))

        def largest(sizes: Sequence[int]) -> tuple[int, ...]:
            return tuple(max(sizes[f] for f in column if f is not None) for column in columns)

        return cls(tuple(map(tuple, features)), largest(capacities), largest(strides))

    @classmethod
    def of_group(
        cls, placed: PlacedGroup, layout: BagLayout, devices_per_owner: int = 1
    ) -> OwnerFeatures:
        """Return the columns of a group whose tables lie whole on their owners, largest first.

        Args:
            placed: The group.
            layout: Layout of the group's features in the batch.
            devices_per_owner: Number of devices of an owner: 1, or those of a host.
        """
        owner = {each.first_row: each.shard.device // devices_per_owner for each in placed.shards}
        owners = [owner[row] for row in layout.row_offsets]
        capacities, strides = layout.capacities, layout.strides
        by_size = sorted(range(len(owners)), key=lambda f: (-strides[f], -capacities[f], f))
        numbers = range(placed.num_devices // devices_per_owner)
        return cls.of(
            [[f for f in by_size if owners[f] == number] for number in numbers], capacities, strides
        )

    def received(self, num_rows: int) -> BagLayout:
        """Return the layout of what an owner of ``num_rows`` rows receives.

        It is a batch with a feature for each sender and column.
        """
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
        self,
        values: Shaped[Array, "n ..."],
        starts: Sequence[int],
        counts: Sequence[int],
        sizes: Sequence[int],
        parts_out: int = 1,
    ) -> Shaped[Array, "owners positions ..."]:
        """Return the values of each feature in its owner's column, padded with zeros.

        Args:
            values: The values of all features.
            starts: Position of the first value of each feature.
            counts: Number of values of each feature.
            sizes: Size of each column.
            parts_out: Hint for the result; see `jaxrec.embed.kernels.base`.
        """
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
        """Return the values of all features, one after the other, without padding.

        This is the reverse of `pack`.

        Args:
            packed: The columns of all owners.
            counts: Number of values of each feature.
            sizes: Size of each column.
        """
        column_starts = tuple(itertools.accumulate(sizes, initial=0))
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
    """Lookups of all devices at this owner, column by column.

    Attributes:
        rows: The row of each lookup.
        lengths: Lengths of the bags.
    """

    rows: Int32[Array, " received"]
    lengths: Int32[Array, " received_bags"]


def send_lookups(
    owned: OwnerFeatures,
    rows: Int32[Array, " n"],
    lengths: Int32[Array, " all_bags"],
    layout: BagLayout,
    channel: Channel,
) -> BagsRoute:
    """Send this device's lookups to the owners of their features.

    Args:
        owned: The features of each owner.
        rows: The row that the owner looks up, for each lookup.
        lengths: Lengths of all bags of this device's batch.
        layout: Layout of the group's features in the batch.
        channel: Channel to the owners.
    """
    rows, lengths = channel.send_together(
        owned.pack(rows, _starts(layout.capacities), layout.capacities, owned.capacities),
        owned.pack(lengths, layout.length_starts, layout.strides, owned.strides),
    )
    return BagsRoute(rows.reshape(-1), lengths.reshape(-1))


def received_lookups(
    owned: OwnerFeatures,
    received: BagsRoute,
    num_rows: int,
    scales: Float[Array, " received"] | None = None,
) -> Lookups:
    """Return the flat lookups that an owner of ``num_rows`` rows received."""
    layout = owned.received(num_rows)
    return kernels.flatten_bags(received.rows, received.lengths, scales, layout, num_rows)


def send_scales(
    owned: OwnerFeatures, scales: Float[Array, " n"] | None, layout: BagLayout, channel: Channel
) -> Float[Array, " received"] | None:
    """Send the scales of this device's lookups as `send_lookups` sends rows; differentiable."""
    if scales is None:
        return None
    capacities = layout.capacities
    packed = owned.pack(scales, _starts(capacities), capacities, owned.capacities)
    return channel.send(packed).reshape(-1)


def send_bags(
    owned: OwnerFeatures, bags: Float[Array, "bags dim"], layout: BagLayout, channel: Channel
) -> Float[Array, "bags_of_group dim"]:
    """Send pooled bags from the owners of their features to the samples; differentiable.

    Args:
        owned: The features of each owner.
        bags: This owner's bags, in the order of `OwnerFeatures.received`.
        layout: Layout of the group's features in the batch.
        channel: Channel to the owners.

    Returns:
        This device's bags, in the order of the layout.
    """
    home = channel.send_rows(bags.reshape(len(owned.features), -1, bags.shape[1]))
    by_feature = owned.unpack(home, layout.strides, owned.strides)
    if not layout.is_interleaved:
        return by_feature
    return _transpose(by_feature, layout.num_features, layout.strides[0])


def send_bag_gradients(
    owned: OwnerFeatures, gradient: RowGradients, channel: Channel
) -> RowGradients:
    """Return the gradient of this device's bags where `send_bags` took the bags from."""
    (layout,), values = gradient.layouts, gradient.values
    if layout.is_interleaved:
        values = _transpose(values, layout.strides[0], layout.num_features)
    starts = _starts(layout.strides)
    packed = owned.pack(values, starts, layout.strides, owned.strides, **channel.sent)
    received = channel.send_gradients(packed)
    return dataclasses.replace(gradient, values=received.reshape(-1, values.shape[1]))


def _starts(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the first position of each feature, features one after the other."""
    return tuple(itertools.accumulate(counts, initial=0))[:-1]


def _transpose(bags: Float[Array, "bags dim"], outer: int, inner: int) -> Float[Array, "bags dim"]:
    """Return bags that lie ``[outer, inner]`` as ``[inner, outer]``."""
    return bags.reshape(outer, inner, bags.shape[1]).swapaxes(0, 1).reshape(bags.shape)
