"""Known machines, by their makers' data sheets.

Memory and bandwidths are from data sheets. The fraction of a bandwidth that kernels reach is an
estimate, the same for all machines: 65 % for gathered rows (FBGEMM's published forward kernels),
50 % for updated rows, 80 % for copies and links. Times of a host's work for tables with caches are
estimates, too. `jaxrec plan --calibrate` measures instead.

Sources:
    A100: NVIDIA A100 datasheet (80 GB SXM: 2,039 GB/s; NVLink 600 GB/s both ways; PCIe Gen4) and
        DGX A100 datasheet (8 x 200 Gb/s; 2 TB; 30 TB NVMe).
    H100: NVIDIA H100 datasheet (80 GB SXM: 3.35 TB/s; NVLink 900 GB/s both ways; PCIe Gen5) and DGX
        H100 datasheet (8 x 400 Gb/s; 2 TB; 30 TB NVMe).
    H200: NVIDIA H200 datasheet (141 GB; 4.8 TB/s; NVLink 900 GB/s both ways) and DGX H200
        datasheet.
    B200: DGX B200 datasheet and user guide (1,440 GB and 64 TB/s over 8 GPUs; 14.4 TB/s NVLink
        both ways; 8 x 400 Gb/s; 2 TB; 8 x 3.84 TB NVMe).
    TPU v5e: cloud.google.com/tpu/docs/v5e (16 GB; 819 GB/s; ICI 400 GB/s both ways a chip; 512 GiB
        for 8 chips).
    TPU v6e: cloud.google.com/tpu/docs/v6e (32 GB; 1,638 GB/s; ICI 800 GB/s both ways a chip; PCIe
        Gen5; 1,536 GiB for 8 chips).
    TPU v5p: cloud.google.com/tpu/docs/v5p (95 GiB; 2,765 GB/s; ICI 1,200 GB/s both ways a chip;
        448 GB for 4 chips).
        ICI also joins the hosts of a slice. The pages name no PCIe of v5e and v5p: Gen4 is assumed.
    Sorting: Adinets and Merrill 2022, "Onesweep: a faster least significant digit radix sort for
        GPUs" (29.4 G 32-bit keys a second on an A100); row numbers with their indices and runs
        take about six times as long as keys alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrec.plan.quantities import Links, Rate

_GATHERED, _UPDATED, _REACHED = 0.65, 0.5, 0.8
_GB, _TB = 10**9, 10**12
# The host's work for tables with caches, on a core of a server.
_ASSIGN = Rate(call=100e-6, item=20e-9)
_MOVES = Rate(call=1e-3, item=500e-9)


def _accelerator(
    name: str,
    *,
    memory: float,
    bandwidth: float,
    link: float,
    network: float,
    host_link: float,
    devices_per_host: int = 8,
    host_memory: int = 2000,
    disk: int = 30_000,
    sort: float = 29.4e9 / 6 / 2.039e12,
    packed_copies: float = 20.0,
) -> dict[str, Any]:
    """Return the fields of a machine of accelerators, from sizes in GB and GB/s.

    ``bandwidth`` of a device's memory is in TB/s, reads and writes together. ``link`` goes from a
    device to others of its host, ``network`` to other hosts, ``host_link`` between host and device,
    one way each. ``sort`` is the number of row numbers sorted while memory moves a byte.
    ``packed_copies`` (see `jaxrec.plan.Topology`) is from the bytes of a step compiled for H200s.
    """
    call = 5e-6  # to start a kernel
    # Four copies in the host's memory, at 10 GB/s each; see "host_moves".
    in_memory = 2 / (host_link * _GB * _REACHED) + 4 / (10 * _GB * _REACHED)
    return {
        "name": name,
        "devices_per_host": devices_per_host,
        "memory": round(memory * _GB),
        "host_memory": round(host_memory * _GB),
        "disk": round(disk * _GB),
        # Gathers and updates both read and write a row.
        "gather": Rate(call=call, byte=2 / (bandwidth * _TB * _GATHERED)),
        "update": Rate(call=call, byte=2 / (bandwidth * _TB * _UPDATED)),
        "sort": Rate(call=4 * call, item=1 / (sort * (bandwidth * _TB))),
        "copy": Rate(call=call, byte=2 / (bandwidth * _TB * _REACHED)),
        "within": Links.of(15e-6, link * _GB * _REACHED),
        "between": Links.of(30e-6, network * _GB * _REACHED),
        "assign": _ASSIGN,
        # A row is copied to the device and another back, and each to and from a record.
        "host_moves": dataclasses.replace(_MOVES, byte=in_memory),
        # Eight NVMe disks of 7 GB/s.
        "store_moves": dataclasses.replace(_MOVES, byte=in_memory + 2 / (8 * 7 * _GB * _REACHED)),
        "granule": 64,
        "packed_copies": packed_copies,
    }


def _tpu(
    name: str,
    *,
    memory: float,
    bandwidth: float,
    link: float,
    host_memory: int,
    host_link: float = 32,
    devices_per_host: int = 8,
) -> dict[str, Any]:
    """Return the fields of a machine of TPUs, whose links reach all chips of a slice alike."""
    return _accelerator(
        name,
        memory=memory,
        bandwidth=bandwidth,
        link=link,
        network=link,
        host_link=host_link,
        devices_per_host=devices_per_host,
        host_memory=host_memory,
        disk=0,
        # TPUs sort by comparing, several times slower than by radix.
        sort=29.4e9 / 24 / 2.039e12,
        packed_copies=0.0,  # not counted for TPUs
    )


MACHINES: dict[str, dict[str, Any]] = {
    "a100": _accelerator("a100", memory=80, bandwidth=2.039, link=300, network=25, host_link=32),
    "h100": _accelerator("h100", memory=80, bandwidth=3.35, link=450, network=50, host_link=64),
    "h200": _accelerator("h200", memory=141, bandwidth=4.8, link=450, network=50, host_link=64),
    "b200": _accelerator("b200", memory=180, bandwidth=8, link=900, network=50, host_link=64),
    "tpu-v5e": _tpu("tpu-v5e", memory=16, bandwidth=0.819, link=200, host_memory=550),
    "tpu-v6e": _tpu(
        "tpu-v6e", memory=32, bandwidth=1.638, link=400, host_memory=1649, host_link=64
    ),
    "tpu-v5p": _tpu(
        "tpu-v5p",
        memory=95 * 2**30 / _GB,
        bandwidth=2.765,
        link=600,
        host_memory=448,
        devices_per_host=4,
    ),
    # Simulated devices on two cores of a server; calibrate for anything else.
    "cpu": {
        "name": "cpu",
        "devices_per_host": 8,
        "memory": 4 * _GB,
        "host_memory": 32 * _GB,
        "disk": 1000 * _GB,
        "gather": Rate(call=20e-6, item=20e-9, byte=1 / (4 * _GB)),
        "update": Rate(call=20e-6, item=40e-9, byte=1 / (3 * _GB)),
        "sort": Rate(call=50e-6, item=200e-9),
        "copy": Rate(call=10e-6, byte=1 / (4 * _GB)),
        "within": Links.of(300e-6, 1 * _GB),
        "between": Links.of(300e-6, 1 * _GB),
        "assign": _ASSIGN,
        "host_moves": Rate(call=2e-3, item=1e-6, byte=1 / _GB),
        "store_moves": Rate(call=3e-3, item=2e-6, byte=2 / _GB),
        "granule": 64,
    },
}

# Machine by the beginning of `jax.Device.device_kind`; the first that fits counts.
_KINDS = {
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v6": "tpu-v6e",
    "TPU v5p": "tpu-v5p",
    "TPU v5": "tpu-v5p",  # the name that JAX gives a v5p
}


def find_machine(platform: str, device_kind: str) -> str | None:
    """Return the machine whose devices JAX gives this kind; None if unknown."""
    if platform == "cpu":
        return "cpu"
    for beginning, machine in _KINDS.items():
        if device_kind.startswith(beginning):
            return machine
    return None
