"""Arrays that travel through JAX transformations and refuse arithmetic.

Row indices are numbers, but a sum of two of them is nonsense. Functions over pytrees do not know
that: ``jax.tree.map(lambda g: 2 * g, gradients)`` would double row indices together with gradients
and so update other rows. JAX has one public kind of array without arithmetic, the random key, and
any bits can be a key's data. A sealed array is such a key array: `jax.jit`, `jax.lax.scan`,
indexing, stacking and shardings take it, and every other operation is a TypeError.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Shaped

Content = TypeVar("Content")


def _refuse(*_: Any) -> Any:
    raise TypeError("sealed row indices of jaxrec.Gradients are not a random key")


# JAX prints the tag in its errors: "mul does not accept dtypes key<...>, float32".
_SEALED = define_prng_impl(
    key_shape=(1,),
    seed=_refuse,
    split=_refuse,
    random_bits=_refuse,
    fold_in=_refuse,
    name="jaxrec_sealed",
    tag="row indices of jaxrec.Gradients: use its map, scale, norm, clip, + and *",
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sealed(Generic[Content]):
    """A pytree of arrays whose leaves refuse arithmetic.

    Attributes:
        leaves: The leaves as key arrays, shaped as they were.
        dtypes: Their dtypes.
        tree: The structure of the pytree.
    """

    leaves: tuple[Any, ...]
    dtypes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})

    def open(self) -> Content:
        """Return the pytree as it was sealed."""
        leaves = map(_open, self.leaves, self.dtypes)
        return jax.tree.unflatten(self.tree, leaves)


def seal(content: Content) -> Sealed[Content]:
    """Seal a pytree of arrays of 32-bit numbers or booleans.

    Raises:
        TypeError: An array is of another type.
    """
    leaves, tree = jax.tree.flatten(content)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    dtypes = tuple(array.dtype.name for array in arrays)
    return Sealed(tuple(map(_seal, arrays)), dtypes, tree)


def _seal(array: Shaped[Array, "..."]) -> Any:
    if array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    elif array.dtype.itemsize == 4:
        bits = jax.lax.bitcast_convert_type(array, jnp.uint32)
    else:
        raise TypeError(f"sealed arrays have 32 bits or are booleans, got {array.dtype}")
    return jax.random.wrap_key_data(bits[..., None], impl=_SEALED)


def _open(sealed: Any, dtype: str) -> Shaped[Array, "..."]:
    bits = jax.random.key_data(sealed)[..., 0]
    if dtype == "bool":
        return bits != 0
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))
