"""Inputs of click models: a sample's vectors of one width, and the columns of some features."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import check_dense, common_width, num_features
from jaxrec.nn.mlp import MLP
from jaxrec.ragged.arrays import AnyArray


class InputVectors(nnx.Module):
    """A sample's pooled embeddings, and vectors that an MLP makes of its dense features.

    ``bottom_layer_sizes`` are the MLP's layers; the last is a multiple of the tables' width, and
    the MLP gives as many vectors. ``model`` names the model in errors.
    """

    def __init__(
        self,
        model: str,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int,
        bottom_layer_sizes: Sequence[int],
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.dim = common_width(model, embeddings.configs)
        self.num_dense = num_dense
        self.dtype = dtype
        last = bottom_layer_sizes[-1] if bottom_layer_sizes else 0
        if num_dense and (last < 1 or last % self.dim):
            raise ValueError(
                f"bottom_layer_sizes of {model} ends with a multiple of the tables' width, "
                f"{self.dim}, for vectors of the dense features; got {tuple(bottom_layer_sizes)}"
            )
        self.bottom = (
            MLP(num_dense, bottom_layer_sizes, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
            if num_dense
            else None
        )
        self.count = num_features(embeddings) + (last // self.dim if num_dense else 0)

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"] | None, pooled: Float[Array, "batch _"]
    ) -> Float[Array, "batch vectors dim"]:
        """Return ``[batch, vectors, dim]``, those of the dense features first."""
        check_dense(dense, self.num_dense, pooled.shape[0])
        # All tables have one width, so the pooled columns are the features' vectors side by side.
        made = () if self.bottom is None or dense is None else (self.bottom(dense),)
        columns = jnp.concatenate(promote(self.dtype, *made, pooled), axis=1)
        return columns.reshape(columns.shape[0], self.count, self.dim)


@dataclasses.dataclass(frozen=True)
class FeatureColumns:
    """The columns of some features in the pooled output of a collection, as ``(start, stop)``."""

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, what: str, embeddings: EmbeddingBagCollection, features: Sequence[str]
    ) -> FeatureColumns:
        """Find the columns of some features; errors call the names ``what``."""
        spans: dict[str, list[tuple[int, int]]] = {}
        start = 0
        for table in embeddings.configs:
            for name in table.feature_names:
                spans.setdefault(name, []).append((start, start + table.embedding_dim))
                start += table.embedding_dim
        if not set(features) <= set(spans):
            raise ValueError(
                f"{what} names features that tables read, {sorted(spans)}; got {list(features)}"
            )
        return cls(tuple(span for name in features for span in spans[name]))

    @property
    def size(self) -> int:
        """Number of the columns."""
        return sum(stop - start for start, stop in self.spans)

    def __call__(self, pooled: Float[Array, "batch _"]) -> Float[Array, "batch columns"]:
        """Return the columns of the features, ``[batch, size]``."""
        if not self.spans:
            return pooled[:, :0]
        return jnp.concatenate([pooled[:, start:stop] for start, stop in self.spans], axis=1)
