"""The inputs of an exported model, found from an example batch, an encoder or the tables."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrec.data import TableEncoder, usual_capacity
from jaxrec.embed import EmbeddingCollection
from jaxrec.embed.taps import tapped_modules
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.capacity import capacity_for
from jaxrec.ragged.raw_ids import is_raw
from jaxrec.serve.artifact.batch_spec import (
    ArrayInput,
    BatchSize,
    BatchSpec,
    Feature,
    Input,
    RaggedInput,
    Structure,
    flatten,
)

# Number of ids per sample that capacities are made for, without an example or a number of the user.
DEFAULT_IDS = 8

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Capacity = Callable[[int], int]
"""Function that returns a feature's capacity for ids, given the number of samples of a batch."""


def batch_spec(
    model: nnx.Module,
    function: Callable[..., Any],
    example: tuple[Any, ...] | None,
    encoder: TableEncoder | None,
    batch_sizes: Sequence[int],
    ids_per_sample: float | Mapping[str, float] | None,
) -> BatchSpec:
    """Describe the batches that an exported model takes; see `jaxrec.serve.export`."""
    sizes = _checked_sizes(batch_sizes)
    bounds = table_bounds(model)
    if encoder is not None:
        if example is not None:
            raise ValueError("the inputs are those of the encoder; leave the example out")
        _check_encoder(encoder, bounds)
    if example is not None:
        structure, leaves = flatten(tuple(example), "batch")
        inputs, capacities = _of_example(leaves, bounds, _per_id_features(model))
    else:
        num_dense, features = _of_signature(model, function, encoder, tuple(bounds))
        inputs, capacities = _of_features(num_dense, features, bounds, encoder)
        structure = Structure("tuple", (), (Structure(),) * len(inputs))
    if ids_per_sample is not None:
        inputs, capacities = _with_ids_per_sample(inputs, capacities, ids_per_sample)
    ladder = tuple(
        BatchSize(
            size,
            tuple(tuple(capacity(size) for capacity in each.values()) for each in capacities),
        )
        for size in sizes
    )
    return BatchSpec(structure, tuple(inputs), ladder)


def _checked_sizes(batch_sizes: Sequence[int]) -> list[int]:
    sizes = sorted(set(batch_sizes))
    if not sizes or any(not isinstance(size, int | np.integer) or size < 1 for size in sizes):
        raise ValueError(f"batch_sizes are whole numbers of 1 or more, got {batch_sizes!r}")
    return [int(size) for size in sizes]


def _check_encoder(encoder: TableEncoder, bounds: Mapping[str, int]) -> None:
    """Raise a ValueError if an encoder has an open vocabulary, or more rows than a model's table.

    ``bounds`` has the number of rows that each feature's table has.
    """
    if encoder.schema.dynamic:
        names = ", ".join(map(repr, encoder.schema.dynamic))
        raise ValueError(f"columns {names} have open vocabularies; exported models have fixed ones")
    for name, rows in encoder.table_rows.items():
        # Fewer rows are fine: tables may be larger than their vocabularies.
        if rows > bounds.get(name, rows):
            raise ValueError(
                f"the encoder has {rows} rows for column {name!r}, but the model's table has "
                f"{bounds[name]}; give the encoder that the model was trained with"
            )


def table_bounds(model: nnx.Module) -> dict[str, int]:
    """Return the number of valid ids of each feature: the fewest rows of a table that reads it."""
    bounds: dict[str, int] = {}
    for module in tapped_modules(model).values():
        for feature, count in module.tables.get_value().bounds.items():
            bounds[feature] = min(count, bounds.get(feature, count))
    return bounds


def _per_id_features(model: nnx.Module) -> set[str]:
    """Return the features that an `EmbeddingCollection` of the model reads."""
    return {
        feature
        for module in tapped_modules(model).values()
        if isinstance(module, EmbeddingCollection)
        for config in module.configs
        for feature in config.feature_names
    }


def _of_example(
    leaves: Sequence[tuple[str, Any]], bounds: Mapping[str, int], per_id: set[str]
) -> tuple[list[Input], list[dict[str, Capacity]]]:
    """Return the inputs of an example batch, and for each ragged one the features' capacities.

    ``per_id`` has the features whose rows are looked up one by one.
    """
    inputs: list[Input] = []
    capacities = []
    for name, leaf in leaves:
        if isinstance(leaf, KeyedJaggedArray):
            ragged, of_keys = _ragged(name, leaf, bounds, per_id)
            inputs.append(ragged)
            capacities.append(of_keys)
        else:
            inputs.append(_array(name, leaf))
    sizes = {name: _num_samples(leaf) for name, leaf in leaves}
    if len(set(sizes.values())) != 1 or not next(iter(sizes.values()), 0):
        each = ", ".join(f"{size} in {name}" for name, size in sizes.items()) or "none"
        raise ValueError(
            f"the inputs of the example must have equally many samples, 1 or more; got {each}"
        )
    return inputs, capacities


def _num_samples(leaf: Any) -> int:
    return leaf.batch_size if isinstance(leaf, KeyedJaggedArray) else np.shape(leaf)[0]


def _array(name: str, leaf: Any) -> ArrayInput:
    if not isinstance(leaf, np.ndarray | jax.Array) or np.ndim(leaf) == 0:
        raise TypeError(
            f"{name} is {leaf!r}; a batch has arrays with a leading batch axis and "
            "KeyedJaggedArrays, in tuples, lists and dicts"
        )
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise TypeError(f"{name} is an array of {leaf.dtype}; programs take numbers and bools")
    return ArrayInput(name, dtype.name, tuple(leaf.shape[1:]))


def _ragged(
    name: str, batch: KeyedJaggedArray, bounds: Mapping[str, int], per_id: set[str]
) -> tuple[RaggedInput, dict[str, Capacity]]:
    if is_raw(batch.values) or batch.slot_keys:
        raise ValueError(
            f"{name} has raw ids or slots of jaxrec.tier; exported models take row indices"
        )
    if np.ndim(batch.values) != 1:
        raise ValueError(f"{name} is on a mesh; give the batch as it was before shard_batch")
    if batch.inverse_indices is not None:
        raise ValueError(
            f"{name} has inverse_indices; exported models take a bag for each sample and feature"
        )
    features, capacities = [], {}
    for key in batch.keys:
        column = jax.device_get(batch[key])
        lengths = np.asarray(column.lengths)
        first = int(lengths[0]) if lengths.size else 0
        # Only per-id features: a model may reshape their rows to [samples, ids, dim], which a
        # program for any lengths would break. Spare capacity says that the user expects other
        # lengths.
        is_full = first > 0 and (lengths == first).all()
        is_fixed = is_full and column.capacity == lengths.sum() and key in per_id
        features.append(Feature(key, bounds.get(key), first if is_fixed else None))
        capacities[key] = _fixed(first) if is_fixed else _usual(lengths)
    return RaggedInput(name, tuple(features), batch.weights is not None), capacities


def _fixed(ids: int) -> Capacity:
    return lambda samples: samples * ids


def _usual(lengths: np.ndarray) -> Capacity:
    return lambda samples: capacity_for(usual_capacity(lengths, samples))


def _mean(ids: float) -> Capacity:
    return lambda samples: capacity_for(math.ceil(samples * ids))


def _of_signature(
    model: nnx.Module,
    function: Callable[..., Any],
    encoder: TableEncoder | None,
    features: tuple[str, ...],
) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of dense features and the names of the categorical ones.

    The number is None if the function takes categorical features alone.
    """
    if encoder is not None:
        return encoder.schema.num_dense, tuple(encoder.schema.categorical)
    # The first parameter is the model, or self.
    _, *parameters = inspect.signature(function).parameters.values()
    required = [
        each for each in parameters if each.default is each.empty and each.kind in _POSITIONAL
    ]
    if len(required) == 1 and features:
        return None, features
    num_dense = getattr(model, "num_dense", None)
    if len(required) == 2 and features and isinstance(num_dense, int):
        return num_dense, features
    names = ", ".join(each.name for each in required)
    raise ValueError(
        f"the inputs ({names}) do not follow from {type(model).__name__}; give a batch of some "
        f"samples as example=({names},)"
    )


def _of_features(
    num_dense: int | None,
    features: tuple[str, ...],
    bounds: Mapping[str, int],
    encoder: TableEncoder | None,
) -> tuple[list[Input], list[dict[str, Capacity]]]:
    """Return the inputs ``(dense, features)`` or ``(features,)``, and the features' capacities.

    Without an encoder a sample has `DEFAULT_IDS` ids of each feature.
    """
    inputs: list[Input] = []
    if num_dense is not None:
        inputs.append(ArrayInput("batch[0]", "float32", (num_dense,)))
    ragged = tuple(Feature(name, bounds.get(name)) for name in features)
    inputs.append(RaggedInput(f"batch[{len(inputs)}]", ragged))

    def capacity(name: str) -> Capacity:
        if encoder is None:
            return _mean(DEFAULT_IDS)
        return lambda samples: encoder.capacities(samples)[name]

    return inputs, [{name: capacity(name) for name in features}]


def _with_ids_per_sample(
    inputs: Sequence[Input],
    capacities: Sequence[dict[str, Capacity]],
    ids_per_sample: float | Mapping[str, float],
) -> tuple[list[Input], list[dict[str, Capacity]]]:
    """Return the inputs and capacities, changed by the user's ``ids_per_sample``.

    It is the mean number of ids in a sample, of all features or by feature. A feature that it
    names gets a capacity for that number and may have any number of ids in a sample.
    """
    names = [key for of_keys in capacities for key in of_keys]
    if not isinstance(ids_per_sample, Mapping):
        ids_per_sample = dict.fromkeys(names, ids_per_sample)
    for name, ids in ids_per_sample.items():
        if name not in names:
            raise ValueError(
                f"ids_per_sample names {name!r}, but the features are {', '.join(names)}"
            )
        if isinstance(ids, bool) or not isinstance(ids, int | float) or not 0 < ids < 2**31:
            raise ValueError(f"ids_per_sample of {name!r} is a number above 0, got {ids!r}")

    def changed(each: RaggedInput) -> RaggedInput:
        features = tuple(
            # Without ``fixed``: a capacity by hand allows any number of ids.
            Feature(x.name, x.num_ids) if x.name in ids_per_sample else x
            for x in each.features
        )
        return RaggedInput(each.name, features, each.is_weighted)

    return [changed(x) if isinstance(x, RaggedInput) else x for x in inputs], [
        {
            name: _mean(ids_per_sample[name]) if name in ids_per_sample else capacity
            for name, capacity in of_keys.items()
        }
        for of_keys in capacities
    ]
