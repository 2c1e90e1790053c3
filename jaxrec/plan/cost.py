"""What a placement costs: seconds of a step and bytes of memory, in formulas.

Where this follows TorchRec's estimators and where it differs is in ``docs/planner.md``.

Notation, for one device and one step. A table has ``R`` rows of ``w`` columns (a part of its
columns, if they are cut) of ``s`` bytes, and ``m`` bytes of optimizer state a row. A device's own
samples have ``n`` ids of it, ``b`` bags, and room ``c >= n`` for ids: arrays have the size of the
room. ``u`` of the ids are distinct rows; of the samples of all ``D`` devices together, ``U`` are.
Sums and gradients are float32, 4 bytes. What is written ``gather(n, 4 w)`` below is the time to
gather ``n`` rows of ``4 w`` bytes (`Topology.gather`), ``sort(c)`` that to sort ``c`` row numbers,
``copy(v)`` that to move ``v`` bytes.

**Groups.** Tables of equal width, type and optimizer share arrays and travel together, and a
collective ends when its slowest device does. So the time of a step is not that of the device with
the largest sum, but the sum over groups of each group's slowest device. The same holds of memory:
the arrays of a group have as many rows on every device as on the fullest.

**Copies** (`data_parallel`). Every device has all rows and looks its own ids up,
``gather(n, w s)``, writing bags of ``4 w``. Gradients are summed by row, which sorts the ids twice,
once to number the rows and once for the sum: ``2 sort(c) + gather(n, 4 w) + copy(4 w c)``.
Everybody gets everybody's sums, an all-gather of ``D c (4 + 4 w)`` bytes, and makes the same update
of ``U`` rows: ``sort(D c) + gather(D u, 4 w) + update(U, w s + m)``.

**Rows** (every other type, `exchange="rows"`). A device sorts its ids and drops repeats, asks the
owners, gets rows, pools at home: ``sort(c) + gather(n, w s)`` and bags of ``4 w``. Backward, it
sums gradients by row, ``sort(c) + gather(n, 4 w)``, and sends the sums to the owners, who were
asked for the rows.

Between each two devices the exchange has room for ``C = 1.25 c / D`` rows a round, so a round moves
``L = 1.25 c`` places, used or not: ``all_to_all(4 + w s) + copy(w s)`` for each forward, and
``all_to_all(4 w) + copy(4 w) + sort`` backward. If owner ``d`` has a share ``q_d`` of a
device's ``u`` distinct rows, it reads ``gather(D q_d u, w s)`` forward, adds up
``gather(D q_d u, 4 w)`` backward and updates ``q_d U`` rows: ``update(q_d U, w s + m)``.

What does not fit a round takes more of them. With ``A = D max_d q_d u`` that is
``r = ceil(A / L)`` rounds backward and, where that is not 1, ``1 + r`` forward, since the first one
starts over. The sums in ``A`` and ``L`` go over the tables of the group.

**Bags** (`exchange="sums"` where a device has whole columns). Ids go to the owner of their table,
which pools bags and sends them home; which device that is needs no sort. Between two devices there
is room for the ids and bags of the features that the fullest device has, since all run one program:
if the tables of device ``d`` have room for ``c_d`` ids and ``b_d`` bags of every device, then
``all_to_all(4)`` of ``P = D max_d c_d`` places and ``all_to_all(4 + 4 w)`` of ``B = D max_d b_d``
bags forward, and ``all_to_all(4 w)`` of as many backward. The owner does ``gather(D n_d, w s)``
forward, ``sort(D c_d) + gather(D n_d, 4 w) + update(U_d, w s + m)`` backward, and
``copy(4 w D b_d)`` in each pass; at home bags are copied twice in each.

**Sums** (`exchange="sums"` where rows are cut over devices). Ids go to the owners with their
repeats: ``sort(c)`` to group them and ``all_to_all(4)`` of ``L = 1.25 c`` places, with 4 bytes more
in each pass where ids have weights. Owners find as many ids of each bag as devices say,
``all_to_all`` of ``4 D b`` bytes. The owner pools what it has of each bag of all devices,
``gather(D q_d n, w s)`` into ``D b`` sums, ``copy(8 w D b)``; a reduce-scatter of ``4 w D b`` bytes
brings them home.
Backward, an all-gather of as many bytes brings the bags' gradients, and the owner sums and updates:
``sort(L) + gather(D q_d n, 4 w) + update(q_d U, w s + m)``. Where ``A = D max_d q_d n`` is more
than ``L``, all of it takes room for ``D c`` places instead.

**Whole rows.** Where columns are cut and the optimizer looks at whole rows, the rows' parts of its
sums go back and forth. With rows that is ``2 all_to_all(4) + sort`` for each place; with bags an
all-reduce of ``4 D c`` bytes for each table, a number for each lookup of all devices, and one more
``sort`` of the owner's places. Where the norm of a table's gradient is clipped (`clip_norm`),
gradients are added up twice, and with rows they travel twice.

**Collectives.** Of ``V`` bytes to be sent to all devices alike, ``(h - 1) / D`` go to the other
devices of a host of ``h``, and ``(D - h) / D`` to other hosts; an all-to-all sends both at once and
takes the longer. Reduce-scatter and all-gather of ``V`` bytes go by host, ``V (h - 1) / h`` on the
links within, and then, for each device, ``V / h (H - 1) / H`` on those between.

**Caches** (storage "host" and "disk"). The device holds the hottest ``r R`` rows and their state;
of the rows that a step updates, those not held are fetched before it and written back after:
``2 host_link(w s + m)`` each, and for "disk" ``2 disk_link(w s + m)`` more.

**Memory** of a device, in bytes: rows and state, ``w s + m`` for each row it holds (see groups);
``12 c`` for the rows, bags and factors that the backward pass needs, ``17 c`` for the way of rows
and ``13 c + 4 D b`` for that of sums, ``8 b w`` for the looked-up embeddings and their gradients,
all groups together; and while one group's exchange runs, what `exchange_bytes` counts, of the group
that has the most. By bags, the fullest device's places take
16 bytes each, and its bags ``4 w``. What compiled programs take is in ``docs/planner.md``.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxrec.optim import RowOptimizer
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWork, itemsize, state_bytes

PHASES = (
    "forward compute",
    "forward exchange",
    "backward compute",
    "backward exchange",
    "prefetch",
)
# Room of a round of the exchange, over the even share; see jaxrec.mesh.tables.
SLACK = 1.25
FLOAT32 = 4

COPIES, ROWS, SUMS, BAGS = "copies", "rows", "sums", "bags"
# Bytes of a place for an id at its owner: as received, and as row, bag and scale of a lookup.
PLACE_BYTES = 16


def phases(**seconds: float) -> np.ndarray:
    """Seconds of each of `PHASES`, given by name."""
    named = {name.replace(" ", "_"): i for i, name in enumerate(PHASES)}
    vector = np.zeros(len(PHASES))
    for name, value in seconds.items():
        vector[named[name]] = value
    return vector


@dataclasses.dataclass(frozen=True)
class GroupKey:
    """What tables have in common that share arrays and travel together.

    Attributes:
        collection: Path of their collection.
        width: Columns.
        dtype: Type of the rows.
        optimizer: How they change.
        way: "copies", "rows", "sums" or "bags".
        storage: "device", "host" or "disk".
        is_weighted: Whether ids have weights.
        whole_dim: Columns of the tables, where pieces of rows are updated together; else 0.
    """

    collection: str
    width: int
    dtype: str
    optimizer: RowOptimizer
    way: str
    storage: str
    is_weighted: bool
    whole_dim: int

    @classmethod
    def of(cls, work: TableWork, width: int, way: str, storage: str) -> GroupKey:
        """The group of pieces of a table, of so many columns."""
        whole_dim = work.dim if work.optimizer.needs_whole_rows else 0
        return cls(
            work.collection,
            width,
            work.dtype,
            work.optimizer,
            way,
            storage,
            work.is_weighted,
            whole_dim,
        )

    @property
    def is_cut(self) -> bool:
        """Whether parts of rows are updated together."""
        return self.whole_dim not in (0, self.width)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its state."""
        return self.width * itemsize(self.dtype) + state_bytes(self.optimizer, self.width)

    def __str__(self) -> str:
        return f"{self.dtype}_{self.width} by {self.way}" + (
            "" if self.storage == "device" else f" ({self.storage})"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class GroupCost:
    """What a group costs, by what happens to its rows.

    Attributes:
        launch: Seconds to start its kernels and collectives, by phase.
        exchanged: Seconds for each row through the exchange, by phase.
        room: The part of it that a place for a row takes, used or not.
        updated: Seconds for each row that its owner updates, by phase.
        fetched: Seconds for each row that its owner fetches from host memory or disk, by phase.
        placed: Seconds for each place for an id at the owner of its bag, by phase.
        pooled: Seconds for each place for a bag at its owner, by phase.
        row_bytes: Bytes of a row and its state, on the device that holds it.
        bag_bytes: Bytes of a place for a bag at its owner.
    """

    launch: np.ndarray
    exchanged: np.ndarray
    room: np.ndarray
    updated: np.ndarray
    fetched: np.ndarray
    placed: np.ndarray
    pooled: np.ndarray
    row_bytes: int
    bag_bytes: int

    @property
    def rates(self) -> np.ndarray:
        """Seconds for one of each that `jaxrec.plan.options.Option.load` counts, but for rows held,
        by phase."""
        return np.array([self.exchanged, self.updated, self.fetched, self.placed, self.pooled])


def group_cost(key: GroupKey, topology: Topology) -> GroupCost:
    """The costs of a group's rows; see the formulas above."""
    row, sums = key.width * itemsize(key.dtype), key.width * FLOAT32
    gather, sort, update = topology.gather, topology.sort, topology.update
    latency = _latency(topology)
    update_row = update.seconds(calls=0, items=1, bytes=_granules(key.row_bytes, topology))
    updated = phases(backward_compute=update_row)
    fetched = np.zeros(len(PHASES))
    if key.storage != "device":
        fetched = phases(prefetch=_fetch_row(key, topology))
    placed = pooled = np.zeros(len(PHASES))
    norms = 2 if key.optimizer.clip_norm is not None else 1
    match key.way:
        case "copies":
            launch = phases(
                forward_compute=gather.call,
                backward_compute=3 * sort.call + 2 * gather.call + update.call,
                backward_exchange=2 * latency,
            )
            # The same on every device: see `home_seconds`.
            room = touched = updated = np.zeros(len(PHASES))
        case "rows":
            launch = phases(
                forward_compute=sort.call + 3 * gather.call,
                forward_exchange=2 * latency,
                backward_compute=2 * sort.call + 3 * gather.call + update.call,
                backward_exchange=norms * latency,
            )
            room = phases(
                forward_compute=topology.copy.byte * row,
                forward_exchange=all_to_all(FLOAT32 + row, topology),
                backward_compute=norms * topology.copy.byte * sums + sort.item,
                backward_exchange=norms * all_to_all(sums, topology),
            )
            if key.is_cut:
                room += phases(
                    backward_compute=sort.item,
                    backward_exchange=2 * all_to_all(FLOAT32, topology),
                )
            touched = phases(
                forward_compute=_gather(row, topology),
                backward_compute=norms * _gather(sums, topology),
            )
        case "bags":
            launch = phases(
                forward_compute=2 * gather.call,
                forward_exchange=2 * latency,
                backward_compute=sort.call + gather.call + update.call,
                backward_exchange=(norms + key.is_cut) * latency,
            )
            room = np.zeros(len(PHASES))
            touched = phases(
                forward_compute=_gather(row, topology),
                backward_compute=norms * _gather(sums, topology),
            )
            placed = phases(
                forward_exchange=all_to_all(4 + FLOAT32 * key.is_weighted, topology),
                backward_compute=(norms + key.is_cut) * sort.item,
            )
            copied = topology.copy.byte * sums
            pooled = phases(
                forward_compute=copied,
                forward_exchange=all_to_all(4 + sums, topology),
                backward_compute=copied,
                backward_exchange=all_to_all(sums, topology),
            )
        case "sums":
            launch = phases(
                forward_compute=2 * sort.call + 2 * gather.call,
                forward_exchange=2 * latency,
                backward_compute=sort.call + gather.call + update.call,
                backward_exchange=norms * latency,
            )
            scale = FLOAT32 * key.is_weighted
            room = phases(
                forward_exchange=all_to_all(4 + scale, topology),
                backward_compute=sort.item,
                backward_exchange=all_to_all(scale, topology),
            )
            touched = phases(
                forward_compute=_gather(row, topology),
                backward_compute=norms * _gather(sums, topology),
            )
    return GroupCost(
        launch,
        room + touched,
        room,
        updated,
        fetched,
        placed,
        pooled,
        key.row_bytes,
        sums if key.way == BAGS else 0,
    )


def overflow_rooms(key: GroupKey, needed: float, room: float, devices: int) -> tuple[float, float]:
    """Places that an exchange takes forward and backward beyond those that are needed.

    Args:
        key: The group.
        needed: Rows through the exchange on the slowest device.
        room: Places that there are, in one round.
        devices: Number of devices.

    Returns:
        0 and 0 where all fits.
    """
    if needed <= room * (1 + 1e-9) or key.way in (COPIES, BAGS):
        return 0.0, 0.0
    if key.way == SUMS:
        extra = max(0.0, room / SLACK * devices - needed)
        return extra, extra
    rounds = math.ceil(needed / room - 1e-9)
    return (1 + rounds) * room - needed, rounds * room - needed


def home_seconds(work: TableWork, key: GroupKey, topology: Topology) -> np.ndarray:
    """Seconds that one part of a table's columns takes on every device alike, by phase."""
    c, n, devices = work.capacity, work.lookups, topology.num_devices
    row, sums = key.width * itemsize(key.dtype), key.width * FLOAT32
    copy, sort, update = topology.copy.byte, topology.sort.item, topology.update
    bags = copy * work.bags * sums if work.is_pooled else 0.0
    match key.way:
        case "copies":
            update_row = update.seconds(calls=0, items=1, bytes=_granules(key.row_bytes, topology))
            return phases(
                forward_compute=n * _gather(row, topology) + bags,
                backward_compute=(2 + devices) * c * sort
                + copy * c * sums
                + (n + devices * work.distinct()) * _gather(sums, topology)
                + work.distinct(devices) * update_row,
                backward_exchange=all_gather(devices * c * (FLOAT32 + sums), topology),
            )
        case "rows":
            return phases(
                forward_compute=c * sort + n * _gather(row, topology) + bags,
                backward_compute=c * sort + n * _gather(sums, topology),
            )
        case "bags":
            totals = 0.0
            if key.is_cut:
                every = FLOAT32 * devices * c * key.width / key.whole_dim
                totals = reduce_scatter(every, topology) + all_gather(every, topology)
            return phases(
                forward_compute=2 * bags, backward_compute=2 * bags, backward_exchange=totals
            )
        case _:
            everywhere = devices * work.bags * sums
            return phases(
                forward_compute=c * sort + 2 * copy * everywhere,
                forward_exchange=reduce_scatter(everywhere, topology)
                + all_to_all(FLOAT32 * devices * work.bags, topology),
                backward_exchange=all_gather(everywhere, topology),
            )


def exchanged_rows(work: TableWork, key: GroupKey, topology: Topology) -> float:
    """Rows through the exchange if one device owned the whole table."""
    if key.way == COPIES:
        return 0.0
    return topology.num_devices * (work.distinct() if key.way == ROWS else work.lookups)


def exchanged_at_least(work: TableWork, key: GroupKey) -> float:
    """Rows through the exchange in a single round, wherever the owners are."""
    return 0.0 if key.way in (COPIES, BAGS) else SLACK * work.capacity


def kept_bytes(work: TableWork, key: GroupKey, devices: int) -> float:
    """Bytes that one part of a table's columns keeps from the forward to the backward pass."""
    lines = work.bags if work.is_pooled else work.capacity
    route = {
        COPIES: 0.0,
        BAGS: 0.0,
        ROWS: (12 + 4 * SLACK) * work.capacity,
        SUMS: (8 + 4 * SLACK) * work.capacity + 4 * devices * work.bags,
    }
    return 12 * work.capacity + route[key.way] + 2 * lines * key.width * FLOAT32


def exchange_bytes(work: TableWork, key: GroupKey, topology: Topology) -> float:
    """Bytes of one part of a table's columns while its group is exchanged and updated.

    Sums of gradients, what is sent and what is received, and eight arrays of row numbers.
    """
    c, devices, sums = work.capacity, topology.num_devices, key.width * FLOAT32
    match key.way:
        case "copies":
            return c * (sums + 32) + devices * c * (sums + 32)
        case "rows":
            return 2 * c * (sums + 32) + 2 * SLACK * c * (sums + 4)
        case "bags":
            return 32 * c
        case _:
            return devices * work.bags * sums + 2 * SLACK * c * 12 + 32 * c


def all_to_all(bytes: float, topology: Topology) -> float:
    """Seconds of an all-to-all of so many bytes a device, latency left out."""
    devices, each = topology.num_devices, topology.devices_per_host
    within = topology.within.all_to_all.byte * bytes * (each - 1) / devices
    between = topology.between.all_to_all.byte * bytes * (devices - each) / devices
    return max(within, between)


def reduce_scatter(bytes: float, topology: Topology) -> float:
    """Seconds to add up arrays of so many bytes, each device keeping a part; latency left out."""
    return _by_host(
        bytes, topology.within.reduce_scatter.byte, topology.between.reduce_scatter.byte, topology
    )


def all_gather(bytes: float, topology: Topology) -> float:
    """Seconds until every device has all of so many bytes; latency left out."""
    return _by_host(
        bytes, topology.within.all_gather.byte, topology.between.all_gather.byte, topology
    )


def _by_host(bytes: float, within: float, between: float, topology: Topology) -> float:
    hosts, each = topology.hosts, topology.devices_per_host
    return bytes * (within * (each - 1) / each + between * (hosts - 1) / hosts / each)


def _latency(topology: Topology) -> float:
    """Seconds to start a collective."""
    if topology.num_devices == 1:
        return 0.0
    return (topology.between if topology.hosts > 1 else topology.within).all_to_all.call


def _gather(bytes: float, topology: Topology) -> float:
    """Seconds for each of many gathered rows."""
    return topology.gather.seconds(calls=0, items=1, bytes=_granules(bytes, topology))


def _granules(bytes: float, topology: Topology) -> float:
    return -(-bytes // topology.granule) * topology.granule


def _fetch_row(key: GroupKey, topology: Topology) -> float:
    """Seconds to bring a row and its state to the device and back."""
    seconds = topology.host_link.seconds(calls=0, items=1, bytes=key.row_bytes)
    if key.storage == "disk":
        seconds += topology.disk_link.seconds(calls=0, items=1, bytes=key.row_bytes)
    return 2 * seconds
