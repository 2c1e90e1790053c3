"""The interface of an exchange's costs, and what all exchanges have in common."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from jaxrec.embed.formats import RowFormat
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.state import state_bytes
from jaxrec.mesh.exchange import Exchange
from jaxrec.mesh.precision import ExchangePrecision, encoded_bytes
from jaxrec.optim import RowOptimizer
from jaxrec.plan.quantities import Load, Perf
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload, looked_up_bytes

# Bytes of an id, of a weight, and of an element of pooled embeddings and gradients.
WORD = 4
# Bytes of a position for an id at the owner of its bag: as received, and as row, bag and scale.
_ID_POSITION_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Group:
    """Tables that share arrays and travel together.

    Attributes:
        collection: Path of their collection in the model.
        width: Columns; fewer than the tables' own where these are cut.
        row_format: Format of the stored rows.
        optimizer: Row optimizer.
        exchange: How their rows travel.
        is_weighted: Whether ids have weights.
        whole_width: Columns of the tables, if the optimizer needs whole rows; else 0.
        precision: Formats in which rows and gradients travel.
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
            workload.dim if workload.optimizer.needs_whole_rows else 0,
            precision,
        )

    @property
    def joins_columns(self) -> bool:
        """Whether column shards of a row exchange partial sums, so that it is updated as one."""
        return self.whole_width not in (0, self.width)

    @property
    def is_packed(self) -> bool:
        """Whether rows are stored as codes, which an update unpacks and packs."""
        return not isinstance(self.row_format, PlainRows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, ``w s``; of one byte an element, those of its scale too."""
        return self.row_format.row_bytes(self.width)

    @property
    def looked_up_bytes(self) -> int:
        """Bytes of a row as a lookup returns it."""
        return looked_up_bytes(self.row_format, self.width)

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of a row as it travels."""
        return encoded_bytes(self.precision.forward, self.width, self.looked_up_bytes)

    @property
    def sent_bag_bytes(self) -> int:
        """Bytes of a pooled embedding as it travels."""
        return encoded_bytes(self.precision.forward, self.width, self.gradient_bytes)

    @property
    def sent_gradient_bytes(self) -> int:
        """Bytes of a gradient as it travels."""
        return encoded_bytes(self.precision.backward, self.width, self.gradient_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a pooled embedding or of a row's gradient, ``4 w``."""
        return self.width * WORD

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of a row with its optimizer state, ``w s + m``."""
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

    The formulas are for one device and one step. A table has ``R`` rows of ``w`` columns of ``s``
    bytes, and ``m`` bytes of optimizer state a row. A device's own samples have ``n`` ids of it in
    arrays of capacity ``c >= n``, and ``b`` bags. ``u`` of the ids are distinct rows; over the
    samples of all ``D`` devices, ``U`` are. Pooled embeddings and gradients are float32, 4 bytes.
    ``gather(n, 4 w)`` is the time to gather ``n`` rows of ``4 w`` bytes, ``update(n, v)`` to update
    ``n`` rows of ``v`` bytes, ``sort(c)`` to sort ``c`` row numbers, ``copy(v)`` to move ``v``
    bytes; each takes `Topology`'s rate. Starting them is counted by `launch` alone.

    Attributes:
        group: The tables.
        topology: The devices.
    """

    exchange: ClassVar[Exchange]
    group: Group
    topology: Topology

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "exchange" in vars(cls):
            COSTS[cls.exchange] = cls

    @abc.abstractmethod
    def launch(self) -> Perf:
        """Return the seconds to start the group's kernels and collectives in a step."""

    @abc.abstractmethod
    def home(self, workload: TableWorkload) -> Perf:
        """Return the seconds that a column shard of a table takes on every device alike."""

    @abc.abstractmethod
    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes on every device while the group is exchanged and updated.

        They are sums of gradients, what is sent and received, and eight arrays of row numbers.
        """

    def sum_at_home(self, bags: float, topology: Topology) -> float:
        """Return the seconds to add up the owners' parts of some bags, each at its own device.

        A reduce-scatter of ``4 w`` for each bag; in narrower formats, which a collective cannot
        add, an all-to-all of as many numbers.

        Args:
            bags: Number of bags that each device has parts of.
            topology: The devices that take part.
        """
        if self.group.precision.forward == "float32":
            return reduce_scatter(bags * self.group.gradient_bytes, topology)
        return all_to_all(bags * self.group.sent_bag_bytes, topology)

    def route_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of a table's route, kept from the forward to the backward pass."""
        return 0.0

    def round_capacity(self, workload: TableWorkload) -> float:
        """Return the positions for rows that a table adds to one round of the exchange."""
        return 0.0

    def position(self) -> Perf:
        """Return the seconds of a position: space for one row or id in a message, used or not."""
        return Perf()

    def empty_positions(self, demand: float, capacity: float) -> tuple[float, float]:
        """Return the positions moved without a row, forward and backward, if rounds overflow.

        Args:
            demand: Rows through the exchange on the slowest device.
            capacity: Positions in one round.

        Returns:
            0 and 0 where all rows fit one round.
        """
        return 0.0, 0.0

    def overflow_steps(self, rounds: float) -> list[float]:
        """Return the demands, in rounds, up to which overflowing rows take the same positions.

        Args:
            rounds: The largest demand to cover.
        """
        return []

    def shares(self, workload: TableWorkload, rows: np.ndarray) -> np.ndarray:
        """Return the shares of a table's exchanged rows by row part, ``[row_parts]``.

        Args:
            workload: The table.
            rows: Rows of each part.
        """
        return workload.shares(rows, of_rows=False)

    def exchanged_rows(self, workload: TableWorkload) -> float:
        """Return the rows of a table that all devices together read: ``D n``, each lookup one."""
        return self.topology.num_devices * workload.lookups

    def load(self, workload: TableWorkload, rows: np.ndarray, *, is_cache: bool = False) -> Load:
        """Return the load of shards that hold a table's rows part by part, ``[row_parts]``.

        The owner of a share ``q`` of the rows reads ``q D n`` of them and updates ``q U``.

        Args:
            workload: The table.
            rows: Rows of each part.
            is_cache: Whether the rows are those of a cache, over which ids spread evenly.
        """
        shares, devices = self.shares(workload, rows), self.topology.num_devices
        if is_cache:
            shares = rows / rows.sum()
        load = Load.zeros(len(rows))
        load.exchanged[:] = load.gathered[:] = self.exchanged_rows(workload) * shares
        load.updated[:] = workload.distinct(devices) * shares
        load.held[:] = rows
        return load

    def perf(self, load: Load) -> Perf:
        """Return the seconds of a device's load.

        The owner of ``r`` exchanged rows takes ``gather(r, w s)`` forward and sums gradients in
        ``gather(r, 4 w)`` backward, twice where the norm of a table's gradient is clipped. Rows
        updated take ``update(1, w s + m)`` each. Where packed rows are updated by many kernels,
        these take `Topology.packed_copies` times ``copy(4 w r)`` besides.
        """
        gradient = self.gradient_passes * self.gather(self.group.gradient_bytes)
        gradient += self.packed_update
        return self.position() * load.exchanged + Perf(
            forward_compute=self.gather(self.group.row_bytes) * load.gathered,
            backward_compute=gradient * load.gathered + self.update * load.updated,
        )

    def bytes(self, load: Load) -> np.ndarray:
        """Return the bytes of a device's load.

        They are ``w s + m`` for each row held, 16 for each position for an id and ``4 w`` for each
        bag.
        """
        return (
            self.group.stored_row_bytes * load.held
            + _ID_POSITION_BYTES * load.ids
            + self.group.gradient_bytes * load.bags
        )

    def kept_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes that every device keeps from the forward to the backward pass.

        They are ``12 c`` for rows, bags and factors, ``8 b w`` for the embeddings and their
        gradients (``8 c w`` where they are not pooled), and the route.
        """
        embeddings = workload.bags if workload.is_pooled else workload.capacity
        kept = 12 * workload.capacity + 2 * embeddings * self.group.gradient_bytes
        return kept + self.route_bytes(workload)

    @property
    def gradient_passes(self) -> int:
        """Number of times that gradients are summed: 2 where a table's norm is clipped, else 1."""
        return 2 if self.group.optimizer.clip_norm is not None else 1

    @property
    def latency(self) -> float:
        """Seconds to start a collective."""
        return latency(self.topology)

    @property
    def update(self) -> float:
        """Seconds to update a row, ``update(1, w s + m)``."""
        bytes = self._granules(self.group.stored_row_bytes)
        return self.topology.update.seconds(calls=0, items=1, bytes=bytes)

    @property
    def packed_update(self) -> float:
        """Seconds of a lookup in the kernels that update packed rows; 0 where they are one."""
        if not self.group.is_packed:
            return 0.0
        copies = self.topology.packed_copies * self.group.gradient_bytes
        return copies * self.topology.copy.byte

    def gather(self, bytes: float) -> float:
        """Return the seconds for each of many gathered rows of ``bytes``."""
        return self.topology.gather.seconds(calls=0, items=1, bytes=self._granules(bytes))

    def pool(self, workload: TableWorkload) -> float:
        """Return the seconds to write a device's own bags, ``copy(4 w b)``; 0 if not pooled."""
        if not workload.is_pooled:
            return 0.0
        return self.topology.copy.byte * workload.bags * self.group.gradient_bytes

    def _granules(self, bytes: float) -> float:
        return -(-bytes // self.topology.granule) * self.topology.granule


class ForwardPass(ExchangeCosts):
    """Keeps the forward pass alone of an exchange's costs, for frozen and quantized tables.

    Arrays of the backward pass are counted nevertheless, since a model may train other tables. It
    stands before an exchange's costs in the bases of a class; `forward_costs` makes such classes.
    """

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
    """Return the costs of an exchange without its backward pass."""
    return type(f"Forward{costs.__name__}", (ForwardPass, costs), {})


def _forward(perf: Perf) -> Perf:
    """Return the seconds without those of the backward pass, which are 0 times what they were."""
    return Perf(
        perf.forward_compute,
        perf.forward_exchange,
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
    """Return the seconds of an all-to-all in which each device sends ``bytes``, its own share too.

    With ``V`` bytes, ``D`` devices and ``h`` devices a host, each device sends ``V (h - 1) / D`` to
    the other devices of its host and ``V (D - h) / D`` to other hosts. Both go at once, and the
    longer time counts.
    """
    devices, per_host = topology.num_devices, topology.devices_per_host
    within = topology.within.all_to_all.byte * bytes * (per_host - 1) / devices
    between = topology.between.all_to_all.byte * bytes * (devices - per_host) / devices
    return max(within, between)


def reduce_scatter(bytes: float, topology: Topology) -> float:
    """Return the seconds to add up arrays of ``bytes``, each device keeping its share.

    ``V`` bytes go by host: ``V (h - 1) / h`` on the links within each of ``H`` hosts of ``h``
    devices, and then ``V / h (H - 1) / H`` from each device between hosts.
    """
    return _by_host(
        bytes, topology.within.reduce_scatter.byte, topology.between.reduce_scatter.byte, topology
    )


def all_gather(bytes: float, topology: Topology) -> float:
    """Return the seconds until every device has all of ``bytes``, as in `reduce_scatter`."""
    return _by_host(
        bytes, topology.within.all_gather.byte, topology.between.all_gather.byte, topology
    )


def _by_host(bytes: float, within: float, between: float, topology: Topology) -> float:
    hosts, per_host = topology.hosts, topology.devices_per_host
    return bytes * (within * (per_host - 1) / per_host + between * (hosts - 1) / hosts / per_host)
