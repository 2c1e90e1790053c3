"""The tables of a model, real or abstract, or of a list of configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeGuard

import jax
from flax import nnx
from jaxtyping import Array

from jaxrec import optim
from jaxrec.embed.collection import Collection
from jaxrec.embed.config import MAX_ROWS, TableConfig
from jaxrec.embed.functional import default_store
from jaxrec.embed.layout import TableLayout, layout_tables
from jaxrec.embed.tables import Tables
from jaxrec.embed.taps import tapped_modules


@dataclasses.dataclass(frozen=True)
class ModelTables:
    """The tables of a model, by collection."""

    # Path, layout and whether ids have weights, of each collection.
    collections: tuple[tuple[str, TableLayout, bool], ...]
    dense_bytes: int  # of the model's other parameters
    is_configured: bool  # whether the tables exist already, so that their types are fixed

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(table.name for _, layout, _ in self.collections for table in layout.configs)


# A model, real or abstract; a function that makes one; or configurations of tables.
Model: TypeAlias = nnx.Module | Callable[[], nnx.Module] | Sequence[TableConfig]


def read_model(model: Model) -> ModelTables:
    """Return the tables of a model with jaxrec's collections, or of configurations."""
    if is_function(model):
        # Called under eval_shape: no array is made, so that a model larger than this machine can be
        # planned.
        with default_store(_make_store):
            model = nnx.eval_shape(model)
    if isinstance(model, nnx.Module):
        tables = _read_module(model)
    elif isinstance(model, Sequence) and all(isinstance(table, TableConfig) for table in model):
        tables = _read_configs(model)
    else:
        raise TypeError(
            "a plan is for a Flax model with jaxrec's collections, for a function that makes one, "
            f"or for a sequence of table configurations, got {type(model).__name__}"
        )
    if not tables.names:
        raise ValueError("there are no tables to plan: the model has no jaxrec collection")
    collections: dict[str, str] = {}
    for path, layout, _ in tables.collections:
        for table in layout.configs:
            if table.name in collections:
                raise ValueError(
                    f"collections {collections[table.name]!r} and {path!r} both have a table "
                    f"{table.name!r}; a plan goes by name, so rename one of them"
                )
            collections[table.name] = path
    return tables


def _make_store(layout: TableLayout, key: Array) -> Tables:
    """Make tables; without arrays if one has more rows than int32 can number."""
    # `Tables.init` refuses what int32 cannot number; of these tables only the layout is read.
    is_large = any(table.num_embeddings > MAX_ROWS for table in layout.configs)
    return Tables({}, {}, layout) if is_large else Tables.init(layout, key)


def is_function(model: Model) -> TypeGuard[Callable[[], nnx.Module]]:
    """Return whether a model is given by a function that makes it."""
    return callable(model) and not isinstance(model, nnx.Module)


def _read_module(model: nnx.Module) -> ModelTables:
    collections = []
    for path, module in tapped_modules(model).items():
        if isinstance(module, Collection):
            layout = module.tables.get_value().layout
            # The layout of tables on a mesh contains the one that they had on one device.
            layout = layout if isinstance(layout, TableLayout) else layout.whole
            collections.append((path, layout, module.is_weighted))
    dense = jax.tree.leaves(nnx.state(model, nnx.Param))
    dense_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in dense)
    return ModelTables(tuple(collections), dense_bytes, is_configured=True)


def _read_configs(configs: Sequence[TableConfig]) -> ModelTables:
    """Read configurations: bags form one collection, per-id tables another."""
    kinds: dict[type, list[TableConfig]] = {}
    for config in configs:
        kinds.setdefault(type(config), []).append(config)
    collections = tuple(
        # As `EmbeddingBagCollection` does by default; a configuration's own optimizer precedes it.
        (kind.__name__, layout_tables(tables, optim.rowwise_adagrad()), False)
        for kind, tables in kinds.items()
    )
    return ModelTables(collections, 0, is_configured=False)
