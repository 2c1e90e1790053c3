"""Loading checkpoints into models with any placement of their tables.

Files hold a table's rows in logical order. Each host reads the rows of its own devices only. Names,
shapes and checksums are compared before the first variable changes.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxrec._public import directory_second
from jaxrec.embed.collection import Collection
from jaxrec.embed.config import TableConfig
from jaxrec.embed.padding import zero_padding_rows
from jaxrec.embed.rows import write
from jaxrec.embed.slots import TableRows
from jaxrec.embed.variables import put_like, value_like
from jaxrec.mesh.ahead import restore_capacities
from jaxrec.tier.planning.model_tables import TableVocabulary
from jaxrec.tier.planning.tier import RUN_STATE, Tier, tier_of
from jaxrec.tier.saved_stores import check_stores, load_stores
from jaxrec.tier.vocabulary.assignment import LoadedRows
from jaxrec.train.checkpoint.arrays import (
    read_arrays,
    read_changes,
    read_forms,
    read_table,
    read_tables,
)
from jaxrec.train.checkpoint.files import (
    STORES,
    CheckpointError,
    CheckpointMetadata,
    chain,
    damaged,
    open_checkpoint,
    read_capacities,
    read_run,
    read_shapes,
)
from jaxrec.train.checkpoint.matching import Match, listed, match_checkpoint, refusal
from jaxrec.train.checkpoint.tree import collections, placed_configs, without_end

State = TypeVar("State")

# Bytes of tables that are read at once, over all devices.
_READ_BYTES = 1 << 30


@directory_second
def restore(
    model: nnx.Module,
    directory: str | os.PathLike[str],
    optimizer: nnx.Optimizer | None = None,
    *,
    step: int | None = None,
    resized: bool = False,
    partial: bool = False,
) -> CheckpointMetadata:
    """Load a checkpoint of a directory into a model, in place.

    Checksums, names and shapes are compared before anything is loaded: a difference leaves the
    model and the optimizer as they were. If reading fails later, such as by a disk error, a note on
    the error names the tables that are already loaded.

    Args:
        model: A model with the same tables and parameters; their placement may differ.
        directory: Directory of the checkpoints.
        optimizer: The model's optimizer; None: load the model only.
        step: The checkpoint's step; None: the newest.
        resized: Whether tables may have more or fewer rows than the saved ones, as after a
            vocabulary grew or was cut at its end. Rows that both have are loaded with their state;
            the model's other rows stay as they are.
        partial: Whether the model may differ from the saved one: tables that were added, removed,
            frozen or trained again, other row optimizers, other layers. Tables, parameters and
            optimizer state that fit by name and shape are loaded. The rest of the model stays as it
            is, and ``differences`` of the result lists it. The rows of a table with another row
            optimizer are loaded without their state.

    Returns:
        The checkpoint's metadata.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or its variables are not the
            model's; with ``partial``, no table and no parameter fits.

    Example:
        >>> import jaxrec, optax, tempfile
        >>> def make(**options):
        ...     tables = [jaxrec.EmbeddingBagConfig("user", 8, 4, **options),
        ...               jaxrec.EmbeddingBagConfig("item", 8, 4)]
        ...     adam = jaxrec.optim.adam(0.1)
        ...     model = jaxrec.EmbeddingBagCollection(tables, optimizer=adam, rngs=nnx.Rngs(0))
        ...     return model, jaxrec.Optimizer(model, optax.sgd(0.1))
        >>> path = jaxrec.train.checkpoint.save(tempfile.mkdtemp(), *make())
        >>> model, optimizer = make(trainable=False)
        >>> metadata = restore(model, path.parent, optimizer, partial=True)
        >>> [(difference.kind, difference.name) for difference in metadata.differences]
        [('optimizer of table', 'user')]
    """
    path = open_checkpoint(directory, step)
    return load(path, model, optimizer, resized=resized, partial=partial)


def load(
    path: pathlib.Path,
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    *,
    resized: bool = False,
    partial: bool = False,
) -> CheckpointMetadata:
    """Load the checkpoint in a folder that `open_checkpoint` returned; see `restore`."""
    run, links, capacities = read_run(path), chain(path), read_capacities(path)
    saved = read_arrays(path, {"dense", "optimizer", "vocabularies"})
    shapes = read_shapes(path)
    named, tier = collections(model), tier_of(model)
    match = match_checkpoint(model, optimizer, saved, shapes, read_forms(links[0]), resized=resized)
    if match.differences and not partial:
        raise refusal(path, match.differences, resized=resized)
    if match.differences and not match.dense and not any(match.tables.values()):
        raise CheckpointError(
            f"{path}: no table and no parameter of the checkpoint fits the model; "
            f"{match.differences[0]}"
        )
    vocabularies = _vocabularies(match, tier, saved["vocabularies"], links)
    # Converted before the first table changes: a value that does not fit must leave the model as it
    # was.
    values = [
        (variable, value_like(value, variable.get_raw_value()))
        for variable, value in (*match.dense, *match.optimizer)
    ]

    loaded: list[str] = []
    try:
        for name, of_collection in match.tables.items():
            collection = named[name]
            for tables, has_state in _together(collection, of_collection):
                forms = {
                    table.name: collection.tables.get_value().checkpoint_shapes(table.name)
                    for table in tables
                }
                read = read_tables(links[0], name, forms, has_state=has_state)
                for table in tables:
                    common = min(shapes[name][table.name][0], table.num_embeddings)
                    # Popped, so that a table's arrays are freed before the next table is converted.
                    old, logical = collection.tables.get_value(), read.pop(table.name)
                    collection.tables.set_value(old.from_checkpoint(table.name, logical, common))
                    loaded.append(table.name)
        # Except for its tables, an incremental checkpoint is complete. Tables come from the full
        # one, and the changes of each link go over them, in order.
        for link in links[1:]:
            _load_changes(named, read_changes(link), match.tables)
        for name, of_collection in match.tables.items():
            stored = named[name].tables
            stored.set_value(zero_padding_rows(stored.get_value(), of_collection))
        if tier is not None and vocabularies:
            _load_vocabularies(model, tier, vocabularies, links, match.tables)
    except BaseException as error:
        if loaded:
            error.add_note(f"{path}: tables {listed(loaded)} of the model are loaded, others not")
        raise
    # Last, since nothing can fail here any more.
    for variable, value in values:
        variable.set_value(value)
    restore_capacities(model, capacities)
    return dataclasses.replace(run, differences=tuple(match.differences))


class StateError(CheckpointError):
    """The state of the run was saved with other shapes; ``reason`` ends a sentence about it."""

    def __init__(self, path: pathlib.Path, saved: list[Any], wanted: list[Any]) -> None:
        self.reason = f"was saved with arrays of {saved}, but here it has {wanted}"
        super().__init__(
            f"{path}: the state of the run, such as that of metrics, {self.reason}; "
            "Trainer.restore(..., partial=True) leaves it as it is"
        )


@directory_second
def restore_state(
    state: State, directory: str | os.PathLike[str], *, step: int | None = None
) -> State:
    """Return the pytree that was passed to `CheckpointManager.save` as ``state``.

    Args:
        state: A pytree of the same structure, shapes and types, such as the initial state.
        directory: Directory of the checkpoints.
        step: The checkpoint's step; None: the newest.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or its state has other shapes.
    """
    return load_state(open_checkpoint(directory, step), state)


def load_state(path: pathlib.Path, state: State) -> State:
    """Read the run's state from a folder that `open_checkpoint` returned; see `restore_state`."""
    saved = read_arrays(path, {"run"})["run"]
    leaves, tree = jax.tree.flatten(state)
    found = [saved.get(str(i)) for i in range(len(saved))]
    shapes = [np.shape(leaf) for leaf in leaves]
    if [np.shape(x) for x in found] != shapes:
        raise StateError(path, [np.shape(x) for x in found], shapes)
    return jax.tree.unflatten(
        tree, [put_like(x.astype(leaf.dtype), leaf) for x, leaf in zip(found, leaves, strict=True)]
    )


def _together(
    collection: Collection, has_state: Mapping[str, bool]
) -> Iterator[tuple[list[TableConfig], bool]]:
    """Yield groups of tables to read at once, up to `_READ_BYTES` or one larger table.

    ``has_state`` says by name which tables to load, and whether with their state. Each group is a
    list of tables and whether all of them are loaded with their state.
    """
    # One read has one tree of arguments, with state or without.
    for with_state in (True, False):
        group: list[TableConfig] = []
        size = 0
        for table in placed_configs(collection):
            if has_state.get(table.name) is not with_state:
                continue
            form = collection.tables.get_value().checkpoint_shapes(table.name)
            needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(form))
            if group and size + needed > _READ_BYTES:
                yield group, with_state
                group, size = [], 0
            group.append(table)
            size += needed
        if group:
            yield group, with_state


def _vocabularies(
    match: Match,
    tier: Tier | None,
    saved: Mapping[str, dict[str, np.ndarray]],
    links: Sequence[pathlib.Path],
) -> dict[str, dict[str, np.ndarray]]:
    """Return the saved state of the vocabularies that fit, after checking their row stores."""
    if tier is None or not match.vocabularies:
        return {}
    path = links[-1]
    if RUN_STATE not in saved:
        raise damaged(path, "the state of its vocabularies lacks that of the run")
    try:
        wanted = [each for each in tier.vocabularies if each.name in match.vocabularies]
        check_stores(wanted, [link / STORES for link in links])
    except (ValueError, RuntimeError) as error:  # or that of another process
        raise CheckpointError(f"{path}: {error}") from None
    return {
        name: {key: without_end(array) for key, array in saved[name].items()}
        for name in (*match.vocabularies, RUN_STATE)
    }


def _load_vocabularies(
    model: nnx.Module,
    tier: Tier,
    state: Mapping[str, dict[str, np.ndarray]],
    links: Sequence[pathlib.Path],
    has_state: Mapping[str, Mapping[str, bool]],
) -> None:
    """Load vocabularies and their row stores, and move the rows whose index changes."""
    wanted = [each for each in tier.vocabularies if each.name in state]
    if len(wanted) < len(tier.vocabularies):
        tier.settle(model)  # the others keep their ids and rows
    places = tier.load_state(state)
    load_stores(wanted, [link / STORES for link in links])
    _move_rows(model, wanted, places, links, has_state)


def _load_changes(
    named: Mapping[str, Collection],
    changes: dict[str, Any],
    has_state: Mapping[str, Mapping[str, bool]],
) -> None:
    """Write the changed rows of an incremental checkpoint, ``[collection][table]``, into tables.

    Rows beyond a table that has fewer now are left out, and so are tables that ``has_state`` lacks.
    """
    for path, tables in changes.items():
        for name, arrays in tables.items():
            if name not in has_state.get(path, {}):
                continue
            variable = named[path].tables
            store = variable.get_value()
            (config,) = [each for each in placed_configs(named[path]) if each.name == name]
            is_there = arrays["index"] < config.num_embeddings
            values = {key: array[is_there] for key, array in arrays.items()}
            index = values.pop("index")
            if not has_state[path][name]:
                values = {"rows": values["rows"]}
            variable.set_value(store.with_placed(store.placed.rows_of(name, index).write(values)))


def _move_rows(
    model: nnx.Module,
    vocabularies: Sequence[TableVocabulary],
    places: Mapping[str, LoadedRows],
    links: Sequence[pathlib.Path],
    has_state: Mapping[str, Mapping[str, bool]],
) -> None:
    """Load the rows of ids that have another row index in the model than in the checkpoint.

    ``places`` has both indices by vocabulary. Rows of ids that no longer have room go to the store.
    """
    for each in vocabularies:
        loaded = places[each.name]
        moved = loaded.old_rows != loaded.rows
        is_kept = loaded.dropped_ids.size > 0 and each.transfer is not None
        if not moved.any() and not is_kept:
            continue
        dropped = []
        for table in each.tables:
            collection = collections(model)[table.collection or "."]
            store = collection.tables.get_value()
            path, name = table.collection or ".", table.config.name
            read = read_table(links[0], path, name, has_state=has_state[path][name] or is_kept)
            for link in links[1:]:
                changes = read_changes(link)[path][name]
                index = changes.pop("index")
                for key in read:
                    read[key][index] = changes[key]
            # All old rows were read to the host, so that a row may move to where another one comes
            # from.
            rows = {key: array[loaded.old_rows[moved]] for key, array in read.items()}
            placed = write(store.placed, [TableRows(name, loaded.rows[moved])], [rows])
            collection.tables.set_value(store.with_placed(placed))
            dropped.append({key: array[loaded.dropped_rows] for key, array in read.items()})
        if each.transfer is not None and is_kept:
            each.transfer.put(loaded.dropped_ids, dropped)
