"""Saving and loading models: tables by name, their rows in order, whatever their layout."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection, TableVariable


class CheckpointError(ValueError):
    """There is no checkpoint, or it is of another model."""


def save(directory: pathlib.Path, model: nnx.Module, optimizer: nnx.Optimizer) -> pathlib.Path:
    """Saves a model and its optimizer as the newest checkpoint of a directory.

    The checkpoint appears under its final name once it is complete. Older ones are removed then.

    Args:
        directory: Where checkpoints go, one folder each, named after the step.
        model: The model; its tables are saved by name, logical rows in order, with their optimizer
            state, so that they can be loaded into any layout.
        optimizer: Its optimizer, with the number of steps.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It cannot be written, for instance because the disk is full. What was saved before
            is still there.
    """
    import orbax.checkpoint as ocp

    step = int(optimizer.step.get_value())
    path = directory.absolute() / str(step)
    # Where a write fails, those under way beside it end in tracebacks of their own.
    require_space(directory, model, optimizer)
    with _os_errors(path), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _tree(model, optimizer), force=True)
    for older in _checkpoints(directory):
        if older != step:
            shutil.rmtree(directory / str(older))
    return path


def require_space(directory: pathlib.Path, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
    """Makes the directory, and sees whether `save` has room in it.

    Raises:
        OSError: There is not room enough, or no directory can be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    arrays = jax.tree.leaves(jax.eval_shape(lambda: _tree(model, optimizer)))
    needed = sum(array.size * array.dtype.itemsize for array in arrays)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: the model takes {needed:,} bytes, {free:,} are free",
            str(directory),
        )


def restore(
    directory: pathlib.Path, model: nnx.Module, optimizer: nnx.Optimizer | None = None
) -> None:
    """Loads the newest checkpoint of a directory into a model, in place.

    Args:
        directory: Where `save` put it.
        model: A model with the same tables and parameters; their layout may differ.
        optimizer: Its optimizer; None to load the model alone.

    Raises:
        CheckpointError: There is no checkpoint, or the model has others than the saved variables.
    """
    import orbax.checkpoint as ocp

    steps = _checkpoints(directory)
    if not steps:
        raise CheckpointError(f"{directory}: there is no saved model here")
    path = directory.absolute() / str(steps[-1])
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path).item_metadata.tree
        target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved)
        saved = checkpointer.restore(path, target)
    _load(_dense_variables(model), saved["dense"], path)
    collections = _collections(model)
    _match(set(collections), set(saved["tables"]), path)
    for name, collection in collections.items():
        tables = saved["tables"][name]
        _match({table.name for table in collection.configs}, set(tables), path)
        for table, content in tables.items():
            collection.load_table(table, content["rows"])
            if optimizer is not None:
                collection.load_table_state(table, content.get("state") or {})
    if optimizer is not None:
        _load(_variables(optimizer), saved["optimizer"], path)


def _tree(model: nnx.Module, optimizer: nnx.Optimizer) -> dict[str, Any]:
    """What is saved: nested dictionaries of arrays, under names that layouts do not change."""
    return {
        "dense": {name: _plain(v.get_value()) for name, v in _dense_variables(model).items()},
        "optimizer": {name: _plain(v.get_value()) for name, v in _variables(optimizer).items()},
        "tables": {
            name: {
                table.name: {
                    "rows": collection.table(table.name),
                    "state": collection.table_state(table.name),
                }
                for table in collection.configs
            }
            for name, collection in _collections(model).items()
        },
    }


def _collections(model: nnx.Module) -> dict[str, EmbeddingBagCollection | EmbeddingCollection]:
    return {
        "/".join(map(str, path)) or ".": module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
    }


def _variables(node: Any, wanted: Any = ...) -> dict[str, nnx.Variable]:
    state = nnx.state(node, wanted)
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _dense_variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    return _variables(model, nnx.Not(TableVariable))


def _plain(value: Array) -> Array:
    """Random keys as the numbers they are made of."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def _load(
    variables: dict[str, nnx.Variable], saved: dict[str, np.ndarray], path: pathlib.Path
) -> None:
    _match(set(variables), set(saved), path)
    for name, variable in variables.items():
        old = variable.get_value()
        if saved[name].shape != _plain(old).shape:
            raise CheckpointError(
                f"{path}: {name} was saved with shape {saved[name].shape}, "
                f"but the model's has {old.shape}"
            )
        new = jax.numpy.asarray(saved[name])
        if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
            new = jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))
        variable.set_value(new.astype(old.dtype) if new.dtype != old.dtype else new)


def _match(wanted: set[str], saved: set[str], path: pathlib.Path) -> None:
    if wanted != saved:
        raise CheckpointError(
            f"{path}: the model has {sorted(wanted - saved)} that were not saved, and lacks "
            f"{sorted(saved - wanted)} that were; build it as the saved one was"
        )


def _checkpoints(directory: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints of a directory, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())


@contextlib.contextmanager
def _os_errors(path: pathlib.Path) -> Iterator[None]:
    """Orbax's errors as the errors of the operating system that they wrap, and without its log."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        for unfinished in path.parent.glob(f"{path.name}.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        number = int(code.group(1))
        raise OSError(number, os.strerror(number), str(path)) from None
    finally:
        log.setLevel(level)
