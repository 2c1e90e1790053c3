"""Shards of tables, and the devices of a mesh that store them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices of a mesh, numbered host by host.

    Attributes:
        hosts: Number of hosts; 1 on a mesh of one axis.
        devices_per_host: Number of devices of each host. Fast links join them.
    """

    hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host

    def devices_of(self, host: int) -> tuple[int, ...]:
        """Return the devices of a host."""
        start = host * self.devices_per_host
        return tuple(range(start, start + self.devices_per_host))


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a table that one device stores.

    Attributes:
        rows: First row and the row after the last.
        columns: First column and the column after the last.
        device: Number of the owner on the mesh.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    device: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rows[1] - self.rows[0]
