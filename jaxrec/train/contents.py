"""The arrays of a model and its optimizer, under names that layouts do not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection, TableVariable
from jaxrec.embed.logical import to_logical

Collection = EmbeddingBagCollection | EmbeddingCollection


def saved_tree(model: nnx.Module, optimizer: nnx.Optimizer, state: Any) -> dict[str, Any]:
    """Make what a checkpoint holds: nested dictionaries of copies of all arrays.

    The next step takes the arrays themselves for its results.
    """

    def copies(named: Mapping[str, nnx.Variable]) -> dict[str, Any]:
        return {name: _copy(variable.get_value()) for name, variable in named.items()}

    return {
        "dense": copies(dense_variables(model)),
        "optimizer": copies(variables(optimizer)),
        "tables": {
            name: {table.name: _off_devices(collection, table.name) for table in collection.configs}
            for name, collection in collections(model).items()
        },
        "run": {str(i): _copy(jnp.asarray(x)) for i, x in enumerate(jax.tree.leaves(state))},
    }


def _copy(value: Array) -> Array | np.ndarray:
    array = plain(value)
    # Several processes save what all have, and process 0 what each has for itself.
    is_own = jax.process_count() > 1 and array.is_fully_addressable
    return np.array(array) if is_own else jnp.array(array)


def _off_devices(collection: Collection, name: str) -> dict[str, Any]:
    """Copy a table with its state to the memory of the devices' hosts."""
    logical = to_logical(collection.tables.get_value(), name)
    table = {"rows": logical.rows, "state": logical.state}
    # One table at a time, as devices have no room for copies of all.
    return jax.block_until_ready(
        jax.device_put(
            table, jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), table)
        )
    )


def table_shapes(model: nnx.Module) -> dict[str, dict[str, list[int]]]:
    """Return ``[num_embeddings, embedding_dim]`` by collection and table."""
    return {
        name: {
            table.name: [table.num_embeddings, table.embedding_dim] for table in collection.configs
        }
        for name, collection in collections(model).items()
    }


def collections(model: nnx.Module) -> dict[str, Collection]:
    """Return the model's collections by their paths."""
    return {
        "/".join(map(str, path)) or ".": module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
    }


def variables(node: Any, wanted: Any = ...) -> dict[str, nnx.Variable]:
    """Return the variables of a module or an optimizer by their paths."""
    state = nnx.state(node, wanted)
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def dense_variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Return all variables of a model but its tables."""
    return variables(model, nnx.Not(TableVariable))


def plain(value: Array) -> Array:
    """Return an array of numbers: a random key's own, any other array as it is."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value
