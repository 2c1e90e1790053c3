"""Host batches on a single device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrec.ragged.columns import numbers

# Bytes; XLA copies arrays on a CPU that begin elsewhere.
ALIGNMENT = 64

# Most batches have these types alone, which need no check.
_DEVICE_TYPES = frozenset(map(np.dtype, ("bool", "int32", "float32")))


def put(batch: Any) -> Any:
    """Put a host batch on the default device, as a copy; on a mesh `jaxrec.mesh.shard_batch` does.

    On CPUs JAX uses the host's memory itself, or copies it only once the device is free, and a
    reader that fills its buffers anew would change a batch under way. The batch is thus copied
    before, to memory that JAX takes as it is.

    Args:
        batch: Any pytree of arrays and numbers.

    Raises:
        TypeError: A leaf has no numbers, such as an array of strings.
        ValueError: An integer does not fit 32 bits, or elements are masked.

    Example:
        >>> import numpy as np
        >>> host = np.zeros(1024, np.float32)
        >>> there = put(host)
        >>> host[:] = 1
        >>> float(there.sum())
        0.0
    """
    batch = jax.tree_util.tree_map_with_path(_checked, batch)
    if jax.default_backend() != "cpu":
        return jax.device_put(batch)
    return _on_device(jax.tree.map(_copied, batch))


def _checked(path: tuple[Any, ...], leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) or (type(leaf) is np.ndarray and leaf.dtype in _DEVICE_TYPES):
        return leaf
    return numbers(f"batch{jax.tree_util.keystr(path)}", leaf)


def _copied(leaf: Any) -> Any:
    """A host array in memory of its own, aligned as XLA needs it."""
    if isinstance(leaf, jax.Array):
        return leaf
    memory = np.empty(leaf.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    copy[...] = leaf
    return copy


@jax.jit
def _on_device(batch: Any) -> Any:
    """The batch as arrays of the device, in a third of the time of `jax.device_put`."""
    return batch
