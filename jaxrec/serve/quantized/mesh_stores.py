"""Quantized tables over a mesh: their bytes on one device, and new rows in their place."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec.embed.formats import RowFormat
from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import tapped_modules
from jaxrec.embed.variables import dense_variables
from jaxrec.mesh.creation import shard_tables
from jaxrec.mesh.tables import ShardedTables
from jaxrec.serve.quantized.model_copy import shared_copy
from jaxrec.serve.quantized.pruned_tables import PrunedTables
from jaxrec.serve.quantized.quantized_tables import QuantizedTables

Model = TypeVar("Model", bound=nnx.Module)

Quantized = QuantizedTables | PrunedTables | ShardedTables
"""Stores of quantized tables; a `ShardedTables` has those over a mesh."""


def is_quantized_store(store: TableStore) -> bool:
    """Return whether all tables of a store are quantized, on one device or over a mesh."""
    if isinstance(store, QuantizedTables | PrunedTables):
        return True
    return isinstance(store, ShardedTables) and all(
        config.inference_format is not None for config in store.configs
    )


def row_formats(store: Quantized) -> dict[str, RowFormat]:
    """Return the format of each table of a quantized store, by name."""
    if isinstance(store, ShardedTables):
        return {config.name: config.row_format for config in store.configs}
    return {config.name: store.row_format(config.name) for config in store.configs}


def stored_bytes(store: Quantized, name: str) -> int:
    """Return the number of bytes of a table, once where it is replicated.

    Over a mesh each part of a row that is cut by columns has a scale and an offset of its own.

    Raises:
        KeyError: No table has that name.
    """
    if not isinstance(store, ShardedTables):
        return store.num_bytes(name)
    row_format = row_formats(store)[name]
    (config,) = (config for config in store.configs if config.name == name)
    return sum(
        config.num_embeddings * row_format.row_bytes(stop - start)
        for _, (start, stop), _ in store.layout.column_slices(name)
    )


def on_one_device(model: Model) -> Model:
    """Return a quantized model whose tables lie on one device, with the bytes that they have.

    Args:
        model: A quantized model; one whose tables are over a mesh is copied.

    Raises:
        TypeError: A table is cut by columns, so that the parts of a row have scales of their own;
            or there are several processes.
    """
    modules = tapped_modules(model)
    over_mesh = {
        path: store
        for path, module in modules.items()
        if isinstance(store := module.tables.get_value(), ShardedTables)
    }
    if not over_mesh:
        return model
    stores = {path: gathered(store) for path, store in over_mesh.items()}
    copy = shared_copy(model)
    for path, module in tapped_modules(copy).items():
        module.tables.set_value(stores.get(path, module.tables.get_value()))
    for variable in dense_variables(copy).values():
        variable.set_value(jax.tree.map(copy_to_one_device, variable.get_value()))
    return copy


def gathered(store: ShardedTables) -> QuantizedTables:
    """Return quantized tables of a mesh on one device, with the bytes that they have.

    Raises:
        TypeError: A table is cut by columns, or there are several processes.
    """
    if jax.process_count() > 1:
        raise TypeError(
            "the quantized tables lie over several processes; give the model that "
            "jaxrec.serve.quantize returned, before jaxrec.shard"
        )
    tables = QuantizedTables.zeros(store.configs, row_formats(store))
    for config in store.configs:
        rows = store.stored_rows(config.name)
        if rows is None:
            raise TypeError(
                f"table {config.name!r} is cut by columns over the mesh, where each part of a row "
                "has a scale of its own; give the model that jaxrec.serve.quantize returned, "
                "before jaxrec.shard, or place the table by rows"
            )
        tables = tables.write_stored(config.name, rows)
    return tables


def spread(source: TableStore, like: ShardedTables) -> ShardedTables:
    """Return the rows of quantized tables in the places and with the settings of others.

    Args:
        source: Quantized tables of the same formats, anywhere. Bytes are copied unless either side
            cuts a table by columns.
        like: The tables over a mesh.
    """
    names = [config.name for config in like.layout.configs]
    placements = dict(zip(names, like.layout.placements, strict=True))
    placed = shard_tables(source, placements, like.mesh, like.replica_axis)
    return dataclasses.replace(like, rows=placed.rows, state=placed.state)


def copy_to_one_device(array: Any) -> Any:
    """Return a copy of an array, so that a donated step of its model leaves it alone.

    An array that is replicated over a mesh is copied to one of this process's devices.
    """
    if not isinstance(array, jax.Array):
        return array
    if len(array.sharding.device_set) > 1:
        array = jax.device_put(array.addressable_data(0), jax.local_devices()[0])
    return jnp.copy(array)
