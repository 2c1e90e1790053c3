"""Looking a batch up in its tables."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.layout import Group, TableLayout
from jaxrec.embed.tables import TableStore
from jaxrec.ragged import KeyedArray, KeyedJaggedArray

# Outputs differ in capacity and width, so the names of these axes bind nothing.
Activations: TypeAlias = KeyedArray | dict[str, Float[Array, "*_devices _capacity _dim"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the update must know of a lookup.

    Attributes:
        lookups: For each group its flat lookups.
        bag_of_sample: For each group the bag that each sample has of each feature, as a row of the
            pooled output; only where the batch has `inverse_indices`.
        layouts: For each group where its features lay in the batch.
        routes: For groups over a mesh what their exchange needs to know of other devices.
    """

    lookups: dict[str, Lookups]
    bag_of_sample: dict[str, Int32[Array, "batch features"]]
    layouts: tuple[BagLayout, ...] = dataclasses.field(metadata={"static": True})
    routes: Routes = dataclasses.field(default_factory=dict)


class Route(Protocol):
    """What a group's exchange needs to know of other devices, from ids alone."""

    def map_awaited(self, function: Callable[[Array], Array]) -> Any:
        """The route with a function applied to the indices that exchanges wait for."""


Routes: TypeAlias = dict[str, Any]


@functools.singledispatch
def route(tables: TableStore, features: KeyedJaggedArray) -> Routes:
    """What a lookup of a batch has to find out from other devices before it needs any table.

    A training step can do it for the next batch (`jaxrec.train.RoutedSteps`). Dispatches on
    the kind of tables; those on one device have nobody to ask.

    Args:
        tables: The tables.
        features: The batch.

    Returns:
        By group what `lookup` takes as ``routes``.

    Raises:
        KeyError, ValueError: As `lookup` does.
    """
    return {}


@functools.singledispatch
def lookup(
    tables: TableStore,
    features: KeyedJaggedArray,
    *,
    is_weighted: bool = False,
    dtype: DTypeLike = "float32",
    routes: Routes | None = None,
) -> tuple[Activations, Residuals]:
    """Looks up all features of a batch; dispatches on the kind of tables.

    Differentiable with respect to the batch's weights. Tables are not differentiated: give the
    gradient of the activations to `apply_gradients`.

    Args:
        tables: The tables.
        features: The batch; keys that no table reads are ignored.
        is_weighted: Whether rows are multiplied by the batch's weights.
        dtype: Type of the result.
        routes: What `route` found of the batch; None: it is found out now.

    Returns:
        The activations and what `apply_gradients` needs with their gradient. For pooled tables the
        activations are a `KeyedArray` of ``[batch, sum(dims)]``, blocks by table and then by
        feature; else for each output the ``[capacity, dim]`` rows of its ids, zeros at padding.

        An id outside its table gives NaN and updates nothing; `KeyedJaggedArray`'s constructors
        check ids on the host, with an error.

    Raises:
        KeyError: If the batch lacks a feature.
        ValueError: If ``is_weighted`` and the batch has no weights, if features have different
            numbers of bags and no ``inverse_indices`` say which sample has which, or if the batch
            lies over a mesh and the tables do not.

    Example:
        >>> import jax, jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", 10, 2, initializer="ones")
        >>> tables = jaxrec.embed.init_tables([config], jaxrec.optim.sgd(0.1), jax.random.key(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 2], []]})
        >>> activations, residuals = lookup(tables, batch)
        >>> activations["user"].tolist()
        [[2.0, 2.0], [0.0, 0.0]]
    """
    if features.values.ndim != 1:
        raise ValueError(
            f"the batch has values of shape {tuple(features.values.shape)}, with an axis over the "
            "devices of a mesh, but the tables are on one device; put the model on the mesh with "
            "jaxrec.shard(model, plan, mesh), or give it the batch as it was before shard_batch"
        )
    if is_weighted and features.weights is None:
        raise ValueError(
            "the collection is weighted and the batch has no weights; give them to the batch's "
            "constructor or make the collection with is_weighted=False"
        )
    return look_up(LocalRows(tables.rows), tables.layout, features, is_weighted, dtype)


class RowSource(abc.ABC):
    """Where the rows of a lookup come from: the device's own tables, or those of a mesh."""

    @abc.abstractmethod
    def pool(
        self,
        group: Group,
        features: KeyedJaggedArray,
        weights: Float[Array, " capacity"] | None,
        layout: BagLayout,
        dtype: np.dtype,
    ) -> tuple[Float[Array, "bags dim"], Lookups]:
        """The pooled rows of each bag of the group's features, and what the update must know.

        The pooled rows are differentiable in ``weights``.
        """

    @abc.abstractmethod
    def rows(self, group: Group, lookups: Lookups) -> Float[Array, "lookups dim"]:
        """The row of each lookup; zeros at padding, NaN at an id outside its table."""


@dataclasses.dataclass(frozen=True)
class LocalRows(RowSource):
    """Rows of tables that are whole on this device."""

    tables: dict[str, Float[Array, "rows dim"]]

    def pool(self, group, features, weights, layout, dtype):
        table = self.tables[group.name]
        pooled = pool(table, features.values, features.lengths, weights, layout, dtype)
        return pooled, flatten(features, weights, layout, group)

    def rows(self, group, lookups):
        return kernels.row_lookup(self.tables[group.name], lookups.rows)


def look_up(
    source: RowSource,
    layout: TableLayout,
    features: KeyedJaggedArray,
    is_weighted: bool,
    dtype: DTypeLike,
) -> tuple[Activations, Residuals]:
    """`lookup`, with the rows from ``source``."""
    features = jax.tree.map(jnp.asarray, features)
    # Kernels take weights in float32; their gradient comes out in the batch's own type.
    weights = jnp.asarray(features.weights, jnp.float32) if is_weighted else None
    if layout.is_pooled:
        return _pooled(source, layout, features, weights, jnp.dtype(dtype))
    return _per_id(source, layout, features, jnp.dtype(dtype))


def _pooled(
    source: RowSource,
    tables: TableLayout,
    features: KeyedJaggedArray,
    weights: Array | None,
    dtype: np.dtype,
) -> tuple[KeyedArray, Residuals]:
    blocks, lookups, bag_of_sample, layouts = [], {}, {}, []
    for group in tables.groups:
        layout = group.bags(features)
        is_shared = _shares_bags(features, layout)
        # The gradients of samples that share a bag are added in float32.
        pool_dtype = jnp.dtype("float32") if is_shared else dtype
        pooled, lookups[group.name] = source.pool(group, features, weights, layout, pool_dtype)
        if is_shared:
            bag_of_sample[group.name] = _bag_of_sample(group, features, layout)
            pooled = pooled[bag_of_sample[group.name]].astype(dtype)
        elif not layout.is_interleaved:
            raise ValueError(
                f"features {', '.join(name for name, _ in group.features)} have {layout.strides} "
                "bags; features of different numbers of bags need inverse_indices"
            )
        blocks.append(pooled.reshape(-1, layout.num_features * group.dim))
        layouts.append(layout)
    keyed = KeyedArray(
        _interleave(blocks, tables),
        tuple(output.key for output in tables.outputs),
        tuple(tables.groups[output.group].dim for output in tables.outputs),
    )
    return keyed, Residuals(lookups, bag_of_sample, tuple(layouts))


def _per_id(
    source: RowSource, tables: TableLayout, features: KeyedJaggedArray, dtype: np.dtype
) -> tuple[dict[str, Array], Residuals]:
    rows, lookups, starts, layouts = {}, {}, {}, []
    for group in tables.groups:
        layout = group.bags(features)
        flat = dataclasses.replace(flatten(features, None, layout, group), bags=None)
        lookups[group.name] = flat
        rows[group.name] = source.rows(group, flat).astype(dtype)
        starts[group.name] = np.cumsum((0, *layout.capacities))
        layouts.append(layout)
    activations = {}
    for output in tables.outputs:
        name = tables.groups[output.group].name
        start, end = starts[name][output.position : output.position + 2]
        activations[output.key] = rows[name][start:end]
    return activations, Residuals(lookups, {}, tuple(layouts))


def flatten(
    features: KeyedJaggedArray, weights: Array | None, layout: BagLayout, group: Group
) -> Lookups:
    """The group's lookups in a batch, one by one; those of bags that no sample has are padding."""
    weights = None if weights is None else jax.lax.stop_gradient(weights)
    ids, lengths = jnp.asarray(features.values), jnp.asarray(features.lengths)
    lookups = kernels.flatten_bags(ids, lengths, weights, layout, group.num_rows)
    if not (group.is_pooled and _shares_bags(features, layout)):
        return lookups
    is_used = jnp.zeros(layout.num_bags, bool).at[_bag_of_sample(group, features, layout)].set(True)
    rows = jnp.where(is_used[lookups.bags], lookups.rows, group.num_rows)
    return dataclasses.replace(lookups, rows=rows)


def pool(
    table: Float[Array, "rows dim"],
    ids: Int32[Array, " capacity"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " capacity"] | None,
    layout: BagLayout,
    dtype: np.dtype,
    *,
    parts_in: int = 1,
    parts_out: int = 1,
) -> Float[Array, "bags dim"]:
    """`kernels.pooled_lookup`, differentiable in the weights."""
    static = layout, dtype, parts_in, parts_out
    if weights is None:
        return kernels.pooled_lookup(table, ids, lengths, None, *static)
    return _pool_weighted(table, ids, lengths, weights, static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _pool_weighted(table, ids, lengths, weights, static):
    return kernels.pooled_lookup(table, ids, lengths, weights, *static)


def _pool_weighted_forward(table, ids, lengths, weights, static):
    return _pool_weighted(table, ids, lengths, weights, static), (table, ids, lengths, weights)


def _pool_weighted_backward(static, residuals, gradient):
    """A weight's gradient is the dot product of its row and its bag's gradient."""
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
    pieces = jnp.split(dots, np.cumsum(layout.capacities)[:-1])
    total = jnp.zeros(weights.shape, jnp.float32)
    for start, piece in zip(layout.id_starts, pieces, strict=True):
        total = total.at[start : start + piece.size].add(piece)
    return None, None, None, total.astype(weights.dtype)


_pool_weighted.defvjp(_pool_weighted_forward, _pool_weighted_backward)


def _shares_bags(features: KeyedJaggedArray, layout: BagLayout) -> bool:
    """Whether `inverse_indices` say which bag each sample has; a batch without bags has none."""
    return features.inverse_indices is not None and layout.num_bags > 0


def _bag_of_sample(
    group: Group, features: KeyedJaggedArray, layout: BagLayout
) -> Int32[Array, "batch features"]:
    inverse = jnp.asarray(features.inverse_indices)
    columns = []
    for position, (feature, _) in enumerate(group.features):
        bags = np.arange(layout.num_bags, dtype=np.int32)[layout.bag_rows(position)]
        columns.append(jnp.asarray(bags)[inverse[features.keys.index(feature)]])
    return jnp.stack(columns, axis=1)


def _interleave(blocks: list[Array], layout: TableLayout) -> Float[Array, "batch columns"]:
    """The groups' columns in output order."""
    return jnp.concatenate([blocks[g][:, columns] for g, columns in column_runs(layout)], axis=1)


def column_runs(layout: TableLayout) -> list[tuple[int, slice]]:
    """The outputs in order as (group, columns of the group's block), neighbours joined."""
    runs: list[tuple[int, slice]] = []
    for output in layout.outputs:
        dim = layout.groups[output.group].dim
        columns = slice(output.position * dim, (output.position + 1) * dim)
        if runs and runs[-1][0] == output.group and runs[-1][1].stop == columns.start:
            columns = slice(runs.pop()[1].start, columns.stop)
        runs.append((output.group, columns))
    return runs
