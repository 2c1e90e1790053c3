"""Rows and samples picked from ragged arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, Shaped

from jaxrec.ragged.arrays import AnyArray, require_one_batch, take, to_device
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray
from jaxrec.ragged.offsets import complete_cumsum, offsets_range, segment_ids
from jaxrec.ragged.packing import pinned_capacities


def jagged_index_select(
    values: Shaped[AnyArray, "capacity *element"],
    lengths: Int[AnyArray, " rows"],
    indices: Int[AnyArray, " selected"],
    capacity: int | None = None,
) -> tuple[Shaped[Array, "out_capacity *element"], Int32[Array, " selected"]]:
    """Concatenate rows ``indices[0], indices[1], ...`` of a ragged array.

    FBGEMM's op of that name. Differentiable with respect to the values.

    Args:
        values: ``[capacity, ...]``.
        lengths: ``[rows]``.
        indices: ``[selected]`` from 0 to ``rows - 1``; they may repeat.
        capacity: Capacity of the result. None: `capacity_for` its elements; not under jit.

    Returns:
        ``[capacity, ...]`` values with zeros as padding, and ``[selected]`` lengths. Under jit,
        where no error can be raised, an index out of range gives an empty row, and elements beyond
        the capacity are left out: lengths then sum to more than it.

    Raises:
        IndexError: An index is out of range.
        TypeError: The capacity is missing under jit.
        ValueError: The capacity is too small.

    Example:
        >>> import numpy as np
        >>> rows = np.array([1, 2, 3], np.int32), np.array([1, 2], np.int32)
        >>> values, lengths = jagged_index_select(*rows, np.array([1, 0, 1]), capacity=6)
        >>> values.tolist(), lengths.tolist()
        ([2, 3, 1, 2, 3, 0], [2, 1, 2])
    """
    _check_indices(indices, lengths.shape[0])
    bags, indices = jnp.asarray(lengths).astype(jnp.int32), jnp.asarray(indices)
    indices = jnp.where(indices < 0, bags.shape[0], indices)
    out_lengths = take(bags, indices)
    (capacity,) = _checked_capacities(
        ("values",), out_lengths[None], None if capacity is None else [capacity]
    )
    out_offsets = complete_cumsum(out_lengths)
    starts = take(jnp.asarray(complete_cumsum(bags)), indices)
    source = take(starts, segment_ids(out_offsets, capacity))
    source = source + offsets_range(out_offsets, capacity)
    source = jnp.where(jnp.arange(capacity) < out_offsets[-1], source, values.shape[0])
    return take(to_device(values), source), out_lengths


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
    _check_indices(indices, features.batch_size)
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
    bags = jnp.broadcast_to(indices, (len(features.keys), indices.shape[0]))
    by_key = jnp.asarray(features.lengths).reshape(len(features.keys), features.batch_size)
    lengths = by_key.at[:, jnp.where(indices < 0, features.batch_size, indices)].get(
        mode="fill", fill_value=0
    )
    if isinstance(lengths, jax.core.Tracer) and not isinstance(capacities, Sequence):
        capacities = features.capacity_per_key | dict(capacities or {})
    new_capacities = _checked_capacities(features.keys, lengths, capacities)

    # The samples that are picked share the bags of the batch; then each gets its own.
    ids = to_device(features.values)
    return features._with(
        values=ids, inverse_indices=bags, sample_capacities=new_capacities
    ).expanded()


def _check_indices(indices: Int[AnyArray, " selected"], count: int) -> None:
    """Raise an error for an index out of range, where indices are known."""
    if isinstance(indices, jax.core.Tracer):
        return
    indices = np.asarray(indices)
    if (wrong := np.flatnonzero((indices < 0) | (indices >= count))).size:
        raise IndexError(
            f"indices[{wrong[0]}] is {indices[wrong[0]]}; expected 0 to {count - 1}, one of "
            f"{count} rows"
        )


def _checked_capacities(
    keys: Sequence[str],
    lengths: Int32[Array, "keys rows"],
    capacities: Mapping[str, int] | Sequence[int] | None,
) -> tuple[int, ...]:
    """Return a capacity for each key, checked where lengths are known."""
    if not isinstance(lengths, jax.core.Tracer):
        return pinned_capacities(keys, np.asarray(lengths.sum(axis=1)).tolist(), capacities)
    if capacities is None:
        raise TypeError("a static capacity= is needed under jit")
    return pinned_capacities(keys, [0] * len(keys), capacities)
