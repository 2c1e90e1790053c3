"""Models on a mesh: `shard` moves a model to the places that a plan names, or makes it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrec.embed.collection import Collection, find_collections
from jaxrec.embed.functional import default_store
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.stash import check_stash
from jaxrec.mesh.agree import require_same
from jaxrec.mesh.creation import init_on_mesh, layout_on_mesh, shard_tables
from jaxrec.mesh.dense import DenseName, DenseRule, check_dense, dense_placements, place_dense
from jaxrec.mesh.placement import Placement
from jaxrec.mesh.pool_rows import PoolRows
from jaxrec.mesh.precision import ExchangePrecision
from jaxrec.mesh.processes import watch_processes, who_has
from jaxrec.mesh.ragged_support import check_ragged
from jaxrec.mesh.replicas import ReplicaAxis, replica_axis_of
from jaxrec.mesh.store import MeshStore
from jaxrec.mesh.tables import ShardedTables

Model = TypeVar("Model", bound=nnx.Module)


ON_SHARDED: list[Callable[[nnx.Module], None]] = []
"""Functions of the layers above that `shard` calls with each model once it is on the mesh.

`jaxrec.tier` adds one that divides row stores among processes. Only a model made with `jaxrec.tier`
has row stores, so that package is loaded by then.
"""


@runtime_checkable
class Plan(Protocol):
    """A plan for `shard`, such as `jaxrec.plan.ShardingPlan`."""

    # A protocol, since `jaxrec.mesh` must not import `jaxrec.plan`.

    def to_dict(self) -> dict[str, Placement]:
        """Return the placement of each table, by name."""


@runtime_checkable
class CachingPlan(Plan, Protocol):
    """A plan that may keep rows of tables outside of the devices.

    Attributes:
        caches: Name and cache of each table whose rows are not all on the devices.
    """

    caches: Sequence[tuple[str, Any]]

    def maker(self, make_model: Callable[[], Model]) -> Callable[[], Model]:
        """Return a function that makes the model with the plan's caches in its tables."""


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

    The same model and training loop then run on batches from `jaxrec.mesh.shard_batch`. Results are
    the same, since the loss and the gradients are means over the whole batch. The rows of pools
    (`jaxrec.nn.TensorPool`) are sharded evenly over the devices.

    A table with a cache in the plan becomes a `jaxrec.tier.Cached` table: some rows are on the
    devices, and the others in the row store that the plan names. The training loop then takes its
    batches from `jaxrec.tier.ahead`. If the plan has a `stash`, all collections get it.

    Args:
        model: The model, changed in place; or a function that makes it. The function's tables and
            their optimizer state are made on the mesh, each shard on its own device, so a table may
            be larger than one device. First values are the same on any mesh, with a cache or
            without. A plan with caches needs a function.
        plan: Placements and caches of the tables. It may have tables of other models, too.
        mesh: The devices. On a mesh of two axes the first one numbers the hosts. With several
            processes each passes its own model and plan, which must be equal.
        precision: Formats in which embeddings and gradients travel.
        replica_axis: Axis of the mesh along which replicas of the sharded tables lie. Each replica
            is sharded over the other axes and learns from its own samples;
            `jaxrec.mesh.average_replicas` averages replicas. The plan is for the devices of one
            replica and has no caches. Or a mapping from table names to axes, equal for all tables
            of a collection. Other tables then lie over all axes and may have caches.
        is_ragged: Whether the exchanges "rows" and "pooled" send lists without padding, by XLA's
            ragged all-to-all, which GPUs and TPUs have. Results are the same. On GPUs it is fast
            for up to 8 devices of one process.
        dense: Sharding of the dense part:

            - "replicated": all of it is on every device.
            - "fsdp": each `nnx.Param` with at least `jaxrec.mesh.MIN_SHARDED_SIZE` elements is
              sharded over all devices, along its largest axis that they divide, and so is its optax
              state. A step gathers the parameter where a layer reads it, and scatters its gradient.
            - A function from the path of a parameter, such as ``"over/kernel"``, and its
              `jax.ShapeDtypeStruct` to a `PartitionSpec`; None means "fsdp". Layers read such a
              parameter sharded, without a gather.

    Returns:
        The model.

    Warns:
        UserWarning: Tables take far more memory than they need, since few devices store them; see
            `jaxrec.mesh.layout`. No axis of a large parameter divides by the number of devices.
            ``is_ragged`` over more than 8 GPUs, or over GPUs of several processes.

    Raises:
        TypeError: The plan, the mesh, the model or ``dense`` has a wrong type; the plan has caches,
            but the model is not a function; the model's tables are pruned.
        ValueError: ``is_ragged`` on CPUs or over more than 32 GPUs; a process of the job has no
            device in the mesh, or one of several CPU devices without `join_processes`; a table has
            no placement, or its placement does not fit the table or the mesh; the mesh lacks the
            axis; the planner made the plan for another number of devices; processes have different
            plans or tables; a table has both a cache and replicas; a row store does not fit its
            table; the sharding of a parameter does not fit it or the mesh.
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
        check_ragged(mesh, replica_axis)
    watch_processes()
    if isinstance(plan, CachingPlan) and plan.caches:
        _check_caches(model, plan.caches, replica_axis)
        require_same("plan", {name: repr(cache) for name, cache in plan.caches})
        model = plan.maker(cast(Callable[[], Model], model))
    placements = plan.to_dict()
    stash = getattr(plan, "stash", None)
    check_stash(stash, mesh.devices.flat[0])
    facts = {name: repr(placement) for name, placement in placements.items()}
    require_same("plan", facts if stash is None else facts | {"(stash)": stash})
    if isinstance(model, nnx.Module):
        made = cast(Model, model)
        dense_part = dense_placements(made, dense, mesh, precision.dense)  # before anything moves
        _move_tables(find_collections(made).values(), placements, mesh, replica_axis)
    else:

        def make(layout: TableLayout, key: Array) -> ShardedTables:
            axis = replica_axis_of(layout.configs, replica_axis)
            return init_on_mesh(layout, key, placements, mesh, axis)

        with default_store(make):
            made = model()
        dense_part = dense_placements(made, dense, mesh, precision.dense)
        # `default_store` makes the model's own tables on the mesh. Tables that the function got
        # from elsewhere, such as quantized ones, still have to move.
        elsewhere = [
            collection
            for collection in find_collections(made).values()
            if not isinstance(collection.tables.get_value().placed, MeshStore)
        ]
        _move_tables(elsewhere, placements, mesh, replica_axis)
    # The settings of exchanges belong to the store, not to its arrays, so both paths set them here.
    for collection in find_collections(made).values():
        tables = collection.tables.get_value()
        placed = dataclasses.replace(
            cast(MeshStore, tables.placed), precision=precision, is_ragged=is_ragged
        )
        collection.tables.set_value(tables.with_placed(placed))
        collection.stash = collection.stash if stash is None else stash
    for _, module in nnx.iter_modules(made):
        if isinstance(module, PoolRows):
            module.place(mesh)
    # Everything else: variables that are neither tables nor pools.
    place_dense(made, dense_part, mesh)
    for finish in ON_SHARDED:
        finish(made)
    return made


def _check_arguments(model: Any, plan: Any, mesh: Any, replica_axis: ReplicaAxis) -> None:
    """Raise an error if an argument of `shard` has a wrong type, or the plan does not fit them."""
    if not isinstance(model, nnx.Module) and not callable(model):
        raise TypeError(f"a model is an nnx.Module, or a function that makes one, got {model!r}")
    if not isinstance(plan, Plan):
        raise TypeError(
            f"a plan is made by jaxrec.plan.Planner, or of placements by table: "
            f"ShardingPlan.from_dict({{'user': row_wise()}}), got {plan!r:.80}"
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(f"a model is put on a jax.sharding.Mesh, got {mesh!r}")
    _check_devices(mesh)
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


def _check_devices(mesh: Mesh) -> None:
    """Raise a ValueError if processes of the job would wait for each other for ever."""
    owners = {device.process_index for device in mesh.devices.flat}
    if missing := sorted(set(range(jax.process_count())) - owners):
        raise ValueError(
            f"{who_has(missing)} no device in the mesh, and {jax.process_count()} processes take "
            "part in the job; make the mesh of devices of all of them, as many of each"
        )
    # A CPU orders programs on one device apart from those on several, such as gathers of numbers.
    is_one_of_many = len(mesh.local_devices) == 1 < jax.local_device_count()
    if (
        is_one_of_many
        and jax.process_count() > 1
        and jax.default_backend() == "cpu"
        and jax.config.read("jax_cpu_enable_async_dispatch")
    ):
        raise ValueError(
            f"the mesh has one of the {jax.local_device_count()} CPU devices of a process, whose "
            "steps XLA may run before or after exchanges among processes; start by "
            "jaxrec.mesh.join_processes(), which makes them wait, or make the mesh of all devices"
        )


def _check_caches(
    model: nnx.Module | Callable[[], nnx.Module],
    caches: Sequence[tuple[str, Any]],
    replica_axis: ReplicaAxis,
) -> None:
    """Raise an error if the model is made already, or if a table with a cache has replicas."""
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


def _move_tables(
    collections: Iterable[Collection],
    placements: Mapping[str, Placement],
    mesh: Mesh,
    replica_axis: ReplicaAxis,
) -> None:
    """Move the tables of collections to a mesh, in place."""
    moves = []
    for collection in collections:
        tables = collection.tables.get_value()
        # All errors come before the first table moves, so that a failed call changes no table.
        if (reason := tables.placed.refuse_shard()) is not None:
            raise TypeError(reason)
        axis = replica_axis_of(tables.placed.configs, replica_axis)
        layout_on_mesh(tables.placed, placements, mesh, axis)
        moves.append((collection, tables, axis))
    for collection, tables, axis in moves:
        placed = shard_tables(tables.placed, placements, mesh, axis)
        collection.tables.set_value(tables.with_placed(placed))
