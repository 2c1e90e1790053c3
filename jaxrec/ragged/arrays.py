"""Helpers for arrays on the host (NumPy), on a device (JAX) or over a mesh (an axis of devices)."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxrec.ragged.raw_ids import is_raw, refuse

AnyArray: TypeAlias = Array | np.ndarray


def namespace(*arrays: object) -> types.ModuleType:
    """Return ``numpy`` if all arrays are NumPy's or None, else ``jax.numpy``."""
    # Host batches stay on the host while they are reshaped, so data workers need no device.
    on_host = all(isinstance(array, np.ndarray) for array in arrays if array is not None)
    return np if on_host else jnp


def take(array: Array, *indices: Array, fill_value: float | int | bool = 0) -> Array:
    """Return ``array[indices]``, and ``fill_value`` where an index is past the end."""
    # JAX clips indices by default: one at padding would read the last element and send it a
    # gradient. "fill" does neither.
    if 0 in array.shape[: len(indices)]:  # a gather needs something to read
        shape = (*indices[0].shape, *array.shape[len(indices) :])
        return jnp.full(shape, fill_value, array.dtype)
    # Over Explicit axes JAX asks for the result's sharding: that of the indices, then that of the
    # array's axes that are not indexed.
    sharding = explicit_sharding(indices)
    if sharding is not None:
        element = jax.typeof(array).sharding.spec[len(indices) :]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *element))
    return array.at[indices].get(mode="fill", fill_value=fill_value, out_sharding=sharding)


def explicit_sharding(arrays: Any) -> NamedSharding | None:
    """Return the sharding of the first array over Explicit axes, or None."""
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array):
            sharding = jax.typeof(leaf).sharding
            if AxisType.Explicit in sharding.mesh.axis_types:
                return sharding
    return None


def to_device(array: Any) -> Array:
    """Return ``array`` as a JAX array; refuse raw ids, and integers that JAX would cut."""
    if is_raw(array):
        refuse()
    # An empty JAX array tells the type that JAX would choose, which depends on `jax_enable_x64`.
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.size:
        bounds = jnp.iinfo(jnp.asarray(array[:0]).dtype)
        if array.min() < bounds.min or array.max() > bounds.max:
            extreme = max(int(array.max()), int(array.min()), key=abs)
            raise ValueError(f"{extreme} does not fit {bounds.dtype}; see split_int64")
    return jnp.asarray(array)


def require_one_batch(lengths: AnyArray, operation: str) -> None:
    """Raise a ValueError for a batch over a mesh, whose lengths are ``[devices, bags]``."""
    if lengths.ndim > 1:
        raise ValueError(
            f"{operation} needs one batch, and this one lies over a mesh: it has a batch for each "
            f"of {lengths.shape[0]} devices. Use {operation} before jaxrec.mesh.shard_batch, or on "
            "each device's batch inside of jax.shard_map"
        )


def each_device(
    function: Callable[..., Any], lengths: Int[AnyArray, "*devices rows"], *arrays: Any
) -> Any:
    """Call ``function(lengths, *arrays)`` with one batch, or with the batch of each device.

    Over a mesh lengths are ``[devices, rows]``, and arrays and results begin with that axis too.
    """
    if lengths.ndim == 1:
        return function(lengths, *arrays)
    return on_auto_axes(jax.vmap(function), lengths, *arrays)


def on_auto_axes(function: Callable[..., Any], *arguments: Any, is_replicated: bool = False) -> Any:
    """Call a function with Auto axes in place of Explicit ones, so that XLA chooses shardings.

    The results' first axis gets the sharding of the first argument over Explicit axes, unless they
    are replicated (``is_replicated``).
    """
    # Over Explicit axes JAX refuses a gather, a scatter or a product whose result could be sharded
    # in several ways. Here only the results are pinned; XLA shards everything before them.
    sharding = explicit_sharding(arguments)
    if sharding is None:
        return function(*arguments)
    types = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in types if kind == AxisType.Explicit)
    spec = PartitionSpec() if is_replicated else PartitionSpec(*sharding.spec[:1])
    call = jax.sharding.auto_axes(
        function, axes=explicit, out_sharding=NamedSharding(sharding.mesh, spec)
    )
    return call(*arguments)
