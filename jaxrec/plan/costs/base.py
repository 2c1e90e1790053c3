"""The interface of an exchange's costs, and the costs that all exchanges share."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from jaxrec.embed.formats import RowFormat
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.stash import Stash
from jaxrec.embed.state import state_bytes
from jaxrec.mesh.exchange import Exchange
from jaxrec.mesh.precision import ExchangePrecision, encoded_bytes
from jaxrec.optim import RowOptimizer
from jaxrec.plan.quantities import Load, Perf
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload, looked_up_bytes

# Bytes of an id, of a weight, and of an element of pooled embeddings and gradients.
WORD = 4
# Bytes of a position for an id at the owner of its bag: the id as received, then its row, bag and
# scale, each of 4 bytes.
_ID_POSITION_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Group:
    """Tables that share arrays and are exchanged together.

    ``width`` counts the columns of a shard, fewer than the tables' own where columns are cut.
    ``whole_width`` counts the tables' columns if the optimizer needs whole rows, else it is 0.
    """

    collection: str
    width: int
    row_format: RowFormat
    optimizer: RowOptimizer
    exchange: Exchange
    is_weighted: bool
    whole_width: int
    precision: ExchangePrecision = ExchangePrecision()  # noqa: RUF009 (frozen)

    @classmethod
    def of(
        cls,
        workload: TableWorkload,
        width: int,
        exchange: Exchange,
        precision: ExchangePrecision = ExchangePrecision(),  # noqa: B008 (frozen)
    ) -> Group:
        """Return the group of a table's shards of ``width`` columns."""
        return cls(
            workload.collection,
            width,
            workload.table.row_format,
            workload.optimizer,
            exchange,
            workload.is_weighted,
            # Only then do column shards of one table depend on each other. With 0 elsewhere, tables
            # of 128 and 64 columns may be cut to 32 and share a group.
            workload.dim if workload.optimizer.needs_whole_rows else 0,
            precision,
        )

    @property
    def joins_columns(self) -> bool:
        """Whether column shards of a row exchange partial sums, to be updated as one row."""
        return self.whole_width not in (0, self.width)

    @property
    def is_packed(self) -> bool:
        """Whether rows are stored as codes, which an update unpacks and packs."""
        return not isinstance(self.row_format, PlainRows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as stored, with its scale if it has one."""
        return self.row_format.row_bytes(self.width)

    @property
    def looked_up_bytes(self) -> int:
        """Bytes of a row as a lookup returns it."""
        return looked_up_bytes(self.row_format, self.width)

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of a row in a message, by the precision of the exchange."""
        return encoded_bytes(self.precision.forward, self.width, self.looked_up_bytes)

    @property
    def sent_bag_bytes(self) -> int:
        """Bytes of a pooled embedding in a message, by the precision of the exchange."""
        return encoded_bytes(self.precision.forward, self.width, self.gradient_bytes)

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of a gradient in a message, by the precision of the exchange."""
        return encoded_bytes(self.precision.backward, self.width, self.gradient_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a pooled embedding or of a row's gradient: 4 for each column."""
        return self.width * WORD

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of a row as stored, with its scale and its optimizer state."""
        return self.row_bytes + state_bytes(self.optimizer, self.width)

    def __str__(self) -> str:
        return f"{self.row_format.name}_{self.width} by {self.exchange.name}"


COSTS: dict[Exchange, type[ExchangeCosts]] = {}
"""The costs of each exchange: a class derived from `ExchangeCosts` that names one adds itself."""


@dataclasses.dataclass(frozen=True)
class ExchangeCosts(abc.ABC):
    """Seconds and bytes of one group of tables under one exchange.

    A collective ends when its slowest device does. So a step takes the sum over groups of each
    group's slowest device, not the largest sum over devices. The same holds for memory: a group's
    arrays have as many rows on every device as on the fullest.

    Costs are of three kinds. A subclass gives each exchange's own:

    - once for a group: `launch`;
    - on every device alike, for each column shard of a table: `home`, `round_capacity`,
      `route_bytes` and `temporary_bytes`;
    - for what a device owns: `load` counts it, `perf` and `bytes` say what the counts cost. Where
      a device gets more rows than a round of the exchange has capacity for, `empty_positions` says
      which positions are moved without a row.

    The formulas in docstrings are for one device and one step. Their words mean:

    - ``lookups``: ids of the device's own samples in a table, in arrays of size ``capacity``;
    - ``bags``: bags of these samples; ``devices``: number of devices;
    - ``width``: columns of the group's shards. Pooled embeddings and gradients are float32, so one
      has ``4 * width`` bytes;
    - ``gather(rows, bytes)``: time to gather rows of ``bytes`` bytes each; ``sort(n)``: to sort
      ``n`` row numbers; ``copy(bytes)``: to move bytes, each at the rate of `Topology`;
    - ``all_to_all(bytes)``, ``reduce_scatter(bytes)``, ``all_gather(bytes)``: times of collectives,
      by the functions of `jaxrec.plan.costs.base`.

    `launch` alone counts the time to start kernels and collectives.

    Attributes:
        group: The tables.
        topology: The devices.
    """

    exchange: ClassVar[Exchange]
    group: Group
    topology: Topology

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not ``hasattr``: `forward_costs` derives classes that inherit an exchange, and these must
        # not replace the class that they inherit it from.
        if "exchange" in vars(cls):
            COSTS[cls.exchange] = cls

    @abc.abstractmethod
    def launch(self) -> Perf:
        """Return the seconds to start the group's kernels and collectives in a step."""

    @abc.abstractmethod
    def home(self, workload: TableWorkload) -> Perf:
        """Return the seconds that a column shard of a table takes on every device alike."""

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes on every device while the group is exchanged and updated.

        They are eight int32 arrays of row numbers, ``32 * capacity``. An exchange may add sums of
        gradients, and messages sent and received.
        """
        return 32 * workload.capacity

    def sum_at_home(self, bags: float, topology: Topology) -> float:
        """Return the seconds to send owners' sums of bags to the samples' devices and add them."""
        # A collective adds in the format that it sends, so narrower formats are sent by an
        # all-to-all of as many numbers and added in float32 there.
        if self.group.precision.forward == "float32":
            return reduce_scatter(bags * self.group.gradient_bytes, topology)
        return all_to_all(bags * self.group.sent_bag_bytes, topology)

    def route_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of a table's route, kept from the forward to the backward pass."""
        return 0.0

    def round_capacity(self, workload: TableWorkload) -> float:
        """Return the positions, each space for one row, that a table adds to a round's messages."""
        return 0.0

    def position(self) -> Perf:
        """Return the seconds of a position: space for one row or id in a message, used or not."""
        return Perf()

    def empty_positions(self, demand: float, capacity: float) -> tuple[float, float]:
        """Return the positions moved without a row, forward and backward, if one round overflows.

        ``demand`` rows go through the slowest device; a round has ``capacity`` positions. If the
        rows fit one round, both are 0.
        """
        return 0.0, 0.0

    def overflow_steps(self, rounds: float) -> list[float]:
        """Return the rows that an exchange holds after each overflow, in multiples of a round's.

        The last number is at least ``rounds``, the number of rounds that the rows need. The list is
        empty if one round is enough.
        """
        return []

    def shares(self, workload: TableWorkload, rows: np.ndarray) -> np.ndarray:
        """Return the share of a table's exchanged rows that each row shard has, ``[row_parts]``.

        ``rows`` are the numbers of rows of these shards.
        """
        return workload.shares(rows, of_rows=False)

    def exchanged_rows(self, workload: TableWorkload) -> float:
        """Return the rows of a table that all devices read together: one for each lookup."""
        return self.topology.num_devices * workload.lookups

    def load(self, workload: TableWorkload, rows: np.ndarray, *, is_cache: bool = False) -> Load:
        """Return the load of shards that hold ``rows`` rows of a table, ``[row_parts]``.

        The owner of a share of the rows (`shares`) reads that share of `exchanged_rows`. It updates
        that share of the distinct rows of all devices.
        """
        shares, devices = self.shares(workload, rows), self.topology.num_devices
        # A cache gives rows to ids as they come, so hot ids are not side by side but spread evenly.
        if is_cache:
            shares = rows / rows.sum()
        load = Load.zeros(len(rows))
        load.exchanged[:] = load.gathered[:] = self.exchanged_rows(workload) * shares
        load.updated[:] = workload.distinct(devices) * shares
        load.held[:] = rows
        return load

    def perf(self, load: Load) -> Perf:
        """Return the seconds of a device's load.

        Forward, a gathered row takes the time to `gather` its stored bytes. Backward, it takes
        `packed_update` and the time to `gather` its gradient, ``4 * width`` bytes, twice where a
        table's gradient norm is clipped. An updated row takes `update`.
        """
        gradient = self.gradient_passes * self.gather(self.group.gradient_bytes)
        gradient += self.packed_update
        return self.position() * load.exchanged + Perf(
            forward_compute=self.gather(self.group.row_bytes) * load.gathered,
            backward_compute=gradient * load.gathered + self.update * load.updated,
        )

    def bytes(self, load: Load) -> np.ndarray:
        """Return the bytes of a device's load.

        They are `Group.stored_row_bytes` for each row held, 16 for each position for an id and
        ``4 * width`` for each bag.
        """
        return (
            self.group.stored_row_bytes * load.held
            + _ID_POSITION_BYTES * load.ids
            + self.group.gradient_bytes * load.bags
        )

    def kept_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes that every device keeps from the forward to the backward pass.

        They are the route, ``12 * capacity`` for the row, bag and scale of each position for an id,
        and ``8 * width * bags`` for embeddings and their gradients. Without pooling these are
        ``8 * width * capacity``. Max pooling adds ``4 * width * bags`` for the positions of the
        largest elements, and ``4 * width * capacity`` for the gradients of their rows.
        """
        embeddings = workload.bags if workload.is_pooled else workload.capacity
        arrays = 2 * embeddings
        if workload.takes_max:
            arrays += workload.bags + workload.capacity
        return self.residual_bytes(workload) + arrays * self.group.gradient_bytes

    def residual_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of a lookup's residuals: the route and ``12 * capacity``.

        A stash (`jaxrec.embed.stash`) takes them off the device until the group is updated.
        """
        return 12 * workload.capacity + self.route_bytes(workload)

    def restore(self, workload: TableWorkload, stash: Stash | None) -> Perf:
        """Return the seconds that every device takes to stash a table's residuals and restore them.

        "host" moves `residual_bytes` twice at the rate of `Topology.host_moves`. "recompute" takes
        ``sort(capacity) + copy(residual_bytes)`` and ``all_to_all(4 * round_capacity)``.
        """
        bytes, topology = self.residual_bytes(workload), self.topology
        if stash == "host":
            return Perf(backward_compute=2 * bytes * topology.host_moves.byte)
        if stash == "recompute":
            compute = workload.capacity * topology.sort.item + bytes * topology.copy.byte
            ids = WORD * self.round_capacity(workload)
            return Perf(backward_compute=compute, backward_exchange=all_to_all(ids, topology))
        return Perf()

    @property
    def gradient_passes(self) -> int:
        """Number of times that gradients are summed: 2 where a table's norm is clipped, else 1."""
        # The norm is known only after all sums. They are made once for it, and again by the fused
        # update, which takes the gradients of lookups.
        return 2 if self.group.optimizer.clip_norm is not None else 1

    @property
    def latency(self) -> float:
        """Seconds to start a collective."""
        return latency(self.topology)

    @property
    def update(self) -> float:
        """Seconds to update a row and its optimizer state."""
        bytes = self._granules(self.group.stored_row_bytes)
        return self.topology.update.seconds(calls=0, items=1, bytes=bytes)

    @property
    def packed_update(self) -> float:
        """Seconds that a lookup adds to an update of packed rows; 0 where that is one kernel."""
        if not self.group.is_packed:
            return 0.0
        copies = self.topology.packed_copies * self.group.gradient_bytes
        return copies * self.topology.copy.byte

    def gather(self, bytes: float) -> float:
        """Return the seconds for each of many gathered rows of ``bytes`` bytes."""
        return self.topology.gather.seconds(calls=0, items=1, bytes=self._granules(bytes))

    def pool(self, workload: TableWorkload) -> float:
        """Return the seconds to write a device's bags, ``copy(4 * width * bags)``, if pooled.

        Max pooling also writes the positions of the largest elements, as many bytes.
        """
        if not workload.is_pooled:
            return 0.0
        arrays = 2 if workload.takes_max else 1
        return arrays * self.topology.copy.byte * workload.bags * self.group.gradient_bytes

    def spread(self, workload: TableWorkload) -> float:
        """Return the seconds to give a bag's gradient to the rows with its largest elements.

        They are ``copy(4 * width * capacity)`` with max pooling, else 0.
        """
        if not workload.takes_max:
            return 0.0
        return self.topology.copy.byte * workload.capacity * self.group.gradient_bytes

    def _granules(self, bytes: float) -> float:
        return -(-bytes // self.topology.granule) * self.topology.granule


# For frozen and quantized tables. A mixin: it stands before an exchange's costs in the bases of a
# class, and `super` finds these.
class ForwardPass(ExchangeCosts):
    """Costs of an exchange's forward pass alone; `forward_costs` makes classes with it."""

    # Bytes are not overridden: arrays of the backward pass stay counted, since the model may train
    # other tables.
    def launch(self) -> Perf:
        return _forward(super().launch())  # type: ignore[safe-super]

    def home(self, workload: TableWorkload) -> Perf:
        return _forward(super().home(workload))  # type: ignore[safe-super]

    def position(self) -> Perf:
        return _forward(super().position())

    def perf(self, load: Load) -> Perf:
        return _forward(super().perf(load))


@functools.cache
def forward_costs(costs: type[ExchangeCosts]) -> type[ExchangeCosts]:
    """Return the class of an exchange's costs without its backward pass."""
    # Cached, so that equal groups have costs of one class.
    return type(f"Forward{costs.__name__}", (ForwardPass, costs), {})


def _forward(perf: Perf) -> Perf:
    """Return the seconds without those of the backward pass."""
    return Perf(
        perf.forward_compute,
        perf.forward_exchange,
        # Times 0 instead of 0, to keep the shape of arrays.
        0.0 * perf.backward_compute,
        0.0 * perf.backward_exchange,
        perf.prefetch,
    )


# Seconds of collectives over links within hosts and between them, for the bytes alone; `latency` is
# the time to start one.


def latency(topology: Topology) -> float:
    """Return the seconds to start a collective over all devices; 0 for a single device."""
    if topology.num_devices == 1:
        return 0.0
    return (topology.between if topology.hosts > 1 else topology.within).all_to_all.call


def all_to_all(bytes: float, topology: Topology) -> float:
    """Return the seconds of an all-to-all of ``bytes`` from each device, its own share included.

    A device sends ``bytes * (devices_per_host - 1) / devices`` to other devices of its host and
    ``bytes * (devices - devices_per_host) / devices`` to other hosts. Both go at once, and the
    longer time counts.
    """
    devices, per_host = topology.num_devices, topology.devices_per_host
    within = topology.within.all_to_all.byte * bytes * (per_host - 1) / devices
    between = topology.between.all_to_all.byte * bytes * (devices - per_host) / devices
    return max(within, between)


def reduce_scatter(bytes: float, topology: Topology) -> float:
    """Return the seconds to add up arrays of ``bytes`` bytes, each device keeping its share.

    Each device sends ``bytes * (devices_per_host - 1) / devices_per_host`` within its host. Then it
    sends ``bytes / devices_per_host * (hosts - 1) / hosts`` to other hosts.
    """
    return _by_host(
        bytes, topology.within.reduce_scatter.byte, topology.between.reduce_scatter.byte, topology
    )


def all_gather(bytes: float, topology: Topology) -> float:
    """Return the seconds to bring an array of ``bytes`` bytes, a share on each device, to all.

    A device sends as many bytes as in `reduce_scatter`.
    """
    return _by_host(
        bytes, topology.within.all_gather.byte, topology.between.all_gather.byte, topology
    )


def _by_host(bytes: float, within: float, between: float, topology: Topology) -> float:
    hosts, per_host = topology.hosts, topology.devices_per_host
    return bytes * (within * (per_host - 1) / per_host + between * (hosts - 1) / hosts / per_host)
