"""Pointwise attention by native kernels on a CPU, else by tiles of XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrec.embed import kernels
from jaxrec.nn.jagged_tiles import TilePlan

# A function of the plan, the position bias (or None), queries, keys and values.
Attend = Callable[..., Array]


def takes(query: Array, key: Array, value: Array, bias: Array | None) -> bool:
    """Return whether native kernels take a call, on the machines where they can."""
    # A native call is opaque to XLA's partitioner, which would gather the whole batch on every
    # device for it.
    if jax.device_count() > 1 or {query.dtype, key.dtype, value.dtype} - _NARROW:
        return False
    of_float = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    of_int = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    choice = kernels.describe(
        "attention",
        *(of_float(array.shape) for array in (query, key, value)),
        of_int((3, query.shape[0])),
        of_int((2, 1)),
        of_float((0, query.shape[1]) if bias is None else bias.shape),
        1.0,
    )
    return choice.chosen.get("cpu") == "cpu"


_NARROW = {jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    tiled: Attend,
    alpha: float,
    plan: TilePlan,
    bias: Array | None,
    query: Array,
    key: Array,
    value: Array,
) -> Array:
    """Compute ``tiled(plan, bias, query, key, value)`` and its gradients by native kernels."""
    return _output(tiled, alpha, plan, bias, query, key, value)


def _forward(tiled: Attend, alpha: float, plan: TilePlan, *arrays: Any) -> tuple[Array, Any]:
    return _output(tiled, alpha, plan, *arrays), (plan, *arrays)


def _backward(tiled: Attend, alpha: float, residuals: Any, cotangent: Array) -> Any:
    return None, *_gradients(tiled, alpha, *residuals, cotangent)


attend.defvjp(_forward, _backward)


# A native call has no derivatives. Where a pass is differentiated once more, in forward mode as by
# `jax.hessian`, the tangents are those of the tiles.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _output(tiled: Attend, alpha: float, plan: TilePlan, *arrays: Any) -> Array:
    def native(plan: TilePlan, *arrays: Any) -> Array:
        return kernels.attention(**_operands(plan, *arrays), alpha=alpha)

    return jax.lax.platform_dependent(plan, *arrays, cpu=native, default=tiled)


@_output.defjvp
def _output_and_tangent(tiled: Attend, alpha: float, primals: Any, tangents: Any) -> Any:
    # `jax.vjp` runs the forward pass that has derivatives of its own.
    plan, *arrays = primals
    _, tangent = jax.jvp(
        lambda *arrays: jax.vjp(functools.partial(tiled, plan), *arrays)[0],
        tuple(arrays),
        tuple(tangents[1:]),
    )
    return _output(tiled, alpha, *primals), tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(tiled: Attend, alpha: float, plan: TilePlan, *arrays: Any) -> tuple[Any, ...]:
    """Return the gradients of bias, query, key and value; the last array is the cotangent."""

    def native(plan: TilePlan, *arrays: Any) -> tuple[Any, ...]:
        *inputs, cotangent = arrays
        *of_vectors, of_bias = kernels.attention_gradients(
            **_operands(plan, *inputs), gradient=cotangent, alpha=alpha
        )
        bias = inputs[0]
        gradients = (None if bias is None else of_bias, *of_vectors)
        return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, tuple(inputs))

    default = functools.partial(_tiled_gradients, tiled)
    return jax.lax.platform_dependent(plan, *arrays, cpu=native, default=default)


@_gradients.defjvp
def _gradients_and_tangents(tiled: Attend, alpha: float, primals: Any, tangents: Any) -> Any:
    plan, *arrays = primals
    of_tiles = functools.partial(_tiled_gradients, tiled, plan)
    _, changes = jax.jvp(of_tiles, tuple(arrays), tuple(tangents[1:]))
    return _gradients(tiled, alpha, *primals), changes


def _tiled_gradients(tiled: Attend, plan: TilePlan, *arrays: Any) -> tuple[Any, ...]:
    *inputs, cotangent = arrays
    return jax.vjp(functools.partial(tiled, plan), *inputs)[1](cotangent)


def _operands(
    plan: TilePlan, bias: Array | None, query: Array, key: Array, value: Array
) -> dict[str, Any]:
    """Return the arrays of the primitive."""
    ranges = plan.intervals
    fields = [ranges.first, ranges.last, ranges.own]
    fields += [] if ranges.group is None else [ranges.group]
    flat = [field.reshape(-1)[: query.shape[0]] for field in fields]
    if bias is None:
        bias = jnp.zeros((0, query.shape[1]))
    floats = {"query": query, "key": key, "value": value, "bias": bias}
    return {
        **{name: array.astype(jnp.float32) for name, array in floats.items()},
        "ranges": jnp.stack(flat),
        "offsets": plan.offsets,
    }
