"""Loading checkpoints: tables by name, their rows in order, whatever their layout.

Tables go between devices and files in equal parts: no host ever has more of one than its devices.
Everything that can be checked is checked before the first variable changes.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.config import TableConfig
from jaxrec.embed.logical import from_logical, logical_form
from jaxrec.train.arrays import read_arrays, read_forms, read_tables
from jaxrec.train.contents import Collection, collections, dense_variables, plain, variables
from jaxrec.train.files import CheckpointError as CheckpointError
from jaxrec.train.files import Run as Run
from jaxrec.train.files import best_step as best_step
from jaxrec.train.files import open_checkpoint as open_checkpoint
from jaxrec.train.files import read_json, read_run
from jaxrec.train.files import steps as steps
from jaxrec.train.saver import Saver as Saver
from jaxrec.train.saver import require_space as require_space
from jaxrec.train.saver import save as save

State = TypeVar("State")

# Bytes of the tables that are read together, all devices' parts.
_READ_BYTES = 1 << 30


def restore(
    directory: str | os.PathLike[str],
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    *,
    step: int | None = None,
    resized: bool = False,
) -> Run:
    """Load a checkpoint of a directory into a model, in place.

    The checksums of all its files, and all names and shapes, are compared first: an error leaves
    the model and the optimizer as they were. If a file cannot be read after that, for instance
    because the disk fails, the error has a note that names the tables that are loaded already.

    Args:
        directory: Where `save` or a `Saver` put it.
        model: A model with the same tables and parameters; their layout may differ.
        optimizer: Its optimizer; None to load the model alone.
        step: Which; None: the newest.
        resized: Whether a table may have another number of rows than the saved one: the rows that
            both have are loaded, with their state, and the others stay as they are. For a
            vocabulary that grew at its end, or was cut there.

    Returns:
        What the checkpoint says about the run.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or the model has others than
            the saved variables.
    """
    return load(open_checkpoint(directory, step), model, optimizer, resized=resized)


def load(
    path: pathlib.Path,
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    *,
    resized: bool = False,
) -> Run:
    """Load a checkpoint that `open_checkpoint` has found; see `restore`."""
    run = read_run(path)
    saved = read_arrays(path, {"dense", "optimizer"})
    shapes = read_json(path / "tables" / "metadata")
    named = collections(model)
    _match("collections", named, shapes, path)
    for name, collection in named.items():
        _match("tables", [table.name for table in collection.configs], shapes[name], path)
        for table in collection.configs:
            _check_shape(table, tuple(shapes[name][table.name]), resized, path)
    if optimizer is not None:
        _check_state(named, read_forms(path), path)
    values = _new_values("variables", dense_variables(model), saved["dense"], path)
    if optimizer is not None:
        values += _new_values("optimizer variables", variables(optimizer), saved["optimizer"], path)

    loaded: list[str] = []
    try:
        for name, collection in named.items():
            for tables in _together(collection):
                forms = {
                    table.name: logical_form(collection.tables.get_value(), table.name)
                    for table in tables
                }
                read = read_tables(path, name, forms, has_state=optimizer is not None)
                for table in tables:
                    common = min(shapes[name][table.name][0], table.num_embeddings)
                    old, logical = collection.tables.get_value(), read.pop(table.name)
                    collection.tables.set_value(from_logical(old, table.name, logical, common))
                    loaded.append(table.name)
    except BaseException as error:
        if loaded:
            error.add_note(f"{path}: tables {_listed(loaded)} of the model are loaded, others not")
        raise
    for variable, value in values:
        variable.set_value(value)
    return run


def restore_state(
    directory: str | os.PathLike[str], state: State, *, step: int | None = None
) -> State:
    """Read the pytree that was saved as `Saver.save`'s ``state``, in the form of ``state``.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it has another state.
    """
    return load_state(open_checkpoint(directory, step), state)


def load_state(path: pathlib.Path, state: State) -> State:
    """Read the state of a checkpoint that `open_checkpoint` has found; see `restore_state`."""
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
        tree, [_put_like(x.astype(leaf.dtype), leaf) for x, leaf in zip(found, leaves, strict=True)]
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
    """Yield the tables in turns of `_READ_BYTES` or of one table."""
    group: list[TableConfig] = []
    size = 0
    for table in collection.configs:
        form = logical_form(collection.tables.get_value(), table.name)
        needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(form))
        if group and size + needed > _READ_BYTES:
            yield group
            group, size = [], 0
        group.append(table)
        size += needed
    if group:
        yield group


def _check_state(named: dict[str, Collection], saved: dict[str, Any], path: pathlib.Path) -> None:
    """Compare the state that row optimizers keep with the saved one."""
    for name, collection in named.items():
        for table in collection.configs:
            wanted = logical_form(collection.tables.get_value(), table.name).state
            state = saved[name][table.name].get("state") or {}
            widths = [{key: x.shape[1:] for key, x in s.items()} for s in (wanted, state)]
            if widths[0] != widths[1]:
                raise CheckpointError(
                    f"{path}: the optimizer of table {table.name!r} keeps {_kept(wanted)}, but "
                    f"{_kept(state)} was saved; load the model without its optimizer"
                )


def _kept(state: dict[str, Any]) -> str:
    return _listed([f"{key}{list(x.shape[1:]) or ''}" for key, x in sorted(state.items())])


def _new_values(
    what: str, named: dict[str, nnx.Variable], saved: dict[str, np.ndarray], path: pathlib.Path
) -> list[tuple[nnx.Variable, Array]]:
    """Make the values that variables are to have, without setting them."""
    _match(what, named, saved, path)
    for name, variable in named.items():
        wanted = plain(variable.get_value()).shape
        if saved[name].shape != wanted:
            raise CheckpointError(
                f"{path}: {name} was saved with shape {saved[name].shape}, but the model's has "
                f"{wanted}"
            )
    return [(v, _new_value(v.get_value(), saved[name])) for name, v in named.items()]


def _new_value(old: Array, saved: np.ndarray) -> Array:
    if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
        new = _put_like(saved, jax.random.key_data(old))
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
    return _put_like(saved.astype(old.dtype), old)


def _put_like(value: np.ndarray, old: Any) -> Array:
    """A value where the old one is, if that is on several devices."""
    if not isinstance(old, jax.Array) or len(old.sharding.device_set) == 1:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index])


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


def _listed(names: list[str], most: int = 8) -> str:
    """Names as text, the first of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more if names else "nothing"
