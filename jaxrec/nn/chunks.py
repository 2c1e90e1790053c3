"""`sum_in_chunks`: a sum over samples, computed with its gradients a few samples at a time."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jaxrec.embed.collection import TableVariable
from jaxrec.embed.taps import Tap
from jaxrec.mesh.pool_rows import RowsVariable

# Samples of a chunk per core of a CPU, measured with two cores (docs/performance.md).
_SAMPLES_PER_CORE = 512

# A batch that would have fewer chunks is computed at once: the loop would cost more than it saves.
_FEWEST_CHUNKS = 4


def sum_in_chunks(
    losses: Callable[..., Any], module: nnx.Module, *arrays: Any, samples: int | None = None
) -> tuple[Float[Array, ""], Any]:
    """Sum the losses of a batch's samples, and differentiate the sum, chunk by chunk.

    The layers run forward and backward for one chunk before the next chunk begins. So their
    activations stay in a CPU's caches, and only those of one chunk take memory. The sum and its
    gradients equal those of ``losses`` of the whole batch, up to the rounding of sums. Look
    embeddings up for the whole batch before, and pass them among ``arrays``.

    `jax.grad` and `jax.hessian` differentiate the sum; `jax.jvp` and `jax.linearize` alone raise a
    TypeError.

    A chunk's samples are spread evenly over the batch. So each device of a mesh has its part of
    every chunk if the number of devices divides ``samples``.

    Args:
        losses: Function ``losses(module, *arrays)`` of some samples of the arrays. It returns their
            losses ``[n]``, or a pair of losses and outputs. Outputs are a pytree of arrays
            ``[n, ...]`` and are not differentiated. The results of a sample must not depend on
            other samples.
        module: The layers; the sum is differentiated with respect to its variables.
        arrays: Pytrees of arrays ``[batch, ...]``. The sum is differentiated with respect to the
            floats among them.
        samples: Samples of a chunk, a divisor of the batch. None: in a process whose only device is
            a CPU, up to 512 per core if the batch has at least four such chunks; otherwise the
            whole batch, as also if ``losses`` changes variables of the module.

    Returns:
        The sum, float32 if the losses are narrower; and the outputs of the whole batch, or None.

    Raises:
        ValueError: The arrays differ in their number of samples, or ``samples`` does not divide it;
            ``losses`` returns other shapes; or ``samples`` is given and ``losses`` changes
            variables of the module, as dropout and batch normalization do in training.

    Example:
        >>> import optax
        >>> layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        >>> def losses(layer, x, labels):
        ...     return optax.sigmoid_binary_cross_entropy(layer(x)[:, 0], labels)
        >>> x, labels = jnp.ones((8, 3)), jnp.ones(8)
        >>> def loss(layer):
        ...     return sum_in_chunks(losses, layer, x, labels, samples=2)[0] / 8
        >>> value, gradients = nnx.value_and_grad(loss)(layer)
        >>> bool(jnp.allclose(value, losses(layer, x, labels).mean()))
        True
    """
    batch = _batch_size(arrays)
    # Tables are held outside of the loop over chunks, which must not carry them from trip to trip.
    # Their rows were read before.
    graph, *states = nnx.split(module, nnx.Any(Tap, TableVariable, RowsVariable), ...)
    held, state = states

    def call(state: Any, arrays: Any) -> tuple[Array, Any]:
        own = nnx.merge(graph, held, state)
        before = _values(own)
        result = _summed(losses(own, *arrays), _batch_size(arrays))
        if changed := _different(before, _values(own)):
            raise _ChangedVariableError(
                f"the losses change {changed[0]!r} of the module, which a sum in chunks cannot "
                "keep; put the module in evaluation mode, or give no samples="
            )
        return result

    if samples is None:
        chunks = _usual_chunks(batch)
        if chunks > 1 and _changes_variables(call, state, arrays):
            chunks = 1
    else:
        chunks = _given_chunks(batch, samples)
    if chunks == 1:
        total, outputs = _summed(losses(module, *arrays), batch)
    else:
        total, outputs = _in_chunks(call, chunks, state, arrays)
    return total, jax.lax.stop_gradient(outputs)


class _ChangedVariableError(ValueError):
    """The losses change variables of the module."""


# Tracing alone finds this out: a changed variable holds another tracer object.
def _changes_variables(call: Callable[..., Any], state: Any, arrays: Any) -> bool:
    try:
        jax.eval_shape(call, state, arrays)
    except _ChangedVariableError:
        return True
    return False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_chunks(
    call: Callable[..., Any], chunks: int, state: Any, arrays: Any
) -> tuple[Float[Array, ""], Any]:
    """Return the sum over all chunks, and the outputs; `_forward` serves differentiated calls."""
    cut = _cut(arrays, chunks)

    def one(total: Array, chunk: Array) -> tuple[Array, Any]:
        more, outputs = call(state, _take(cut, chunk))
        return total + more, outputs

    form, _ = jax.eval_shape(call, state, _take(cut, 0))
    total, outputs = jax.lax.scan(one, jnp.zeros((), form.dtype), jnp.arange(chunks))
    return total, _joined(outputs)


def _forward(
    call: Callable[..., Any], chunks: int, state: Any, arrays: Any
) -> tuple[tuple[Float[Array, ""], Any], Any]:
    """Return the sum and the outputs, and the gradients as residuals for `_backward`.

    An argument that is not differentiated has the gradient None.
    """
    # Gradients are computed here, not in the backward pass, while a chunk's activations are still
    # in the cache. They need not be kept: the gradient of a sum is a factor times these, so
    # `_backward` only scales.
    (state, arrays), is_wanted = _values_and_flags((state, arrays))
    cut = _cut(arrays, chunks)
    leaves, structure = jax.tree.flatten((state, cut))
    of_state = len(jax.tree.leaves(state))

    def total_of(wanted: list[Array], others: list[Array]) -> tuple[Array, Any]:
        of_leaves = iter(wanted), iter(others)
        merged = [next(of_leaves[not flag]) for flag in is_wanted]
        state, arrays = jax.tree.unflatten(structure, merged)
        return call(state, arrays)

    def chunk_leaves(chunk: Array | int) -> tuple[list[Array], list[Array]]:
        own = [*leaves[:of_state], *_take(leaves[of_state:], chunk)]
        pairs = list(zip(own, is_wanted, strict=True))
        return [x for x, flag in pairs if flag], [x for x, flag in pairs if not flag]

    differentiate = jax.value_and_grad(total_of, has_aux=True)
    in_state = sum(is_wanted[:of_state])

    def one(carry: tuple[Array, list[Array]], chunk: Array) -> Any:
        total, sums = carry
        (more, outputs), gradients = differentiate(*chunk_leaves(chunk))
        # Gradients of the module's variables add up over chunks. Those of the arrays belong to a
        # chunk's samples, and are written at its place.
        sums = [
            x + gradient
            if number < in_state
            else jax.lax.dynamic_update_index_in_dim(x, gradient, chunk, 1)
            for number, (x, gradient) in enumerate(zip(sums, gradients, strict=True))
        ]
        return (total + more, sums), outputs

    (form, _), forms = jax.eval_shape(differentiate, *chunk_leaves(0))
    whole = [leaf for leaf, flag in zip(leaves, is_wanted, strict=True) if flag]
    zeros = [
        jnp.zeros_like(leaf, jnp.promote_types(gradient.dtype, jnp.float32))
        if number < in_state
        # Zeros with the sharding of the leaf, which `jnp.zeros` would not have. XLA folds `where`.
        else jnp.where(False, leaf, 0).astype(gradient.dtype)
        for number, (leaf, gradient) in enumerate(zip(whole, forms, strict=True))
    ]
    start = jnp.zeros((), form.dtype), zeros
    (total, sums), outputs = jax.lax.scan(one, start, jnp.arange(chunks))
    results = iter(sums)
    of_leaves = [next(results) if flag else None for flag in is_wanted]
    gradients = [
        None if x is None else x.astype(leaf.dtype) if number < of_state else _uncut(x)
        for number, (x, leaf) in enumerate(zip(of_leaves, leaves, strict=True))
    ]
    return (total, _joined(outputs)), jax.tree.unflatten(structure, gradients)


def _backward(
    call: Callable[..., Any], chunks: int, gradients: Any, cotangents: Any
) -> tuple[Any, Any]:
    factor, _ = cotangents  # outputs are not differentiated
    if isinstance(factor, SymbolicZero):
        return None, None
    state, arrays = jax.tree.map(lambda x: (x * factor).astype(x.dtype), gradients)
    return state, arrays


_in_chunks.defvjp(_forward, _backward, symbolic_zeros=True)


def _values_and_flags(tree: Any) -> tuple[Any, list[bool]]:
    """Return the values of leaves, and whether a derivative with respect to each is wanted."""
    leaves, structure = jax.tree.flatten(tree)
    flags = [leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.inexact) for leaf in leaves]
    return jax.tree.unflatten(structure, [leaf.value for leaf in leaves]), flags


def _cut(arrays: Any, chunks: int) -> Any:
    """Return arrays ``[batch, ...]`` as ``[samples, chunks, ...]``."""
    # A chunk takes every n-th sample. Contiguous chunks would each lie on one device of a mesh.
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, chunks, *jnp.shape(x)[1:])), arrays)


def _uncut(array: Array) -> Array:
    return array.reshape(-1, *array.shape[2:])


def _take(cut: Any, chunk: Array | int) -> Any:
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, chunk, axis=1, keepdims=False), cut
    )


def _joined(outputs: Any) -> Any:
    """Return outputs ``[chunks, samples, ...]`` in the order of the batch."""
    return jax.tree.map(lambda x: _uncut(jnp.moveaxis(x, 0, 1)), outputs)


def _given_chunks(batch: int, samples: int) -> int:
    if samples < 1 or batch % samples:
        raise ValueError(
            f"samples={samples} of a chunk do not divide the batch's {batch}; give a divisor"
        )
    return max(batch // samples, 1)


def _usual_chunks(batch: int) -> int:
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return 1
    fewest = -(-batch // (_SAMPLES_PER_CORE * _cores()))
    if fewest < _FEWEST_CHUNKS:
        return 1
    # The number must divide the batch; chunks of less than half the size would not pay.
    return next((n for n in range(fewest, 2 * fewest + 1) if batch % n == 0), 1)


def _cores() -> int:
    # In a container the process may have fewer cores than the machine.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _batch_size(arrays: Any) -> int:
    shapes = [jnp.shape(x) for x in jax.tree.leaves(arrays)]
    sizes = {shape[:1] for shape in shapes}
    if len(sizes) != 1 or () in sizes:
        raise ValueError(
            f"arrays of a sum in chunks have a row for each sample, [batch, ...]; got {shapes}"
        )
    return shapes[0][0]


def _summed(returned: Any, samples: int) -> tuple[Array, Any]:
    """Return the sum of a loss function's losses, and its outputs, checked."""
    losses, outputs = returned if isinstance(returned, tuple) else (returned, None)
    if jnp.shape(losses) != (samples,):
        raise ValueError(
            f"the losses of {samples} samples have shape {jnp.shape(losses)}; return one number "
            f"for each sample, [{samples}]"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
        if jnp.shape(leaf)[:1] != (samples,):
            raise ValueError(
                f"outputs{jax.tree_util.keystr(path)} of {samples} samples have shape "
                f"{jnp.shape(leaf)}; return [{samples}, ...]"
            )
    return losses.sum(dtype=jnp.promote_types(losses.dtype, jnp.float32)), outputs


def _values(module: nnx.Module) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(module))
    return {"/".join(map(str, path)): each.get_raw_value() for path, each in flat}


def _different(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = before.keys() | after.keys()
    return sorted(name for name in names if before.get(name) is not after.get(name))
