"""Steps of a lookup that all stores share: flat lookups, pooling, and a collection's outputs."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.config import EmbeddingBagConfig, TableConfig
from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.layout import Group, TableLayout
from jaxrec.embed.padding import padding_positions
from jaxrec.embed.row_gradients import Residuals
from jaxrec.ragged import KeyedArray, KeyedJaggedArray
from jaxrec.ragged.key_segments import take_segments
from jaxrec.ragged.shared_bags import LOST, known_capacities, sample_ids
from jaxrec.ragged.wide_ids import narrow


def lookup_weights(
    features: KeyedJaggedArray, is_weighted: bool, tables: Sequence[TableConfig]
) -> Float[Array, " capacity"] | None:
    """Return the batch's weights in float32; None if the collection is not weighted."""
    if not is_weighted:
        return None
    refuse_weighted_max(tables)
    require_weights(features)
    return jnp.asarray(features.weights, jnp.float32)


def refuse_weighted_max(tables: Sequence[TableConfig]) -> None:
    """Raise a ValueError if a table of a weighted collection has max pooling."""
    for table in tables:
        if getattr(table, "pooling", None) == "max":
            raise ValueError(
                f"table {table.name!r} has pooling='max', which takes no weights, but its "
                "collection has is_weighted=True; put the table into a collection of its own"
            )


def require_weights(features: KeyedJaggedArray) -> None:
    """Raise a ValueError if a batch for a weighted collection has no weights."""
    if features.weights is None:
        raise ValueError(
            "the collection is weighted and the batch has no weights; give them to the batch's "
            "constructor or make the collection with is_weighted=False"
        )


def warn_of_unused_weights(features: KeyedJaggedArray, tables: Sequence[TableConfig]) -> None:
    """Warn if a batch has weights and its tables are pooled without them."""
    # Only pooling could have used the weights.
    if features.weights is None or not isinstance(tables[0], EmbeddingBagConfig):
        return
    names = ", ".join(repr(table.name) for table in tables)
    read = ", ".join(dict.fromkeys(repr(f) for table in tables for f in table.feature_names))
    warnings.warn(
        f"the batch has weights, but the collection of the tables {names} is not weighted: the "
        f"bags of {read} are pooled without weights. Make the collection with is_weighted=True, or "
        "look up a batch without weights, dataclasses.replace(features, weights=None)",
        stacklevel=3,
    )


def pool(
    table: Float[TableArray, "rows dim"],
    ids: Int32[Array, " capacity"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " capacity"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
    **hints: int,
) -> Float[Array, "bags dim"]:
    """Pool the rows of bags, ``[bags, dim]``; differentiable in the weights.

    ``hints`` are those of `kernels.pooled_lookup`.
    """
    if weights is None:
        return kernels.pooled_lookup(table, ids, lengths, None, layout, dtype, **hints)
    return _pool_weighted(table, ids, lengths, weights, (layout, dtype, tuple(hints.items())))


# A rule of our own: JAX cannot differentiate through a native kernel, and would make a table-sized
# gradient of the reference. Tables get no gradient here (None): taps carry theirs.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _pool_weighted(table, ids, lengths, weights, static):
    layout, dtype, hints = static
    return kernels.pooled_lookup(table, ids, lengths, weights, layout, dtype, **dict(hints))


def _pool_weighted_forward(table, ids, lengths, weights, static):
    return _pool_weighted(table, ids, lengths, weights, static), (table, ids, lengths, weights)


def _pool_weighted_backward(static, residuals, gradient):
    """Return each weight's gradient: the dot product of its row and its bag's gradient."""
    table, ids, lengths, weights = residuals
    layout = static[0]
    if layout.num_bags == 0:  # a batch without samples
        return None, None, None, jnp.zeros_like(weights)
    lookups = kernels.flatten_bags(ids, lengths, None, layout, table.shape[0])
    rows = kernels.row_lookup(table, lookups.rows).astype(jnp.float32)
    dots = jnp.sum(rows * gradient[lookups.bags].astype(jnp.float32), axis=1)
    if lookups.scales is not None:
        dots = dots * lookups.scales
    dots = jnp.where(lookups.rows == table.shape[0], 0, dots)
    # Features' segments may overlap (one feature, two tables), so they are added, not concatenated.
    by_feature = jnp.split(dots, np.cumsum(layout.capacities)[:-1])
    total = jnp.zeros(weights.shape, jnp.float32)
    for start, part in zip(layout.id_starts, by_feature, strict=True):
        total = total.at[start : start + part.size].add(part)
    return None, None, None, total.astype(weights.dtype)


_pool_weighted.defvjp(_pool_weighted_forward, _pool_weighted_backward)


def pool_lookups(
    table: Float[TableArray, "rows dim"],
    ids: Int32[Array, " capacity"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " capacity"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
    lookups: Lookups,
    is_trained: bool,
    **hints: int,
) -> tuple[Float[Array, "bags dim"], Lookups]:
    """Pool the rows of bags by their sum, mean or maximum, ``[bags, dim]``.

    Returns them and the lookups that the update needs: ``lookups``, with the winners of a maximum
    if the group is trained. ``hints`` are those of the kernel.
    """
    if not layout.takes_max:
        return pool(table, ids, lengths, weights, layout, dtype, **hints), lookups
    # Tables that are not trained, such as those of an exported model, need no winners.
    bags, winners = kernels.max_lookup(table, ids, lengths, layout, dtype, is_trained, **hints)
    return bags, dataclasses.replace(lookups, winners=winners) if is_trained else lookups


def flatten(
    features: KeyedJaggedArray, weights: Array | None, layout: BagLayout, group: Group
) -> Lookups:
    """Return a group's flat lookups in a batch; lookups of bags that no sample has are padding."""
    # Lookups are residuals of the update. The gradient of weights comes from `pool` alone.
    weights = None if weights is None else jax.lax.stop_gradient(weights)
    ids, lengths = narrow(features.values), jnp.asarray(features.lengths)
    lookups = kernels.flatten_bags(ids, lengths, weights, layout, group.num_rows)
    return of_read_rows(lookups, features, layout, group, group.num_rows)


def of_read_rows(
    lookups: Lookups,
    features: KeyedJaggedArray,
    layout: BagLayout,
    group: Group,
    padding: int,
) -> Lookups:
    """Replace rows that are not read by ``padding``; drop ``bags`` if not pooled.

    These are the rows of bags that no sample has and, without pooling, of padding ids.
    """
    # A bag that no sample has must not touch its rows: they would count as looked up, and
    # optimizers with a decay or moments change a looked-up row even without a gradient.
    if shares_bags(features, layout):
        bags = _bag_of_sample(group, features, layout)
        is_used = jnp.zeros(layout.num_bags, bool).at[bags].set(True)
        rows = jnp.where(is_used[lookups.bags], lookups.rows, padding)
        lookups = dataclasses.replace(lookups, rows=rows)
    if group.is_pooled:
        return lookups
    readers = [(feature, group.tables[index]) for feature, index in group.features]
    if (is_padding := padding_positions(features, layout, readers)) is not None:
        rows = jnp.where(is_padding, padding, lookups.rows)
        lookups = dataclasses.replace(lookups, rows=rows)
    return dataclasses.replace(lookups, bags=None)


def shares_bags(features: KeyedJaggedArray, layout: BagLayout) -> bool:
    """Return whether samples share bags, as the batch's `inverse_indices` tell."""
    return features.inverse_indices is not None and layout.num_bags > 0


def join_pooled(
    tables: TableLayout,
    features: KeyedJaggedArray,
    layouts: Mapping[str, BagLayout],
    pooled: Mapping[str, Float[Array, "bags dim"]],
    lookups: Mapping[str, Lookups],
    dtype: DTypeLike,
    **residuals: Any,
) -> tuple[KeyedArray, Residuals]:
    """Join the groups' pooled rows to a collection's output; return it and its residuals."""
    blocks, bag_of_sample = [], {}
    for group in tables.groups:
        layout, bags = layouts[group.name], pooled[group.name]
        if shares_bags(features, layout):
            bag_of_sample[group.name] = _bag_of_sample(group, features, layout)
            bags = bags[bag_of_sample[group.name]]
        elif not layout.is_interleaved:
            raise ValueError(
                f"features {', '.join(name for name, _ in group.features)} have {layout.strides} "
                "bags; features of different numbers of bags need inverse_indices"
            )
        blocks.append(bags.astype(dtype).reshape(-1, layout.num_features * group.dim))
    # Outputs are in the order of tables; neighbours in a group are copied together.
    columns = [blocks[group][:, columns] for group, columns in tables.column_runs()]
    values = jnp.concatenate(columns, axis=1)
    keyed = KeyedArray(values, tables.output_keys, tables.output_dims)
    saved = Residuals(dict(lookups), bag_of_sample, tuple(layouts.values()), **residuals)
    return keyed, saved


def split_rows(
    tables: TableLayout,
    features: KeyedJaggedArray,
    layouts: Mapping[str, BagLayout],
    rows: Mapping[str, Float[Array, "lookups dim"]],
    lookups: Mapping[str, Lookups],
    dtype: DTypeLike,
    **residuals: Any,
) -> tuple[dict[str, Float[Array, "_capacity _dim"]], Residuals]:
    """Split the groups' rows into a per-id collection's outputs; return them and residuals."""
    # If samples share bags, the outputs are those of the expanded batch, sample by sample. Tables
    # were read once for each bag; here rows are copied from the lookups to the samples.
    rows, lookup_of_line = dict(rows), {}
    capacities = {name: layout.capacities for name, layout in layouts.items()}
    for group in tables.groups:
        name, layout = group.name, layouts[group.name]
        if shares_bags(features, layout):
            positions, capacities[name] = _positions_of_samples(group, features, layout)
            rows[name] = kernels.row_lookup(rows[name], positions)
            lookup_of_line[name] = positions
    outputs = {}
    for output in tables.outputs:
        name = tables.groups[output.group].name
        ends = np.cumsum((0, *capacities[name]))
        start, end = ends[output.position : output.position + 2]
        outputs[output.key] = rows[name][start:end, : output.dim].astype(dtype)
    return outputs, Residuals(dict(lookups), lookup_of_line, tuple(layouts.values()), **residuals)


def _bag_of_sample(
    group: Group, features: KeyedJaggedArray, layout: BagLayout
) -> Int32[Array, "batch features"]:
    """Return the row of the group's pooled output that has each sample's bag of each feature."""
    inverse = jnp.asarray(features.inverse_indices)
    columns = []
    for position, (feature, _) in enumerate(group.features):
        bags = np.arange(layout.num_bags, dtype=np.int32)[layout.bag_rows(position)]
        columns.append(jnp.asarray(bags)[inverse[features.keys.index(feature)]])
    return jnp.stack(columns, axis=1)


def _positions_of_samples(
    group: Group, features: KeyedJaggedArray, layout: BagLayout
) -> tuple[Int32[Array, " sample_capacity"], tuple[int, ...]]:
    """Return the position of each sample's ids among the lookups, and each feature's capacity."""
    # A position without an id becomes padding, whose row is zeros. An id that does not fit into the
    # capacity becomes a bad row: NaN, and not a silent loss.
    keys = [features.keys.index(feature) for feature, _ in group.features]
    of_batch = known_capacities(features)
    capacities = tuple(of_batch[key] for key in keys)
    lengths = take_segments(jnp.asarray(features.lengths), layout.length_starts, layout.strides)
    bags = jnp.asarray(features.inverse_indices)[np.array(keys, np.int32)]
    found = sample_ids(lengths, bags, layout.strides, layout.capacities, capacities)
    return jnp.where(found.positions == LOST, kernels.BAD_ROW, found.positions), capacities
