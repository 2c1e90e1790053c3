"""Models on a mesh, by plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrec.embed.collection import Collection
from jaxrec.embed.functional import default_store
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import tapped_modules
from jaxrec.mesh.agree import require_same
from jaxrec.mesh.channel import check_ragged
from jaxrec.mesh.creation import init_on_mesh, layout_on_mesh, shard_tables
from jaxrec.mesh.dense import DenseName, DenseRule, check_dense, dense_placements, place_dense
from jaxrec.mesh.placement import Placement
from jaxrec.mesh.pool_rows import PoolRows
from jaxrec.mesh.precision import ExchangePrecision
from jaxrec.mesh.processes import watch_processes
from jaxrec.mesh.replicas import ReplicaAxis, replica_axis_of
from jaxrec.mesh.store import MeshStore
from jaxrec.mesh.tables import ShardedTables

Model = TypeVar("Model", bound=nnx.Module)


ON_SHARDED: list[Callable[[nnx.Module], None]] = []
"""Functions of layers above that `shard` calls with each model once it lies on the mesh.

`jaxrec.tier` divides row stores among processes there. A model that has row stores has loaded it.
"""


@runtime_checkable
class Plan(Protocol):
    """A plan as `shard` takes it; `jaxrec.plan.ShardingPlan` is one."""

    def to_dict(self) -> dict[str, Placement]:
        """Return the placement of each table, by name."""


@runtime_checkable
class CachingPlan(Plan, Protocol):
    """A plan that may keep the rows of tables elsewhere, as `jaxrec.plan.ShardingPlan` may.

    Attributes:
        caches: Name and cache of each table that is not kept on the devices whole.
    """

    caches: Sequence[tuple[str, Any]]

    def maker(self, make_model: Callable[[], Model]) -> Callable[[], Model]:
        """Return the function that makes the model with the plan's caches in its tables."""


def shard(
    model: Model | Callable[[], Model],
    plan: Plan,
    mesh: Mesh,
    *,
    precision: ExchangePrecision = ExchangePrecision(),  # noqa: B008 (frozen)
    replica_axis: ReplicaAxis = None,
    is_ragged: bool = False,
    dense: DenseName | DenseRule = "replicated",
) -> Model:
    """Put a model on a mesh: its tables as the plan says, its dense part as ``dense`` says.

    The same model and training loop then run on batches from `jaxrec.mesh.shard_batch`, with the
    same results: the loss is the mean over the whole batch, and so are gradients. The rows of pools
    (`jaxrec.nn.TensorPool`) lie in equal shards over the devices.

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
            them; see `jaxrec.mesh.layout`. No axis of a large parameter divides by the devices.

    Raises:
        TypeError: The plan, the mesh, the model or ``dense`` has a wrong type; the plan has caches,
            and the model is made already; the model's tables are pruned.
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
    _check_arguments(model, plan, mesh, replica_axis)
    check_dense(dense, mesh, precision.dense)
    if is_ragged:
        check_ragged(mesh)
    watch_processes()
    if isinstance(plan, CachingPlan) and plan.caches:
        _check_caches(model, plan.caches, replica_axis)
        require_same("plan", {name: repr(cache) for name, cache in plan.caches})
        model = plan.maker(cast(Callable[[], Model], model))
    placements = plan.to_dict()
    require_same("plan", {name: repr(placement) for name, placement in placements.items()})
    if isinstance(model, nnx.Module):
        made = cast(Model, model)
        dense_part = dense_placements(made, dense, mesh, precision.dense)  # before anything moves
        _move_tables(_collections(made), placements, mesh, replica_axis)
    else:

        def make(layout: TableLayout, key: Array) -> ShardedTables:
            axis = replica_axis_of(layout.configs, replica_axis)
            return init_on_mesh(layout, key, placements, mesh, axis)

        with default_store(make):
            made = model()
        dense_part = dense_placements(made, dense, mesh, precision.dense)
        # Tables that come from elsewhere, such as quantized ones.
        elsewhere = [
            collection
            for collection in _collections(made)
            if not isinstance(collection.tables.get_value().placed, MeshStore)
        ]
        _move_tables(elsewhere, placements, mesh, replica_axis)
    for collection in _collections(made):
        tables = collection.tables.get_value()
        placed = dataclasses.replace(
            cast(MeshStore, tables.placed), precision=precision, is_ragged=is_ragged
        )
        collection.tables.set_value(tables.with_placed(placed))
    for _, module in nnx.iter_modules(made):
        if isinstance(module, PoolRows):
            module.place(mesh)
    place_dense(made, dense_part, mesh)
    for finish in ON_SHARDED:
        finish(made)
    return made


def _check_arguments(model: Any, plan: Any, mesh: Any, replica_axis: ReplicaAxis) -> None:
    if not isinstance(model, nnx.Module) and not callable(model):
        raise TypeError(f"a model is an nnx.Module, or a function that makes one, got {model!r}")
    if not isinstance(plan, Plan):
        raise TypeError(
            f"a plan is made by jaxrec.plan.Planner, or of placements by table: "
            f"ShardingPlan.from_dict({{'user': row_wise()}}), got {plan!r:.80}"
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(f"a model is put on a jax.sharding.Mesh, got {mesh!r}")
    planned, devices = getattr(plan, "num_devices", None), mesh.devices.size
    if isinstance(replica_axis, Mapping):
        if missing := sorted(set(replica_axis) - set(plan.to_dict())):
            raise ValueError(f"replica_axis names tables that the plan does not place: {missing}")
        if planned is not None:
            raise ValueError(
                f"the plan was made for {planned} devices, but tables with replicas lie over fewer "
                "devices than others: plan for each number of devices, and join the plans by "
                "ShardingPlan.from_dict(first.to_dict() | second.to_dict())"
            )
    elif replica_axis in mesh.axis_names:
        devices //= mesh.shape[replica_axis]
    if planned is not None and planned != devices:
        raise ValueError(
            f"the plan was made for {planned} devices, and there are {devices}"
            f"{' in each replica' if replica_axis else ''}: plan anew by "
            "Planner(Topology.from_mesh(mesh)), or keep the placements nevertheless by "
            "ShardingPlan.from_dict(plan.to_dict())"
        )


def _check_caches(
    model: nnx.Module | Callable[[], nnx.Module],
    caches: Sequence[tuple[str, Any]],
    replica_axis: ReplicaAxis,
) -> None:
    if isinstance(model, nnx.Module):
        name, cache = caches[0]
        raise TypeError(
            f"the plan has a cache of {cache.rows:,} rows for table {name!r}, but the model is "
            "made already, with all of the table's rows; give jaxrec.shard a function that makes "
            "the model, or plan with storages=('device',)"
        )
    for name, _ in caches:
        axis = replica_axis.get(name) if isinstance(replica_axis, Mapping) else replica_axis
        if axis is not None:
            raise ValueError(
                f"the plan has a cache for table {name!r}, which replicas over axis {axis!r} "
                "would change each in its own way; plan with storages=('device',), or leave "
                "replica_axis out"
            )


def _collections(model: nnx.Module) -> list[Collection]:
    return [module for module in tapped_modules(model).values() if isinstance(module, Collection)]


def _move_tables(
    collections: Sequence[Collection],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    replica_axis: ReplicaAxis,
) -> None:
    stores = [(each, each.tables.get_value()) for each in collections]
    for _, tables in stores:
        # Errors come before anything is moved.
        if (reason := tables.placed.refuse_shard()) is not None:
            raise TypeError(reason)
        layout_on_mesh(tables.placed, placements, mesh, _axis_of(tables.placed, replica_axis))
    for collection, tables in stores:
        axis = _axis_of(tables.placed, replica_axis)
        placed = shard_tables(tables.placed, placements, mesh, axis)
        collection.tables.set_value(tables.with_placed(placed))


def _axis_of(tables: TableStore, replica_axis: ReplicaAxis) -> str | None:
    return replica_axis_of(tables.configs, replica_axis)
