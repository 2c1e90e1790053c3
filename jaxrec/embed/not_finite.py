"""Reports of steps that are not finite, and of ids outside their tables that make them so."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from jaxrec.embed.gradients import Gradients, rows_are_finite
from jaxrec.embed.taps import tapped_modules
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.bounds import find_bad_ids
from jaxrec.ragged.wide_ids import WideIds


class NotFiniteError(ArithmeticError):
    """The loss or a gradient of a step is NaN or infinite."""


def report_not_finite(gradients: Gradients, step: Int[Array, ""]) -> None:
    """Raise on the host, from compiled code too, where a loss or a gradient is not finite.

    Raises:
        NotFiniteError: The loss or a gradient is not finite; it names each of them. Compiled code
            raises `jax.errors.JaxRuntimeError` with the same text.
    """
    is_finite: dict[str, Array] = {"the loss": gradients.loss_is_finite.open()}
    for keys, leaf in jax.tree.leaves_with_path(gradients.dense):
        is_finite[f"the gradient of parameter {_name(keys)}"] = jnp.isfinite(leaf).all()
    for path, calls in gradients.tables.items():
        for call in calls:
            for name, rows in call.items():
                group = gradients.stores[path].groups[name]
                where = f"the gradient of the embeddings of {path or 'the model'}, group {name}"
                optimizer, has_numbers = group.optimizer, jnp.isfinite(rows.values).all()
                too_large = (
                    f"{where} (beyond {optimizer.largest_gradient:.0e}, too large for the squares "
                    f"that {type(optimizer).__name__} keeps in float32)"
                )
                for what, finite in (
                    (where, has_numbers),
                    (too_large, ~has_numbers | rows_are_finite(rows, group)),
                ):
                    is_finite[what] = is_finite[what] & finite if what in is_finite else finite
    _call_back(functools.partial(_raise_not_finite, tuple(is_finite)), step, *is_finite.values())


def _raise_not_finite(names: tuple[str, ...], step: Any, *is_finite: Any) -> None:
    wrong = [name for name, finite in zip(names, is_finite, strict=True) if not finite]
    if wrong:
        raise NotFiniteError(
            f"the step after update {int(step)} is skipped: not finite are {', '.join(wrong)}"
        )


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def check_ids(features: KeyedJaggedArray, bounds: Mapping[str, int], *, always: bool) -> None:
    """Raise at an id outside its tables.

    Args:
        features: A batch, on the host, on one device or over a mesh.
        bounds: For each feature the number of ids that its tables have.
        always: Whether compiled code calls back to the host to check; otherwise batches that are
            being traced are not checked.

    Raises:
        ValueError: An id is outside its table. Compiled code raises `jax.errors.JaxRuntimeError`
            with the same text.
    """
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(features)):
        _raise_bad_id(bounds, features)
    elif always:
        _call_back(functools.partial(_raise_bad_id, bounds), features)


def _call_back(function: Any, *arrays: Any) -> None:
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        jax.debug.callback(function, *arrays)
    else:
        function(*arrays)


def _raise_bad_id(bounds: Mapping[str, int], features: KeyedJaggedArray) -> None:
    message = _describe_bad_ids(features, bounds)
    if message is not None:
        raise ValueError(
            f"{message}; to check or clamp ids when batches are made, give bounds=module.bounds of "
            "the module that looks them up to the batch's constructor"
        )


def bad_id_of_batch(model: nnx.Module, batch: Any) -> str | None:
    """Return a sentence about an id outside its table, of any batch in a pytree; None: all fit.

    Args:
        model: A model with collections of tables.
        batch: Any pytree with `KeyedJaggedArray`s whose keys the collections read. With several
            processes this looks at the part that lies on this process's devices.
    """
    leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedArray))
    for features in leaves:
        if not isinstance(features, KeyedJaggedArray):
            continue
        for module in tapped_modules(model).values():
            message = _describe_bad_ids(features, module.tables.get_value().layout.bounds)
            if message is not None:
                return message
    return None


def _describe_bad_ids(features: KeyedJaggedArray, bounds: Mapping[str, int]) -> str | None:
    """Return a sentence about the first feature with an id outside its table; None: all fit."""
    parts = list(_parts(features))
    for key, feature in enumerate(features.keys):
        if feature not in bounds:
            continue
        start, first_bag = sum(features.capacities[:key]), sum(features.strides[:key])
        stride = features.strides[key]
        found = []
        for number, values, all_lengths in parts:
            lengths = all_lengths[first_bag : first_bag + stride]
            ids = values[start : start + int(lengths.sum())]
            found.append(
                find_bad_ids(feature, ids, lengths, bounds[feature], first_sample=number * stride)
            )
        if bad := [each for each in found if each is not None]:
            count = sum(each.positions.size for each in bad)
            return f"{bad[0].message} ({count} such id{'s' * (count > 1)} in the batch)"
    return None


def _parts(features: KeyedJaggedArray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Iterate over the number, ids and lengths of each device's part of a batch."""
    values: Any = features.values  # an array, or wide ids
    lengths = features.lengths
    if isinstance(values, WideIds):
        high = _parts(features._with(values=values.high))
        low = _parts(features._with(values=values.low))
        for (device, upper, own), (_, lower, _) in zip(high, low, strict=True):
            yield device, np.asarray(WideIds(upper, lower)), own
    elif np.ndim(values) == 1:
        yield 0, np.asarray(values), np.asarray(lengths)
    elif isinstance(values, jax.Array) and isinstance(lengths, jax.Array):
        by_index = {shard.index[0].start or 0: shard.data for shard in lengths.addressable_shards}
        for shard in values.addressable_shards:
            first = shard.index[0].start or 0
            pairs = zip(np.asarray(shard.data), np.asarray(by_index[first]), strict=True)
            for device, (ids, own) in enumerate(pairs, start=first):
                yield device, ids, own
    else:
        yield from zip(range(len(values)), np.asarray(values), np.asarray(lengths), strict=True)
