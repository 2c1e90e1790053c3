"""Quantization of a model's tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import DTypeLike

from jaxrec.embed.collection import Collection
from jaxrec.embed.config import TableConfig, find_config
from jaxrec.embed.formats import RowFormat
from jaxrec.embed.layout import inference_layout
from jaxrec.embed.store import TableStore
from jaxrec.embed.tables import Tables
from jaxrec.embed.taps import tapped_modules
from jaxrec.embed.variables import gather_variables
from jaxrec.serve.quantized.models import copy_to_one_device, stores_of
from jaxrec.serve.quantized.pruned_tables import PrunedTables, RowMap
from jaxrec.serve.quantized.pruning import Pruning
from jaxrec.serve.quantized.rows import table_formats

Model = TypeVar("Model", bound=nnx.Module)

OUTPUT_DTYPES = ("float32", "bfloat16", "float16")


def quantize(
    model: Model,
    dtype: str = "int8",
    *,
    per_table: Mapping[str, str] | None = None,
    output_dtype: DTypeLike | None = None,
    prune: Mapping[str, Pruning] | None = None,
) -> Model:
    """Return a copy of a model whose tables are quantized, for inference.

    The copy is called like the model. Its tables lie on one device, from which `jaxrec.shard` puts
    them on a mesh, and its lookups read the packed rows. Everything else is copied; the model stays
    as it is. Rows are quantized 16 MiB at a time, so that memory holds little beside the model's
    tables and the quantized ones.

    Args:
        model: A model with tables on one device or over a mesh. With several processes all of them
            call this, and each gets the whole quantized model.
        dtype: Format of the tables: "int8", "int4" or "int2" (a scale and an offset for each row),
            "float8", "float16", or "bfloat16" and "float32", which keep a table as it is.
        per_table: Formats of single tables, by name.
        output_dtype: Type of the looked-up embeddings: "float32", "bfloat16" or "float16"; None:
            that of the model's collections. Sums are taken in float32.
        prune: Rules for the tables to prune, by name, such as `by_norm`. Their pruned rows take no
            memory, and their ids read zeros; see `PrunedTables`.

    Raises:
        TypeError: The model is not an `nnx.Module`, or is abstract; a table has an open vocabulary
            or a cache (`jaxrec.tier`); or ``prune`` has values that are not rules.
        KeyError: ``per_table`` or ``prune`` names a table that the model lacks.
        ValueError: There is no such format; the model has no tables; a table is quantized already,
            has a width that the format cannot pack, or holds a NaN, an infinity or a number that is
            too large for the format; or ``prune`` names a table with max pooling.

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
    stores = stores_of(model)
    if not stores:
        raise ValueError(f"{type(model).__name__} has no tables to quantize")
    for store in stores.values():
        check_store(store)
    tables = [config for store in stores.values() for config in store.configs]
    formats = table_formats(tables, dtype, per_table or {})
    row_maps = _row_maps(stores.values(), prune or {})
    small = _copy_without_tables(model)
    for path, module in tapped_modules(small).items():
        store = stores[path]
        module.tables.set_value(empty_store(store.configs, formats, row_maps).like(store))
        module.is_trainable = False
        if output_dtype is not None and isinstance(module, Collection):
            module.dtype = output_dtype
    return small


def empty_store(
    configs: Sequence[TableConfig],
    formats: Mapping[str, RowFormat],
    row_maps: Mapping[str, RowMap],
) -> Tables | PrunedTables:
    """Return a quantized store without arrays; tables that ``row_maps`` lacks are not pruned."""
    names = {config.name for config in configs}
    if row_maps := {name: row_map for name, row_map in row_maps.items() if name in names}:
        return PrunedTables.of(configs, formats, row_maps)
    return Tables({}, {}, inference_layout(configs, formats))


def _checked_output(dtype: DTypeLike | None) -> str | None:
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in OUTPUT_DTYPES:
        raise ValueError(f"output_dtype={dtype!r} is not one of {', '.join(OUTPUT_DTYPES)}")
    return name


def check_store(store: TableStore) -> None:
    """Raise a ValueError or TypeError where the tables of a store cannot be quantized."""
    names = ", ".join(repr(config.name) for config in store.configs)
    if any(config.inference_format is not None for config in store.configs):
        formats = ", ".join(dict.fromkeys(config.row_format.name for config in store.configs))
        raise ValueError(
            f"tables {names} are quantized already ({formats}); quantize the model that they were "
            "quantized from"
        )
    leaves = jax.tree.leaves(store)
    if any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in leaves):
        raise TypeError(
            f"tables {names} are abstract, and quantize packs their rows; call it outside of "
            "jax.jit and nnx.eval_shape. Give a Planner the quantized model, not a function that "
            "makes it"
        )
    if store.placed is not store:
        raise TypeError(
            f"tables {names} are kept by {type(store).__name__}, which moves rows between the "
            "table and elsewhere; quantize takes tables that have all of their rows, on one device "
            "or over a mesh"
        )


def _row_maps(stores: Iterable[TableStore], prune: Mapping[str, Pruning]) -> dict[str, RowMap]:
    """Return the map of each table that ``prune`` names, made by the table's rule."""
    owners = {config.name: store for store in stores for config in store.configs}
    for name, rule in prune.items():
        if name not in owners:
            raise KeyError(
                f"prune has a rule for {name!r}, but no table is named so; there are "
                f"{', '.join(map(repr, owners))}"
            )
        if not isinstance(rule, Pruning):
            raise TypeError(
                f"prune[{name!r}] is a rule such as jaxrec.serve.by_norm(share=0.3), got {rule!r}"
            )
        # A pruned id reads zeros, which are larger than many an element.
        if getattr(find_config(owners[name].configs, name), "pooling", None) == "max":
            raise ValueError(
                f"table {name!r} has pooling='max', and the zeros of pruned rows would be the "
                "largest elements of bags; leave it out of prune"
            )
    return {name: RowMap.of_kept(rule.kept(owners[name], name)) for name, rule in prune.items()}


def _copy_without_tables(model: Model) -> Model:
    """Return a copy of a model whose collections have stores without rows."""
    stores = [(module, module.tables.get_value()) for module in tapped_modules(model).values()]
    try:
        for module, store in stores:
            module.tables.set_value(store.without_rows)
        copy = nnx.clone(model)
    finally:
        # A clone copies all arrays. So the tables are taken out of the user's model for that
        # moment, and put back even if the clone fails.
        for module, store in stores:
            module.tables.set_value(store)
    gather_variables(copy)
    nnx.update(copy, jax.tree.map(copy_to_one_device, nnx.state(copy)))
    return copy
