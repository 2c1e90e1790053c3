"""Samples and distinct ids picked from a batch."""

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

    FBGEMM's ``keyed_jagged_index_select_dim1``. Where samples share bags (``inverse_indices``) the
    bags stay as they are, and only the samples' places in them are picked.

    Args:
        features: The batch.
        indices: ``[selected]`` from 0 to ``batch_size - 1``; they may repeat.
        capacities: Capacities of the result, by name or in order. Other keys keep their capacity
            under jit, which holds the ids of samples that do not repeat; otherwise they get
            `capacity_for` their ids.

    Returns:
        A batch of ``selected`` samples. Under jit, where no error can be raised, an index out of
        range gives an empty bag, and a key whose ids exceed its capacity has the id -1 (and the
        weight NaN) throughout, which makes its embeddings NaN.

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
        sample_capacities = features.sample_capacities if is_traced else ()
        return dataclasses.replace(
            features, inverse_indices=inverse_indices, sample_capacities=sample_capacities
        )
    if len(set(features.strides)) > 1:
        raise ValueError(
            f"keys have different numbers of bags, {features.strides}, and no inverse_indices say "
            "which sample has which"
        )
    # A sample is picked as if it shared its bags: `expanded` knows how to write such bags out.
    bags = jnp.broadcast_to(indices, (len(features.keys), indices.shape[0]))
    by_key = jnp.asarray(features.lengths).reshape(len(features.keys), features.batch_size)
    lengths = by_key.at[:, jnp.where(indices < 0, features.batch_size, indices)].get(
        mode="fill", fill_value=0
    )
    if isinstance(lengths, jax.core.Tracer) and not isinstance(capacities, Sequence):
        capacities = features.capacity_per_key | dict(capacities or {})
    new_capacities = checked_capacities(features.keys, lengths, capacities)

    # The samples that are picked share the bags of the batch; then each gets its own.
    ids = to_device(features.values)
    return features._with(
        values=ids, inverse_indices=bags, sample_capacities=new_capacities
    ).expanded()


class UniqueIndices(NamedTuple):
    """The distinct ids of groups of features.

    Attributes:
        unique: For each group one bag of its distinct ids, ascending, under the name of the group's
            first feature.
        inverse: ``[capacity]`` int32. ``unique.values[inverse[i]]`` is the id at position ``i`` of
            the batch's values; at padding the length of ``unique.values``, which
            ``rows.at[inverse].get(mode="fill")`` leaves out.
    """

    unique: KeyedJaggedArray
    inverse: Int32[Array, " capacity"]


def jagged_unique_indices(
    features: KeyedJaggedArray, groups: Sequence[Sequence[str]] | None = None
) -> UniqueIndices:
    """Return each id of a batch once, and where it went; works under jit.

    FBGEMM's op of that name. Rows of a table are then looked up once an id: look ``unique`` up with
    a `jaxrec.EmbeddingCollection`, compute on its rows, and read ``rows[inverse]``.

    Args:
        features: The batch; its weights are left out.
        groups: Keys whose ids are of one table, group by group, each key in one group. None: each
            key is a group.

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

    # Ids of a group ascend, and its padding stands behind them, still within its segment.
    place = 2 * group_of + (~is_id).astype(jnp.int32)
    positions = jnp.arange(total, dtype=jnp.int32)
    # Positions that lie as the ids: under `jax.vmap` over Explicit axes the sort would not say how
    # the order lies.
    place, ids, order = jax.lax.sort((place, ids, positions + 0 * place), num_keys=2)
    is_used = place % 2 == 0
    is_new = is_used & (
        (positions == 0) | (place != jnp.roll(place, 1)) | (ids != jnp.roll(ids, 1))
    )
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
    """Return numbers of the positions of a permuted batch in the order of the batch."""
    capacities = by_group.capacities
    starts = dict(zip(by_group.keys, np.cumsum((0, *capacities))[:-1].tolist(), strict=True))
    parts = [
        inverse[starts[key] : starts[key] + capacity]
        for key, capacity in features.capacity_per_key.items()
    ]
    return jnp.concatenate(parts) if parts else inverse
