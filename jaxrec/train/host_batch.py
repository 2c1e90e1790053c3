"""Transfer of host batches to a single device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrec.ragged.columns import numbers

# Bytes; XLA on a CPU copies arrays with another alignment.
ALIGNMENT = 64

# Types that need no check.
_DEVICE_TYPES = frozenset(map(np.dtype, ("bool", "int32", "float32")))


def put_batch(batch: Any) -> Any:
    """Copy a host batch to the default device; `jaxrec.mesh.shard_batch` is for meshes.

    `jax.device_put` may use host memory in place on a CPU, or copy it later, so that a reader that
    reuses its buffers would change the batch. This function copies the batch before it returns.

    Args:
        batch: Any pytree of arrays and numbers.

    Raises:
        TypeError: A leaf has no numbers, such as an array of strings.
        ValueError: An integer does not fit 32 bits, or elements are masked.

    Example:
        >>> import numpy as np
        >>> host = np.zeros(1024, np.float32)
        >>> there = put_batch(host)
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
    """Copy a host array to memory that XLA uses in place."""
    if isinstance(leaf, jax.Array):
        return leaf
    memory = np.empty(leaf.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    copy[...] = leaf
    return copy


@jax.jit
def _on_device(batch: Any) -> Any:
    """Convert to device arrays, in a third of the time of `jax.device_put`."""
    return batch
