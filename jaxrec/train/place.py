"""Host batches on a single device."""

from __future__ import annotations

from typing import Any

import jax


def put(batch: Any) -> Any:
    """Puts a host batch on the default device, as a copy; on a mesh `jaxrec.mesh.shard_batch` does.

    On CPUs `jax.device_put` may use the host's memory itself, which a reader that fills its buffers
    anew would change under a step that is under way; and a compiled copy takes a third of its time.

    Args:
        batch: Any pytree of arrays.

    Example:
        >>> import numpy as np
        >>> host = np.zeros(1024, np.float32)
        >>> there = put(host)
        >>> host[:] = 1
        >>> float(there.sum())
        0.0
    """
    return _copy(batch) if jax.default_backend() == "cpu" else jax.device_put(batch)


@jax.jit
def _copy(batch: Any) -> Any:
    return batch
