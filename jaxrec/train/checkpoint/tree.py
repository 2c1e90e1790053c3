"""The arrays of a model and its optimizer, by names that do not depend on their placement."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.collection import Collection, find_collections
from jaxrec.embed.config import TableConfig
from jaxrec.embed.variables import ArrayVariable, dense_variables, plain, variables
from jaxrec.tier.changes.tracked_tables import ChangedIds
from jaxrec.tier.planning.tier import Tier, tier_of
from jaxrec.tier.saved_stores import snapshot_stores


@dataclasses.dataclass(frozen=True)
class Changes:
    """The changes that an incremental checkpoint saves.

    ``tables`` has the changed ids by collection and table; ``stores`` has by vocabulary the ids
    whose records in row stores changed, None: all.
    """

    tables: Mapping[tuple[str, str], ChangedIds]
    stores: Mapping[str, np.ndarray | None]


TakeChanges: TypeAlias = Callable[[], Changes | None]
"""Function that returns the changes to save; None: all rows are saved."""


def saved_tree(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    state: Any,
    stores: pathlib.Path | None = None,
    take_changes: TakeChanges = lambda: None,
) -> dict[str, Any]:
    """Copy a model's, its optimizer's and the run's arrays to the nested dictionaries of a file.

    ``stores`` is the folder for snapshots of row stores; None: they are not saved. ``take_changes``
    is called once the tables agree with their vocabularies.
    """
    # Everything is copied, since the next training step donates the arrays themselves.
    tier = tier_of(model)
    if tier is None:
        changes = take_changes()
        return _saved_tree(model, optimizer, state, None if changes is None else changes.tables)
    with tier.settled(model):
        changes = take_changes()
        # Within the same block as the copies of rows: a row that moved between the two would be in
        # both places or in neither.
        if stores is not None:
            snapshot_stores(tier.vocabularies, stores, {} if changes is None else changes.stores)
        vocabularies = {
            name: {key: _with_end(array) for key, array in arrays.items()}
            for name, arrays in tier.state().items()
        }
        rows = None
        if changes is not None:
            rows = {key: _changed_rows(tier, key, ids) for key, ids in changes.tables.items()}
        tree = _saved_tree(model, optimizer, state, rows)
        return {**tree, "vocabularies": vocabularies}


def _changed_rows(tier: Tier, key: tuple[str, str], changed: ChangedIds) -> ChangedIds:
    """Return the changed ids of a table as row indices; ids that only the store has are left out.

    ``key`` is the path of the collection and the name of the table.
    """
    for each in tier.vocabularies:
        if any((table.collection, table.config.name) == key for table in each.tables):
            # The file of an incremental checkpoint names rows, as a full one does; the vocabulary
            # that is saved with it says whose they are.
            rows = each.vocabulary.map.find(changed.ids)
            rows = np.concatenate([changed.unknown, rows[rows >= 0]])
            return ChangedIds(np.sort(rows), changed.removed, changed.unknown)
    return changed


def _with_end(array: np.ndarray) -> np.ndarray:
    """Append an element, since Orbax's files hold no empty arrays."""
    return np.concatenate([array, np.zeros((1, *array.shape[1:]), array.dtype)])


def without_end(array: np.ndarray) -> np.ndarray:
    """Remove the element that `_with_end` appended."""
    return array[:-1]


def _saved_tree(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    state: Any,
    changes: Mapping[tuple[str, str], ChangedIds] | None,
) -> dict[str, Any]:
    """Copy all arrays but those of vocabularies; ``changes`` None: the whole tables."""

    def copies(named: Mapping[str, ArrayVariable]) -> dict[str, Any]:
        return {name: _copy(variable.get_raw_value()) for name, variable in named.items()}

    def table(path: str, collection: Collection, name: str) -> dict[str, Any]:
        if changes is None:
            return _off_devices(collection, name)
        rows = changes["" if path == "." else path, name].ids
        values = collection.tables.get_value().placed.rows_of(name, rows).read()
        arrays = {"index": rows, "rows": values.pop("rows"), "state": values}
        return jax.tree.map(_with_end, arrays)

    # Before the copies of other arrays: a table is copied on the devices on its way to the host,
    # and must not need room beside them.
    tables = {
        path: {config.name: table(path, each, config.name) for config in each.configs}
        for path, each in collections(model).items()
    }
    return {
        "dense": copies(dense_variables(model)),
        "optimizer": copies(variables(optimizer)),
        "tables" if changes is None else "changes": tables,
        "run": {str(i): _copy(jnp.asarray(x)) for i, x in enumerate(jax.tree.leaves(state))},
    }


def _copy(value: Array) -> Array | np.ndarray:
    array = plain(value)
    # Orbax saves global arrays by all processes, and NumPy arrays by process 0.
    is_own = jax.process_count() > 1 and array.is_fully_addressable
    return np.array(array) if is_own else jnp.array(array)


def _off_devices(collection: Collection, name: str) -> dict[str, Any]:
    """Copy a table and its optimizer state from the devices to pinned host memory."""
    logical = collection.tables.get_value().checkpoint_view(name)
    table = {"rows": logical.rows, "state": logical.state}
    # One table at a time: copies of all tables may not fit the devices.
    return jax.block_until_ready(
        jax.device_put(
            table, jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), table)
        )
    )


def table_shapes(model: nnx.Module) -> dict[str, dict[str, list[int]]]:
    """Return ``[rows on the devices, columns]`` of each table, by collection and table."""
    return {
        name: {
            table.name: [table.num_embeddings, table.embedding_dim]
            for table in placed_configs(collection)
        }
        for name, collection in collections(model).items()
    }


def placed_configs(collection: Collection) -> tuple[TableConfig, ...]:
    """Return the tables' configurations with the numbers of rows that they have on the devices."""
    return collection.tables.get_value().layout.configs


def collections(model: nnx.Module) -> dict[str, Collection]:
    """Return the model's collections by path; "." is the model itself."""
    return {path or ".": each for path, each in find_collections(model).items()}
