"""Table stores of models: those of one model that are quantized, and pairs of two models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from flax import nnx

from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import tapped_modules
from jaxrec.serve.quantized.mesh_stores import Quantized, is_quantized_store


def stores(model: nnx.Module) -> dict[str, TableStore]:
    """Return the table stores of a model by the paths of their collections."""
    return {path: module.tables.get_value() for path, module in tapped_modules(model).items()}


def quantized_stores(model: nnx.Module) -> dict[str, Quantized]:
    """Return the quantized table stores of a model by the paths of their collections.

    Raises:
        TypeError: A store is not quantized.
    """
    found = stores(model)
    for store in found.values():
        if not is_quantized_store(store):
            names = ", ".join(repr(config.name) for config in store.configs)
            raise TypeError(
                f"tables {names} are not quantized; give the model that jaxrec.serve.quantize "
                "returned, on one device or over a mesh"
            )
    return cast(dict[str, Quantized], found)


def paired_stores(
    small: nnx.Module, other: nnx.Module
) -> Iterator[tuple[str, Quantized, TableStore]]:
    """Iterate over the collections of a quantized model: the path, its store, and the other's.

    Raises:
        TypeError: The first model is not quantized.
        ValueError: A table is in one model only, or has another shape there.
    """
    first, second = quantized_stores(small), stores(other)
    if different := sorted({*_shapes(first)} ^ {*_shapes(second)}):
        _, name, rows, columns = different[0]
        raise ValueError(
            f"the models have different tables: table {name!r} of {rows} rows and {columns} "
            "columns is in one of them only"
        )
    for path, store in first.items():
        yield path, store, second[path]


def _shapes(each: Mapping[str, TableStore]) -> Iterator[tuple[str, str, int, int]]:
    for path, store in each.items():
        for config in store.configs:
            yield path, config.name, config.num_embeddings, config.embedding_dim
