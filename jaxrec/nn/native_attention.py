"""Pointwise attention by the kernels of the device at hand, else by tiles of XLA.

The registry of kernels chooses them: native ones on CPUs, Mosaic's on Hopper GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

from jaxrec.embed import kernels
from jaxrec.nn.jagged_tiles import TilePlan

# A function of the plan, the position bias (or None), queries, keys and values.
Attend = Callable[..., Array]

_NARROW = {jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}
_PRIMITIVES = ("attention", "attention_gradients")


@dataclasses.dataclass(frozen=True)
class Call:
    """Static arguments of a call.

    Attributes:
        tiled: Computes the call in XLA.
        alpha: Factor of the products of queries and keys.
        scale: Factor of the sums.
        platforms: Platforms whose kernels take the call.
    """

    tiled: Attend
    alpha: float
    scale: float
    platforms: tuple[str, ...]

    def by_platform(
        self,
        tiled: Callable[..., Any],
        kernel: Callable[..., Any],
        plan: TilePlan,
        bias: Array | None,
        query: Array,
        *arrays: Any,
    ) -> Any:
        """Call ``kernel(dtype, ...)`` on the platforms that have one, else ``tiled(...)``."""
        # Those for CPUs compute in float32, those for GPUs in the type of the queries.
        types = {"cpu": jnp.dtype(jnp.float32), "cuda": query.dtype}
        special = {name: functools.partial(kernel, types[name]) for name in self.platforms}
        operands = plan, bias, query, *arrays
        if not special:
            return tiled(*operands)
        return jax.lax.platform_dependent(*operands, default=tiled, **special)


def platforms(
    query: Array, key: Array, value: Array, bias: Array | None, *, is_scaled: bool = False
) -> tuple[str, ...]:
    """Return the platforms, "cpu" and "cuda", whose kernels compute a call in this process.

    ``is_scaled``: the result is multiplied by a factor for each query afterwards.
    """
    # A kernel is opaque to XLA's partitioner, which would gather the whole batch on every device
    # for it.
    if jax.device_count() > 1 or {query.dtype, key.dtype, value.dtype} - _NARROW:
        return ()
    shapes = [array.shape for array in (query, key, value)]
    bias_shape = (0, query.shape[1]) if bias is None else bias.shape
    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = ["cpu"] if _chosen("cpu", wide, bias_shape) == "cpu" else []
    # Kernels of GPUs round the sums to the type of the queries, and their gradient too. Without the
    # factor, often one over the length, sums overflow float16; with it, gradients vanish there.
    if is_scaled and query.dtype == jnp.float16:
        return tuple(found)
    same = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value)]
    return (*found, "cuda") if _chosen("cuda", same, bias_shape) == "mosaic" else tuple(found)


def _chosen(platform: str, vectors: list[Any], bias_shape: tuple[int, ...]) -> str | None:
    """Return the implementation of both primitives on a platform; None: they have several."""
    query = vectors[0]
    arguments: dict[str, Any] = {
        "ranges": jax.ShapeDtypeStruct((4, query.shape[0]), jnp.int32),
        "offsets": jax.ShapeDtypeStruct((2, 1), jnp.int32),
        "bias": jax.ShapeDtypeStruct(bias_shape, jnp.float32),
        "alpha": 1.0,
    }
    of_output = jax.ShapeDtypeStruct((*query.shape[:2], vectors[2].shape[2]), query.dtype)
    names = set()
    for primitive in _PRIMITIVES:
        more = {} if primitive == "attention" else {"gradient": of_output}
        try:
            choice = kernels.describe(primitive, *vectors, **arguments, **more)
        except ValueError:  # The kernels that the user named do not take the call.
            return None
        names.add(choice.chosen.get(platform))
    return names.pop() if len(names) == 1 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    call: Call, plan: TilePlan, bias: Array | None, query: Array, key: Array, value: Array
) -> Array:
    """Compute ``call.tiled(plan, bias, query, key, value)`` and its gradients by kernels."""
    return _output(call, plan, bias, query, key, value)


def _forward(call: Call, plan: TilePlan, *arrays: Any) -> tuple[Array, Any]:
    return _output(call, plan, *arrays), (plan, *arrays)


def _backward(call: Call, residuals: Any, cotangent: Array) -> Any:
    return None, *_gradients(call, *residuals, cotangent)


attend.defvjp(_forward, _backward)


# A kernel has no derivatives. Where a pass is differentiated once more, in forward mode as by
# `jax.hessian`, the tangents are those of the tiles.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _output(call: Call, plan: TilePlan, *arrays: Any) -> Array:
    def kernel(dtype: DTypeLike, plan: TilePlan, *arrays: Any) -> Array:
        operands = _operands(dtype, plan, *arrays)
        out = kernels.attention(**operands, alpha=call.alpha, scale=call.scale)
        return out.astype(jnp.float32)

    return call.by_platform(call.tiled, kernel, plan, *arrays)


@_output.defjvp
def _output_and_tangent(call: Call, primals: Any, tangents: Any) -> Any:
    # `jax.vjp` runs the forward pass that has derivatives of its own.
    plan, *arrays = primals
    _, tangent = jax.jvp(
        lambda *arrays: jax.vjp(functools.partial(call.tiled, plan), *arrays)[0],
        tuple(arrays),
        tuple(tangents[1:]),
    )
    return _output(call, *primals), tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(call: Call, plan: TilePlan, *arrays: Any) -> tuple[Any, ...]:
    """Return the gradients of bias, query, key and value; the last array is the cotangent."""

    def kernel(dtype: DTypeLike, plan: TilePlan, *arrays: Any) -> tuple[Any, ...]:
        *inputs, cotangent = arrays
        *of_vectors, of_bias = kernels.attention_gradients(
            **_operands(dtype, plan, *inputs),
            gradient=cotangent.astype(dtype),
            alpha=call.alpha,
            scale=call.scale,
        )
        bias = inputs[0]
        gradients = (None if bias is None else of_bias, *of_vectors)
        return jax.tree.map(lambda gradient, x: gradient.astype(x.dtype), gradients, tuple(inputs))

    default = functools.partial(_tiled_gradients, call.tiled)
    return call.by_platform(default, kernel, plan, *arrays)


@_gradients.defjvp
def _gradients_and_tangents(call: Call, primals: Any, tangents: Any) -> Any:
    plan, *arrays = primals
    of_tiles = functools.partial(_tiled_gradients, call.tiled, plan)
    _, changes = jax.jvp(of_tiles, tuple(arrays), tuple(tangents[1:]))
    return _gradients(call, *primals), changes


def _tiled_gradients(tiled: Attend, plan: TilePlan, *arrays: Any) -> tuple[Any, ...]:
    *inputs, cotangent = arrays
    return jax.vjp(functools.partial(tiled, plan), *inputs)[1](cotangent)


def _operands(
    dtype: DTypeLike,
    plan: TilePlan,
    bias: Array | None,
    query: Array,
    key: Array,
    value: Array,
) -> dict[str, Any]:
    """Return the arrays of the primitive, vectors of a type."""
    ranges = plan.intervals
    fields = [ranges.first, ranges.last, ranges.own]
    fields += [] if ranges.group is None else [ranges.group]
    flat = [field.reshape(-1)[: query.shape[0]] for field in fields]
    if bias is None:
        bias = jnp.zeros((0, query.shape[1]))
    vectors = {"query": query, "key": key, "value": value}
    return {
        **{name: array.astype(dtype) for name, array in vectors.items()},
        "bias": bias.astype(jnp.float32),
        "ranges": jnp.stack(flat),
        "offsets": plan.offsets,
    }
