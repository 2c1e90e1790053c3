"""Loading checkpoints into models with any placement of their tables.

Files hold a table's rows in logical order. Each host reads the rows of its own devices only. Names,
shapes and checksums are compared before the first variable changes.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.config import TableConfig
from jaxrec.embed.row_access import TableRows, write
from jaxrec.embed.some_rows import write_ids
from jaxrec.embed.variables import dense_variables, plain, put_like, value_like, variables
from jaxrec.mesh.capacity import restore_capacities
from jaxrec.tier.saved_stores import check_stores, load_stores
from jaxrec.tier.tier import Tier, tier_of
from jaxrec.tier.vocabulary.vocabulary import LoadedRows
from jaxrec.train.checkpoint.arrays import (
    read_arrays,
    read_changes,
    read_forms,
    read_table,
    read_tables,
)
from jaxrec.train.checkpoint.checksums import STORES
from jaxrec.train.checkpoint.files import (
    CheckpointError,
    CheckpointMetadata,
    chain,
    open_checkpoint,
    read_capacities,
    read_json,
    read_run,
)
from jaxrec.train.checkpoint.tree import (
    Collection,
    collections,
    placed_configs,
    without_end,
)

State = TypeVar("State")

# Bytes of tables that are read at once, over all devices.
_READ_BYTES = 1 << 30


def restore(
    directory: str | os.PathLike[str],
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    *,
    step: int | None = None,
    resized: bool = False,
) -> CheckpointMetadata:
    """Load a checkpoint of a directory into a model, in place.

    The checksums of all files, all names and all shapes are compared first: a difference leaves the
    model and the optimizer as they were. If reading fails later, such as by a disk error, a note of
    the error names the tables that are already loaded.

    Args:
        directory: Directory of the checkpoints.
        model: A model with the same tables and parameters; their placement may differ.
        optimizer: The model's optimizer; None: load the model only.
        step: The checkpoint's step; None: the newest.
        resized: Whether tables may have more or fewer rows than the saved ones. Rows that both have
            are loaded with their state, other rows stay as they are: for a vocabulary that grew at
            its end or was cut there.

    Returns:
        The checkpoint's metadata.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or its variables are not those
            of the model.
    """
    return load(open_checkpoint(directory, step), model, optimizer, resized=resized)


def load(
    path: pathlib.Path,
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    *,
    resized: bool = False,
) -> CheckpointMetadata:
    """Load the checkpoint in the folder ``path`` that `open_checkpoint` returned; see `restore`."""
    run, links = read_run(path), chain(path)
    saved = read_arrays(path, {"dense", "optimizer", "vocabularies"})
    shapes = read_json(path / "tables" / "metadata")
    named, tier = collections(model), tier_of(model)
    _match("collections", named, shapes, path)
    for name, collection in named.items():
        _match("tables", [table.name for table in collection.configs], shapes[name], path)
        cached = [] if tier is None else tier.cached_tables
        for table in placed_configs(collection):
            may_differ = resized or table.name in cached
            _check_shape(table, tuple(shapes[name][table.name]), may_differ, path)
    if optimizer is not None:
        _check_state(named, read_forms(links[0]), path)
    vocabularies = _new_vocabularies(model, saved["vocabularies"], links)
    values = _new_values("variables", dense_variables(model), saved["dense"], path)
    if optimizer is not None:
        values += _new_values("optimizer variables", variables(optimizer), saved["optimizer"], path)

    loaded: list[str] = []
    try:
        for name, collection in named.items():
            for tables in _together(collection):
                forms = {
                    table.name: collection.tables.get_value().checkpoint_shapes(table.name)
                    for table in tables
                }
                read = read_tables(links[0], name, forms, has_state=optimizer is not None)
                for table in tables:
                    common = min(shapes[name][table.name][0], table.num_embeddings)
                    old, logical = collection.tables.get_value(), read.pop(table.name)
                    collection.tables.set_value(old.from_checkpoint(table.name, logical, common))
                    loaded.append(table.name)
        for link in links[1:]:
            _load_changes(named, read_changes(link), has_state=optimizer is not None)
        if tier is not None:
            places = tier.load_state(vocabularies)
            load_stores(tier.vocabularies, [link / STORES for link in links])
            _move_rows(model, tier, places, links, optimizer is not None)
    except BaseException as error:
        if loaded:
            error.add_note(f"{path}: tables {_listed(loaded)} of the model are loaded, others not")
        raise
    for variable, value in values:
        variable.set_value(value)
    restore_capacities(model, read_capacities(path))
    return run


def restore_state(
    directory: str | os.PathLike[str], state: State, *, step: int | None = None
) -> State:
    """Read the pytree that `CheckpointManager.save` got as ``state``.

    Args:
        directory: Directory of the checkpoints.
        state: A pytree of the same structure, shapes and types, such as the initial state.
        step: The checkpoint's step; None: the newest.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or its state has other shapes.
    """
    return load_state(open_checkpoint(directory, step), state)


def load_state(path: pathlib.Path, state: State) -> State:
    """Read the state in the folder that `open_checkpoint` returned; see `restore_state`."""
    saved = read_arrays(path, {"run"})["run"]
    leaves, tree = jax.tree.flatten(state)
    found = [saved.get(str(i)) for i in range(len(saved))]
    shapes = [np.shape(leaf) for leaf in leaves]
    if [np.shape(x) for x in found] != shapes:
        raise CheckpointError(
            f"{path}: the state that was saved has arrays of {[np.shape(x) for x in found]}, but "
            f"here it has {shapes}"
        )
    return jax.tree.unflatten(
        tree, [put_like(x.astype(leaf.dtype), leaf) for x, leaf in zip(found, leaves, strict=True)]
    )


def _check_shape(
    table: TableConfig, saved: tuple[int, ...], resized: bool, path: pathlib.Path
) -> None:
    wanted = (table.num_embeddings, table.embedding_dim)
    if resized and saved[1] == wanted[1]:
        return
    if saved != wanted:
        advice = "" if resized else "; load it with resized=True to keep the rows that both have"
        raise CheckpointError(
            f"{path}: table {table.name!r} was saved with shape {saved}, but the model's has "
            f"{wanted}" + (advice if saved[1] == wanted[1] else "")
        )


def _together(collection: Collection) -> Iterator[list[TableConfig]]:
    """Yield groups of tables of up to `_READ_BYTES`, or of one larger table."""
    group: list[TableConfig] = []
    size = 0
    for table in placed_configs(collection):
        form = collection.tables.get_value().checkpoint_shapes(table.name)
        needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(form))
        if group and size + needed > _READ_BYTES:
            yield group
            group, size = [], 0
        group.append(table)
        size += needed
    if group:
        yield group


def _check_state(named: dict[str, Collection], saved: dict[str, Any], path: pathlib.Path) -> None:
    """Check that the saved state of row optimizers has the names and widths of the model's."""
    for name, collection in named.items():
        for table in collection.configs:
            wanted = collection.tables.get_value().checkpoint_shapes(table.name).state
            state = saved[name][table.name].get("state") or {}
            widths = [{key: x.shape[1:] for key, x in s.items()} for s in (wanted, state)]
            if widths[0] != widths[1]:
                raise CheckpointError(
                    f"{path}: the optimizer of table {table.name!r} keeps {_kept(wanted)}, but "
                    f"{_kept(state)} was saved; load the model without its optimizer"
                )


def _kept(state: dict[str, Any]) -> str:
    return _listed([f"{key}{list(x.shape[1:]) or ''}" for key, x in sorted(state.items())])


def _new_vocabularies(
    model: nnx.Module, saved: dict[str, dict[str, np.ndarray]], links: Sequence[pathlib.Path]
) -> dict[str, dict[str, np.ndarray]]:
    """Return the saved state of the vocabularies, without changing those of the model."""
    path = links[-1]
    tier = tier_of(model)
    _match("vocabularies", [] if tier is None else tier.state_names, saved, path)
    state = {
        name: {key: without_end(array) for key, array in arrays.items()}
        for name, arrays in saved.items()
    }
    if tier is not None:
        try:
            check_stores(tier.vocabularies, state, [link / STORES for link in links])
        except (ValueError, RuntimeError) as error:  # or that of another process
            raise CheckpointError(f"{path}: {error}") from None
    return state


def _load_changes(
    named: Mapping[str, Collection], changes: dict[str, Any], has_state: bool
) -> None:
    """Load the changed rows of an incremental checkpoint into tables, as far as these reach."""
    for path, tables in changes.items():
        for name, arrays in tables.items():
            variable = named[path].tables
            store = variable.get_value()
            (config,) = [each for each in placed_configs(named[path]) if each.name == name]
            is_there = arrays["index"] < config.num_embeddings
            values = {key: array[is_there] for key, array in arrays.items()}
            index = values.pop("index")
            if not has_state:
                values = {"rows": values["rows"]}
            variable.set_value(store.with_placed(write_ids(store.placed, name, index, values)))


def _move_rows(
    model: nnx.Module,
    tier: Tier,
    places: Mapping[str, LoadedRows],
    links: Sequence[pathlib.Path],
    has_state: bool,
) -> None:
    """Load the rows of ids whose row in the table is not the one that was saved.

    Rows of ids without room go to the store.
    """
    for each in tier.vocabularies:
        loaded = places[each.name]
        moved = loaded.old_rows != loaded.rows
        is_kept = loaded.dropped_ids.size > 0 and each.transfer is not None
        if not moved.any() and not is_kept:
            continue
        dropped = []
        for table in each.tables:
            collection = collections(model)[table.collection or "."]
            store = collection.tables.get_value()
            read = read_table(
                links[0], table.collection or ".", table.config.name, has_state=has_state or is_kept
            )
            for link in links[1:]:
                changes = read_changes(link)[table.collection or "."][table.config.name]
                index = changes.pop("index")
                for key in read:
                    read[key][index] = changes[key]
            rows = {key: array[loaded.old_rows[moved]] for key, array in read.items()}
            placed = write(store.placed, [TableRows(table.config.name, loaded.rows[moved])], [rows])
            collection.tables.set_value(store.with_placed(placed))
            dropped.append({key: array[loaded.dropped_rows] for key, array in read.items()})
        if each.transfer is not None and is_kept:
            each.transfer.put(loaded.dropped_ids, dropped)


def _new_values(
    what: str, named: dict[str, nnx.Variable], saved: dict[str, np.ndarray], path: pathlib.Path
) -> list[tuple[nnx.Variable, Array]]:
    """Make the new values of variables without setting them."""
    _match(what, named, saved, path)
    for name, variable in named.items():
        wanted = plain(variable.get_raw_value()).shape
        if saved[name].shape != wanted:
            raise CheckpointError(
                f"{path}: {name} was saved with shape {saved[name].shape}, but the model's has "
                f"{wanted}"
            )
    return [(v, value_like(saved[name], v.get_raw_value())) for name, v in named.items()]


def _match(what: str, wanted: Iterable[str], saved: Iterable[str], path: pathlib.Path) -> None:
    missing, extra = sorted({*wanted} - {*saved}), sorted({*saved} - {*wanted})
    differences = []
    if missing:
        differences.append(f"lacks the model's {what} {_listed(missing)}")
    if extra:
        differences.append(f"has {what} {_listed(extra)} that the model lacks")
    if differences:
        raise CheckpointError(
            f"{path}: the checkpoint {' and '.join(differences)}; build the model as the saved one "
            "was"
        )


def _listed(names: list[str], limit: int = 8) -> str:
    """Return names as text, at most the first ``limit``."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more if names else "nothing"
