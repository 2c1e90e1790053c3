"""The deep & cross network, version 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.click_model import num_columns
from jaxrec.nn.crossnet import CrossNet, LowRankMixtureCrossNet
from jaxrec.nn.mlp import MLP
from jaxrec.nn.wide_deep import with_dense
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class DCNv2(nnx.Module):
    """Predicts clicks by a cross network and a deep network, one after the other or side by side.

    Wang et al. 2021, "DCN V2: Improved deep & cross network and practical lessons for web-scale
    learning to rank systems" (arXiv:2008.13535), figure 1. Embeddings may differ in width.

    Args:
        embeddings: The tables.
        num_dense: Number of dense features, which stand in front of the embeddings.
        cross_layers: Layers of the cross network.
        low_rank: Rank of its matrices; None: full (equation 1). With a rank the layers are
            mixtures of ``num_experts`` low-rank experts (equation 4).
        num_experts: Experts of a low-rank layer.
        deep_layer_sizes: Layers of the deep network; a linear head reads the last.
        structure: "stacked": the deep network sees the cross network's output. "parallel": both see
            the input, and the logit is a linear function of both outputs.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type that the last layer computes in and the logits have; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: A size is below 1, the structure is neither of the two, or there are several
            experts of full rank.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = DCNv2(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...               cross_layers=2, low_rank=4, num_experts=2, deep_layer_sizes=(16,),
        ...               rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        cross_layers: int,
        low_rank: int | None = None,
        num_experts: int = 1,
        deep_layer_sizes: Sequence[int],
        structure: Literal["stacked", "parallel"] = "stacked",
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if structure not in ("stacked", "parallel"):
            raise ValueError(f"structure is 'stacked' or 'parallel', got {structure!r}")
        if low_rank is None and num_experts != 1:
            raise ValueError(f"num_experts={num_experts} needs low_rank=; give both or neither")
        columns = num_columns(embeddings) + num_dense
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.dtype = dtype
        self.structure = structure
        self.cross: Callable[[Array], Array]
        if low_rank is None:
            self.cross = CrossNet(columns, cross_layers, rngs=rngs, **types)
        else:
            self.cross = LowRankMixtureCrossNet(
                columns, cross_layers, num_experts, low_rank, rngs=rngs, **types
            )
        self.deep = MLP(columns, deep_layer_sizes, rngs=rngs, **types)
        last = deep_layer_sizes[-1] + (columns if structure == "parallel" else 0)
        of_head = types if logit_dtype is None else types | {"dtype": logit_dtype}
        self.head = nnx.Linear(last, 1, rngs=rngs, **of_head)

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
            ValueError: ``dense`` is missing, or has another number of columns.
        """
        return self.logits(dense, self.look_up(features))

    def look_up(self, features: KeyedJaggedArray) -> Float[Array, "batch columns"]:
        """Return the pooled embeddings of a batch, which `logits` takes."""
        return jnp.asarray(self.embeddings(features).values)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch columns"],
    ) -> Float[Array, " batch"]:
        """Return the logits of samples whose embeddings are looked up.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            embedded: Result of `look_up`, or some rows of it (`sum_in_chunks`).

        Raises:
            ValueError: As for calls of the model.
        """
        inputs = with_dense(embedded, dense, self.num_dense, self.dtype)
        crossed = self.cross(inputs)
        if self.structure == "stacked":
            return self.head(self.deep(crossed))[:, 0]
        return self.head(jnp.concatenate([crossed, self.deep(inputs)], axis=1))[:, 0]
