"""Towers: tables with the layers over them, which may run on the host that stores the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.embed.config import TableConfig
from jaxrec.embed.variables import PlacedVariable
from jaxrec.mesh import table_row_wise
from jaxrec.mesh.exchange import ExchangeLike
from jaxrec.mesh.placement import Placement
from jaxrec.mesh.towers import Tower, TowerTables, run_towers, towers_of
from jaxrec.nn.positions import FeatureProcessedEmbeddingBagCollection
from jaxrec.ragged import KeyedArray, KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class EmbeddingTower(nnx.Module):
    """Tables and an interaction over their embeddings; TorchRec's module of that name.

    Args:
        embeddings: The tables.
        interaction: Function from the pooled embeddings, ``[batch, sum(dims)]``, to
            ``[batch, columns]``, such as an `MLP` or a `CrossNet`.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        >>> tower = EmbeddingTower(embeddings, jaxrec.nn.MLP(16, (4,), rngs=rngs))
        >>> ids = KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> tower(ids).shape
        (2, 4)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection | FeatureProcessedEmbeddingBagCollection,
        interaction: Callable[[Array], Array],
    ):
        self.embeddings = embeddings
        self.interaction = interaction

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        """The tables' configurations, in order."""
        return self.embeddings.configs

    def __call__(self, features: KeyedJaggedArray) -> Float[Array, "batch columns"]:
        """Return the output of the interaction, ``[batch, columns]``."""
        return self.interaction(jnp.asarray(self.embeddings(features).values))


class EmbeddingTowerCollection(nnx.Module):
    """Towers side by side; TorchRec's module of that name.

    Args:
        towers: The towers, such as `EmbeddingTower`: any modules that take the batch and return
            ``[batch, columns]``.

    Raises:
        ValueError: ``towers`` is empty.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> def tower(name):
        ...     tables = [jaxrec.EmbeddingBagConfig(name, 100, 8)]
        ...     embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        ...     return EmbeddingTower(embeddings, jaxrec.nn.MLP(8, (4,), rngs=rngs))
        >>> towers = EmbeddingTowerCollection([tower("user"), tower("item")])
        >>> ids = KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> towers(ids).shape
        (2, 8)
    """

    def __init__(self, towers: Iterable[Any]):
        self.towers = nnx.List(towers)
        if not self.towers:
            raise ValueError("a collection of towers has at least one tower, got none")

    def __call__(self, features: KeyedJaggedArray) -> Float[Array, "batch columns"]:
        """Return the towers' outputs side by side, in order."""
        return jnp.concatenate([tower(features) for tower in self.towers], axis=1)


class DisaggregatedMultiTower(nnx.Module):
    """A model of towers: features interact within a tower first, then the towers' outputs interact.

    Luo et al. 2024, "Disaggregated multi-tower: Topology-aware modeling technique for efficient
    large-scale recommendation" (arXiv:2403.00877), section 3. A tower is a group of tables on
    devices with fast links, and a module that compresses their embeddings to few columns. The
    layers on top see the towers' outputs and the dense features.

    On one device, and on a mesh after `jaxrec.shard` alone, tower modules run on the samples'
    devices. After `disaggregate` they run on the hosts of their tables. Hosts then exchange ids and
    towers' outputs, of which ``(hosts - 1) / hosts`` travels; embeddings stay within a host. Tower
    modules must then have parameters only: no dropout and no batch statistics. Like all dense
    parameters they are replicated on every device.

    Args:
        embeddings: The tables of all towers.
        towers: For each tower the names of its tables and its module, such as an `MLP` or a
            `CrossNet`. The module maps the tower's pooled embeddings side by side,
            ``[batch, sum(dims)]``, ordered by table and then by feature, to ``[batch, columns]``.
        over: The layers on top, such as an `MLP` or a `CrossNet` with a head: a function of
            ``[batch, columns]``, the outputs of all towers in order and then those of ``dense``.
        dense: Function from the dense features, ``[batch, num_dense]``, to ``[batch, columns]``,
            such as an `MLP`; None: no dense features.

    Raises:
        ValueError: Not every table is in exactly one tower.

    Example:
        >>> import jaxrec
        >>> rngs, names = nnx.Rngs(0), ("user", "city", "item", "shop")
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in names]
        >>> model = DisaggregatedMultiTower(
        ...     EmbeddingBagCollection(tables, rngs=rngs),
        ...     [(("user", "city"), jaxrec.nn.MLP(16, (4,), rngs=rngs)),
        ...      (("item", "shop"), jaxrec.nn.MLP(16, (4,), rngs=rngs))],
        ...     over=jaxrec.nn.MLP(8, (16, 1), activation_on_last=False, rngs=rngs))
        >>> batch = KeyedJaggedArray.from_lists({name: [[1], [2]] for name in names})
        >>> model(None, batch).shape
        (2, 1)
        >>> {name: placement.places for name, placement in model.placements(num_hosts=2).items()}
        {'user': (0,), 'city': (0,), 'item': (1,), 'shop': (1,)}

        On two hosts of four devices: ::

            mesh = jax.make_mesh((2, 4), ("host", "device"))
            plan = jaxrec.plan.ShardingPlan.from_dict(model.placements(num_hosts=2))
            model = jaxrec.shard(model, plan, mesh)
            model.disaggregate()
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        towers: Sequence[tuple[Sequence[str], Callable[[Array], Array]]],
        over: Callable[[Array], Array],
        *,
        dense: Callable[[Array], Array] | None = None,
    ):
        self.embeddings = embeddings
        self.tables = tuple(tuple(names) for names, _ in towers)
        self.towers = nnx.List([module for _, module in towers])
        self.over = over
        self.dense = dense
        names = [name for tower in self.tables for name in tower]
        if sorted(names) != sorted(table.name for table in embeddings.configs) or not all(
            self.tables
        ):
            raise ValueError(
                f"each table is in one tower and each tower has tables; the tables are "
                f"{[table.name for table in embeddings.configs]}, the towers {self.tables}"
            )

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"] | None, features: KeyedJaggedArray
    ) -> Float[Array, "batch columns"]:
        """Return the output of ``over``, ``[batch, columns]``.

        Raises:
            ValueError: Dense features are given to a model without ``dense``, or are missing.
        """
        if (dense is None) != (self.dense is None):
            raise ValueError(
                "dense features and dense=, the layers over them, come together; give both or "
                "neither"
            )
        pooled, tables = self.embeddings(features), towers_of(self.embeddings.tables.get_value())
        if tables is not None:
            outputs = self._on_hosts(tables, jnp.asarray(pooled.values))
        else:
            outputs = self._at_samples(pooled)
        if dense is not None and self.dense is not None:
            outputs.append(self.dense(jnp.asarray(dense)))
        return self.over(jnp.concatenate(outputs, axis=1))

    def _reads(self, tower: int) -> list[tuple[str, str]]:
        """Return a tower's pairs of table and feature, in the order of its module's input."""
        configs = {table.name: table for table in self.embeddings.configs}
        return [(name, f) for name in self.tables[tower] for f in configs[name].feature_names]

    def _at_samples(self, pooled: KeyedArray) -> list[Array]:
        reads = [(t.name, f) for t in self.embeddings.configs for f in t.feature_names]
        blocks = dict(zip(reads, (jnp.asarray(pooled[key]) for key in pooled.keys), strict=True))
        return [
            module(jnp.concatenate([blocks[read] for read in self._reads(tower)], axis=1))
            for tower, module in enumerate(self.towers)
        ]

    def _on_hosts(self, tables: TowerTables, looked_up: Array) -> list[Array]:
        # All towers' parameters go to every host, as one pytree: which tower a host runs is decided
        # there.
        places = tables.columns()
        graph, parameters = nnx.split(self.towers)

        def tower(index: int) -> tuple[int, Tower]:
            hosts, columns = zip(*(places[read] for read in self._reads(index)), strict=True)

            def run(parameters: nnx.State, values: Array) -> Array:
                module = nnx.merge(graph, parameters)[index]
                return module(jnp.concatenate([values[:, part] for part in columns], axis=1))

            return hosts[0], run

        towers = [tower(index) for index in range(len(self.towers))]
        return run_towers(tables, looked_up, towers, parameters)

    def disaggregate(self) -> None:
        """Run tower modules on the hosts of their tables from now on.

        Call it after `jaxrec.shard` with a plan of `placements`, on a mesh of two axes, hosts
        first.

        Raises:
            ValueError: The tables of a tower are not on one host, or a tower module has variables
                that are not parameters, or sharded parameters.
        """
        variable = self.embeddings.tables
        store = variable.get_value()
        tables = TowerTables.of(store.placed)
        parameters = nnx.to_flat_state(nnx.state(self.towers, nnx.Param))
        if sharded := [path for path, each in parameters if isinstance(each, PlacedVariable)]:
            raise ValueError(
                "towers on hosts read whole parameters, and these have sharded ones, such as "
                f"{'/'.join(map(str, sharded[0]))!r}; give jaxrec.shard a function dense= that "
                "returns PartitionSpec() for the parameters of towers"
            )
        if more := nnx.to_flat_state(nnx.state(self.towers, nnx.Not(nnx.Param))):
            names = sorted("/".join(map(str, path)) for path, _ in more)
            raise ValueError(
                f"modules of towers on hosts have parameters alone, and these have {names}; leave "
                "dropout and batch statistics to the layers on top"
            )
        for index in range(len(self.tables)):
            hosts = {tables.columns()[read][0] for read in self._reads(index)}
            if len(hosts) > 1:
                raise ValueError(
                    f"tables {self.tables[index]} of one tower are on hosts {sorted(hosts)}; "
                    "place them on one, as placements() does"
                )
        variable.set_value(store.with_placed(tables))

    def placements(
        self, num_hosts: int, *, exchange: ExchangeLike = "rows"
    ) -> dict[str, Placement]:
        """Return placements that shard each table by rows over the devices of its tower's host.

        Tower ``i`` goes to host ``i % num_hosts``. `jaxrec.plan.ShardingPlan.from_dict` takes the
        result.

        Args:
            num_hosts: Length of the mesh's first axis.
            exchange: See `jaxrec.mesh.row_wise`; `disaggregate` takes "rows".
        """
        return {
            name: table_row_wise(host=index % num_hosts, exchange=exchange)
            for index, tower in enumerate(self.tables)
            for name in tower
        }
