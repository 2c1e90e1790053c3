"""Base class of models that rank a target item by a history of items."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.nn.click_model import num_columns, with_dense
from jaxrec.nn.sequence import last_states
from jaxrec.ragged import JaggedArray, KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray

# Joins arrays of a sample, such as what a history says, with its target, profile and dense
# features: `[batch, columns]`.
Join: TypeAlias = Callable[..., Array]


class HistoryModel(nnx.Module):
    """Reads a batch's histories, targets and other features; implementors compute `logits`.

    An item may have several features (its id, its shop, its category). Their embeddings are
    concatenated, both for the target and for each item of the history.

    Attributes:
        item_columns: Columns of a history's items and of a target.
        profile_columns: Columns of the profile and of the dense features.
        columns: Columns of the target, the profile and the dense features.
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        pairs: Mapping[str, str],
        *,
        profile: EmbeddingBagCollection | None,
        num_dense: int,
        dtype: DTypeLike | None,
    ):
        widths = {name: t.embedding_dim for t in items.configs for name in t.feature_names}
        features = [*pairs, *pairs.values()]
        if not pairs or set(features) - set(widths):
            raise ValueError(
                f"pairs name features of the item tables, {sorted(widths)}, a history and its "
                f"target each; got {dict(pairs)}"
            )
        self.item_columns = sum(widths[name] for name in pairs)
        if self.item_columns != sum(widths[name] for name in pairs.values()):
            raise ValueError(f"histories and targets differ in width: {widths}")
        self.profile_columns = num_dense + (0 if profile is None else num_columns(profile))
        self.columns = self.item_columns + self.profile_columns
        self.items = items
        self.pairs = tuple(pairs.items())
        self.profile = profile
        self.num_dense = num_dense
        self.dtype = dtype

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"] | None, features: KeyedJaggedArray
    ) -> Float[Array, " batch"]:
        """Return the logits of a batch.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            features: The batch's ids: histories, targets and profile.

        Returns:
            ``[batch]`` logits: the log-odds of a click on the target.

        Raises:
            ValueError: Histories have different capacities, or ``dense`` has another shape.
        """
        embedded = self.items(features)
        histories = [embedded[history] for history, _ in self.pairs]
        if len({column.values.shape[:-1] for column in histories}) > 1:
            shapes = {name: embedded[name].values.shape for name, _ in self.pairs}
            raise ValueError(
                f"histories have one length and one capacity, got values of {shapes}; give the "
                "batch's constructor capacities="
            )
        # A target feature has one id per sample: its last state is its embedding.
        target = jnp.concatenate([last_states(embedded[name]) for _, name in self.pairs], axis=-1)
        values = jnp.concatenate([column.values for column in histories], axis=-1)
        blocks: list[AnyArray] = [target]
        if self.profile is not None:
            blocks.append(self.profile(features).values)
        join = functools.partial(self._join, dense, blocks)
        return self.logits(JaggedArray(values, histories[0].lengths), target, join)

    def _join(self, dense: AnyArray | None, after: list[AnyArray], *before: Array) -> Array:
        blocks = [jnp.asarray(array) for array in (*before, *after)]
        # Over a mesh what follows from histories has an axis of devices; samples have none.
        blocks = [array.reshape(-1, array.shape[-1]) for array in blocks]
        return with_dense(jnp.concatenate(blocks, axis=1), dense, self.num_dense, self.dtype)

    def logits(
        self, history: JaggedArray, target: Float[Array, "*devices rows dim"], join: Join
    ) -> Float[Array, " batch"]:
        """Return the logits of samples.

        Args:
            history: ``[capacity, item_columns]`` values; over a mesh one more axis in front.
            target: ``[rows, item_columns]``.
            join: ``join(*arrays)`` returns ``[batch, columns]``: dense features, the arrays, the
                target and the profile.
        """
        raise NotImplementedError
