"""Raw 64-bit ids: arrays that stay on the host, since JAX would cut them to 32 bits silently."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental.hijax import register_hitype
from jax.tree_util import GetAttrKey

RESERVED = -1  # the bits of 2**64 - 1 too; many pipelines pad with it
_MESSAGE = (
    "raw 64-bit ids stay on the host, since JAX would cut them to 32 bits: loop over "
    "jaxrec.tier.ahead(model, batches), which turns them into rows, make row indices of them with "
    "jaxrec.ragged.hash_ids(values, num_embeddings) before a batch is packed, or put row indices "
    "of tables of more than 2**31 rows on a mesh with jaxrec.mesh.shard_batch(..., id_bits=64)"
)


class RawIds(np.ndarray):
    """Raw 64-bit ids, an int64 NumPy array that JAX refuses.

    Slices and copies are raw ids too; arithmetic and comparisons give plain NumPy arrays, and so
    does ``np.asarray``.

    Raises:
        ValueError: The array is given to JAX.
    """

    def __jax_array__(self) -> NoReturn:
        refuse()

    # The result of arithmetic is not an id: ``ids % 1000`` are row indices, which JAX may have.
    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        array = np.asarray(array)
        return array[()] if return_scalar else array


def refuse(where: str = "values") -> NoReturn:
    """Raise a ValueError for raw ids in the array named ``where``; it says where they belong."""
    raise ValueError(f"{where}: {_MESSAGE}")


# Without this, JAX treats a subclass of NumPy's array as a plain one, and `__jax_array__` is never
# called.
register_hitype(RawIds, lambda _: refuse())


def is_raw(array: Any) -> bool:
    """Return whether an array holds raw ids."""
    return isinstance(array, RawIds)


def as_raw(array: Any) -> Any:
    """Return an int64 NumPy array as raw ids; anything else as it is."""
    if type(array) is np.ndarray and array.dtype == np.int64:
        return array.view(RawIds)
    return array


def like(array: Any, *sources: Any) -> Any:
    """Return ``array`` as raw ids if one of ``sources``, which it was computed from, holds some."""
    return as_raw(array) if any(map(is_raw, sources)) else array


def register_ragged(
    kind: type,
    arrays: tuple[str, ...],
    static: tuple[str, ...] = (),
    make: Callable[..., Any] | None = None,
) -> None:
    """Register a class as a pytree; its ``values`` may hold raw ids.

    Args:
        kind: The class.
        arrays: Names of the fields that are leaves, ``values`` first.
        static: Names of the fields that are part of the tree structure.
        make: Function that makes an object of all fields, in order; None: the class.
    """
    get_arrays, paths = operator.attrgetter(*arrays), tuple(map(GetAttrKey, arrays))
    get_static = operator.attrgetter(*static) if static else lambda _: ()
    make = make or kind

    # Batches with raw ids have another tree structure. When jit finds a structure and shapes in its
    # cache it does not ask the arrays, and so would take raw ids for int32 ones. And arrays lose
    # their subclass on the way.
    def flatten(ragged: Any) -> tuple[tuple[Any, ...], tuple[Any, bool]]:
        return get_arrays(ragged), (get_static(ragged), is_raw(ragged.values))

    def flatten_with_paths(ragged: Any) -> tuple[tuple[Any, ...], tuple[Any, bool]]:
        leaves, structure = flatten(ragged)
        return tuple(zip(paths, leaves, strict=True)), structure

    def unflatten(structure: tuple[Any, bool], leaves: Iterable[Any]) -> Any:
        fields, has_raw_ids = structure
        values, *others = leaves
        return make(as_raw(values) if has_raw_ids else values, *others, *fields)

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_paths, unflatten, flatten)
