"""The topology of a machine: devices, hosts, memory and the rates of operations."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jaxrec.mesh.creation import mesh_shape
from jaxrec.plan.machines import MACHINES, find_machine
from jaxrec.plan.rates import Links, Rate

_RATES = ("gather", "update", "sort", "copy", "assign", "host_moves", "store_moves")
_SIZES = ("hosts", "devices_per_host", "memory", "host_memory", "disk", "granule")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind on hosts of one kind.

    Attributes:
        name: Name of the machine.
        hosts: Number of hosts.
        devices_per_host: Number of devices on each, joined by fast links.
        memory: Bytes of each device.
        host_memory: Bytes of each host.
        disk: Bytes of each host's local disks.
        gather: Reads of random rows, written one after the other; an item is a row, bytes are the
            rows' bytes.
        update: Updates of rows and optimizer state in place; an item is a row, bytes are those of
            the row and its state.
        sort: Sorts of row numbers, with the runs of equal ones; an item is a row number.
        copy: Copies within a device's memory.
        within: Collectives among the devices of one host.
        between: Collectives among devices of different hosts, one of each.
        assign: Assignments of cached rows to the ids of a batch, on the host; an item is an id.
        host_moves: Moves of rows between the devices and the host's memory, and of as many rows
            back; a call is one table in one step, an item is a row that comes and one that leaves,
            bytes are those of the row and its optimizer state.
        store_moves: The same moves for a row store on disk.
        granule: Smallest read of memory in bytes; a narrower row takes as long.

    Raises:
        ValueError: If a size is not positive.

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

    def __post_init__(self) -> None:
        for field in ("hosts", "devices_per_host", "memory", "granule"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"topology: {field} is an integer of 1 or more, got {value!r}")

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    @classmethod
    def named(cls, machine: str, *, devices: int, devices_per_host: int | None = None) -> Topology:
        """Return a cluster of known machines, with their published rates.

        Args:
            machine: One of "a100", "h100", "h200", "b200", "tpu-v5p" and "cpu".
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
            memory: Bytes of each device; None: as many as that of this process's devices reports
                which has the fewest, since arrays have equal parts on all devices.
            replica_axis: Axis of the mesh over which there are replicas of the sharded tables, as
                for `jaxrec.shard`: the topology has the devices of one replica. Plan with the
                samples of one.

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

    def with_devices(self, devices: int, devices_per_host: int | None = None) -> Topology:
        """Return a cluster of these machines with another number of devices.

        Args:
            devices: Number of devices in all.
            devices_per_host: Number of devices on each host; None: as many as here, or all if
                they are fewer.

        Raises:
            ValueError: If the devices do not fill whole hosts.
        """
        hosts, each = _hosts(devices, devices_per_host, self.devices_per_host)
        return dataclasses.replace(self, hosts=hosts, devices_per_host=each)

    def to_dict(self) -> dict[str, Any]:
        """Return the topology as JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Topology:
        """Make a topology from what `to_dict` returned.

        Raises:
            ValueError: If a field is missing, unknown or not a number.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if "host_link" in fields:
            raise ValueError(
                "the topology was measured before moves of cached rows were; measure it again by "
                "`jaxrec plan --calibrate`"
            )
        if problem := known.symmetric_difference(fields):
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
