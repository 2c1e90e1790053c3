"""Raw 64-bit ids: arrays that stay on the host, since JAX would cut them to 32 bits silently."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from jax.experimental.hijax import register_hitype

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
    """Refuse raw ids in the array named ``where``, with a hint where they belong."""
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
    """Return NumPy's result as raw ids if one of its sources is."""
    return as_raw(array) if any(map(is_raw, sources)) else array
