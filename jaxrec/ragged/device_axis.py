"""Functions of one batch, applied to a batch over a mesh, which has an axis over the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Int

from jaxrec.ragged.arrays import AnyArray, explicit_sharding


def each_device(
    function: Callable[..., Any],
    lengths: Int[AnyArray, "*devices rows"],
    *arrays: Any,
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
