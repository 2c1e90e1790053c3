"""Dense arrays that are gathered where layers read them."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrec.embed.variables import DensePlacement, put
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.precision import DenseFormat, Precision


@dataclasses.dataclass(frozen=True)
class Gathered(DensePlacement):
    """Reads gather the array; its gradient is summed over the devices and put as the array lies.

    Attributes:
        ndim: Number of axes of the array.
        format: Format in which devices send each other parts of the gradient.
    """

    ndim: int
    format: DenseFormat = "float32"

    def read(self, array: Array) -> Array:
        if array.ndim != self.ndim:  # within nnx.scan or nnx.vmap over one of its axes
            return put(array, self.replicated)
        if self.format == "float32":
            return _gather(array, self)
        return _gather_in_format(array, self)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(array: Array, placement: Gathered) -> Array:
    return put(array, placement.replicated)


def _gather_forward(array: Array, placement: Gathered) -> tuple[Array, None]:
    return _gather(array, placement), None


def _gather_backward(placement: Gathered, _: None, gradient: Array) -> tuple[Array]:
    return (put(gradient, placement.sharding),)


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_in_format(array: Array, placement: Gathered) -> Array:
    """Gather an array as one whose gradient every device has for its own samples alone.

    JAX calls such arrays reduced, and their gradients unreduced. It knows them over Explicit axes.
    """
    if not isinstance(array, jax.core.Tracer):
        return put(array, placement.replicated)
    mesh = placement.sharding.mesh
    return put(array, NamedSharding(mesh, PartitionSpec(reduced=set(mesh.axis_names))))


def _gather_in_format_forward(array: Array, placement: Gathered) -> tuple[Array, None]:
    return _gather_in_format(array, placement), None


def _gather_in_format_backward(
    placement: Gathered, _: None, gradient: Float[Array, "..."]
) -> tuple[Array]:
    return (_sum_over_devices(gradient, placement),)


_gather_in_format.defvjp(_gather_in_format_forward, _gather_in_format_backward)


def _sum_over_devices(gradient: Float[Array, "..."], placement: Gathered) -> Float[Array, "..."]:
    """Add the gradients of all devices in float32, which travel in fewer bits.

    Each device sends each other one its part, and sums the parts that come in. Where the array is
    replicated, the sums travel to all devices.
    """
    mesh, spec = placement.sharding.mesh, placement.sharding.spec
    axes, devices = tuple(mesh.axis_names), mesh.devices.size
    cut = next((i for i, names in enumerate(spec) if names is not None), None)
    channel = Channel(axes, Precision())

    def sum_parts(parts: Float[Array, "devices n"]) -> Float[Array, " n"]:
        return channel.send(parts.astype(placement.format)).astype(jnp.float32).sum(axis=0)

    def shards(own: Array) -> Array:
        assert cut is not None
        parts = jnp.stack(jnp.split(own, devices, axis=cut))
        return sum_parts(parts.reshape(devices, -1)).reshape(parts.shape[1:])

    def flat_shards(own: Array) -> Array:
        flat = jnp.pad(own.reshape(-1), (0, -own.size % devices))
        sums = sum_parts(flat.reshape(devices, -1)).astype(placement.format)
        return jax.lax.bitcast_convert_type(sums, jnp.uint16)

    unreduced = PartitionSpec(*[None] * gradient.ndim, unreduced=set(axes))
    if cut is not None:
        total = jax.shard_map(shards, mesh=mesh, in_specs=unreduced, out_specs=spec)(gradient)
        return total.astype(gradient.dtype)
    over = jax.shard_map(flat_shards, mesh=mesh, in_specs=unreduced, out_specs=PartitionSpec(axes))
    bits = put(over(gradient), placement.replicated)
    flat = jax.lax.bitcast_convert_type(bits, jnp.dtype(placement.format))
    return flat[: math.prod(gradient.shape)].reshape(gradient.shape).astype(gradient.dtype)
