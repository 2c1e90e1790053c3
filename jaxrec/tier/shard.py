"""Models on a mesh, by plans that may have caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxrec.mesh import shard as shard_without_caches
from jaxrec.mesh.agree import require_same
from jaxrec.mesh.dense import DenseName, DenseRule
from jaxrec.mesh.precision import Precision
from jaxrec.mesh.replicas import ReplicaAxis
from jaxrec.mesh.shard import Plan
from jaxrec.plan import ShardingPlan
from jaxrec.tier.make import make_named
from jaxrec.tier.model_tables import collections_of
from jaxrec.tier.tier import tier_of
from jaxrec.tier.vocabulary.cached import Cached

Model = TypeVar("Model", bound=nnx.Module)


def shard(
    model: Model | Callable[[], Model],
    plan: Plan,
    mesh: Mesh,
    *,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    replica_axis: ReplicaAxis = None,
    is_ragged: bool = False,
    dense: DenseName | DenseRule = "replicated",
) -> Model:
    """Put a model on a mesh: its tables as the plan says, its dense part as ``dense`` says.

    The same model and training loop then run on batches from `jaxrec.mesh.shard_batch`, with the
    same results: the loss is the mean over the whole batch, and so are gradients.

    Tables with a cache in the plan have `jaxrec.tier.Cached`, with a few rows on the devices and
    the others in the row store that the plan names. The training loop then takes its batches from
    `jaxrec.tier.ahead`.

    Args:
        model: The model, changed in place; or a function that makes it, which plans with caches
            need. Tables that the function makes, and their optimizer state, are made on the mesh,
            each shard on its own device: they never lie anywhere whole. Their values are the same
            on any mesh, with a cache and without.
        plan: The placements and caches of the tables. It may have tables of other models, too.
        mesh: The devices, of one axis or of two, hosts first. With several processes each calls
            this with a model and a plan of its own, which must be alike.
        precision: The formats in which embeddings and gradients travel.
        replica_axis: Axis of the mesh over which there are replicas of the sharded tables, each
            over the other axes. Replicas learn from their own samples, and
            `jaxrec.mesh.average_replicas` averages them. The plan is for the devices of one
            replica, and has no caches. A mapping from names of tables to axes gives only these
            tables replicas, all tables of a collection alike; other tables lie over all axes and
            may have caches.
        is_ragged: Whether the exchanges "rows" and "pooled" send lists without padding, by XLA's
            ragged all-to-all, which GPUs and TPUs have. Results are the same.
        dense: Where the dense part lies. "replicated": on every device. "fsdp": each `nnx.Param` of
            `jaxrec.mesh.MIN_SHARDED_SIZE` elements or more is cut over all devices, along its
            largest axis that they divide, and so is its optax state. A step gathers a parameter
            where a layer reads it, and scatters its gradient. Or a function from the path of a
            parameter, such as ``"over/kernel"``, and a `jax.ShapeDtypeStruct` to a `PartitionSpec`,
            or to None for "fsdp". Layers read such a parameter as it lies.

    Returns:
        The model.

    Warns:
        UserWarning: Tables take far more memory than they need, since few of the devices hold
            them; see `jaxrec.mesh.balance`. No axis of a large parameter divides by the devices.

    Raises:
        TypeError: The plan, the mesh, the model or ``dense`` has a wrong type; the plan has caches,
            and the model is made already.
        ValueError: ``is_ragged`` on CPUs; a table has no placement, or one that does not fit the
            table or the mesh; the mesh lacks the axis; the planner made the plan for another number
            of devices; processes have different plans or tables; there are caches and replicas;
            a row store does not fit its table; the sharding of a parameter does not fit it or the
            mesh.
        BlockingIOError: Another run has a row store open.
        OSError: A row store cannot be reached, read or written.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=10**9, embedding_dim=2)
        >>> plan = jaxrec.plan.ShardingPlan.from_dict(
        ...     {"user": jaxrec.mesh.row_wise()}, {"user": jaxrec.plan.TableCache(rows=100)})
        >>> model = shard(
        ...     lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)), plan, mesh)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[999_999_999], [7, 8]]})
        >>> [model(features).values.shape for features in jaxrec.tier.ahead(model, [batch])]
        [(2, 2)]
    """
    place = functools.partial(
        shard_without_caches,
        mesh=mesh,
        precision=precision,
        replica_axis=replica_axis,
        is_ragged=is_ragged,
        dense=dense,
    )
    if not isinstance(plan, ShardingPlan) or not plan.caches:
        return _with_divided_stores(place(model, plan))
    table, cache = plan.caches[0]
    if isinstance(model, nnx.Module):
        raise TypeError(
            f"the plan has a cache of {cache.rows:,} rows for table {table!r}, but the model is "
            "made already, with all of the table's rows; give jaxrec.shard a function that makes "
            "the model, or plan with storages=('device',)"
        )
    replicas = [
        (name, axis)
        for name, _ in plan.caches
        for axis in [replica_axis.get(name) if isinstance(replica_axis, Mapping) else replica_axis]
        if axis is not None
    ]
    if replicas:
        table, axis = replicas[0]
        raise ValueError(
            f"the plan has a cache for table {table!r}, which replicas over axis {axis!r} "
            "would change each in its own way; plan with storages=('device',), or leave "
            "replica_axis out"
        )
    require_same("plan", {name: repr(each) for name, each in plan.caches})
    tables = {name: Cached(each.rows, each.store) for name, each in plan.caches}
    make = model if not callable(model) else functools.partial(make_named, model, tables)
    return _with_divided_stores(place(make, dataclasses.replace(plan, caches=())))


def _with_divided_stores(model: Model) -> Model:
    """Divide the rows in row stores among the processes that share the tables."""
    processes = set(range(jax.process_count()))
    if (tier := tier_of(model)) is None or len(processes) == 1:
        return model
    places = [each.tables.get_value().devices for each in collections_of(model).values()]
    if all(
        place.mesh is not None
        and not place.has_replicas  # they have rows of their own until they are averaged
        and {device.process_index for device in place.mesh.devices.flat} == processes
        for place in places
    ):
        tier.divide_stores()
    return model
