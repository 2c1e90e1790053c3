"""Arrays on the host (NumPy), on a device (JAX) or over a mesh, with an axis over its devices."""

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
    """Return ``numpy`` if all the arrays (None aside) are NumPy's, else ``jax.numpy``.

    Host batches stay on the host while they are reshaped, so data workers need no device.
    """
    on_host = all(isinstance(array, np.ndarray) for array in arrays if array is not None)
    return np if on_host else jnp


def take(array: Array, *indices: Array, fill_value: float | int | bool = 0) -> Array:
    """Return ``array[indices]``, and ``fill_value`` where an index is past the end.

    An index past the end is not read, and passes no gradient back. Over Explicit axes the result
    lies as the indices, which are of one shape, and the axes of the array that are not indexed.
    """
    # Clipped, as JAX reads by default, an index of padding would read the last element, and send it
    # a gradient.
    if 0 in array.shape[: len(indices)]:  # a gather needs something to read
        shape = (*indices[0].shape, *array.shape[len(indices) :])
        return jnp.full(shape, fill_value, array.dtype)
    sharding = explicit_sharding(indices)
    if sharding is not None:
        element = jax.typeof(array).sharding.spec[len(indices) :]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *element))
    return array.at[indices].get(mode="fill", fill_value=fill_value, out_sharding=sharding)


def explicit_sharding(arrays: Any) -> NamedSharding | None:
    """Return the sharding of the first array over Explicit axes; None: there is no such array."""
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array):
            sharding = jax.typeof(leaf).sharding
            if AxisType.Explicit in sharding.mesh.axis_types:
                return sharding
    return None


def to_device(array: Any) -> Array:
    """Return ``array`` as a JAX array, no integer cut.

    Raises:
        ValueError: It is NumPy's and holds integers that JAX would cut to 32 bits, or raw ids.
    """
    if is_raw(array):
        refuse()
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.size:
        bounds = jnp.iinfo(jnp.asarray(array[:0]).dtype)
        if array.min() < bounds.min or array.max() > bounds.max:
            extreme = max(int(array.max()), int(array.min()), key=abs)
            raise ValueError(f"{extreme} does not fit {bounds.dtype}; see split_int64")
    return jnp.asarray(array)


def require_one_batch(lengths: AnyArray, operation: str) -> None:
    """Refuse a batch over a mesh, which has one batch for each device.

    Args:
        lengths: The lengths of its bags.
        operation: Name of what needs one batch.
    """
    if lengths.ndim > 1:
        raise ValueError(
            f"{operation} needs one batch, and this one lies over a mesh: it has a batch for each "
            f"of {lengths.shape[0]} devices. Use {operation} before jaxrec.mesh.shard_batch, or on "
            "each device's batch inside of jax.shard_map"
        )


def each_device(
    function: Callable[..., Any], lengths: Int[AnyArray, "*devices rows"], *arrays: Any
) -> Any:
    """Call ``function(lengths, *arrays)`` with one batch, or with that of each device.

    Args:
        function: A function of one batch.
        lengths: ``[rows]``; over a mesh ``[devices, rows]``.
        *arrays: Further pytrees of the batch. Over a mesh they have the same axis in front.

    Returns:
        The result. Over a mesh its arrays have the axis over the devices in front.
    """
    if lengths.ndim == 1:
        return function(lengths, *arrays)
    return on_auto_axes(jax.vmap(function), lengths, *arrays)


def on_auto_axes(function: Callable[..., Any], *arguments: Any, is_replicated: bool = False) -> Any:
    """Call a function in which XLA chooses shardings, as it does over Auto axes.

    Over Explicit axes JAX refuses a gather, a scatter or a product whose result could lie in
    several ways. This function decides for its results, and leaves what is between to XLA.

    Args:
        function: The function.
        *arguments: Its arguments, pytrees of arrays.
        is_replicated: Whether the results are replicated. Otherwise their first axis lies as that
            of the first argument over Explicit axes.

    Returns:
        The results. Where no argument lies over Explicit axes, this only calls the function.
    """
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
