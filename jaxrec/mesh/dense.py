"""The dense part of a model on a mesh."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec.embed.collection import TableVariable
from jaxrec.embed.sharded_variables import (
    DensePlacement,
    ShardedVariable,
    shard_variable,
    unshard_variable,
)
from jaxrec.mesh.agree import fingerprint, put_on_mesh, require_same
from jaxrec.mesh.pool_rows import RowsVariable

MIN_SHARDED_SIZE = 2**16
"""Number of elements from which "fsdp" shards an array."""

DenseName: TypeAlias = Literal["replicated", "fsdp"]

DenseRule: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], PartitionSpec | None]
"""Returns where a dense parameter lies, given its path such as "over/kernel" and its shape.

None leaves the parameter to "fsdp".
"""


def check_dense(dense: Any) -> None:
    """Check the argument ``dense`` of `jaxrec.mesh.shard`.

    Raises:
        TypeError: It is neither a name nor a function.
        ValueError: The name is unknown.
    """
    if isinstance(dense, str) and dense not in get_args(DenseName):
        raise ValueError(
            f"dense={dense!r} is not one of {', '.join(map(repr, get_args(DenseName)))}; or give a "
            "function from the path and the shape of a parameter to its PartitionSpec"
        )
    if not isinstance(dense, str) and not callable(dense):
        raise TypeError(
            "dense is 'replicated', 'fsdp', or a function from the path and the shape of a "
            f"parameter to its PartitionSpec, got {dense!r}"
        )


def place_dense(model: nnx.Module, dense: DenseName | DenseRule, mesh: Mesh) -> None:
    """Put all variables of a model but its tables and pools on a mesh.

    Args:
        model: The model, changed in place.
        dense: See `jaxrec.mesh.shard`.
        mesh: The devices.

    Raises:
        TypeError: The rule returns something else.
        ValueError: A sharding does not fit its parameter or the mesh; the processes have different
            models.
    """
    placements = dense_placements(model, dense, mesh)
    state = nnx.state(model, nnx.Not(nnx.Any(TableVariable, RowsVariable)))
    named = {_name(path): variable for path, variable in nnx.to_flat_state(state)}
    if jax.process_count() > 1:
        for variable in named.values():
            if isinstance(variable, ShardedVariable):  # of another mesh, or sharded otherwise
                variable.set_raw_value(variable.whole())
                unshard_variable(variable)
        leaves = {name: jax.tree.leaves(each.get_raw_value()) for name, each in named.items()}
        require_same("model", {name: str([*map(fingerprint, x)]) for name, x in leaves.items()})
    everywhere = NamedSharding(mesh, PartitionSpec())
    for name, variable in named.items():
        placement = placements.get(name)
        sharding = everywhere if placement is None else placement.sharding
        array = jax.tree.map(lambda x, to=sharding: put_on_mesh(x, to), variable.get_raw_value())
        unshard_variable(variable)
        variable.set_raw_value(array)
        if placement is not None:
            shard_variable(variable, placement)


def dense_placements(
    model: nnx.Module, dense: DenseName | DenseRule, mesh: Mesh
) -> dict[str, DensePlacement]:
    """Return the placements of the parameters that are sharded, by path.

    Raises:
        TypeError: The rule returns something else.
        ValueError: A sharding does not fit its parameter or the mesh.
    """
    if dense == "replicated":
        return {}
    placements = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, array = _name(path), variable.get_raw_value()
        if not isinstance(array, jax.Array) or not jnp.issubdtype(array.dtype, jnp.floating):
            continue
        given = None if isinstance(dense, str) else dense(name, _form(array))
        spec = _fsdp(name, array, mesh) if given is None else _checked(name, array, given, mesh)
        if any(axis is not None for axis in spec):
            sharding = NamedSharding(mesh, spec)
            placements[name] = DensePlacement(sharding, array.ndim, is_gathered=given is None)
    return placements


def _fsdp(name: str, array: jax.Array, mesh: Mesh) -> PartitionSpec:
    """Cut an array over all devices along its largest axis that they divide."""
    devices = mesh.devices.size
    if array.size < MIN_SHARDED_SIZE or devices == 1:
        return PartitionSpec()
    sizes = [size if size % devices == 0 else 0 for size in array.shape]
    if not any(sizes):
        warnings.warn(
            f"parameter {name!r} of shape {array.shape} stays whole on every device, since none of "
            f"its axes divides by the {devices} devices; make one a multiple of {devices}, or give "
            "dense= a function that returns its PartitionSpec",
            stacklevel=2,
        )
        return PartitionSpec()
    axis = sizes.index(max(sizes))
    return PartitionSpec(*[None] * axis, tuple(mesh.axis_names))


def _checked(name: str, array: jax.Array, spec: Any, mesh: Mesh) -> PartitionSpec:
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"dense= returned {spec!r} for parameter {name!r}; it returns a "
            "jax.sharding.PartitionSpec, or None for what 'fsdp' does"
        )
    if len(spec) > array.ndim:
        raise ValueError(
            f"dense= returned {spec} for parameter {name!r}, whose shape {array.shape} has fewer "
            "axes"
        )
    for size, axes in zip(array.shape, spec, strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        if unknown := [axis for axis in names if axis not in mesh.axis_names]:
            raise ValueError(
                f"dense= returned {spec} for parameter {name!r}, but the mesh has no axis "
                f"{unknown[0]!r}; its axes are {', '.join(map(repr, mesh.axis_names))}"
            )
        parts = math.prod(mesh.shape[axis] for axis in names)
        if size % parts:
            raise ValueError(
                f"dense= returned {spec} for parameter {name!r} of shape {array.shape}, but "
                f"{size} does not divide by {parts} devices"
            )
    return spec


def _form(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
