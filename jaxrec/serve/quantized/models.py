"""Models with quantized tables: copies, stores, and the stores of two models in pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import tapped_modules
from jaxrec.embed.variables import dense_variables, gather_variables

Model = TypeVar("Model", bound=nnx.Module)


def shared_copy(model: Model) -> Model:
    """Copy a model's variables but not its arrays, which both models then share.

    Dense variables that are sharded over a mesh are gathered: the copy has them on every device.
    """
    graph, state = nnx.split(model)
    # `nnx.split` returns the model's own variables; a map over the tree makes new ones.
    copy = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    gather_variables(copy)
    return copy


def on_one_device(model: Model) -> Model:
    """Return a model whose tables lie on one device; rows keep their bytes.

    A model over a mesh is copied; see `TableStore.to_one_device` for the TypeErrors.
    """
    stores = stores_of(model)
    if all(store.devices.mesh is None for store in stores.values()):
        return model
    whole = {path: store.to_one_device() for path, store in stores.items()}
    copy = shared_copy(model)
    for path, module in tapped_modules(copy).items():
        module.tables.set_value(whole[path])
    for variable in dense_variables(copy).values():
        variable.set_value(jax.tree.map(copy_to_one_device, variable.get_value()))
    return copy


def one_copy(array: Any) -> Any:
    """Return one device's copy of an array that several devices have; other arrays as they are."""
    if isinstance(array, jax.Array) and len(array.sharding.device_set) > 1:
        return array.addressable_data(0)
    return array


def copy_to_one_device(array: Any) -> Any:
    """Copy an array to one device; one that several devices have goes to this process's first."""
    if not isinstance(array, jax.Array):
        return array
    one = one_copy(array)
    # A copy and no alias: a training step donates the model's arrays.
    return jnp.copy(one if one is array else jax.device_put(one, jax.local_devices()[0]))


def stores_of(model: nnx.Module) -> dict[str, TableStore]:
    """Return the table stores of a model by the paths of their collections."""
    return {path: module.tables.get_value() for path, module in tapped_modules(model).items()}


def is_quantized(store: TableStore) -> bool:
    """Return whether all tables of a store are quantized, on one device or over a mesh."""
    return all(config.inference_format is not None for config in store.configs)


def quantized_stores(model: nnx.Module) -> dict[str, TableStore]:
    """Return the stores of a model by collection; raise a TypeError if one is not quantized."""
    stores = stores_of(model)
    for store in stores.values():
        if not is_quantized(store):
            names = ", ".join(repr(config.name) for config in store.configs)
            raise TypeError(
                f"tables {names} are not quantized; give the model that jaxrec.serve.quantize "
                "returned, on one device or over a mesh"
            )
    return stores


def paired_stores(
    small: nnx.Module, other: nnx.Module
) -> Iterator[tuple[str, TableStore, TableStore]]:
    """Yield each collection's path, its store in a quantized model, and its store in another one.

    A ValueError names a table that only one of the models has, or that has another shape in it.
    """
    first, second = quantized_stores(small), stores_of(other)
    if different := sorted({*_shapes(first)} ^ {*_shapes(second)}):
        _, name, rows, columns = different[0]
        raise ValueError(
            f"the models have different tables: table {name!r} of {rows} rows and {columns} "
            "columns is in one of them only"
        )
    for path, store in first.items():
        yield path, store, second[path]


def _shapes(stores: Mapping[str, TableStore]) -> Iterator[tuple[str, str, int, int]]:
    for path, store in stores.items():
        for config in store.configs:
            yield path, config.name, config.num_embeddings, config.embedding_dim
