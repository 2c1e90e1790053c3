"""A model on a mesh."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec.embed.collection import Collection, TableVariable
from jaxrec.embed.taps import tapped_modules
from jaxrec.mesh.placement import Placement
from jaxrec.mesh.storage import shard_tables

Model = TypeVar("Model", bound=nnx.Module)


@runtime_checkable
class Plan(Protocol):
    """What `shard` needs of a plan; `jaxrec.plan.ShardingPlan` is one."""

    def to_dict(self) -> dict[str, Placement]:
        """The placement of each table, by name."""


def shard(model: Model, plan: Plan, mesh: Mesh) -> Model:
    """Puts a model on a mesh: its tables as the plan says, everything else on every device.

    The same model and training loop then run on batches from `shard_batch`, with the same results:
    the loss is the mean over the whole batch, and so are gradients.

    Args:
        model: The model; it is changed in place.
        plan: Where each table goes. Tables of other models may be in it.
        mesh: The devices, of one axis or of two, hosts first.

    Returns:
        The model.

    Raises:
        ValueError: If a table has no placement, or one that does not fit the table or the mesh.

    Example:
        >>> import jax, jaxrec
        >>> from flax import nnx
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=8, embedding_dim=2)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> plan = jaxrec.plan.ShardingPlan.from_dict({"user": jaxrec.mesh.row_wise()})
        >>> model = shard(model, plan, mesh)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2, 3]]})
        >>> model(jaxrec.mesh.shard_batch(batch, mesh)).values.shape
        (2, 2)
    """
    placements = plan.to_dict()
    sharded = {
        path: shard_tables(collection.tables.get_value(), placements, mesh)
        for path, collection in tapped_modules(model).items()
        if isinstance(collection, Collection)
    }
    everywhere = NamedSharding(mesh, PartitionSpec())
    dense = nnx.state(model, nnx.Not(TableVariable))
    nnx.update(model, jax.tree.map(lambda x: jax.device_put(x, everywhere), dense))
    for path, tables in sharded.items():
        tapped_modules(model)[path].tables.set_value(tables)
    return model
