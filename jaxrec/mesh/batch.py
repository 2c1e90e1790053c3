"""Host batches on a mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.capacity import rung


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts a host batch on a mesh, its samples in equal parts over all devices.

    Args:
        batch: Any pytree of `KeyedJaggedArray`s and arrays with a leading batch axis. With several
            processes, this process's part of the batch.
        mesh: The devices.

    Returns:
        The same pytree. Arrays are ``[batch, ...]`` over the devices. A `KeyedJaggedArray` has one
        more axis in front, over the devices: each has its own samples as a batch of its own, all
        of equal capacities.

    Raises:
        ValueError: If the batch does not divide by the devices.
    """
    return jax.tree.map(
        lambda leaf: _shard(leaf, mesh),
        batch,
        is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedArray),
    )


def _shard(leaf: Any, mesh: Mesh) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    if not isinstance(leaf, KeyedJaggedArray):
        leaf = np.asarray(leaf)
        _divide(leaf.shape[0] if leaf.ndim else 0, mesh)
        return jax.make_array_from_process_local_data(sharding, leaf)
    parts = split_samples(leaf, _divide(leaf.batch_size, mesh))
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *parts)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), stacked)


def _divide(samples: int, mesh: Mesh) -> int:
    devices = len(mesh.local_devices)
    if samples == 0 or samples % devices:
        raise ValueError(
            f"a batch of {samples} samples does not divide by the {devices} devices of the mesh "
            "in this process; drop or pad samples to a multiple"
        )
    return devices


def split_samples(batch: KeyedJaggedArray, parts: int) -> list[KeyedJaggedArray]:
    """Cuts a host batch into ``parts`` batches of consecutive samples and equal capacities."""
    if batch.inverse_indices is not None:
        raise ValueError("a batch with inverse_indices is cut by whoever knows its samples")
    lengths = np.asarray(batch.lengths).reshape(len(batch.keys), parts, -1)
    counts = lengths.sum(axis=2)
    capacities = tuple(rung(int(count)) for count in counts.max(axis=1))
    ends = np.cumsum(counts, axis=1)
    segments = np.cumsum((0, *batch.capacities))[:-1]

    def cut(array: np.ndarray, part: int) -> np.ndarray:
        out = np.zeros(sum(capacities), array.dtype)
        starts = np.cumsum((0, *capacities))
        for key in range(len(batch.keys)):
            first = segments[key] + ends[key, part] - counts[key, part]
            out[starts[key] : starts[key] + counts[key, part]] = array[
                first : first + counts[key, part]
            ]
        return out

    values = np.asarray(batch.values)
    weights = None if batch.weights is None else np.asarray(batch.weights)
    return [
        KeyedJaggedArray(
            cut(values, part),
            lengths[:, part].reshape(-1),
            None if weights is None else cut(weights, part),
            keys=batch.keys,
            capacities=capacities,
            strides=(lengths.shape[2],) * len(batch.keys),
        )
        for part in range(parts)
    ]
