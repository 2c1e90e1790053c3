"""Base class of click models (a lookup, then layers), and checks of their sizes and inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec._public import warn_of_earlier_form
from jaxrec.embed import EmbeddingBagCollection
from jaxrec.embed.config import TableConfig
from jaxrec.nn.arithmetic import promote
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class ClickModel(nnx.Module):
    """A model of two halves: `lookup` reads the tables, `logits` computes the rest."""

    # The halves are two methods because only the second can be cut by samples. One lookup serves
    # the whole batch, and `sum_in_chunks` then runs the layers over a few samples at a time.
    embeddings: EmbeddingBagCollection

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"] | None, features: KeyedJaggedArray
    ) -> Float[Array, " batch"]:
        """Return the logits of a batch.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            features: The batch's ids, of every feature that the tables read.

        Returns:
            ``[batch]`` logits: the log-odds of a click.

        Raises:
            ValueError: ``dense`` is missing, has another number of columns, or has another number
                of samples than the ids.
        """
        return self.logits(dense, self.lookup(features))

    def lookup(self, features: KeyedJaggedArray) -> Any:
        """Return the pooled embeddings of a batch, ``[batch, columns]``, which `logits` takes."""
        return jnp.asarray(self.embeddings(features).values)

    def look_up(self, features: KeyedJaggedArray) -> Any:
        """Call `lookup`, with a `DeprecationWarning`: this is its name in earlier versions."""
        warn_of_earlier_form(f"{type(self).__name__}.look_up is called lookup now")
        return self.lookup(features)

    def logits(self, dense: Any, embedded: Any) -> Float[Array, " batch"]:
        """Return the logits of samples from the result of `lookup`.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            embedded: Result of `lookup`, or some rows of it (`sum_in_chunks`).

        Raises:
            ValueError: As for calls of the model.
        """
        raise NotImplementedError


def check_dense(dense: Any, num_dense: int, samples: int) -> None:
    """Require dense features of ``[samples, num_dense]``; None stands for no columns."""
    shape: tuple[int, ...] = (samples, 0) if dense is None else tuple(np.shape(dense))
    if len(shape) != 2:
        raise ValueError(
            f"dense features are [batch, num_dense], here [{samples}, {num_dense}]; got an array "
            f"of shape {shape}"
        )
    if shape[1] != num_dense:
        raise ValueError(
            f"the model has {num_dense} dense features, but the batch has {shape[1]}; num_dense= "
            "of the model says how many columns they have"
        )
    if shape[0] != samples:
        raise ValueError(
            f"there are dense features of {shape[0]} samples, but ids of {samples}; a batch has "
            "both of the same samples"
        )


def with_dense(
    pooled: Float[AnyArray, "batch columns"],
    dense: Float[AnyArray, "batch num_dense"] | None,
    num_dense: int,
    dtype: DTypeLike | None,
) -> Float[Array, "batch all_columns"]:
    """Check dense features, and concatenate them and pooled embeddings in one type."""
    check_dense(dense, num_dense, pooled.shape[0])
    if dense is None:
        return jnp.asarray(pooled)
    return jnp.concatenate(promote(dtype, dense, pooled), axis=1)


def check_logit_layer(name: str, layer_sizes: Sequence[int]) -> None:
    """Require layer sizes that end with 1; errors call them ``name``."""
    if not layer_sizes or layer_sizes[-1] != 1:
        raise ValueError(f"{name} ends with 1, the column of the logit; got {tuple(layer_sizes)}")


def common_width(model: str, tables: Sequence[TableConfig]) -> int:
    """Return the width of all tables, which must be the same."""
    # The error lists every width: the table that differs is rarely the first.
    widths = {table.name: table.embedding_dim for table in tables}
    if len(set(widths.values())) != 1:
        raise ValueError(f"{model}'s tables are of one width, embedding_dim; got {widths}")
    return next(iter(widths.values()))


def num_features(embeddings: EmbeddingBagCollection) -> int:
    """Return the number of blocks in the pooled output, one per feature of each table."""
    # A table that several features read has several blocks.
    return sum(len(table.feature_names) for table in embeddings.configs)


def num_columns(embeddings: EmbeddingBagCollection) -> int:
    """Return the number of columns of the pooled output."""
    return sum(table.embedding_dim * len(table.feature_names) for table in embeddings.configs)
