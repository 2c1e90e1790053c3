"""Many operations in one compiled program: their results, and the gradients of these."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray, complete_cumsum
from jaxrec.ragged.offsets import without_padding


def program(operations: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], dict[str, Any]]:
    """Compile operations on one input to a function that returns what each of them gives."""

    def run(inputs: Any) -> dict[str, Any]:
        results = {}
        for name, operation in operations.items():
            with named(name):
                results[name] = with_gradients(operation, inputs)
        return results

    return nnx.jit(run)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Add the name of an entry to its errors."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the entry {name}")
        raise


def with_gradients(operation: Callable[[Any], Any], inputs: Any) -> Any:
    """Return a result without its padding, and the gradients of its `total` in the floats."""
    leaves, tree = jax.tree.flatten(inputs)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def loss(floats: list[Any]) -> tuple[Any, Any]:
        rest = iter(floats)
        merged = [next(rest) if flag else x for x, flag in zip(leaves, is_float, strict=True)]
        result = without_all_padding(operation(jax.tree.unflatten(tree, merged)))
        return total(result), result

    floats = [x for x, flag in zip(leaves, is_float, strict=True) if flag]
    (_, result), gradients = jax.value_and_grad(loss, has_aux=True)(floats)
    return result, gradients


def without_all_padding(result: Any) -> Any:
    """Replace ragged arrays by their arrays, with zeros as padding, and other types by dicts."""
    ragged = (JaggedArray, KeyedArray, KeyedJaggedArray)

    def plain(value: Any) -> Any:
        if isinstance(value, KeyedArray):
            return value.values
        if isinstance(value, KeyedJaggedArray):
            return {key: plain(column) for key, column in value.to_dict().items()}
        if not isinstance(value, JaggedArray):
            return value
        offsets = complete_cumsum(value.lengths)
        arrays = [without_padding(value.values, offsets), value.lengths]
        if value.weights is not None:
            arrays.append(without_padding(value.weights, offsets))
        return arrays

    return jax.tree.map(plain, result, is_leaf=lambda value: isinstance(value, ragged))


def total(result: Any) -> Any:
    """Return a smooth number that every float of the result has part in."""
    leaves = [x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating)]
    return functools.reduce(jnp.add, [jnp.sin(x).sum() for x in leaves], jnp.zeros(()))
