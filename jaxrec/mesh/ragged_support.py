"""Meshes on which XLA's ragged all-to-all serves: by platform, number of devices and version.

On GPUs it is one kernel that writes to the other devices' memory, for up to 8 devices of one
process. Otherwise it is a loop of sends and receives, before which the host waits for the device.
Its kernels for symmetric memory have space for 32 devices
(https://github.com/openxla/xla/issues/47283). Both numbers are constants of XLA, read from the CUDA
plugins of JAX 0.10.2 to 0.12.0.1: ``RaggedAllToAllKernelImpl`` takes an array of 8 pointers,
``MultiGpuBarrierKernelImpl`` one of 32.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrec.mesh.replicas import ReplicaAxis

# Platforms on which XLA has a ragged all-to-all.
_RAGGED_PLATFORMS = ("gpu", "tpu")
_KERNEL_DEVICES, _MOST_DEVICES = 8, 32
# Until JAX 0.12 kernels write past their space, from then on they report an error. The last version
# that was read; XLA's source has space for 128 devices since.
_CHECKED, _LAST_READ = (0, 12), (0, 12, 0, 1)


def check_ragged(mesh: Mesh, replica_axis: ReplicaAxis = None) -> None:
    """Raise a ValueError if ragged all-to-alls fail on a mesh; warn if they are slow there."""
    platform = mesh.devices.flat[0].platform
    if platform not in _RAGGED_PLATFORMS:
        raise ValueError(
            f"XLA has no ragged all-to-all for {platform} devices; shard with is_ragged=False there"
        )
    if platform != "gpu":
        return
    replicas = _replicas(mesh, replica_axis)
    devices = replicas[0].size
    advice = "Shard with is_ragged=False: results are the same"
    if devices > _MOST_DEVICES and jax.__version_info__ <= _LAST_READ:
        fails = "fails" if jax.__version_info__ >= _CHECKED else "crashes"
        raise ValueError(
            f"is_ragged=True with tables over {devices} GPUs: with symmetric memory, the ragged "
            f"all-to-all of JAX {jax.__version__} {fails} on more than {_MOST_DEVICES} GPUs, and "
            f"without it is a slow loop of sends and receives. {advice}"
        )
    processes = max(len({device.process_index for device in each.flat}) for each in replicas)
    if devices > _KERNEL_DEVICES or processes > 1:
        of = "one process" if processes == 1 else f"{processes} processes"
        warnings.warn(
            f"is_ragged=True with tables over {devices} GPUs of {of}: XLA's ragged all-to-all is "
            f"one kernel only for up to {_KERNEL_DEVICES} GPUs of one process. Here each is a slow "
            f"loop of sends and receives, before which the host waits for the device. {advice}",
            stacklevel=3,
        )


def _replicas(mesh: Mesh, replica_axis: ReplicaAxis) -> np.ndarray:
    """Return the devices of each group that exchanges rows: ``[replicas, ...]``."""
    # Where only some tables have replicas, the others are over all devices.
    if isinstance(replica_axis, Mapping) or replica_axis not in mesh.axis_names:
        return mesh.devices[None]
    return np.moveaxis(mesh.devices, mesh.axis_names.index(replica_axis), 0)
