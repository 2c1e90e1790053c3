"""Dot products of all pairs of a sample's vectors, computed and differentiated by native kernels.

The derivatives are two bilinear functions. `pair_tangents` maps vectors' tangents to products'
tangents, and `pair_gradients` maps products' gradients to vectors' gradients; each is a transpose
of the other. They are JAX primitives, so that forward mode, reverse mode and mixtures of both reach
the native kernel. `jax.custom_vjp` would have no forward mode.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrec.embed import kernels
from jaxrec.embed.kernels import reference


@jax.custom_jvp
def pairwise_dots(vectors: Float[Array, "batch vectors dim"]) -> Float[Array, "batch pairs"]:
    """Return the dot products of all pairs of a sample's vectors.

    Training steps compute the products and their gradients with native kernels if the vectors are
    float32, on a CPU, in a process with one device. XLA computes all other cases. Forward mode,
    `jax.hessian` and `jax.linearize` work too.

    Args:
        vectors: ``[batch, n, dim]``.

    Returns:
        ``[batch, n * (n - 1) / 2]``, the pairs in the order (0, 1), (0, 2), ..., (1, 2), ...

    Raises:
        ValueError: ``vectors`` does not have three axes.

    Example:
        >>> import jax.numpy as jnp
        >>> pairwise_dots(jnp.array([[[1.0, 0.0], [2.0, 3.0], [4.0, 5.0]]])).tolist()
        [[2.0, 4.0, 23.0]]
    """
    return reference.pair_products(vectors)


@jax.custom_jvp
def _products(vectors: Float[Array, "batch vectors dim"]) -> Float[Array, "batch pairs"]:
    """Compute `pairwise_dots` where it is differentiated."""
    # `custom_jvp` calls this as the primal of `pairwise_dots`. It needs the rule too, for second
    # derivatives: a native call has no derivatives of its own.
    return implementation().pair_products(vectors)


def _products_and_tangents(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Float[Array, "batch pairs"], Float[Array, "batch pairs"]]:
    return _products(*primals), pair_tangents(*primals, *tangents)


pairwise_dots.defjvp(_products_and_tangents)
_products.defjvp(_products_and_tangents)


def implementation() -> ModuleType:
    """Return the module with the kernels: native for one device, XLA's for several."""
    # A native call is opaque to XLA's partitioner, which would gather the whole batch on every
    # device for it.
    return kernels if jax.device_count() == 1 else reference


def pair_tangents(
    vectors: Float[Array, "*batch n dim"], tangents: Float[Array, "*batch n dim"]
) -> Float[Array, "*batch pairs"]:
    """Map tangents of the vectors to tangents of the products of all pairs."""
    return _TANGENTS.bind(vectors, tangents)


def pair_gradients(
    vectors: Float[Array, "*batch n dim"], gradients: Float[Array, "*batch pairs"]
) -> Float[Array, "*batch n dim"]:
    """Map gradients of the products of all pairs to gradients of the vectors."""
    return _GRADIENTS.bind(vectors, gradients)


def _compute_tangents(vectors: Array, tangents: Array) -> Array:
    _, products = jax.jvp(reference.pair_products, (vectors,), (tangents,))
    return products


def _compute_gradients(vectors: Array, gradients: Array) -> Array:
    return implementation().pair_gradients(vectors, gradients)


def _type_of_products(vectors: Any, _: Any) -> Any:
    """Return the abstract type of the products, sharded like the vectors' batch."""
    *batch, n, _ = vectors.shape
    spec = PartitionSpec(*vectors.sharding.spec[:-2], None)
    sharding = NamedSharding(vectors.sharding.mesh, spec)
    return vectors.update(shape=(*batch, n * (n - 1) // 2), sharding=sharding)


def _type_of_vectors(vectors: Any, _: Any) -> Any:
    return vectors


def _define(name: str, compute: Callable[..., Array], type_of_result: Callable[..., Any]) -> Any:
    """Make a primitive of two operands ``[*axes, batch, ...]``."""
    primitive = Primitive(name)

    def run(vectors: Array, other: Array) -> Array:
        function = compute
        for _ in range(vectors.ndim - 3):
            function = jax.vmap(function)
        return function(vectors, other)

    # Under `jax.vmap` the mapped axis goes to the front and the primitive stays one call.
    def batch(axis: Any, operands: Any, axes: Any) -> tuple[Array, int | None]:
        if all(place is None for place in axes):
            return primitive.bind(*operands), None
        in_front = (
            batching.bdim_at_front(operand, place, axis.size, axis.explicit_mesh_axis)
            for operand, place in zip(operands, axes, strict=True)
        )
        return primitive.bind(*in_front), 0

    primitive.def_impl(run)
    primitive.def_abstract_eval(type_of_result)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


_TANGENTS = _define("pair_tangents", _compute_tangents, _type_of_products)
_GRADIENTS = _define("pair_gradients", _compute_gradients, _type_of_vectors)

# Each pair of rules is the transpose with respect to the first operand, then to the second.
ad.defbilinear(
    _TANGENTS,
    lambda cotangent, _, tangents: pair_gradients(tangents, cotangent),
    lambda cotangent, vectors, _: pair_gradients(vectors, cotangent),
)
ad.defbilinear(
    _GRADIENTS,
    lambda cotangent, _, gradients: pair_gradients(cotangent, gradients),
    lambda cotangent, vectors, _: pair_tangents(vectors, cotangent),
)
