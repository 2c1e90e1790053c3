"""The dense part of a model on a mesh: replicated, or sharded over all devices ("fsdp")."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrec.embed.collection import TableVariable
from jaxrec.embed.variables import (
    DensePlacement,
    PlacedVariable,
    place_variable,
    put,
    release_variable,
)
from jaxrec.mesh.agree import fingerprint, put_on_mesh, require_same
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.pool_rows import RowsVariable
from jaxrec.mesh.precision import DenseFormat, ExchangePrecision


@dataclasses.dataclass(frozen=True)
class Gathered(DensePlacement):
    """Placement of a sharded parameter that a layer reads whole.

    A read gathers the array. Its gradient is summed over devices and sharded like the array.

    Attributes:
        ndim: Number of axes of the array.
        format: Format in which devices send each other parts of the gradient.
    """

    ndim: int
    format: DenseFormat = "float32"

    def read(self, array: Array) -> Array:
        if array.ndim != self.ndim:  # within nnx.scan or nnx.vmap over one of its axes
            return put(array, self.replicated)
        return _gather(array, self)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(array: Array, placement: Gathered) -> Array:
    """Gather an array; in a narrow format each device keeps the gradient of its own samples."""
    # JAX calls such arrays reduced and their gradients unreduced, and has them for Explicit axes
    # alone. With other axes XLA adds the gradients up, in their own type, before we see them.
    if placement.format == "float32" or not isinstance(array, jax.core.Tracer):
        return put(array, placement.replicated)
    mesh = placement.sharding.mesh
    return put(array, NamedSharding(mesh, PartitionSpec(reduced=set(mesh.axis_names))))


def _gather_forward(array: Array, placement: Gathered) -> tuple[Array, None]:
    return _gather(array, placement), None


def _gather_backward(placement: Gathered, _: None, gradient: Array) -> tuple[Array]:
    if placement.format == "float32":
        return (put(gradient, placement.sharding),)
    return (_sum_over_devices(gradient, placement),)


_gather.defvjp(_gather_forward, _gather_backward)


def _sum_over_devices(gradient: Float[Array, "..."], placement: Gathered) -> Float[Array, "..."]:
    """Add the gradients of all devices in float32; they travel in `Gathered.format`."""
    # A reduce-scatter by hand: XLA's own would add in the narrow format. Each device adds up one
    # part, which all others send it. If the array is replicated, the sums then go to all devices.
    mesh, spec = placement.sharding.mesh, placement.sharding.spec
    axes, devices = tuple(mesh.axis_names), mesh.devices.size
    cut = next((i for i, names in enumerate(spec) if names is not None), None)
    channel = Channel(axes, ExchangePrecision())

    def sum_parts(parts: Float[Array, "devices n"]) -> Float[Array, " n"]:
        return channel.send(parts.astype(placement.format)).astype(jnp.float32).sum(axis=0)

    def shards(own: Array) -> Array:
        assert cut is not None
        parts = jnp.stack(jnp.split(own, devices, axis=cut))
        return sum_parts(parts.reshape(devices, -1)).reshape(parts.shape[1:])

    def flat_shards(own: Array) -> Array:
        flat = jnp.pad(own.reshape(-1), (0, -own.size % devices))
        sums = sum_parts(flat.reshape(devices, -1)).astype(placement.format)
        # As bits, or XLA may gather them in float32 where it widens bfloat16.
        return jax.lax.bitcast_convert_type(sums, jnp.uint16)

    unreduced = PartitionSpec(*[None] * gradient.ndim, unreduced=set(axes))
    if cut is not None:
        total = jax.shard_map(shards, mesh=mesh, in_specs=unreduced, out_specs=spec)(gradient)
        return total.astype(gradient.dtype)
    over = jax.shard_map(flat_shards, mesh=mesh, in_specs=unreduced, out_specs=PartitionSpec(axes))
    bits = put(over(gradient), placement.replicated)
    flat = jax.lax.bitcast_convert_type(bits, jnp.dtype(placement.format))
    return flat[: math.prod(gradient.shape)].reshape(gradient.shape).astype(gradient.dtype)


MIN_SHARDED_SIZE = 2**16
"""Smallest number of elements of a parameter that "fsdp" shards."""

DenseName: TypeAlias = Literal["replicated", "fsdp"]

DenseRule: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], PartitionSpec | None]
"""Function from a dense parameter's path, such as "over/kernel", and its shape to its sharding.

None leaves the parameter to "fsdp".
"""


def check_dense(dense: Any, mesh: Mesh, format: DenseFormat) -> None:
    """Check the argument ``dense`` of `jaxrec.shard`, and the format of dense gradients."""
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
    if format != "float32" and set(mesh.axis_types) != {AxisType.Explicit}:
        raise ValueError(
            f"ExchangePrecision(dense={format!r}) needs a mesh whose axes are all Explicit, since "
            "XLA sums the gradients of other meshes before they can be cast; make it by "
            f"jax.make_mesh({tuple(mesh.shape.values())}, {tuple(mesh.axis_names)}), or leave "
            "dense out"
        )


def place_dense(model: nnx.Module, placements: Mapping[str, DensePlacement], mesh: Mesh) -> None:
    """Put a model's variables on a mesh, in place, except for tables and pools.

    ``placements`` are by path. Variables without a placement are replicated.
    """
    state = nnx.state(model, nnx.Not(nnx.Any(TableVariable, RowsVariable)))
    named = {_name(path): variable for path, variable in nnx.to_flat_state(state)}
    # Replicas start from each process's own values, which must therefore be the same.
    if jax.process_count() > 1:
        for variable in named.values():
            if isinstance(variable, PlacedVariable):  # of another mesh, or sharded otherwise
                variable.set_raw_value(variable.whole())
                release_variable(variable)
        leaves = {name: jax.tree.leaves(each.get_raw_value()) for name, each in named.items()}
        require_same("model", {name: str([*map(fingerprint, x)]) for name, x in leaves.items()})
    everywhere = NamedSharding(mesh, PartitionSpec())
    for name, variable in named.items():
        placement = placements.get(name)
        sharding = everywhere if placement is None else placement.sharding
        array = jax.tree.map(lambda x, to=sharding: put_on_mesh(x, to), variable.get_raw_value())
        release_variable(variable)
        variable.set_raw_value(array)
        if placement is not None:
            place_variable(variable, placement)


def dense_placements(
    model: nnx.Module, dense: DenseName | DenseRule, mesh: Mesh, format: DenseFormat = "float32"
) -> dict[str, DensePlacement]:
    """Return a placement for each dense parameter that is not simply replicated, by path.

    ``dense`` is the argument of `jaxrec.shard`; ``format`` is the format in which gradients of
    large parameters travel.
    """
    placements: dict[str, DensePlacement] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, array = _name(path), variable.get_raw_value()
        if not isinstance(array, jax.Array) or not jnp.issubdtype(array.dtype, jnp.floating):
            continue
        shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
        given = None if isinstance(dense, str) else dense(name, shape)
        if given is not None:
            if any(axis is not None for axis in _checked(name, array, given, mesh)):
                placements[name] = DensePlacement(NamedSharding(mesh, given))
            continue
        spec = PartitionSpec() if dense == "replicated" else _fsdp(name, array, mesh)
        sharding = NamedSharding(mesh, spec)
        # Small arrays would save little, and vectors, such as biases and scales, stay exact.
        is_large = array.ndim > 1 and array.size >= MIN_SHARDED_SIZE
        if format != "float32" and is_large and mesh.devices.size > 1:
            placements[name] = Gathered(sharding, array.ndim, format)
        elif any(axis is not None for axis in spec):
            placements[name] = Gathered(sharding, array.ndim)
    return placements


def _fsdp(name: str, array: jax.Array, mesh: Mesh) -> PartitionSpec:
    """Cut an array over all devices along its largest divisible axis; return the spec."""
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
    """Return the spec that a user's function gave for a parameter; raise if it does not fit."""
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


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
