"""Batches whose samples share bags: capacities, and the expansion to one bag per sample."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jaxrec.ragged.arrays import AnyArray, each_device, namespace, take
from jaxrec.ragged.bounds import BAD_ID, INT32_BOUND
from jaxrec.ragged.columns import integers
from jaxrec.ragged.offsets import bag_ids, bag_starts
from jaxrec.ragged.raw_ids import like

# Position of an id for which the capacity had no space. It differs from every position in an array
# and from that of padding, so that the id turns into NaN and does not vanish.
LOST = -1


class SampleIds(NamedTuple):
    """The ids of each sample, as positions in the arrays of a batch whose samples share bags.

    Attributes:
        positions: ``[sum(sample_capacities)]`` positions in ``values``; ``sum(capacities)`` at
            padding, and `LOST` for all ids of a key that exceeds its capacity.
        lengths: ``[keys * batch]`` number of ids of each key of each sample.
    """

    positions: Int32[AnyArray, " sample_capacity"]
    lengths: Int32[AnyArray, " keys_samples"]


def sample_ids(
    lengths: Int32[AnyArray, " bags"],
    bags: Int32[AnyArray, "keys batch"],
    strides: Sequence[int],
    capacities: Sequence[int],
    sample_capacities: Sequence[int],
) -> SampleIds:
    """Give each sample the ids of its bags; ``bags`` outside their key count as empty."""
    lengths, bags = jnp.asarray(lengths), jnp.asarray(bags)
    num_keys, batch = bags.shape
    first_bags = np.cumsum((0, *strides), dtype=np.int32)[:-1, None]
    is_bag = (bags >= 0) & (bags < np.array(strides, np.int32)[:, None])
    bags = jnp.where(is_bag, bags + first_bags, lengths.shape[0])
    limits = np.array(sample_capacities, np.int32)[:, None]
    # Samples whose ids end beyond the capacity are cut at it, so that positions stay within the
    # key's segment. The cut is never silent: the whole key is marked `LOST` below.
    ends = jnp.cumsum(take(lengths, bags), axis=1, dtype=jnp.int32)
    fitting_ends = jnp.pad(jnp.minimum(ends, limits), [(0, 0), (1, 0)])
    fitting = jnp.diff(fitting_ends, axis=1).reshape(-1)
    samples = (batch,) * num_keys
    # A sample's ids lie one after the other in both layouts, so one shift per sample, the distance
    # between its starts, turns a new position into an old one.
    owner = bag_ids(fitting, samples, sample_capacities)
    starts = take(bag_starts(lengths, strides, capacities), bags).reshape(-1)
    shifts = take(starts - bag_starts(fitting, samples, sample_capacities), owner)
    positions = jnp.arange(sum(sample_capacities), dtype=jnp.int32) + shifts
    positions = jnp.where(owner < fitting.shape[0], positions, sum(capacities))
    is_lost = jnp.repeat(ends[:, -1:] > limits, batch, axis=1).reshape(-1)
    lost = take(is_lost, owner, fill_value=False)
    return SampleIds(jnp.where(lost, LOST, positions), fitting)


def _sample_ids_on_host(
    lengths: np.ndarray,
    bags: np.ndarray,
    strides: Sequence[int],
    capacities: Sequence[int],
    sample_capacities: Sequence[int],
) -> SampleIds:
    """Compute `sample_ids` of NumPy arrays; the capacities must hold all ids."""
    # Readers expand batches in their own threads, where a compiled program would wait for the
    # device. The loop runs over keys, at most a few hundred; NumPy runs over samples and ids.
    positions = np.full(sum(sample_capacities), sum(capacities), np.int32)
    all_taken = [np.zeros(0, np.int32)]
    first_bag = first_id = start = 0
    sizes = zip(bags, strides, capacities, sample_capacities, strict=True)
    for of_key, stride, capacity, size in sizes:
        own = lengths[first_bag : first_bag + stride]
        taken = own[of_key]
        shifts = (np.cumsum(own) - own)[of_key] - (np.cumsum(taken) - taken)
        count = int(taken.sum())
        positions[start : start + count] = first_id + np.repeat(shifts, taken) + np.arange(count)
        all_taken.append(taken)
        first_bag, first_id, start = first_bag + stride, first_id + capacity, start + size
    return SampleIds(positions, np.concatenate(all_taken))


def expand(batch: Any) -> Any:
    """Compute `KeyedJaggedArray.expanded` of a batch with ``inverse_indices``."""
    if not batch.keys:
        return batch
    capacities = known_capacities(batch)
    if sum(capacities) >= INT32_BOUND:
        raise ValueError(
            f"with bags of its own for each sample the batch has space for {sum(capacities)} ids; "
            "int32 numbers fewer than 2**31"
        )
    on_host = namespace(batch.values, batch.lengths, batch.weights, batch.inverse_indices) is np
    find = _sample_ids_on_host if on_host and batch.lengths.ndim == 1 else sample_ids
    xp = np if find is _sample_ids_on_host else jnp

    def of_batch(lengths: Any, values: Any, weights: Any, inverse: Any) -> tuple[Any, ...]:
        found = find(lengths, inverse, batch.strides, batch.capacities, capacities)

        def pick(array: Any, lost: float) -> Any:
            # One more element, a zero, for padding to read.
            padded = xp.pad(array, (0, 1))
            picked = padded[xp.where(found.positions == LOST, array.shape[0], found.positions)]
            # -1 sets all bits of any integer type, of the uint32 words of wide ids too.
            mark = np.asarray(lost).astype(array.dtype)
            return like(xp.where(found.positions == LOST, mark, picked), array)

        ids = jax.tree.map(functools.partial(pick, lost=BAD_ID), values)
        return ids, found.lengths, None if weights is None else pick(weights, np.nan)

    arrays = batch.lengths, batch.values, batch.weights, batch.inverse_indices
    values, lengths, weights = each_device(of_batch, *arrays)
    return batch._with(
        values=values,
        lengths=lengths,
        weights=weights,
        inverse_indices=None,
        capacities=capacities,
        strides=(batch.batch_size,) * len(batch.keys),
        sample_capacities=(),
    )


def known_capacities(batch: Any) -> tuple[int, ...]:
    """Return a batch's ``sample_capacities``; unknown ones are computed, or bounded under jit."""
    if batch.sample_capacities:
        return batch.sample_capacities
    arrays = batch.lengths, batch.inverse_indices
    if any(isinstance(array, jax.core.Tracer) for array in arrays) or not all(
        isinstance(array, np.ndarray) or array.is_fully_addressable for array in arrays
    ):
        return tuple(capacity * max(batch.batch_size, 1) for capacity in batch.capacities)
    return capacities_of_samples(*arrays, batch.strides, batch.capacities)


def with_known_capacities(batch: Any) -> Any:
    """Return the batch with its `known_capacities` as sample capacities, if samples share bags."""
    if batch.inverse_indices is None or batch.sample_capacities:
        return batch
    return batch._with(sample_capacities=known_capacities(batch))


def capacities_of_samples(
    lengths: AnyArray, inverse: AnyArray, strides: Sequence[int], capacities: Sequence[int]
) -> tuple[int, ...]:
    """Return the capacity of each key in the expanded batch, on the host.

    ``lengths`` are ``[*devices, sum(strides)]``, ``inverse`` ``[*devices, keys, batch]``.
    """
    # A key with equally long bags and no padding (one id per sample, say) expands to exactly its
    # demand, which is the same for every batch. Other keys get a capacity with space to vary.
    lengths, batch = np.asarray(lengths), np.shape(inverse)[-1]
    result, first = [], 0
    demands = demands_of_samples(lengths, inverse, strides)
    for stride, capacity, demand in zip(strides, capacities, demands, strict=True):
        of_bags = lengths[..., first : first + stride]
        is_full = stride > 0 and bool((of_bags.astype(np.int64) * stride == capacity).all())
        result.append(demand if is_full else sample_capacity(capacity, demand, batch))
        first += stride
    return tuple(result)


def demands_of_samples(
    lengths: AnyArray, inverse: AnyArray, strides: Sequence[int]
) -> tuple[int, ...]:
    """Return the number of ids of each key in the expanded batch, on the fullest device."""
    lengths, inverse = np.asarray(lengths), np.asarray(inverse)
    demands, first = [], 0
    for key, stride in enumerate(strides):
        of_bags = lengths[..., first : first + stride].astype(np.int64)
        of_samples = np.take_along_axis(of_bags, inverse[..., key, :], axis=-1)
        demands.append(int(of_samples.sum(axis=-1).max(initial=0)))
        first += stride
    return tuple(demands)


def sample_capacity(capacity: int, demand: int, batch: int) -> int:
    """Return ``capacity``, doubled until it holds the ``demand`` of all samples."""
    # Doubling keeps programs few: the share of samples that share a bag changes little from batch
    # to batch. More than `capacity` ids per sample cannot occur.
    doubled = capacity << (max(demand - 1, 0) // max(capacity, 1)).bit_length()
    return min(doubled, capacity * max(batch, 1))


def ordered_inverse(keys: Sequence[str], inverse: Any) -> Any:
    """Return ``inverse_indices`` in any form that `PackOptions` names as ``[keys, batch]``."""
    if isinstance(inverse, tuple) and len(inverse) == 2 and _are_names(inverse[0]):
        names, rows = inverse
        if len(names) != len(rows):
            raise ValueError(
                f"inverse_indices name {len(names)} features and have {len(rows)} rows"
            )
        inverse = dict(zip(names, rows, strict=True))
    if not isinstance(inverse, Mapping):
        return inverse
    if missing := [key for key in keys if key not in inverse]:
        raise ValueError(
            f"inverse_indices lack the features {missing}; give the bag of each sample for all of "
            f"{list(keys)}"
        )
    if unknown := [key for key in inverse if key not in keys]:
        raise ValueError(f"inverse_indices name {unknown}, but the features are {list(keys)}")
    rows = [
        row
        if isinstance(row := inverse[key], jax.Array)
        else integers(f"inverse_indices of feature {key!r}", "bag number", row)
        for key in keys
    ]
    shapes = {key: tuple(row.shape) for key, row in zip(keys, rows, strict=True)}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(
            "inverse_indices by name are [batch] for each feature, the bag of each sample; got the "
            f"shapes {shapes}"
        )
    if any(isinstance(row, jax.Array) for row in rows):
        return jnp.stack([jnp.asarray(row) for row in rows])
    return np.stack(rows) if rows else np.zeros((0, 0), np.int32)


def _are_names(names: Any) -> bool:
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        return False
    return all(isinstance(name, str) for name in names)
