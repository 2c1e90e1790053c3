"""Arithmetic of layers: type promotion, and matrix products with faster gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float


def promote(dtype: DTypeLike | None, *arrays: Any) -> tuple[Array, ...]:
    """Convert arrays to ``dtype``; None: to their common type."""
    if dtype is None:
        dtype = jnp.result_type(*arrays)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def dot_general(
    inputs: Float[Array, "*batch in_features"],
    kernel: Float[Array, "in_features out_features"],
    dimension_numbers: Any,
    **options: Any,
) -> Float[Array, "*batch out_features"]:
    """Compute `jax.lax.dot_general` for `nnx.Linear`, with a faster gradient of the kernel."""
    # The gradient of a kernel [512, 256] is inputs.T @ gradients, which XLA computes at 70 GFLOP/s
    # on one core of AMD Zen 4. Its transpose, gradients.T @ inputs, runs at 95: the wider matrix
    # belongs on the right. Kernels of one column are left alone: their gradient is a sum of rows,
    # not a product.
    if jax.default_backend() == "cpu" and 1 < kernel.shape[1] < kernel.shape[0]:
        kernel = _transposed_gradient(kernel)
    return jax.lax.dot_general(inputs, kernel, dimension_numbers, **options)


@jax.custom_jvp
def _transposed_gradient(kernel: Array) -> Array:
    """Return the kernel; its gradient is computed transposed, then transposed back."""
    return kernel


@_transposed_gradient.defjvp
def _tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (kernel,), (tangent,) = primals, tangents
    # XLA would merge the product and the transpose into the slower product; a barrier prevents it.
    return kernel, jax.lax.optimization_barrier(tangent.T).T
