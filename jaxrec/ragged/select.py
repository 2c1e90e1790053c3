"""Selection of samples and of distinct ids from a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jaxrec.ragged.arrays import AnyArray, require_one_batch, to_device
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray
from jaxrec.ragged.offsets import complete_cumsum
from jaxrec.ragged.packing import check_indices, checked_capacities


def keyed_jagged_index_select(
    features: KeyedJaggedArray,
    indices: Int[AnyArray, " selected"],
    capacities: Mapping[str, int] | Sequence[int] | None = None,
) -> KeyedJaggedArray:
    """Return the samples ``indices[0], indices[1], ...`` of a batch, for every key.

    FBGEMM's ``keyed_jagged_index_select_dim1``. Where samples share bags, the bags stay and only
    ``inverse_indices`` change.

    Args:
        features: The batch.
        indices: ``[selected]`` from 0 to ``batch_size - 1``; they may repeat.
        capacities: Capacities of the result, by name or in order. Other keys get `capacity_for`
            their ids. Under jit they keep their capacity, which suffices if no sample repeats.

    Returns:
        A batch of ``selected`` samples. Under jit no error can be raised. An index out of range
        then gives an empty bag (where samples share bags, the bag of another sample). If the ids of
        a key exceed its capacity, all ids of that key are -1 (and all weights NaN), which makes its
        embeddings NaN.

    Raises:
        IndexError: An index is out of range.
        ValueError: A capacity is too small, keys have different numbers of bags and no
            ``inverse_indices``, or the batch lies over a mesh.

    Example:
        >>> import numpy as np
        >>> batch = KeyedJaggedArray.from_lists({"f": [[1], [2, 3], [4]]})
        >>> keyed_jagged_index_select(batch, np.array([1, 0])).to_lists()
        {'f': [[2, 3], [1]]}
    """
    require_one_batch(features.lengths, "keyed_jagged_index_select")
    check_indices(indices, features.batch_size)
    indices = jnp.asarray(indices)
    if features.inverse_indices is not None:
        inverse_indices = jnp.asarray(features.inverse_indices)[:, indices]
        is_traced = isinstance(inverse_indices, jax.core.Tracer)
        # Outside of jit the capacities become unknown, and `expanded` computes them for the new
        # samples. Under jit those of the batch are the best guess.
        sample_capacities = features.sample_capacities if is_traced else ()
        return dataclasses.replace(
            features, inverse_indices=inverse_indices, sample_capacities=sample_capacities
        )
    if len(set(features.strides)) > 1:
        raise ValueError(
            f"keys have different numbers of bags, {features.strides}, and no inverse_indices say "
            "which sample has which"
        )
    # The selected samples share the bags of the batch, one bag each. `expanded` then copies each
    # bag to every sample that has it, and does so within static capacities.
    bags = jnp.broadcast_to(indices, (len(features.keys), indices.shape[0]))
    by_key = jnp.asarray(features.lengths).reshape(len(features.keys), features.batch_size)
    lengths = by_key.at[:, jnp.where(indices < 0, features.batch_size, indices)].get(
        mode="fill", fill_value=0
    )
    if isinstance(lengths, jax.core.Tracer) and not isinstance(capacities, Sequence):
        capacities = features.capacity_per_key | dict(capacities or {})
    new_capacities = checked_capacities(features.keys, lengths, capacities)

    ids = to_device(features.values)
    return features._with(
        values=ids, inverse_indices=bags, sample_capacities=new_capacities
    ).expanded()


class UniqueIndices(NamedTuple):
    """The distinct ids of groups of features.

    Attributes:
        unique: One key per group, named like the group's first feature, with one bag of the group's
            distinct ids in ascending order.
        inverse: ``[capacity]`` int32. ``unique.values[inverse[i]]`` is the id at position ``i`` of
            the batch's values. At padding it is the length of ``unique.values``, so that
            ``rows.at[inverse].get(mode="fill")`` does not read a row.
    """

    unique: KeyedJaggedArray
    inverse: Int32[Array, " capacity"]


def jagged_unique_indices(
    features: KeyedJaggedArray, groups: Sequence[Sequence[str]] | None = None
) -> UniqueIndices:
    """Return each id of a batch once, and its new position; works under jit.

    FBGEMM's op of that name. It lets a model read each row once: look ``unique`` up with a
    `jaxrec.EmbeddingCollection`, compute on its rows, and read ``rows[inverse]``.

    Args:
        features: The batch; its weights are left out.
        groups: For each table the keys with ids of that table; each key is in one group. None: each
            key is its own group.

    Raises:
        KeyError: A group names a key that the batch lacks.
        ValueError: A group is empty, a key of the batch is in two groups or in none, the batch has
            raw ids, or it lies over a mesh.

    Example:
        >>> batch = KeyedJaggedArray.from_lists({"a": [[5, 3], [5]], "b": [[3], []]})
        >>> unique, inverse = jagged_unique_indices(batch, groups=[["a", "b"]])
        >>> unique.to_lists()
        {'a': [[3, 5]]}
        >>> inverse.tolist()[:3]
        [1, 0, 1]
    """
    require_one_batch(features.lengths, "jagged_unique_indices")
    groups = [[key] for key in features.keys] if groups is None else [list(g) for g in groups]
    _check_groups(features, groups)
    by_group = features.select([key for group in groups for key in group])
    capacities = tuple(sum(features.capacity_per_key[key] for key in group) for group in groups)
    ids = to_device(by_group.values)
    total = ids.shape[0]
    group_of = jnp.asarray(np.repeat(np.arange(len(groups), dtype=np.int32), capacities))
    starts = np.concatenate([[0], np.cumsum(capacities)]).astype(np.int32)
    is_id = by_group.segment_ids < by_group.lengths.shape[0]

    # One sort for all groups: first by group, then padding behind ids, then by id. So each group
    # stays in its own segment.
    place = 2 * group_of + (~is_id).astype(jnp.int32)
    positions = jnp.arange(total, dtype=jnp.int32)
    # `0 * place` gives the positions the sharding of the ids. Without it JAX cannot infer that of
    # the sort's result under `jax.vmap` over Explicit axes.
    place, ids, order = jax.lax.sort((place, ids, positions + 0 * place), num_keys=2)
    is_used = place % 2 == 0
    is_new = is_used & (
        (positions == 0) | (place != jnp.roll(place, 1)) | (ids != jnp.roll(ids, 1))
    )
    # Distinct ids are counted over the whole batch; the difference at a group's start turns the
    # count into a slot within the group's segment.
    counted = complete_cumsum(is_new.astype(jnp.int32))
    before = counted[starts]
    first = jnp.asarray(starts[:-1]) - before[:-1]
    slots = counted[1:] - 1 + first[place // 2] if groups else positions
    unique = jnp.zeros(total, ids.dtype).at[jnp.where(is_new, slots, total)].set(ids, mode="drop")
    inverse = jnp.zeros(total, jnp.int32).at[order].set(jnp.where(is_used, slots, total))
    return UniqueIndices(
        KeyedJaggedArray(
            unique,
            jnp.diff(before),
            keys=tuple(group[0] for group in groups),
            capacities=capacities,
            strides=(1,) * len(groups),
        ),
        _in_batch_order(features, by_group, inverse),
    )


def _check_groups(features: KeyedJaggedArray, groups: Sequence[Sequence[str]]) -> None:
    """Raise an error if not every key of a batch is in exactly one group."""
    if not all(groups):
        raise ValueError(f"jagged_unique_indices: a group has at least one key, got {groups}")
    named = [key for group in groups for key in group]
    if unknown := [key for key in named if key not in features.keys]:
        raise KeyError(f"no keys {unknown} among {list(features.keys)}")
    if sorted(named) != sorted(features.keys):
        raise ValueError(
            "jagged_unique_indices: each key is in one group; the keys are "
            f"{list(features.keys)} and the groups {groups}"
        )


def _in_batch_order(
    features: KeyedJaggedArray, by_group: KeyedJaggedArray, inverse: Int32[Array, " capacity"]
) -> Int32[Array, " capacity"]:
    """Reorder ``inverse`` from the key order of ``by_group`` to that of the batch."""
    capacities = by_group.capacities
    starts = dict(zip(by_group.keys, np.cumsum((0, *capacities))[:-1].tolist(), strict=True))
    parts = [
        inverse[starts[key] : starts[key] + capacity]
        for key, capacity in features.capacity_per_key.items()
    ]
    return jnp.concatenate(parts) if parts else inverse
