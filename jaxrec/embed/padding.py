"""Padding ids, which stand for no value: lookups leave them out, and their rows are zeros."""

# Bags lose their padding ids before anything else sees the batch. So no kernel, exchange or store
# knows of them: they do not travel, count in no mean, and no update touches their rows. Embeddings
# that are looked up id by id keep the id's position, so there its row becomes the row of padding.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxrec.embed import kernels
from jaxrec.embed.config import TableConfig
from jaxrec.embed.kernels import BagLayout, DroppingFeature
from jaxrec.embed.rows import write
from jaxrec.embed.slots import TableRows
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.key_segments import starts_of, take_segments
from jaxrec.ragged.wide_ids import WideIds, narrow

PADDING_SLOT = int(np.iinfo(np.int32).max)
"""Stands for padding ids in features whose values are slots (`KeyedJaggedArray.slot_keys`)."""


def padding_ids(tables: Sequence[TableConfig]) -> dict[str, int]:
    """Return the padding id of each feature that has one.

    Raises a ValueError if tables that read one feature have different padding ids, or one has none.
    """
    readers: dict[str, TableConfig] = {}
    for table in tables:
        for feature in table.feature_names:
            other = readers.setdefault(feature, table)
            if other.padding_id != table.padding_id:
                raise ValueError(
                    f"tables {other.name!r} and {table.name!r} read feature {feature!r}, but have "
                    f"padding_id={other.padding_id} and {table.padding_id}; give both the same, or "
                    "each a feature of its own"
                )
    return {
        feature: table.padding_id
        for feature, table in readers.items()
        if table.padding_id is not None
    }


def without_padding_ids(
    features: KeyedJaggedArray, tables: Sequence[TableConfig]
) -> KeyedJaggedArray:
    """Drop the padding ids from the bags of one device's batch; traced.

    A batch without a feature that has one is returned as it is.
    """
    dropped = _values_of_padding(features, padding_ids(tables))
    wanted = [number for number, key in enumerate(features.keys) if key in dropped]
    # Another type of ids is an error of the lookup, which names it.
    if not wanted or not jnp.issubdtype(features.values.dtype, np.integer):
        return features
    id_starts, bag_starts = starts_of(features.capacities), starts_of(features.strides)
    dropping = tuple(
        DroppingFeature(
            id_starts[number],
            features.capacities[number],
            bag_starts[number],
            features.strides[number],
            dropped[features.keys[number]],
        )
        for number in wanted
    )
    lengths = jnp.asarray(features.lengths)
    values: Any = features.values  # an array, or wide ids
    if isinstance(values, WideIds):
        # Kernels take ids of 32 bits: here the id 1 for padding, 0 for any other.
        sizes = tuple(each.capacity for each in dropping)
        is_padding = jnp.zeros(values.shape, bool)
        for each, size in zip(dropping, sizes, strict=True):
            segment = slice(each.id_start, each.id_start + size)
            is_padding = is_padding.at[segment].set(_equals(values[segment], each.dropped))
        ones = tuple(DroppingFeature(*_place(each), dropped=1) for each in dropping)
        kept = kernels.drop_ids(is_padding.astype(jnp.int32), lengths, ones)
        new_values = jax.tree.map(lambda words: _take(jnp.asarray(words), kept.sources), values)
    else:
        # An id beyond int32 does not occur in a batch of int32, and 0 to 2**31 - 1 are all others.
        dropping = tuple(each for each in dropping if each.dropped <= PADDING_SLOT)
        kept = kernels.drop_ids(narrow(values), lengths, dropping)
        new_values = kept.ids
    weights = features.weights
    if weights is not None:
        weights = _take(jnp.asarray(weights), kept.sources)
    return features._with(values=new_values, lengths=kept.lengths, weights=weights)


def padding_positions(
    features: KeyedJaggedArray, layout: BagLayout, readers: Sequence[tuple[str, TableConfig]]
) -> Bool[Array, " lookups"] | None:
    """Return which lookups of a group are of padding ids; None if no feature has one. Traced.

    ``readers`` has the feature and the table of each entry of the layout.
    """
    by_table = [_values_of_padding(features, padding_ids([table])) for _, table in readers]
    dropped = [values.get(feature) for (feature, _), values in zip(readers, by_table, strict=True)]
    if all(each is None for each in dropped):
        return None
    of_lookup = np.repeat([-1 if each is None else each for each in dropped], layout.capacities)
    values: Any = features.values
    segments = jax.tree.map(
        lambda words: take_segments(jnp.asarray(words), layout.id_starts, layout.capacities), values
    )
    # -1 is no id, and its high word would be that of none either.
    return _equals(segments, of_lookup) & jnp.asarray(of_lookup >= 0)


def zero_padding_rows(store: Any, names: Collection[str] | None = None) -> Any:
    """Set the rows of padding ids to zeros, in place; their optimizer state stays.

    ``names`` are the tables to look at; None: all of the store.
    """
    dims = {config.name: config.embedding_dim for config in store.configs}
    rows = {k: row for k, row in store.padding_rows.items() if names is None or k in names}
    if not rows:
        return store
    # Not by `TableStore.rows_of`, which needs arrays: models are also made by `nnx.eval_shape`.
    requests = [TableRows(name, store.find_ids(name, [row]).rows) for name, row in rows.items()]
    zeros = [{"rows": np.zeros((1, dims[name]), np.float32)} for name in rows]
    return store.with_placed(write(store.placed, requests, zeros))


def _values_of_padding(features: KeyedJaggedArray, ids: Mapping[str, int]) -> dict[str, int]:
    """Return the value in the batch that stands for padding, by feature."""
    slots = features.slot_keys
    return {key: PADDING_SLOT if key in slots else number for key, number in ids.items()}


def _place(feature: DroppingFeature) -> tuple[int, int, int, int]:
    return feature.id_start, feature.capacity, feature.length_start, feature.stride


def _equals(ids: Any, number: Any) -> Bool[Array, " n"]:
    """Return where ids, int32 or wide, equal ``number``, a scalar or ``[n]``."""
    number = np.asarray(number, np.int64)
    if isinstance(ids, WideIds):
        return jnp.asarray(ids.is_equal(WideIds.of(number)))
    is_int32 = (number >= 0) & (number <= PADDING_SLOT)
    return (jnp.asarray(ids) == np.where(is_int32, number, -1).astype(np.int32)) & is_int32


def _take(array: Array, positions: Array) -> Array:
    return array.at[positions].get(mode="promise_in_bounds", wrap_negative_indices=False)
