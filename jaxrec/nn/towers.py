"""Towers: tables and the layers over them, kept together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.embed.config import TableConfig
from jaxrec.nn.positions import FeatureProcessedEmbeddingBagCollection
from jaxrec.ragged import KeyedJaggedArray


class EmbeddingTower(nnx.Module):
    """Tables and an interaction over their embeddings; TorchRec's module of that name.

    Args:
        embeddings: The tables.
        interaction: A function of the pooled embeddings, ``[batch, sum(dims)]``, that returns
            ``[batch, columns]``: an `MLP`, a `CrossNet`, ...

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
        towers: The towers, such as `EmbeddingTower`. They may be modules of any kind that take the
            batch and return ``[batch, columns]``.

    Raises:
        ValueError: There are none.

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
