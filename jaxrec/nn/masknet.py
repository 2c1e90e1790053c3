"""MaskNet: products of features with masks that the sample itself computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.arithmetic import dot_general
from jaxrec.nn.click_model import ClickModel, check_logit_layer
from jaxrec.nn.input_vectors import InputVectors
from jaxrec.nn.mlp import MLP
from jaxrec.ragged.arrays import AnyArray


class MaskBlock(nnx.Module):
    """Multiplies columns by a mask that follows from the sample: ``relu(layer_norm(W (m * x)))``.

    The mask is ``m = W_2 relu(W_1 v + b_1) + b_2`` of the sample's embeddings ``v``. Wang et al.
    2021, "MaskNet: Introducing feature-wise multiplication to CTR ranking models by instance-guided
    mask" (arXiv:2102.07619), equations 5 to 10.

    The block has ``(v + 1) * mask_hidden + (mask_hidden + 1) * x + x * out + 2 * out`` parameters
    for ``v`` and ``x`` columns, and ``2 * (v * mask_hidden + mask_hidden * x + x * out)`` FLOPs per
    sample in its products.

    Args:
        instance_features: Columns of ``v``.
        in_features: Columns of ``x``.
        out_features: Columns of the output.
        mask_hidden_size: Hidden columns of the mask's network; the paper has them wider than ``v``.
        dtype: Type that it computes in; None: the wider of the inputs' and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Example:
        >>> import jax.numpy as jnp
        >>> block = MaskBlock(6, 4, 3, mask_hidden_size=8, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 6)), jnp.ones((2, 4))).shape
        (2, 3)
    """

    def __init__(
        self,
        instance_features: int,
        in_features: int,
        out_features: int,
        *,
        mask_hidden_size: int,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.mask = MLP(
            instance_features, (mask_hidden_size, in_features), activation_on_last=False, **types
        )
        self.linear = nnx.Linear(
            in_features, out_features, use_bias=False, dot_general=dot_general, **types
        )
        self.norm = nnx.LayerNorm(out_features, **types)

    def __call__(
        self, instance: Float[Array, "batch v"], x: Float[Array, "batch columns"]
    ) -> Float[Array, "batch out"]:
        """Combine ``[batch, instance_features]`` and ``[batch, in_features]``.

        Returns:
            ``[batch, out_features]``.
        """
        return nnx.relu(self.norm(self.linear(self.mask(instance) * x)))


class MaskNet(ClickModel):
    """Predicts clicks by blocks of masked columns, one after the other or side by side.

    Wang et al. 2021 (arXiv:2102.07619), figure 2. The first block reads the embeddings, each with a
    layer norm; every mask follows from the embeddings as they are. Dense features become vectors by
    an MLP.

    Args:
        embeddings: The tables, all of one width, ``dim``. Each row goes through a layer norm, so
            start with rows of norms about 1: a single update would turn rows near 0 around.
        num_dense: Number of dense features.
        bottom_layer_sizes: Layers of the MLP of the dense features; the last is a multiple of
            ``dim``. Not read without dense features.
        block_sizes: Columns of each `MaskBlock`'s output.
        mask_hidden_size: Hidden columns of each mask's network.
        structure: "serial": each block reads the output of the one before (figure 2, left).
            "parallel": all read the embeddings, and the MLP reads all outputs (right).
        top_layer_sizes: Layers of the MLP on top; the last is 1.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the last layer's arithmetic and of the logits; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: The tables differ in width, there is no block, ``structure`` is unknown, or an
            MLP does not end as given above.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = MaskNet(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...                 bottom_layer_sizes=(16, 8), block_sizes=(16, 16), mask_hidden_size=32,
        ...                 structure="parallel", top_layer_sizes=(16, 1), rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        bottom_layer_sizes: Sequence[int] = (),
        block_sizes: Sequence[int],
        mask_hidden_size: int,
        structure: Literal["serial", "parallel"] = "serial",
        top_layer_sizes: Sequence[int] = (1,),
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if structure not in ("serial", "parallel"):
            raise ValueError(f"structure is 'serial' or 'parallel', got {structure!r}")
        if not block_sizes:
            raise ValueError("block_sizes is empty; give the columns of at least one block")
        check_logit_layer("top_layer_sizes", top_layer_sizes)
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.embeddings = embeddings
        self.structure = structure
        self.vectors = InputVectors(
            "MaskNet",
            embeddings,
            num_dense=num_dense,
            bottom_layer_sizes=bottom_layer_sizes,
            **types,
        )
        self.norms = nnx.List(
            nnx.LayerNorm(self.vectors.dim, **types) for _ in range(self.vectors.count)
        )
        columns = self.vectors.count * self.vectors.dim
        is_serial = structure == "serial"
        inputs = [columns, *(block_sizes[:-1] if is_serial else [columns] * len(block_sizes))]
        self.blocks = nnx.List(
            MaskBlock(columns, size, out, mask_hidden_size=mask_hidden_size, **types)
            for size, out in zip(inputs, block_sizes, strict=False)
        )
        self.top = MLP(
            block_sizes[-1] if is_serial else sum(block_sizes),
            top_layer_sizes,
            activation_on_last=False,
            output_dtype=logit_dtype,
            **types,
        )

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch columns"],
    ) -> Float[Array, " batch"]:
        vectors = self.vectors(dense, embedded)
        instance = vectors.reshape(vectors.shape[0], -1)
        normed = jnp.concatenate(
            [norm(vectors[:, place]) for place, norm in enumerate(self.norms)], axis=1
        )
        if self.structure == "serial":
            hidden = normed
            for block in self.blocks:
                hidden = block(instance, hidden)
        else:
            hidden = jnp.concatenate([block(instance, normed) for block in self.blocks], axis=1)
        return self.top(hidden)[:, 0]
