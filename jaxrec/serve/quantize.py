"""Models with quantized tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import DTypeLike

from jaxrec.embed.collection import Collection
from jaxrec.embed.formats import RowFormat
from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import TappedModule, tapped_modules
from jaxrec.serve.packing import table_parts, write_parts
from jaxrec.serve.quantized_tables import QuantizedTables
from jaxrec.serve.row_formats import table_formats

Model = TypeVar("Model", bound=nnx.Module)

OUTPUT_DTYPES = ("float32", "bfloat16", "float16")


def quantize(
    model: Model,
    dtype: str = "int8",
    *,
    per_table: Mapping[str, str] | None = None,
    output_dtype: DTypeLike | None = None,
) -> Model:
    """Return a copy of a model whose tables are quantized, for inference.

    The copy is called like the model. Its tables lie on one device, and its lookups read the packed
    rows. Everything else is copied; the model stays as it is. Rows are quantized 16 MiB at a time,
    so that memory holds little beside the model's tables and the quantized ones.

    Args:
        model: A model with tables on one device or over a mesh. With several processes all of them
            call this, and each gets the whole quantized model.
        dtype: Format of the tables: "int8", "int4" or "int2" (a scale and an offset for each row),
            "float8", "float16", or "bfloat16" and "float32", which keep a table as it is.
        per_table: Formats of single tables, by name.
        output_dtype: Type of the looked-up embeddings: "float32", "bfloat16" or "float16"; None:
            that of the model's collections. Sums are taken in float32.

    Raises:
        TypeError: The model is no `nnx.Module`; or a table has an open vocabulary or a cache
            (`jaxrec.tier`).
        KeyError: ``per_table`` names a table that the model lacks.
        ValueError: There is no such format; the model has no tables; a table is quantized already,
            has a width that the format cannot pack, or holds a NaN, an infinity or a number that is
            too large for the format.

    Example:
        >>> import jaxrec
        >>> from flax import nnx
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> small = quantize(model, dtype="int8")
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], []]})
        >>> bool(abs(small(batch)["user"] - model(batch)["user"]).max() < 1e-3)
        True
        >>> small.tables.get_value().num_bytes("user"), model.table("user").nbytes
        (1200, 3200)
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"quantize takes a flax.nnx.Module, got {type(model).__name__}")
    output_dtype = _checked_output(output_dtype)
    modules = tapped_modules(model)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no tables to quantize")
    stores: dict[str, TableStore] = {
        path: module.tables.get_value() for path, module in modules.items()
    }
    for store in stores.values():
        _check_store(store)
    tables = [config for store in stores.values() for config in store.configs]
    formats = table_formats(tables, dtype, per_table or {})
    small = _copy_without_tables(model, modules)
    for path, module in tapped_modules(small).items():
        module.tables.set_value(_quantize_store(stores[path], formats))
        module.is_trainable = False
        if output_dtype is not None and isinstance(module, Collection):
            module.dtype = output_dtype
    return small


def _checked_output(dtype: DTypeLike | None) -> str | None:
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in OUTPUT_DTYPES:
        raise ValueError(f"output_dtype={dtype!r} is none of {', '.join(OUTPUT_DTYPES)}")
    return name


def _check_store(store: TableStore) -> None:
    """Raise where the tables of a store cannot be quantized."""
    names = ", ".join(repr(config.name) for config in store.configs)
    if isinstance(store, QuantizedTables):
        formats = ", ".join(row_format.name for row_format in dict.fromkeys(store.formats))
        raise ValueError(
            f"tables {names} are quantized already ({formats}); quantize the model that they were "
            "quantized from"
        )
    if store.placed is not store:
        raise TypeError(
            f"tables {names} are kept by {type(store).__name__}, which moves rows between the "
            "table and elsewhere; quantize takes tables that have all of their rows, on one device "
            "or over a mesh"
        )


def _copy_without_tables(model: Model, modules: Mapping[str, TappedModule]) -> Model:
    """Return a copy of a model whose collections have stores without rows."""
    stores = {path: module.tables.get_value() for path, module in modules.items()}
    try:
        for path, module in modules.items():
            module.tables.set_value(stores[path].without_rows)
        copy = nnx.clone(model)
    finally:
        for path, module in modules.items():
            module.tables.set_value(stores[path])
    nnx.update(copy, jax.tree.map(_copy_to_one_device, nnx.state(copy)))
    return copy


def _copy_to_one_device(array: Any) -> Any:
    """Return a copy of an array, so that a donated step of the model leaves it alone.

    An array that is replicated over a mesh is copied to one of this process's devices.
    """
    if not isinstance(array, jax.Array):
        return array
    if len(array.sharding.device_set) > 1:
        array = jax.device_put(array.addressable_data(0), jax.local_devices()[0])
    return jnp.copy(array)


def _quantize_store(store: TableStore, formats: Mapping[str, RowFormat]) -> QuantizedTables:
    quantized = QuantizedTables.zeros(store.configs, formats)
    rows = dict(quantized.rows)
    for group, row_format in zip(quantized.layout.groups, quantized.formats, strict=True):
        for table, first_row in zip(group.tables, group.row_offsets, strict=True):
            parts = table_parts(store, table.name)
            rows[group.name] = write_parts(
                rows[group.name], row_format, table.name, parts, first_row
            )
    return dataclasses.replace(quantized, rows=rows)
