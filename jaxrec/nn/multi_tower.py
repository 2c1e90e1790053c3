"""Disaggregated multi-tower models: each tower's tables on one host's devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.mesh import table_row_wise
from jaxrec.mesh.placement import Exchange, Placement
from jaxrec.nn.towers import EmbeddingTower, EmbeddingTowerCollection
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class DisaggregatedMultiTower(nnx.Module):
    """Features in groups that interact among themselves first, then, compressed, across groups.

    Luo et al. 2024, "Disaggregated multi-tower: Topology-aware modeling technique for efficient
    large-scale recommendation" (arXiv:2403.00877), section 3: a tower is a group of tables that lie
    on devices with fast links between them, and a tower module over what they give that hands few
    columns on; what is on top sees the towers' outputs and the dense features. `placements` puts
    each tower's tables on one host of a mesh of two axes, hosts first.

    A tower's module runs where its samples are, as all dense layers do, so what travels between
    hosts is the tower's distinct rows (or its sums, see ``exchange``), not the module's output.

    Args:
        towers: A tower for each group of features, whose interaction is the tower module.
        over: What is on top: a function of ``[batch, columns]``, the outputs of all towers in
            order and then the dense features, such as an `MLP` or a `CrossNet` with a head.
        dense: A function of the dense features, ``[batch, num_dense]``, that returns ``[batch,
            columns]``, such as an `MLP`; None: there are no dense features.

    Raises:
        ValueError: There are no towers, or two share a table.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> def tower(*names):
        ...     tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in names]
        ...     embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        ...     return EmbeddingTower(embeddings, jaxrec.nn.MLP(16, (4,), rngs=rngs))
        >>> over = jaxrec.nn.MLP(8, (16, 1), activation_on_last=False, rngs=rngs)
        >>> model = DisaggregatedMultiTower([tower("user", "city"), tower("item", "shop")], over)
        >>> ids = {name: [[1], [2]] for name in ("user", "city", "item", "shop")}
        >>> model(KeyedJaggedArray.from_lists(ids)).shape
        (2, 1)
        >>> {name: placement.places for name, placement in model.placements(num_hosts=2).items()}
        {'user': (0,), 'city': (0,), 'item': (1,), 'shop': (1,)}
    """

    def __init__(
        self,
        towers: Iterable[EmbeddingTower],
        over: Callable[[Array], Array],
        *,
        dense: Callable[[Array], Array] | None = None,
    ):
        self.towers = EmbeddingTowerCollection(towers)
        self.over = over
        self.dense = dense
        self.tables = tuple(
            tuple(table.name for table in tower.configs) for tower in self.towers.towers
        )
        names = [name for tower in self.tables for name in tower]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"towers have their tables to themselves, but {twice} are in two")

    def __call__(
        self,
        features: KeyedJaggedArray,
        dense: Float[AnyArray, "batch num_dense"] | None = None,
    ) -> Float[Array, "batch columns"]:
        """``[batch, columns]``, what ``over`` returns.

        Raises:
            ValueError: There are dense features and the model takes none, or the other way round.
        """
        if (dense is None) != (self.dense is None):
            raise ValueError(
                "dense features and dense=, the layers over them, come together; give both or "
                "neither"
            )
        outputs = [self.towers(features)]
        if dense is not None and self.dense is not None:
            outputs.append(self.dense(jnp.asarray(dense)))
        return self.over(jnp.concatenate(outputs, axis=1))

    def placements(self, num_hosts: int, *, exchange: Exchange = "rows") -> dict[str, Placement]:
        """For each table a placement on its tower's host, by rows over the host's devices.

        Towers go round the hosts in order: make as many as there are hosts. The result is what
        `jaxrec.plan.ShardingPlan.from_dict` takes.

        Args:
            num_hosts: Length of the mesh's first axis.
            exchange: See `jaxrec.mesh.row_wise`.
        """
        return {
            name: table_row_wise(host=index % num_hosts, exchange=exchange)
            for index, tower in enumerate(self.tables)
            for name in tower
        }
