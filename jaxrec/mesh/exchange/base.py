"""The interface of an exchange: how ids, rows and gradients travel between devices."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.kernels.stretches import sum_by_table
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.optim import RowOptimizer
from jaxrec.optim.hyperparameters import Step
from jaxrec.optim.norm import root
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.key_segments import take_segments
from jaxrec.ragged.wide_ids import narrow

# Capacity of a message, in even shares of a device's lookups, before anything is measured.
DEFAULT_CAPACITY_FACTOR = 1.25

Route: TypeAlias = Any
"""A pytree that an exchange computes from the ids of a batch, for its other methods.

If it has an attribute ``demand``, this is the capacity factor that the batch needs, a scalar on
each device; see `jaxrec.mesh.ahead`.
"""

Update: TypeAlias = tuple[Float[TableArray, "local_rows dim"], dict[str, TableArray]]
"""A device's new rows of a group, and their new optimizer state."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A table as a placement cuts it: what an exchange accepts or refuses.

    Attributes:
        is_pooled: Whether the rows of a bag are pooled.
        optimizer: The table's row optimizer.
        column_parts: Number of parts that the columns are cut into.
        row_parts: Largest number of devices that the rows of one column part lie on.
        row_hosts: Largest number of hosts that the rows of one column part lie on.
        hosts: Number of hosts of the mesh.
        shares_devices: Whether a device has several column parts of a row.
        is_large: Whether int32 cannot number the rows, or their slots over the mesh.
        is_alone: Whether the mesh, or each replica of the tables, has one device.
    """

    is_pooled: bool
    optimizer: RowOptimizer
    column_parts: int
    row_parts: int
    row_hosts: int = 1
    hosts: int = 1
    shares_devices: bool = False
    is_large: bool = False
    is_alone: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """Lookups of one group in this device's batch.

    Attributes:
        lookups: The flat lookups, with the scales of mean pooling but without weights.
        ids: All ids of the batch, -1 where int32 does not hold one.
        lengths: Lengths of all bags of the batch.
        weights: Weights of all ids of the batch; None: 1.
        layout: Layout of the group's features in the batch.
    """

    lookups: Lookups
    ids: Int32[Array, " capacity"]
    lengths: Int32[Array, " all_bags"]
    weights: Float[Array, " capacity"] | None
    layout: BagLayout = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        features: KeyedJaggedArray,
        lookups: Lookups,
        weights: Float[Array, " capacity"] | None,
        layout: BagLayout,
    ) -> Request:
        """Return the request of a group's lookups in this device's batch."""
        ids, lengths = narrow(features.values), jnp.asarray(features.lengths)
        return cls(lookups, ids, lengths, weights, layout)

    @property
    def lookup_weights(self) -> Float[Array, " lookups"] | None:
        """Weight of each lookup; None: 1."""
        if self.weights is None:
            return None
        return take_segments(self.weights, self.layout.id_starts, self.layout.capacities)

    @property
    def scales(self) -> Float[Array, " lookups"] | None:
        """Factor of each lookup's row, differentiable in the weights; None: 1."""
        weights, means = self.lookup_weights, self.lookups.scales
        if weights is None or means is None:
            return means if weights is None else weights
        return weights * means

    @property
    def scaled_lookups(self) -> Lookups:
        """The lookups with their scales, as constants."""
        return dataclasses.replace(self.lookups, scales=constant(self.scales))


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of one group's lookups in a step, on each device.

    Attributes:
        devices: Number of devices.
        dim: Number of columns of the group's rows.
        lookups: Space for lookups, over all features of the group.
        bags: Number of bags, over all features.
        capacity: Number of rows or ids that a message has space for; see `MeshStore.capacity`.
        owner_lookups: Space for one device's lookups at one owner, where tables lie whole on it:
            a device, or a host.
        owner_bags: The same for bags.
        hosts: Number of hosts.
    """

    devices: int
    dim: int
    lookups: int
    bags: int
    capacity: int
    owner_lookups: int = 0
    owner_bags: int = 0
    hosts: int = 1


def constant(scales: Float[Array, " n"] | None) -> Float[Array, " n"] | None:
    """Return scales without derivatives."""
    return None if scales is None else jax.lax.stop_gradient(scales)


class Exchange(abc.ABC):
    """How ids, rows and gradients of a group of tables travel between the devices of a mesh.

    A placement names its exchange: one of `jaxrec.mesh.exchange.EXCHANGES` by its name, or an
    object of a class in another package. `ShardedTables` calls it inside `jax.shard_map`: each
    method sees one device's arrays and reaches the other devices through the channel alone.

    Implementors of an exchange do the following:

    1. Derive a frozen dataclass from `Exchange`, so that objects hash and compare by their fields,
       and set `name`.
    2. Say in `refuse` which tables it cannot carry, and why.
    3. Implement `route` by ids alone, with static shapes and nothing dropped. Where the number of
       ids for an owner varies, ``capacity`` is the number that a message has space for, and the
       exchange has to be exact whatever it is.
    4. Implement `pool` for pooled tables and `rows` for tables that are looked up per id.
    5. Implement `owned_gradients`, from which `update` and `squares` follow; or override these two,
       as exchanges do that receive gradients in rounds.

    Attributes:
        name: Name in placements, plans and reports.
        is_replicated: Whether every device has all rows.
        sends_gradients_first: Whether `update` sends gradients before anything that depends on ids.
        takes_large_groups: Whether groups may be *large*; see `PlacedGroup`. Lookups of such a
            group then name the owner of each row, which `PlacedGroup.locate` reads.
    """

    name: ClassVar[str]
    is_replicated: ClassVar[bool] = False
    sends_gradients_first: ClassVar[bool] = False
    takes_large_groups: ClassVar[bool] = False

    def refuse(self, cut: Cut) -> str | None:
        """Return why a table that is cut like this cannot use the exchange; None: it can."""
        return None

    def traffic(self, work: Workload) -> dict[str, int]:
        """Return the bytes that a device puts into each kind of collective in a training step.

        In float32, without weights, for one round. Of an all-to-all, an all-gather and a
        reduce-scatter the part ``(devices - 1) / devices`` leaves the device.

        Args:
            work: Sizes of the lookups.

        Returns:
            Bytes by XLA's name of the collective, such as ``"all-to-all"``.
        """
        raise TypeError(f"exchange {self.name!r} does not say what it sends")

    @abc.abstractmethod
    def route(
        self, placed: PlacedGroup, request: Request, channel: Channel, capacity: int
    ) -> Route:
        """Send what other devices must know of this device's ids.

        Args:
            placed: The group.
            request: This device's lookups; its weights may be missing.
            channel: Channel to the other devices.
            capacity: Number of ids or rows that a message between two devices has space for.
        """

    def pool(
        self,
        placed: PlacedGroup,
        table: Float[TableArray, "local_rows dim"],
        request: Request,
        route: Route,
        channel: Channel,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "bags dim"], Lookups]:
        """Return the pooled rows of this device's bags, and the lookups that the update needs.

        Args:
            placed: The group.
            table: This device's rows.
            request: This device's lookups; the result is differentiable in its weights.
            route: Result of `route`.
            channel: Channel to the other devices.
            dtype: Type of the pooled rows, float32 or narrower; a wider one may be returned.
        """
        raise TypeError(f"exchange {self.name!r} does not pool")

    def rows(
        self,
        placed: PlacedGroup,
        table: Float[TableArray, "local_rows dim"],
        request: Request,
        route: Route,
        channel: Channel,
    ) -> Float[Array, "lookups dim"]:
        """Return the row of each lookup: zeros at padding, NaN at an id outside its table.

        Args:
            placed: The group.
            table: This device's rows.
            request: This device's lookups.
            route: Result of `route`.
            channel: Channel to the other devices.
        """
        raise TypeError(f"exchange {self.name!r} carries pooled rows only")

    def send_gradients(
        self, placed: PlacedGroup, gradient: RowGradients, channel: Channel
    ) -> RowGradients:
        """Return the gradient of this device's bags where the lookups of `pool` are.

        Most exchanges send gradients in `update` and return the gradient as it is.
        """
        return gradient

    def owned_gradients(
        self, placed: PlacedGroup, gradient: RowGradients, channel: Channel, capacity: int
    ) -> RowGradients:
        """Return the gradients of this device's rows from all devices' lookups of them.

        Args:
            placed: The group.
            gradient: The gradient of this device's lookups, after `send_gradients`. Its ``route``
                is None where the gradients of several lookups are merged.
            channel: Channel to the other devices.
            capacity: As for `route`.
        """
        raise TypeError(f"exchange {self.name!r} has no owned_gradients, nor its own update")

    def update(
        self,
        placed: PlacedGroup,
        table: Float[TableArray, "local_rows dim"],
        state: dict[str, TableArray],
        gradient: RowGradients,
        step: Step,
        channel: Channel,
        capacity: int,
    ) -> Update:
        """Bring gradients to the rows' owners, and update each row once.

        Args:
            placed: The group.
            table: This device's rows.
            state: Their optimizer state.
            gradient: The gradient of this device's lookups.
            step: Number of updates made before.
            channel: Channel to the other devices.
            capacity: As for `route`.
        """
        owned = self.owned_gradients(placed, gradient, channel, capacity)
        return update_owned(placed, table, state, owned, step, channel)

    def squares(
        self, placed: PlacedGroup, gradient: RowGradients, channel: Channel, capacity: int
    ) -> Float[Array, " tables"]:
        """Return this device's part of the sum of squares of each table's gradient.

        Args:
            placed: The group.
            gradient: The gradient of this device's lookups.
            channel: Channel to the other devices.
            capacity: As for `route`.
        """
        owned = self.owned_gradients(placed, gradient, channel, capacity)
        return table_squares(placed, owned, None, channel)


def update_owned(
    placed: PlacedGroup,
    table: Float[TableArray, "local_rows dim"],
    state: dict[str, TableArray],
    gradient: RowGradients,
    step: Step,
    channel: Channel,
    **hints: int,
) -> Update:
    """Update each of this device's rows once.

    Args:
        placed: The group.
        table: This device's rows.
        state: Their optimizer state.
        gradient: The gradient of all devices' lookups of these rows.
        step: Number of updates made before.
        channel: Channel to the other devices.
        **hints: Hints to `kernels.fused_update`.
    """
    gradient = clip_tables(placed, gradient, channel)
    optimizer = dataclasses.replace(placed.group.optimizer.of_batch, clip_norm=None)
    rows = gradient.rows_to_write(gradient.lookups.rows, placed.local_rows)
    lookups = dataclasses.replace(gradient.lookups, rows=rows)
    return kernels.fused_update(
        table, state, lookups, gradient.values, optimizer, step, (0,), **hints
    )


def table_squares(
    placed: PlacedGroup, gradient: RowGradients, clip_value: float | None, channel: Channel
) -> Float[Array, " tables"]:
    """Return the sum of squares of the gradients of this device's rows, table by table.

    The gradient is that of all devices' lookups of these rows, each element within ``clip_value``.
    """
    runs, sums = gradient.sum_by_row(placed.local_rows, clip_value)
    is_column = placed.is_column(runs.unique, channel.index)
    squares = sums * sums if is_column is None else jnp.where(is_column, sums * sums, 0)
    squares = jnp.where(runs.unique < placed.local_rows, jnp.sum(squares, axis=1), 0)
    tables = placed.tables_of(runs.unique, channel.index)
    return sum_by_table(squares, tables, len(placed.tables))


def clip_tables(placed: PlacedGroup, gradient: RowGradients, channel: Channel) -> RowGradients:
    """Return the gradient of all devices' lookups with each table's norm within ``clip_norm``."""
    optimizer, lookups = placed.group.optimizer, gradient.lookups
    if optimizer.clip_norm is None:
        return gradient
    squares = table_squares(placed, gradient, optimizer.clip_value, channel)
    factors = clip_factors(squares, optimizer.clip_norm, channel)
    factors = factors[placed.tables_of(lookups.rows, channel.index)]
    scales = factors if lookups.scales is None else factors * lookups.scales
    lookups = dataclasses.replace(lookups, scales=scales)
    return dataclasses.replace(gradient, lookups=lookups)


def clip_factors(
    squares: Float[Array, " tables"], clip_norm: float, channel: Channel
) -> Float[Array, " tables"]:
    """Return the factors that bring the norm of each table's gradient down to the bound.

    Each device gives its part of the sums of squares.
    """
    norms = root(jax.lax.psum(squares, channel.axes))
    return jnp.minimum(1, clip_norm / (norms + 1e-6))
