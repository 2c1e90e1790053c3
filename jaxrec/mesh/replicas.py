"""Replicas of sharded tables, which learn apart for some steps and are averaged."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxrec.embed.formats import PackedRows, TableArray, is_packed
from jaxrec.embed.taps import tapped_modules
from jaxrec.mesh.store import MeshStore


def average_replicas(model: nnx.Module) -> None:
    """Average tables and optimizer state over the replicas that `shard`'s ``replica_axis`` made.

    Call it every few steps, inside a compiled step or outside, and before tables are read or saved,
    since reading reads one of the replicas. A replica's tables move by the gradient of the mean
    over its own samples, so that replicas train as one with plain SGD and an average after every
    step. Tables of `data_parallel` placement and the dense part are always the same everywhere.

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
    averaged = 0
    for module in tapped_modules(model).values():
        store = module.tables.get_value()
        tables = store.placed
        if isinstance(tables, MeshStore) and tables.replica_axis is not None:
            module.tables.set_value(store.with_placed(_average(tables)))
            averaged += 1
    if not averaged:
        raise ValueError(
            "the model has no tables with replicas over an axis of a mesh; give "
            "jaxrec.shard(model, plan, mesh, replica_axis=...) one"
        )


@functools.partial(jax.jit, donate_argnums=0)
def _average(tables: MeshStore) -> MeshStore:
    def mean(array: Array) -> Array:
        wide = jnp.promote_types(array.dtype, jnp.float32)
        return jax.lax.pmean(array.astype(wide), tables.replica_axis).astype(array.dtype)

    def mean_rows(array: TableArray) -> TableArray:
        return array.map_rows(mean) if isinstance(array, PackedRows) else mean(array)

    specs = tables.specs()
    both = (specs, {name: dict.fromkeys(tables.state[name], specs[name]) for name in specs})
    rows, state = jax.shard_map(
        lambda arrays: jax.tree.map(mean_rows, arrays, is_leaf=is_packed),
        mesh=tables.mesh,
        in_specs=(both,),
        out_specs=both,
        check_vma=False,
    )((tables.rows, tables.state))
    return dataclasses.replace(tables, rows=rows, state=state)
