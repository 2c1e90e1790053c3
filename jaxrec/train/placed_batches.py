"""Placing batches on the devices: one at a time, or ahead of the steps that take them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxrec.data import Pipeline
from jaxrec.data.pipeline import each_batch
from jaxrec.mesh.batch_counts import even_batches
from jaxrec.mesh.processes import spans_processes
from jaxrec.ragged.columns import numbers
from jaxrec.tier import ahead
from jaxrec.tier.planning.tier import tier_of

# Number of batches whose ids get their rows ahead of the steps.
_LOOK_AHEAD = 2

# XLA on a CPU uses host memory in place if it begins at a multiple of these bytes.
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
    # NumPy aligns to 16 bytes, and XLA would copy the copy.
    memory = np.empty(leaf.nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    copy[...] = leaf
    return copy


@jax.jit
def _on_device(batch: Any) -> Any:
    """Convert to device arrays, in a third of the time that `jax.device_put` takes."""
    return batch


def placed_batches(
    model: nnx.Module,
    batches: Iterable[Any],
    *stages: Callable[[Any], Any],
    place: Callable[[Any], Any],
    is_training: bool,
    accumulate: int = 1,
    empty: Callable[[Any], Any] | None = None,
) -> AbstractContextManager[Iterator[Any]]:
    """Return a context with the batches on the devices; threads process and place them ahead.

    Each of ``stages`` is a function of a host batch, with a thread of its own. Open vocabularies
    give rows to ids (`jaxrec.tier.ahead`). Processes that share a model get equally many batches
    (`jaxrec.mesh.even_batches`, which takes ``empty``).
    """
    is_shared, tier = spans_processes(model), tier_of(model)
    if tier is None and not is_shared:
        return Pipeline(batches, *stages, place)
    # Without stages this needs no thread of its own: `ahead` or the pipeline below reads the
    # batches.
    host_batches: Iterable[Any] = Pipeline(batches, *stages) if stages else each_batch(batches)
    if is_shared:
        host_batches = even_batches(host_batches, empty=empty)
    if tier is None:
        return Pipeline(host_batches, place)
    return contextlib.closing(
        ahead(
            model,
            host_batches,
            _LOOK_AHEAD,
            is_training=is_training,
            accumulate=accumulate,
            place=place,
        )
    )
