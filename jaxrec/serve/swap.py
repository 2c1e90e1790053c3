"""Replacement of the tables of a model that serves requests in other threads."""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec.embed.collection import TableVariable
from jaxrec.embed.store import TableStore
from jaxrec.embed.variables import dense_variables, plain, variables
from jaxrec.serve.quantized import models, saved
from jaxrec.serve.quantized.models import paired_stores, quantized_stores, shared_copy
from jaxrec.serve.quantized.quantize import check_store
from jaxrec.tier import Subscriber
from jaxrec.train.checkpoint import restore

Model = TypeVar("Model", bound=nnx.Module)

# One swap at a time; and one thread at a time reads or replaces the variables of a model. Two
# locks, so that snapshots go on while a swap makes its arrays.
_SWAP, _VARIABLES = threading.Lock(), threading.Lock()


@dataclasses.dataclass(frozen=True, eq=False)
class _Snapshot:
    """A copy of a model, and pairs of the model's variables and their values at that time."""

    copy: nnx.Module
    values: list[tuple[nnx.Variable, Any]]

    def is_current(self) -> bool:
        # By identity: values change by assignment of new arrays, and comparing elements would read
        # tables.
        return all(variable.get_raw_value() is value for variable, value in self.values)


_SNAPSHOTS: weakref.WeakKeyDictionary[nnx.Module, _Snapshot] = weakref.WeakKeyDictionary()


def snapshot(model: Model) -> Model:
    """Return the model as it is now, for one request; `swap_tables` leaves it alone.

    The snapshot shares the model's arrays. Until the model changes, all callers get the same one,
    in microseconds. It is for reading: compute all results of a request with one snapshot, by
    ``nnx.jit(..., graph=False)`` or `jax.jit`. A call of plain ``nnx.jit`` returns all variables of
    its model, so that XLA copies the tables.

    Args:
        model: The model that serves.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> small = jaxrec.serve.quantize(model)
        >>> predict = nnx.jit(lambda model, batch: model(batch)["user"], graph=False)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], []]})
        >>> predict(snapshot(small), batch).shape
        (2, 8)
    """
    with _VARIABLES:
        known = _SNAPSHOTS.get(model)
        if known is None or not known.is_current():
            values = [(each, each.get_raw_value()) for each in variables(model).values()]
            known = _Snapshot(shared_copy(model), values)
            _SNAPSHOTS[model] = known
    return known.copy  # type: ignore[return-value]


def swap_tables(
    model: nnx.Module,
    source: nnx.Module | Subscriber | str | os.PathLike[str],
    *,
    step: int | None = None,
) -> int:
    """Replace the tables and all other variables of a quantized model while it serves.

    Requests that use `snapshot` see all variables as they were before or as they are after, never a
    mixture. The new variables are complete before any is replaced, so that an error leaves the
    model as it was. Memory holds the quantized tables twice meanwhile, and the old ones until the
    last request that reads them ends. Tables keep their formats and, unless the source is
    quantized, their pruned ids, so that requests are not compiled anew.

    Call it in any thread; two swaps run one after the other.

    Args:
        model: The model that serves, made by `quantize`, on one device or over a mesh. New rows for
            a mesh lie on one device meanwhile, packed.
        source: Where the new variables come from:

            - a float model over any devices, whose rows are packed;
            - a quantized model with the same formats, whose rows are copied, and whose pruned ids
              replace those of the model;
            - the directory of a model that `save_quantized` or ``jaxrec quantize`` wrote;
            - a directory of checkpoints, such as a run of ``jaxrec train``;
            - the `jaxrec.tier.Subscriber` of the model, which applies versions that
              `jaxrec.tier.publish` wrote of a model with float32 tables.
        step: Step of the checkpoint; None: the newest.

    Returns:
        The number of versions that were applied: for a subscriber 0 if there is no new one, for
        other sources 1.

    Raises:
        TypeError: The model's tables are not quantized; or the source is something else.
        ValueError: The source has other tables, formats or variables, or rows that a format cannot
            hold; the subscriber is of another model; or ``step`` is given for a source without
            checkpoints.
        CheckpointError: There is no such checkpoint, or it is damaged.
        VersionError: A published version is damaged or missing.
        OSError: A file cannot be read.

    Example:
        >>> import jaxrec
        >>> def make_model(seed):
        ...     config = jaxrec.EmbeddingBagConfig("user", num_embeddings=100, embedding_dim=8)
        ...     return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(seed))
        >>> small = jaxrec.serve.quantize(make_model(0))
        >>> before = snapshot(small)
        >>> swap_tables(small, make_model(1))
        1
        >>> bool((snapshot(small).table("user") == before.table("user")).all())
        False
    """
    quantized_stores(model)  # an error before anything is read
    if step is not None and not isinstance(source, str | os.PathLike):
        raise ValueError(f"step={step} names a checkpoint, but the source is {source!r}")
    with _SWAP:
        if isinstance(source, Subscriber):
            return _swap_versions(model, source)
        if isinstance(source, nnx.Module):
            staged = _staged_model(model, source)
        elif isinstance(source, str | os.PathLike):
            staged = _staged_files(model, source, step)
        else:
            raise TypeError(
                "swap_tables takes a model, a directory or a jaxrec.tier.Subscriber, got "
                f"{type(source).__name__}"
            )
        _replace(model, staged)
    return 1


def _replace(model: nnx.Module, staged: nnx.Module) -> None:
    """Set all variables of a model to those of ``staged``; a snapshot sees all of them or none."""
    new = variables(staged)
    with _VARIABLES:
        for name, variable in variables(model).items():
            variable.set_value(new[name].get_value())
        _SNAPSHOTS.pop(model, None)  # it holds the old arrays


def _copied(model: Model) -> Model:
    """Return a copy of a model with arrays of its own."""
    copy = shared_copy(model)
    for variable in variables(copy).values():
        variable.set_value(jax.tree.map(_copied_array, variable.get_value()))
    return copy


def _copied_array(array: Any) -> Any:
    """Return a copy of an array with the identical sharding, not just an equivalent one."""
    copy = jnp.copy(array)
    # Programs are compiled for a sharding as it is written. An equal one in other words would
    # compile them anew, in the middle of serving.
    return jax.device_put(copy, array.sharding) if isinstance(array, jax.Array) else copy


def _swap_versions(model: nnx.Module, subscriber: Subscriber) -> int:
    if subscriber.copy is not model:
        raise ValueError(
            "the subscriber takes versions over into another model; make it for the model that "
            "serves: jaxrec.tier.Subscriber(model, url)"
        )
    if not subscriber.has_new():
        return 0
    staged = _copied(model)
    with subscriber.into(staged):
        count = subscriber.update()
        _replace(model, staged)
    return count


def _staged_files(
    model: nnx.Module, directory: str | os.PathLike[str], step: int | None
) -> nnx.Module:
    if saved.is_quantized(directory):
        return _staged_model(model, saved.restore_quantized(model, directory, step=step))
    staged = _copied(model)
    restore(staged, directory, step=step)
    return staged


def _staged_model(model: nnx.Module, source: nnx.Module) -> nnx.Module:
    """Return a copy of ``model`` with the values of ``source``, in its formats and placement."""
    staged = shared_copy(model)
    new_stores = {
        path: _staged_store(store, other) for path, store, other in paired_stores(model, source)
    }
    given = dense_variables(source)
    named = dense_variables(staged)
    if different := sorted(given.keys() ^ named.keys()):
        where = "is not one of the model" if different[0] in given else "is not in the source"
        raise ValueError(f"variable {different[0]!r} {where}; give a source made as the model was")
    for name, variable in named.items():
        value, old = given[name].get_value(), variable.get_value()
        forms = [f"{each.dtype}{list(each.shape)}" for each in (plain(value), plain(old))]
        if forms[0] != forms[1]:
            raise ValueError(
                f"variable {name!r} is {forms[0]} in the source, but {forms[1]} in the model; give "
                "a source made as the model was"
            )
        # A copy, since a source that goes on training donates its arrays.
        variable.set_value(_copy_beside(value, old))
    for name, variable in variables(staged, TableVariable).items():
        variable.set_value(new_stores[name.rpartition("tables")[0].rstrip("/")])
    return staged


def _copy_beside(value: Any, old: Any) -> Any:
    """Copy an array, which may be replicated over a mesh, to the devices of the array ``old``."""
    copy = jnp.copy(models.one_copy(value))
    return jax.device_put(copy, old.sharding) if isinstance(old, jax.Array) else copy


def _staged_store(store: TableStore, other: TableStore) -> TableStore:
    """Return another store's rows in the formats and placement of a quantized store."""
    if not models.is_quantized(other):
        check_store(other)
        return store.like(other)
    given = other.formats()
    for name, row_format in store.formats().items():
        if given[name] != row_format:
            raise ValueError(
                f"table {name!r} is {given[name].name} in the source, but {row_format.name} in "
                "the model; quantize the source as the model was"
            )
    if store.devices.mesh is not None:
        return store.like(other)
    if other.devices.mesh is not None:
        return other.to_one_device()
    return jax.tree.map(jnp.copy, other)  # with its pruned ids
