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
from jaxrec.mesh.exchange.lines import Lines, WrittenRows
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.optim import RowOptimizer
from jaxrec.optim.hyperparameters import Step
from jaxrec.optim.norm import root
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.key_segments import take_segments
from jaxrec.ragged.wide_ids import narrow

# Capacity factor before anything is measured. It is a compromise, not a limit: a batch that needs
# more takes more rounds (or a branch with larger messages), and one that needs less sends padding.
DEFAULT_CAPACITY_FACTOR = 1.25

Route: TypeAlias = Any
"""A pytree that `Exchange.route` computes from the ids of a batch, for the other methods.

An attribute ``demand``, if the route has it, is the capacity factor that the batch needs: a scalar
on each device. `jaxrec.mesh.ahead` reads it.
"""

Update: TypeAlias = tuple[Float[TableArray, "local_rows dim"], dict[str, TableArray]]
"""A device's new rows of a group and their new optimizer state."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A table as its placement cuts it; `Exchange.refuse` reads it.

    Attributes:
        is_pooled: Whether the rows of a bag are pooled.
        optimizer: The table's row optimizer.
        column_parts: Number of parts that the columns are cut into.
        row_parts: Largest number of devices that the rows of one column part lie on.
        row_hosts: Largest number of hosts that the rows of one column part lie on.
        hosts: Number of hosts of the mesh.
        shares_devices: Whether a device has several column parts of a row.
        is_large: Whether int32 is too narrow to number the rows, or their slots over the mesh.
        is_alone: Whether the mesh, or each replica of the tables, has one device.
        takes_max: Whether bags have the largest element of each column, and not the rows' sum.
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
    takes_max: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """Lookups of one group in this device's batch.

    Attributes:
        lookups: The flat lookups. Their scales are those of mean pooling, without weights.
        ids: All ids of the batch; -1 for an id that int32 does not hold.
        lengths: Lengths of all bags of the batch.
        weights: Weights of all ids of the batch; None: 1.
        layout: Layout of the group's features in the batch.
        lines: Lines that the owners sent ahead, the result of `Exchange.fetch`; None: `pool` and
            `rows` fetch them.
    """

    # The weights stay apart from the scales because `pool` has to be differentiable in them.

    lookups: Lookups
    ids: Int32[Array, " capacity"]
    lengths: Int32[Array, " all_bags"]
    weights: Float[Array, " capacity"] | None
    layout: BagLayout = dataclasses.field(metadata={"static": True})
    lines: Lines | None = None

    @classmethod
    def of(
        cls,
        features: KeyedJaggedArray,
        lookups: Lookups,
        weights: Float[Array, " capacity"] | None,
        layout: BagLayout,
        lines: Lines | None = None,
    ) -> Request:
        """Make the request of a group's lookups in this device's batch."""
        ids, lengths = narrow(features.values), jnp.asarray(features.lengths)
        return cls(lookups, ids, lengths, weights, layout, lines)

    @property
    def lookup_weights(self) -> Float[Array, " lookups"] | None:
        """Weight of each lookup; None: 1."""
        if self.weights is None:
            return None
        return take_segments(self.weights, self.layout.id_starts, self.layout.capacities)

    @property
    def scales(self) -> Float[Array, " lookups"] | None:
        """Weight of each lookup, divided by the bag's length if averaged. None: 1."""
        weights, means = self.lookup_weights, self.lookups.scales
        if weights is None or means is None:
            return means if weights is None else weights
        return weights * means

    @property
    def scaled_lookups(self) -> Lookups:
        """The lookups with `scales`, without derivatives."""
        # `Exchange.pool` has the derivative in the weights. The update needs the numbers alone.
        return dataclasses.replace(self.lookups, scales=constant(self.scales))


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of one group's lookups in a step, on each device.

    Attributes:
        devices: Number of devices.
        dim: Number of columns of the group's rows.
        lookups: Capacity for lookups, over all features of the group.
        bags: Number of bags, over all features.
        capacity: Capacity of a message between two devices, in rows or ids; see
            `MeshStore.capacity`.
        owner_lookups: Capacity for one device's lookups at one owner. The owner is a device or a
            host that stores whole tables.
        owner_bags: Number of one device's bags at one owner.
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
    """Protocol by which devices send each other the ids, rows and gradients of a group of tables.

    A placement names its exchange: one of `jaxrec.mesh.exchange.EXCHANGES` by its name, or an
    object of a class in another package. `ShardedTables` calls its methods inside `jax.shard_map`.
    Each call sees one device's arrays and reaches the other devices through the channel alone.

    To write an exchange:

    1. Derive a frozen dataclass from `Exchange`, so that objects hash and compare by their fields.
       Set `name`.
    2. Return from `refuse` why the exchange cannot carry a table.
    3. Implement `route`. It depends on ids alone, has static shapes and drops no id. ``capacity``
       is the number of ids or rows that a message to one owner holds. The exchange must be exact at
       any capacity.
    4. Implement `pool` for pooled tables and `rows` for tables that are looked up per id.
    5. Implement `owned_gradients`; `update` and `squares` call it. An exchange that receives
       gradients in several rounds overrides these two instead.

    Attributes:
        name: Name in placements, plans and reports.
        is_replicated: Whether every device has all rows.
        sends_gradients_first: Whether `update` sends gradients before anything that depends on ids.
        takes_large_groups: Whether groups may be *large*; see `PlacedGroup`. The lookups of a large
            group name the owner of each row, and `PlacedGroup.locate` reads it.
        pools_max: Whether `pool` takes the maximum, too. It needs all rows of a bag on one device,
            and calls `jaxrec.embed.outputs.pool_lookups`.
    """

    name: ClassVar[str]
    is_replicated: ClassVar[bool] = False
    sends_gradients_first: ClassVar[bool] = False
    takes_large_groups: ClassVar[bool] = False
    pools_max: ClassVar[bool] = False

    def refuse(self, cut: Cut) -> str | None:
        """Return why the exchange cannot carry a table that is cut like this; None: it can."""
        return None

    def traffic(self, work: Workload) -> dict[str, int]:
        """Return the bytes that a device puts into each kind of collective in a training step.

        They are bytes in float32, without weights, for one round. ``(devices - 1) / devices`` of
        the bytes of an all-to-all, all-gather or reduce-scatter leave the device.

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
        """Plan the exchange of one batch: send this device's ids, or row requests, to the owners.

        Args:
            placed: The group.
            request: This device's lookups. Its weights may be missing.
            channel: Channel to the other devices.
            capacity: Number of ids or rows that a message between two devices holds.
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
            request: This device's lookups. The pooled rows are differentiable in its weights.
            route: Result of `route`.
            channel: Channel to the other devices.
            dtype: Type of the pooled rows, float32 or narrower. The exchange may return a wider
                type.
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
        """Return the row of each lookup: zeros for padding, NaN for an id outside its table.

        Args:
            placed: The group.
            table: This device's rows.
            request: This device's lookups.
            route: Result of `route`.
            channel: Channel to the other devices.
        """
        raise TypeError(f"exchange {self.name!r} carries pooled rows only")

    def fetch(
        self,
        placed: PlacedGroup,
        table: Float[TableArray, "local_rows dim"],
        request: Request,
        route: Route,
        channel: Channel,
    ) -> Lines | None:
        """Send ahead the lines that `pool` or `rows` needs, before the previous batch's update.

        None, the default: the exchange cannot send them ahead. An exchange that can also implements
        `refetch`, reads ``request.lines`` in `pool` or `rows`, and has routes with two attributes:
        ``owned_rows``, the rows of this device that an update with this route writes, and
        ``has_all_rows``, whether these are all of them, equal on all devices.

        Args:
            placed: The group.
            table: This device's rows.
            request: This device's lookups.
            route: Result of `route`.
            channel: Channel to the other devices.
        """
        return None

    def refetch(
        self,
        placed: PlacedGroup,
        table: Float[TableArray, "local_rows dim"],
        request: Request,
        route: Route,
        channel: Channel,
        written: WrittenRows,
        capacity: float,
    ) -> tuple[Lines, Float[Array, ""]]:
        """Send those lines of `fetch` again that an update changed.

        Args:
            placed: The group.
            table: This device's rows, after the update.
            request: This device's lookups, with the lines of `fetch`.
            route: Result of `route`.
            channel: Channel to the other devices.
            written: Rows that the update wrote.
            capacity: Share of the lines that a message between two devices holds.

        Returns:
            All lines, and the largest share of lines that one device has to send again to another.
        """
        raise TypeError(f"exchange {self.name!r} sends no lines ahead")

    def send_gradients(
        self, placed: PlacedGroup, gradient: RowGradients, channel: Channel
    ) -> RowGradients:
        """Send the gradient of this device's bags to the devices that have the lookups of `pool`.

        Most exchanges send gradients in `update` instead and return the gradient unchanged.
        """
        return gradient

    def owned_gradients(
        self, placed: PlacedGroup, gradient: RowGradients, channel: Channel, capacity: int
    ) -> RowGradients:
        """Send gradients to the rows' owners; return all devices' gradients of this device's rows.

        Args:
            placed: The group.
            gradient: The gradient of this device's lookups, after `send_gradients`. Its ``route``
                is None if it merges the gradients of several lookups.
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
        """Send gradients to the rows' owners, and update each row once.

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

        The caller adds the parts of all devices.

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
    """Update each of this device's rows once, given the gradient of all devices' lookups.

    ``hints`` are options of `kernels.fused_update`, such as ``parts_in``.
    """
    gradient = clip_tables(placed, gradient, channel)
    # The norm is already within its bound. The kernel would bound it by this device's rows alone.
    optimizer = dataclasses.replace(placed.group.optimizer.of_batch, clip_norm=None)
    # A skipped update writes padding alone. A branch around the update would copy the table.
    rows = gradient.rows_to_write(gradient.lookups.rows, placed.local_rows)
    lookups = dataclasses.replace(gradient.lookups, rows=rows)
    return kernels.fused_update(
        table, state, lookups, gradient.values, optimizer, step, (0,), **hints
    )


def table_squares(
    placed: PlacedGroup, gradient: RowGradients, clip_value: float | None, channel: Channel
) -> Float[Array, " tables"]:
    """Return the sum of squares of each table's gradient, over this device's rows.

    The gradient has the lookups of all devices; ``clip_value`` bounds each of its elements.
    """
    # Squares are of whole rows' gradients, so repeats of a row are added up first.
    runs, sums = gradient.sum_by_row(placed.local_rows, clip_value)
    # A slice that is narrower than its group ends with columns of padding, which must not count.
    is_column = placed.is_column(runs.unique, channel.index)
    squares = sums * sums if is_column is None else jnp.where(is_column, sums * sums, 0)
    squares = jnp.where(runs.unique < placed.local_rows, jnp.sum(squares, axis=1), 0)
    tables = placed.tables_of(runs.unique, channel.index)
    return sum_by_table(squares, tables, len(placed.tables))


def clip_tables(placed: PlacedGroup, gradient: RowGradients, channel: Channel) -> RowGradients:
    """Bound the norm of each table's gradient by ``clip_norm`` of the group's optimizer.

    The gradient has the lookups of all devices.
    """
    optimizer, lookups = placed.group.optimizer, gradient.lookups
    if optimizer.clip_norm is None:
        return gradient
    squares = table_squares(placed, gradient, optimizer.clip_value, channel)
    factors = clip_factors(squares, optimizer.clip_norm, channel)
    factors = factors[placed.tables_of(lookups.rows, channel.index)]
    # A factor goes into the scale of each lookup, so the gradient itself is not copied.
    scales = factors if lookups.scales is None else factors * lookups.scales
    lookups = dataclasses.replace(lookups, scales=scales)
    return dataclasses.replace(gradient, lookups=lookups)


def clip_factors(
    squares: Float[Array, " tables"], clip_norm: float, channel: Channel
) -> Float[Array, " tables"]:
    """Return the factor that bounds the norm of each table's gradient by ``clip_norm``.

    ``squares`` are the sums of squares of the tables' gradients over this device's rows.
    """
    norms = root(jax.lax.psum(squares, channel.axes))
    # The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
    return jnp.minimum(1, clip_norm / (norms + 1e-6))
