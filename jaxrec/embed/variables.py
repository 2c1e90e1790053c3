"""The variables of models by path, as arrays that files can hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.collection import TableVariable


def variables(node: Any, wanted: Any = ...) -> dict[str, nnx.Variable]:
    """Return the variables of a module or an optimizer by their paths."""
    state = nnx.state(node, wanted)
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def dense_variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Return all variables of a model except its tables."""
    return variables(model, nnx.Not(TableVariable))


def plain(value: Array) -> Array:
    """Return the data of a random key, and any other array as it is."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def value_like(value: np.ndarray, old: Array) -> Array:
    """Return an array of a file in the place of another, with its type and on its devices."""
    if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
        new = put_like(value, jax.random.key_data(old))
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
    return put_like(value.astype(old.dtype), old)


def put_like(value: np.ndarray, old: Any) -> Array:
    """Put a value on the devices of another array."""
    if not isinstance(old, jax.Array) or len(old.sharding.device_set) == 1:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index])
