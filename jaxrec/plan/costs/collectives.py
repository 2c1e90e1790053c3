"""Seconds of collectives, over links within hosts and between them.

Times are for the bytes alone. `latency` is the time to start a collective.
"""

from __future__ import annotations

from jaxrec.plan.topology import Topology


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
