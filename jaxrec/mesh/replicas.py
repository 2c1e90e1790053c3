"""Replicas of sharded tables: each learns from its own samples until all are averaged."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.config import TableConfig
from jaxrec.embed.formats import PackedRows, TableArray, is_packed
from jaxrec.embed.taps import tapped_modules
from jaxrec.mesh.store import MeshStore, mesh_stores
from jaxrec.optim import diloco

GroupState: TypeAlias = dict[str, Any]
ReplicaAxis: TypeAlias = str | Mapping[str, str] | None
"""Axis of the mesh along which tables have replicas: one for all tables, or an axis by table name.

None: a single replica.
"""


def replica_axis_of(configs: Sequence[TableConfig], replica_axis: ReplicaAxis) -> str | None:
    """Return the axis along which the tables of one collection have replicas."""
    if not isinstance(replica_axis, Mapping):
        return replica_axis
    axes = {config.name: replica_axis.get(config.name) for config in configs}
    if len(set(axes.values())) > 1:
        raise ValueError(
            "the tables of a collection have replicas over one axis, or all have none, but "
            f"replica_axis gives those of one collection {axes}; make a collection for each axis"
        )
    return next(iter(axes.values()), None)


def average_replicas(model: nnx.Module) -> None:
    """Average tables and optimizer state over the replicas that `shard`'s ``replica_axis`` made.

    Call it every few steps, inside a compiled step or outside. Call it before you read tables, too,
    since a read takes one of the replicas. (`jaxrec.train.CheckpointManager` calls it before it
    saves.)

    A replica learns from the mean loss over its own samples. With plain SGD and an average after
    every step, the replicas train as a single one would. Tables of `data_parallel` placement and
    the dense part are always equal in all replicas.

    This is TorchRec's two-dimensional parallelism (``DMPCollection.sync``; Zhang et al. 2025,
    "Two-dimensional sparse parallelism for large scale deep learning recommendation model
    training").

    Args:
        model: The model, changed in place.

    Raises:
        ValueError: The model has no tables with replicas.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1, 1), ("replica", "data"))
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=8, embedding_dim=2)
        >>> plan = jaxrec.plan.ShardingPlan.from_dict({"user": jaxrec.mesh.row_wise()})
        >>> model = jaxrec.shard(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)), plan, mesh,
        ...     replica_axis="replica")
        >>> average_replicas(model)
    """
    _replace(model, _average)


def synchronize_replicas(model: nnx.Module) -> None:
    """Average replicas, and take the outer step of tables whose optimizer is `jaxrec.optim.diloco`.

    Call it every 16 to 100 steps, say, inside a compiled step or outside. Tables with other
    optimizers are averaged, as by `average_replicas`.

    Args:
        model: The model, changed in place.

    Raises:
        TypeError: A table with an outer step is stored in packed rows (``dtype="int8"``).
        ValueError: The model has no tables with replicas.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1, 1), ("replica", "data"))
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=8, embedding_dim=2)
        >>> plan = jaxrec.plan.ShardingPlan.from_dict({"user": jaxrec.mesh.row_wise()})
        >>> optimizer = jaxrec.optim.diloco(optimizer=jaxrec.optim.rowwise_adagrad(0.1))
        >>> model = jaxrec.shard(
        ...     lambda: jaxrec.EmbeddingBagCollection(
        ...         [config], optimizer=optimizer, rngs=nnx.Rngs(0)),
        ...     plan, mesh, replica_axis="replica")
        >>> synchronize_replicas(model)
    """
    for path, tables in mesh_stores(model).items():
        for placed in tables.layout.groups:
            if isinstance(placed.group.optimizer, diloco) and is_packed(tables.rows[placed.name]):
                raise TypeError(
                    f"table {placed.tables[0]!r} of collection {path!r} has packed rows of "
                    f"{placed.group.row_format}, which jaxrec.optim.diloco does not change; give "
                    "the table dtype='float32', 'bfloat16' or 'float16', or another optimizer"
                )
    _replace(model, _synchronize)


def has_replicas(model: nnx.Module) -> bool:
    """Return whether a model has tables with replicas along an axis of a mesh."""
    return any(tables.replica_axis is not None for tables in mesh_stores(model).values())


def _replace(model: nnx.Module, change: Callable[[MeshStore], MeshStore]) -> None:
    """Apply a change to each store of a model that has replicas, in place."""
    if not has_replicas(model):
        raise ValueError(
            "the model has no tables with replicas over an axis of a mesh; give "
            "jaxrec.shard(model, plan, mesh, replica_axis=...) one"
        )
    for path, tables in mesh_stores(model).items():
        if tables.replica_axis is not None:
            variable = tapped_modules(model)[path].tables
            variable.set_value(variable.get_value().with_placed(change(tables)))


@functools.partial(jax.jit, donate_argnums=0)
def _average(tables: MeshStore) -> MeshStore:
    return _on_replicas(tables, lambda name, rows, state: (rows, state))


@functools.partial(jax.jit, donate_argnums=0)
def _synchronize(tables: MeshStore) -> MeshStore:
    optimizers = {placed.name: placed.group.optimizer for placed in tables.layout.groups}

    def step(name: str, rows: TableArray, state: GroupState) -> tuple[TableArray, GroupState]:
        optimizer = optimizers[name]
        # `synchronize_replicas` refuses packed rows, so this is for the type checker.
        if not isinstance(optimizer, diloco) or isinstance(rows, PackedRows):
            return rows, state
        new_rows, new_state = optimizer.outer_step(rows, state)
        return new_rows.astype(rows.dtype), new_state

    return _on_replicas(tables, step)


def _on_replicas(
    tables: MeshStore,
    function: Callable[[str, TableArray, GroupState], tuple[TableArray, GroupState]],
) -> MeshStore:
    """Average replicas, then replace each group's rows and state by ``function`` of the means.

    The function gets the group's name, rows and state.
    """

    def mean(array: Array) -> Array:
        # The sum over many replicas would be rounded in 16 bits.
        wide = jnp.promote_types(array.dtype, jnp.float32)
        return jax.lax.pmean(array.astype(wide), tables.replica_axis).astype(array.dtype)

    def mean_rows(array: TableArray) -> TableArray:
        return array.map_rows(mean) if isinstance(array, PackedRows) else mean(array)

    def on_device(
        rows: dict[str, TableArray], state: dict[str, GroupState]
    ) -> tuple[dict[str, TableArray], dict[str, GroupState]]:
        rows, state = jax.tree.map(mean_rows, (rows, state), is_leaf=is_packed)
        new = {name: function(name, rows[name], state[name]) for name in rows}
        return {name: each[0] for name, each in new.items()}, {
            name: each[1] for name, each in new.items()
        }

    specs = tables.specs()
    both = (specs, {name: dict.fromkeys(tables.state[name], specs[name]) for name in specs})
    rows, state = tables.shard_map(on_device, both, both)(tables.rows, tables.state)
    return dataclasses.replace(tables, rows=rows, state=state)
