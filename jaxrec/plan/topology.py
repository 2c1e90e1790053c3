"""The devices and hosts to plan for: memory, links and the rates of operations."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxrec.mesh.creation import mesh_shape
from jaxrec.plan.machines import MACHINES, find_machine
from jaxrec.plan.quantities import Links, Rate

_RATES = ("gather", "update", "sort", "copy", "assign", "host_moves", "store_moves")
_SIZES = ("hosts", "devices_per_host", "memory", "host_memory", "disk", "granule")
# Fields that are set only where devices differ.
_DIFFERENCES = ("device_memory", "device_speed")
# Left out of files where 0 or empty, so that files of older versions load, and plans that were made
# for them keep their hash.
_OPTIONAL = (*_DIFFERENCES, "packed_copies")
# Rates that a device's speed divides: those of its own memory and arithmetic. Links and hosts have
# their own.
_DEVICE_RATES = ("gather", "update", "sort", "copy")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts of one kind with devices that are alike, or differ in memory and speed.

    Attributes:
        name: Name of the machine.
        hosts: Number of hosts.
        devices_per_host: Number of devices on each host, joined by fast links.
        memory: Bytes of each device; where ``device_memory`` is given, of the smallest device.
        host_memory: Bytes of each host.
        disk: Bytes of each host's local disks.
        gather: Reads of random rows, which are written one after the other. An item is a row, bytes
            are the rows' bytes.
        update: Updates of rows and optimizer state in place. An item is a row, bytes are those of
            the row and its state.
        sort: Sorts of row numbers, with the runs of equal ones. An item is a row number.
        copy: Copies within a device's memory.
        within: Collectives among the devices of one host.
        between: Collectives among devices of different hosts, one device of each host.
        assign: Assignments of cached rows to the ids of a batch, on the host. An item is an id.
        host_moves: Moves of rows from the host's memory to the devices, and of as many rows back. A
            call is one table in one step, an item is a pair of rows, bytes are those of a row
            and its optimizer state.
        store_moves: The same moves for a row store on disk.
        granule: Smallest read of memory in bytes; a narrower row takes as long.
        packed_copies: Copies of the lookups' gradients, in float32, that an update of packed rows
            adds where it consists of many kernels. 0: it is one kernel, as for other rows.
        device_memory: Bytes of each device, or of the devices of each host, where they differ;
            empty: ``memory``. Arrays have equal parts on all devices, so a plan must fit the
            smallest device.
        device_speed: Speed of each device, or of the devices of each host, where they differ;
            empty: 1. A device of speed 2 gathers, updates, sorts and copies in half of the time
            that the rates say for an item or a byte.

    Raises:
        ValueError: If a size or a speed is not positive, or the number of values is neither that of
            the devices nor that of the hosts.

    Example:
        >>> topology = Topology.named("h100", devices=16)
        >>> topology.hosts, topology.devices_per_host, topology.memory
        (2, 8, 80000000000)
    """

    name: str
    hosts: int
    devices_per_host: int
    memory: int
    gather: Rate
    update: Rate
    sort: Rate
    copy: Rate
    within: Links
    between: Links
    assign: Rate
    host_moves: Rate
    store_moves: Rate
    host_memory: int = 0
    disk: int = 0
    granule: int = 64
    packed_copies: float = 0.0
    device_memory: tuple[int, ...] = ()
    device_speed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in ("hosts", "devices_per_host", "memory", "granule"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"topology: {field} is an integer of 1 or more, got {value!r}")
        copies = self.packed_copies
        is_number = isinstance(copies, int | float) and not isinstance(copies, bool)
        if not is_number or not 0 <= copies < math.inf:
            raise ValueError(f"topology: packed_copies is a number of 0 or more, got {copies!r}")
        for field in _DIFFERENCES:
            object.__setattr__(self, field, self._of_devices(field))
        for value in self.device_memory:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"topology: device_memory is bytes, integers of 1 or more, got {value!r}"
                )
        for speed in self.device_speed:
            is_number = isinstance(speed, int | float) and not isinstance(speed, bool)
            if not is_number or not 0 < speed < math.inf:
                raise ValueError(f"topology: device_speed is numbers above 0, got {speed!r}")
        # A group of tables is one array with equal parts on all devices. So the smallest device
        # limits all of them, and more memory elsewhere can only be left free.
        if self.device_memory:
            object.__setattr__(self, "memory", min(self.device_memory))

    def _of_devices(self, field: str) -> tuple[Any, ...]:
        """Return a field's values by device, where they are given by device or by host."""
        values = getattr(self, field)
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"topology: {field} is a sequence of numbers, got {values!r}")
        if len(values) not in (0, self.num_devices, self.hosts):
            raise ValueError(
                f"topology: {field} has {len(values)} numbers for {self.hosts} hosts of "
                f"{self.devices_per_host} devices; give one for each device or for each host"
            )
        each = self.devices_per_host if len(values) == self.hosts else 1
        return tuple(value for value in values for _ in range(each))

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    @property
    def relative_speeds(self) -> tuple[float, ...]:
        """Speed of each device over that of the slowest."""
        slowest = min(self.device_speed, default=1)
        return tuple(speed / slowest for speed in self.device_speed) or (1.0,) * self.num_devices

    @property
    def slowest(self) -> Topology:
        """The same number of devices, all alike, with the least memory and the least speed."""
        if not self.device_memory and not self.device_speed:
            return self
        # Costs are computed once, for the slowest device; `Problem.weights` then says by how much
        # the others are faster. The time of a call is the host's to launch a kernel, and stays.
        speed = min(self.device_speed, default=1)
        rates = {
            name: dataclasses.replace(rate, item=rate.item / speed, byte=rate.byte / speed)
            for name in _DEVICE_RATES
            for rate in (getattr(self, name),)
        }
        return dataclasses.replace(self, device_memory=(), device_speed=(), **rates)

    @classmethod
    def named(cls, machine: str, *, devices: int, devices_per_host: int | None = None) -> Topology:
        """Return a cluster of known machines, with their published rates.

        Args:
            machine: One of "a100", "h100", "h200", "b200", "tpu-v5e", "tpu-v6e", "tpu-v5p" and
                "cpu".
            devices: Number of devices in all.
            devices_per_host: Number of devices on each host; None: as many as the machine usually
                has, or all if they are fewer.

        Raises:
            ValueError: If no machine has that name, or the devices do not fill whole hosts.
        """
        if machine.lower() not in MACHINES:
            raise ValueError(
                f"no machine is named {machine!r}; there are {', '.join(MACHINES)}, and "
                "`jaxrec plan --calibrate` measures another"
            )
        known = MACHINES[machine.lower()]
        hosts, each = _hosts(devices, devices_per_host, known["devices_per_host"])
        return cls(**{**known, "hosts": hosts, "devices_per_host": each})

    @classmethod
    def from_mesh(
        cls, mesh: Mesh, *, memory: int | None = None, replica_axis: str | None = None
    ) -> Topology:
        """Return the devices of a mesh, with the published rates of their kind.

        A mesh of one axis is one host; of two axes, the first counts hosts.

        Args:
            mesh: The devices.
            memory: Bytes of each device. None: the least that any device of this process reports,
                or the machine's published memory if none reports it.
            replica_axis: Axis of the mesh over which the sharded tables are replicated, as for
                `jaxrec.shard`: the topology has the devices of one replica. Plan with the batch of
                one replica.

        Raises:
            ValueError: The mesh lacks the axis, or has no other.

        Example:
            >>> import jax
            >>> Topology.from_mesh(jax.make_mesh((1,), ("data",))).num_devices
            1
        """
        device = mesh.devices.flat[0]
        machine = find_machine(device.platform, device.device_kind)
        if machine is None:
            machine = {"cpu": "cpu", "tpu": "tpu-v5p"}.get(device.platform, "h100")
            warnings.warn(
                f"no rates are known for devices of kind {device.device_kind!r}; planning with "
                f"those of {machine}. `jaxrec plan --calibrate` measures the devices at hand",
                stacklevel=2,
            )
        shape = mesh_shape(mesh, replica_axis)
        per_host = shape.devices_per_host
        topology = cls.named(machine, devices=shape.num_devices, devices_per_host=per_host)
        reported = [_device_memory(each, per_host) for each in mesh.local_devices]
        least = min((memory for memory in reported if memory), default=None)
        return dataclasses.replace(
            topology,
            memory=memory or least or topology.memory,
            host_memory=_host_memory() or topology.host_memory,
        )

    @classmethod
    def joined(cls, parts: Sequence[Topology]) -> Topology:
        """Return one cluster of several, such as hosts of an older and of a newer machine.

        The hosts are numbered part by part. Rates of links, hosts and kernel launches are those of
        the slowest part. The speed of a part's devices is the time to gather a row of 256 bytes on
        the slowest part, divided by the time on this part.

        Args:
            parts: The clusters.

        Raises:
            ValueError: If there are none, or their hosts differ in the number of devices.

        Example:
            >>> a100, h100 = (Topology.named(name, devices=8) for name in ("a100", "h100"))
            >>> both = Topology.joined([a100, h100])
            >>> both.name, both.hosts, [round(speed, 2) for speed in both.device_speed[6:10]]
            ('a100 + h100', 2, [1.0, 1.0, 1.64, 1.64])
        """
        counts = {part.devices_per_host for part in parts}
        if len(counts) != 1:
            raise ValueError(
                "a cluster is joined of hosts that all have as many devices, got "
                f"{[part.devices_per_host for part in parts]} on the hosts of its parts"
            )
        rates: dict[str, Any] = {
            name: _slowest([getattr(part, name) for part in parts]) for name in _RATES
        }
        for name in ("within", "between"):
            links = [getattr(part, name) for part in parts]
            kinds = [field.name for field in dataclasses.fields(Links)]
            rates[name] = Links(
                **{kind: _slowest([getattr(each, kind) for each in links]) for kind in kinds}
            )

        # One number has to stand for a device's gathers, updates, sorts and copies alike; a gather
        # of 64 float32 columns is a usual row's.
        def gather_row(rate: Rate) -> float:
            return rate.seconds(calls=0, items=1, bytes=256)

        return cls(
            " + ".join(dict.fromkeys(part.name for part in parts)),
            hosts=sum(part.hosts for part in parts),
            devices_per_host=counts.pop(),
            memory=min(part.memory for part in parts),
            host_memory=min(part.host_memory for part in parts),
            disk=min(part.disk for part in parts),
            granule=max(part.granule for part in parts),
            packed_copies=max(part.packed_copies for part in parts),
            device_memory=tuple(
                memory
                for part in parts
                for memory in part.device_memory or (part.memory,) * part.num_devices
            ),
            device_speed=tuple(
                speed * gather_row(rates["gather"]) / gather_row(part.gather)
                for part in parts
                for speed in part.device_speed or (1.0,) * part.num_devices
            ),
            **rates,
        )

    def with_devices(self, devices: int, devices_per_host: int | None = None) -> Topology:
        """Return a cluster of these machines with another number of devices.

        Args:
            devices: Number of devices in all.
            devices_per_host: Number of devices on each host; None: as many as here, or all if
                they are fewer.

        Raises:
            ValueError: If the devices do not fill whole hosts, or the topology gives the memory or
                speed of each device and their number changes.
        """
        hosts, each = _hosts(devices, devices_per_host, self.devices_per_host)
        if (hosts, each) == (self.hosts, self.devices_per_host):
            return self
        if self.device_memory or self.device_speed:
            raise ValueError(
                f"the topology says how {self.hosts} hosts of {self.devices_per_host} devices "
                f"differ, and cannot be that of {hosts} hosts of {each}; plan for its "
                f"{self.num_devices} devices"
            )
        return dataclasses.replace(self, hosts=hosts, devices_per_host=each)

    def to_dict(self) -> dict[str, Any]:
        """Return the topology as a dictionary for JSON."""
        fields = dataclasses.asdict(self)
        return {
            name: list(value) if name in _DIFFERENCES else value
            for name, value in fields.items()
            if name not in _OPTIONAL or value
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Topology:
        """Make a topology from the dictionary of `to_dict`.

        Raises:
            ValueError: If a field is missing, unknown or not a number.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if "host_link" in fields:
            raise ValueError(
                "the topology was measured before moves of cached rows were; measure it again by "
                "`jaxrec plan --calibrate`"
            )
        if problem := known.symmetric_difference(fields) - set(_OPTIONAL):
            what = "has no" if sorted(problem)[0] in known else "has an unknown"
            raise ValueError(f"the topology {what} field {sorted(problem)[0]!r}")
        values: dict[str, Any] = dict(fields)
        try:
            values |= {name: Rate(**fields[name]) for name in _RATES}
            for links in ("within", "between"):
                values[links] = Links(**{k: Rate(**rate) for k, rate in fields[links].items()})
            values |= {name: int(fields[name]) for name in _SIZES}
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"the topology is not what `jaxrec plan --calibrate` writes: {error}"
            ) from None
        return cls(**values)

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file that `load` reads."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Topology:
        """Read a topology that was saved, for example by `jaxrec plan --calibrate`.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds no topology.
        """
        try:
            return cls.from_dict(json.loads(pathlib.Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _hosts(devices: int, devices_per_host: int | None, usual: int) -> tuple[int, int]:
    """Return the number of hosts, and of devices on each."""
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices is an integer of 1 or more, got {devices!r}")
    each = min(devices, usual) if devices_per_host is None else devices_per_host
    if each < 1 or devices % each:
        raise ValueError(
            f"{devices} devices do not fill hosts of {each}; give devices_per_host a divisor"
        )
    return devices // each, each


def _slowest(rates: Sequence[Rate]) -> Rate:
    """Return the largest seconds by call, by item and by byte among several rates."""
    names = [field.name for field in dataclasses.fields(Rate)]
    return Rate(**{name: max(getattr(rate, name) for rate in rates) for name in names})


def _device_memory(device: Any, per_host: int) -> int | None:
    """Return the bytes that a device reports; a simulated one has its part of the host's."""
    if device.platform == "cpu":
        host = _host_memory()
        return host and host // per_host
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return None
