"""Saving and loading models: tables by name, their rows in order, whatever their layout.

Tables go between devices and files in equal parts: no host ever has more of one than its devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection, TableVariable
from jaxrec.embed.config import TableConfig
from jaxrec.embed.logical import from_logical, logical_form, to_logical
from jaxrec.train.files import (
    UNFINISHED,
    os_errors,
    path_of,
    quiet,
    read_arrays,
    read_json,
    read_metrics,
    read_run,
    read_tables,
)
from jaxrec.train.files import CheckpointError as CheckpointError
from jaxrec.train.files import Run as Run
from jaxrec.train.files import best_step as best_step
from jaxrec.train.files import steps as steps
from jaxrec.train.keep import Keep

State = TypeVar("State")

Collection = EmbeddingBagCollection | EmbeddingCollection

# Bytes of a chunk of a table's file: what is read at once by a device with other rows.
_CHUNK_BYTES = 1 << 24

# Bytes of the tables that are read together, all devices' parts.
_READ_BYTES = 1 << 30


class Saver:
    """Writes checkpoints while training goes on.

    A checkpoint appears under its name, that of its step, once it is complete: a run killed at any
    moment leaves the last complete one.

    Args:
        directory: Where checkpoints go, one folder each.
        keep: Which of them stay; None: the newest.

    Example:
        >>> import jaxrec, optax, tempfile
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
        >>> with Saver(pathlib.Path(tempfile.mkdtemp()), Keep(last=2)) as saver:
        ...     path = saver.save(model, optimizer, batches=0)
        >>> restore(path.parent, model, optimizer)
        Run(step=0, batches=0, metrics={}, plan=None)
    """

    def __init__(self, directory: pathlib.Path, keep: Keep | None = None):
        import orbax.checkpoint as ocp

        self._directory, self._keep = directory.absolute(), keep or Keep()
        # Also of the threads that write while training goes on.
        self._silence = contextlib.ExitStack()
        self._silence.enter_context(quiet())
        self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._under_way: pathlib.Path | None = None

    @property
    def directory(self) -> pathlib.Path:
        """Where checkpoints go."""
        return self._directory

    def save(
        self,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        *,
        state: Any = None,
        batches: int | None = None,
        metrics: Mapping[str, float] | None = None,
        plan: str | None = None,
    ) -> pathlib.Path:
        """Starts to save; what is saved may change as soon as this returns.

        Args:
            model: The model; its tables are saved by name, logical rows in order, with their
                optimizer state, so that they can be loaded into any layout.
            optimizer: Its optimizer, with the number of steps.
            state: Any pytree of arrays that belongs to the run, such as that of metrics.
            batches, metrics, plan: See `Run`.

        Returns:
            The folder that the checkpoint will have.

        Raises:
            OSError: This or the checkpoint before it cannot be written, for instance because the
                disk is full. What was saved before is still there.
        """
        import orbax.checkpoint as ocp

        self.wait()
        step = int(optimizer.step.get_value())
        path = self._directory / str(step)
        # Where a write fails, those under way beside it end in tracebacks of their own.
        require_space(self._directory, model, optimizer)
        if jax.process_index() == 0:
            for unfinished in self._directory.glob(f"*{UNFINISHED}*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        run = Run(step, batches, dict(metrics or {}), plan)
        tree = _tree(model, optimizer, state)
        chunks = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
        with os_errors(path):
            self._checkpointer.save(
                path,
                ocp.args.Composite(
                    state=ocp.args.StandardSave(tree, jax.tree.map(lambda _: chunks, tree)),
                    tables=ocp.args.JsonSave(_table_shapes(model)),
                    run=ocp.args.JsonSave(dataclasses.asdict(run)),
                ),
                force=True,
            )
        self._under_way = path
        return path

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, and removes those that do not stay.

        Raises:
            OSError: It could not be written.
        """
        if self._under_way is None:
            return
        path, self._under_way = self._under_way, None
        with os_errors(path):
            self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return
        metrics = read_metrics(path.parent)
        for step in set(metrics) - self._keep.chosen(metrics):
            shutil.rmtree(self._directory / str(step))

    def close(self) -> None:
        """Waits, and ends the threads that write."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()
            self._silence.close()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def save(
    directory: pathlib.Path, model: nnx.Module, optimizer: nnx.Optimizer, **details: Any
) -> pathlib.Path:
    """Saves a model and its optimizer as the newest checkpoint of a directory, and waits.

    Older ones are removed. Arguments, result and errors as for `Saver.save`.
    """
    with Saver(directory) as saver:
        return saver.save(model, optimizer, **details)


def require_space(directory: pathlib.Path, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
    """Makes the directory, and sees whether `save` has room in it.

    Raises:
        OSError: There is not room enough, or no directory can be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # As they lie here: on a mesh tables may take more, where each device has a copy.
    needed = sum(_plain(x).nbytes for x in jax.tree.leaves(nnx.state((model, optimizer))))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: the model takes {needed:,} bytes, {free:,} are free",
            str(directory),
        )


def restore(
    directory: pathlib.Path,
    model: nnx.Module,
    optimizer: nnx.Optimizer | None = None,
    *,
    step: int | None = None,
    resized: bool = False,
) -> Run:
    """Loads a checkpoint of a directory into a model, in place.

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
    path = path_of(directory, step)
    saved = read_arrays(path, {"dense", "optimizer"})
    shapes = read_json(path / "tables" / "metadata")
    collections = _collections(model)
    _match(set(collections), set(shapes), path)
    for name, collection in collections.items():
        _match({table.name for table in collection.configs}, set(shapes[name]), path)
        for table in collection.configs:
            _check_shape(table, tuple(shapes[name][table.name]), resized, path)
    _load(_dense_variables(model), saved["dense"], path)
    for name, collection in collections.items():
        for tables in _together(collection):
            wanted = {
                table.name: logical_form(collection.tables.get_value(), table.name)
                for table in tables
            }
            found = read_tables(path, name, wanted, has_state=optimizer is not None)
            for table in tables:
                common = min(shapes[name][table.name][0], table.num_embeddings)
                old, logical = collection.tables.get_value(), found.pop(table.name)
                collection.tables.set_value(from_logical(old, table.name, logical, common))
    if optimizer is not None:
        _load(_variables(optimizer), saved["optimizer"], path)
    return read_run(path.parent, int(path.name))


def restore_state(directory: pathlib.Path, state: State, *, step: int | None = None) -> State:
    """The pytree that was saved as `Saver.save`'s ``state``, in the form of ``state``.

    Raises:
        CheckpointError: There is no such checkpoint, or it has another state.
    """
    path = path_of(directory, step)
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
    """The tables, as many at a time as `_READ_BYTES` hold, though one at least."""
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


def _tree(model: nnx.Module, optimizer: nnx.Optimizer, state: Any) -> dict[str, Any]:
    """What is saved: nested dictionaries of arrays, under names that layouts do not change.

    All are copies, as the next step takes the arrays themselves for its results.
    """

    def copies(variables: Mapping[str, nnx.Variable]) -> dict[str, Any]:
        return {name: _copy(variable.get_value()) for name, variable in variables.items()}

    return {
        "dense": copies(_dense_variables(model)),
        "optimizer": copies(_variables(optimizer)),
        "tables": {
            name: {table.name: _off_devices(collection, table.name) for table in collection.configs}
            for name, collection in _collections(model).items()
        },
        "run": {str(i): _copy(jnp.asarray(x)) for i, x in enumerate(jax.tree.leaves(state))},
    }


def _copy(value: Array) -> Array | np.ndarray:
    plain = _plain(value)
    # Several processes save what all have, and process 0 what each has for itself.
    is_own = jax.process_count() > 1 and plain.is_fully_addressable
    return np.array(plain) if is_own else jnp.array(plain)


def _off_devices(collection: Collection, name: str) -> dict[str, Any]:
    """A table with its state, in the memory of the devices' hosts."""
    logical = to_logical(collection.tables.get_value(), name)
    table = {"rows": logical.rows, "state": logical.state}
    # One table at a time, as devices have no room for copies of all.
    return jax.block_until_ready(
        jax.device_put(
            table, jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), table)
        )
    )


def _table_shapes(model: nnx.Module) -> dict[str, dict[str, list[int]]]:
    return {
        name: {
            table.name: [table.num_embeddings, table.embedding_dim] for table in collection.configs
        }
        for name, collection in _collections(model).items()
    }


def _collections(model: nnx.Module) -> dict[str, Collection]:
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
        if jax.dtypes.issubdtype(old.dtype, jax.dtypes.prng_key):
            new = _put_like(saved[name], jax.random.key_data(old))
            variable.set_value(jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)))
        else:
            variable.set_value(_put_like(saved[name].astype(old.dtype), old))


def _put_like(value: np.ndarray, old: Any) -> Array:
    """A value where the old one is, if that is on several devices."""
    if not isinstance(old, jax.Array) or len(old.sharding.device_set) == 1:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index])


def _match(wanted: set[str], saved: set[str], path: pathlib.Path) -> None:
    if wanted != saved:
        raise CheckpointError(
            f"{path}: the model has {sorted(wanted - saved)} that were not saved, and lacks "
            f"{sorted(saved - wanted)} that were; build it as the saved one was"
        )
