"""Padding of small batches with samples of weight 0."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxrec.ragged import JaggedArray, KeyedJaggedArray
from jaxrec.ragged.packer import fitted


class WeightedBatch(NamedTuple):
    """A batch and the weights of its samples.

    Attributes:
        batch: Any pytree of `KeyedJaggedArray`s and arrays with a leading batch axis.
        weights: ``[batch]`` float32, the weights of the samples; 0 for padding.
    """

    batch: Any
    weights: Float[Array | np.ndarray, " batch"]


def pad_batch(batch: Any, batch_size: int) -> WeightedBatch:
    """Fill a host batch up to ``batch_size`` samples with padding of weight 0.

    All batches of an epoch then have one shape, and XLA compiles the step once. The padding has
    empty bags in each `KeyedJaggedArray`, so that it reads and updates no rows. Arrays repeat their
    last sample: a function that is finite for samples is finite for padding. Arrays without a
    sample get zeros.

    Padding does not change a weighted loss ``(weights * losses).sum() / weights.sum()`` nor metrics
    that take the weights. It does change layers that mix samples, such as batch normalization in
    training and in-batch negatives, unless they take the weights.

    Args:
        batch: Any pytree of `KeyedJaggedArray`s and arrays with a leading batch axis, in host
            memory. Samples of a `WeightedBatch` keep their weights.
        batch_size: Number of samples of the result.

    Returns:
        The padded batch, with the structure of ``batch``, and the weights of its samples. A batch
        of a `jaxrec.Packer` gets the capacities of the packer's batches of ``batch_size`` samples.
        In another batch, most features keep their capacity. A feature whose ``[batch]`` bags all
        have ``n`` ids and whose capacity is ``batch * n`` gets ``batch_size * n``.

    Raises:
        TypeError: A leaf is not an array of samples, or the batch is on a mesh.
        ValueError: The batch has more than ``batch_size`` samples, no arrays, or arrays of
            different numbers of samples.

    Example:
        >>> batch = KeyedJaggedArray.from_lists({"user": [[7], [8, 9]]}), np.array([1.0, 0.0])
        >>> (features, labels), weights = pad_batch(batch, 4)
        >>> features["user"].to_lists(), labels.tolist(), weights.tolist()
        ([[7], [8, 9], [], []], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0])
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
    samples, weights = batch if isinstance(batch, WeightedBatch) else (batch, None)
    leaves, tree = jax.tree_util.tree_flatten_with_path(samples, is_leaf=_is_ragged)
    names = [f"batch{jax.tree_util.keystr(path)}" for path, _ in leaves]
    sizes = {name: _host_size(leaf, name) for name, (_, leaf) in zip(names, leaves, strict=True)}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            "the arrays of a batch must have equally many samples, got "
            f"{', '.join(f'{size} in {name}' for name, size in sizes.items()) or 'no arrays'}"
        )
    size = next(iter(sizes.values()))
    if size > batch_size:
        raise ValueError(
            f"a batch of {size} samples cannot be padded to batch_size={batch_size}; make smaller "
            "batches, or give a larger batch_size"
        )
    weights = np.ones(size, np.float32) if weights is None else np.asarray(weights)
    if weights.shape != (size,):
        raise ValueError(f"{size} samples have weights of shape {weights.shape}, not [{size}]")
    missing = batch_size - size
    if not missing:
        return WeightedBatch(samples, weights)
    samples = jax.tree.unflatten(tree, [_padded(leaf, missing) for _, leaf in leaves])
    return WeightedBatch(samples, np.pad(weights, (0, missing)))


def empty_batch(batch: Any) -> Any:
    """Return a copy of a host batch whose samples all have weight 0 and empty bags.

    The empty batch has the shapes of ``batch``, and reads and updates no rows. Other arrays stay as
    they are, since the model is finite for them. `jaxrec.mesh.even_batches` uses empty batches for
    processes that have no more rows.

    Args:
        batch: Batch in host memory with the weights of its samples in a field ``weights``: a
            `WeightedBatch`, or another dataclass or named tuple such as `ClickBatch`.

    Raises:
        TypeError: The batch has no field ``weights``.

    Example:
        >>> features = KeyedJaggedArray.from_lists({"user": [[7], [8, 9]]})
        >>> empty = empty_batch(pad_batch(features, 2))
        >>> empty.batch["user"].to_lists(), empty.weights.tolist()
        ([[], []], [0.0, 0.0])
    """
    weights = getattr(batch, "weights", None)
    if weights is None or _is_ragged(batch):
        raise TypeError(
            "an empty batch is one whose samples have weight 0, but a batch of type "
            f"{type(batch).__name__} has no weights of its samples; make batches with "
            "jaxrec.data.pad_batch(batch, batch_size), as Trainer(batch_size=...) does"
        )
    without_ids: Any = jax.tree.map(
        lambda leaf: _without_ids(leaf) if _is_ragged(leaf) else leaf, batch, is_leaf=_is_ragged
    )
    fields = {"weights": np.zeros_like(np.asarray(weights))}
    if hasattr(without_ids, "_replace"):
        return without_ids._replace(**fields)
    return dataclasses.replace(without_ids, **fields)


def num_samples(batch: Any) -> int:
    """Return the number of samples of a batch, on the host, a device or a mesh."""
    leaves = jax.tree.leaves(batch, is_leaf=_is_ragged)
    if not leaves:
        raise TypeError(f"a batch must have arrays of samples, got {batch!r}")
    first = leaves[0]
    if isinstance(first, KeyedJaggedArray):
        # A sharded batch has values [devices, capacity], and strides of one device's samples. With
        # shared bags the strides count bags, and the inverse indices count samples.
        devices = first.values.shape[0] if np.ndim(first.values) == 2 else 1
        inverse = first.inverse_indices
        return devices * (max(first.strides, default=0) if inverse is None else inverse.shape[-1])
    if np.ndim(first) == 0:
        raise TypeError(f"the first leaf of a batch must have a leading batch axis, got {first!r}")
    return np.shape(first)[0]


def _is_ragged(leaf: Any) -> bool:
    return isinstance(leaf, KeyedJaggedArray | JaggedArray)


def _host_size(leaf: Any, name: str) -> int:
    if isinstance(leaf, JaggedArray):
        raise TypeError(f"{name} is a JaggedArray; batches have KeyedJaggedArray.from_dict's")
    if _is_ragged(leaf) and np.ndim(leaf.values) != 1:
        raise TypeError(f"{name} is on a mesh; pad batches on the host, before shard_batch")
    if not _is_ragged(leaf) and np.ndim(leaf) == 0:
        raise TypeError(f"{name} is {leaf!r}; a batch must have arrays with a leading batch axis")
    return num_samples(leaf)


def _padded(leaf: Any, missing: int) -> Any:
    if _is_ragged(leaf):
        return _with_empty_bags(leaf, missing)
    array = np.asarray(leaf)
    margin = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
    # Zeros could be a label or a divisor that no real sample has.
    return np.pad(array, margin, mode="edge" if len(array) else "constant")


def _without_ids(batch: KeyedJaggedArray) -> KeyedJaggedArray:
    return dataclasses.replace(
        batch,
        values=np.zeros_like(batch.values),
        lengths=np.zeros_like(batch.lengths),
        weights=None if batch.weights is None else np.zeros_like(batch.weights),
    )


def _with_empty_bags(batch: KeyedJaggedArray, missing: int) -> KeyedJaggedArray:
    """Append ``missing`` samples without ids to a batch."""
    size = batch.batch_size
    lengths = np.split(np.asarray(batch.lengths), np.cumsum(batch.strides)[:-1])
    # Ids of each sample of the features without spare capacity, such as one id per sample: there
    # the capacity follows from the batch size, and padded batches must have the usual shape.
    per_sample = {
        key: capacity // size
        for key, capacity, bags in zip(batch.keys, batch.capacities, lengths, strict=True)
        if size and batch.inverse_indices is None and (bags * size == capacity).all()
    }
    inverse = batch.inverse_indices
    if inverse is not None:
        # The samples of padding share one bag, the last of each key.
        inverse = np.asarray(inverse)
        empty = np.array(batch.strides, inverse.dtype)[:, None]
        inverse = np.concatenate([inverse, np.repeat(empty, missing, axis=1)], axis=1)
    bags = missing if inverse is None else 1
    with_empty = [np.pad(of_key, (0, bags)) for of_key in lengths]
    padded = dataclasses.replace(
        batch,
        lengths=np.concatenate(with_empty),
        inverse_indices=inverse,
        strides=tuple(stride + bags for stride in batch.strides),
    )
    if batch.memory is not None:  # made by a Packer
        # The packer learns the lengths of bags from batches, and must not learn from the empty
        # bags of padding. A shared bag is counted: inverse indices point to it.
        return fitted(padded, batch.memory, lengths if inverse is None else with_empty)
    return padded.with_capacities({key: n * (size + missing) for key, n in per_sample.items()})
