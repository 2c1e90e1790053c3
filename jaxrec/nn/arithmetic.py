"""Arithmetic of layers: the type that they compute in, and products fast to differentiate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float


def promote(dtype: DTypeLike | None, *arrays: Any) -> tuple[Array, ...]:
    """Return the arrays in one type: ``dtype``, or the widest of theirs if it is None."""
    if dtype is None:
        dtype = jnp.result_type(*arrays)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def dot_general(
    inputs: Float[Array, "*batch in_features"],
    kernel: Float[Array, "in_features out_features"],
    dimension_numbers: Any,
    **options: Any,
) -> Float[Array, "*batch out_features"]:
    """Multiply as `jax.lax.dot_general` does, for `nnx.Linear`; kernels' gradients are faster."""
    # The gradient of a kernel [512, 256] is inputs.T @ gradients, which XLA computes at 70 GFLOP/s
    # on one core of AMD Zen 4, and its transpose gradients.T @ inputs at 95: the wider matrix
    # belongs on the right. A gradient of one column is a sum of rows, not a product.
    if jax.default_backend() == "cpu" and 1 < kernel.shape[1] < kernel.shape[0]:
        kernel = _transposed_gradient(kernel)
    return jax.lax.dot_general(inputs, kernel, dimension_numbers, **options)


@jax.custom_jvp
def _transposed_gradient(kernel: Array) -> Array:
    """Return the kernel; its gradient is computed as the transpose of a transposed gradient."""
    return kernel


@_transposed_gradient.defjvp
def _tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (kernel,), (tangent,) = primals, tangents
    # XLA merges a product and a transpose, so a barrier keeps them apart.
    return kernel, jax.lax.optimization_barrier(tangent.T).T
