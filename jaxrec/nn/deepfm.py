"""Factorization machines, and models of a factorization machine and a deep network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import (
    ClickModel,
    check_dense,
    check_logit_layer,
    common_width,
    num_features,
)
from jaxrec.nn.mlp import MLP
from jaxrec.nn.wide_deep import LinearPart
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


def flatten_embeddings(
    embeddings: Sequence[Float[AnyArray, "batch *_"]],
) -> Float[Array, "batch columns"]:
    """Flatten embeddings of ``[batch, ...]`` and concatenate them to ``[batch, columns]``.

    An `MLP` of the result is TorchRec's DeepFM module.

    Raises:
        ValueError: ``embeddings`` is empty.

    Example:
        >>> import jax.numpy as jnp
        >>> flatten_embeddings([jnp.ones((2, 3, 4)), jnp.ones((2, 4))]).shape
        (2, 16)
    """
    if not embeddings:
        raise ValueError("the list of embeddings is empty; give at least one array of [batch, ...]")
    return jnp.concatenate(
        [jnp.asarray(array).reshape(array.shape[0], -1) for array in embeddings], axis=1
    )


class FactorizationMachine(nnx.Module):
    """Sum of the dot products of all pairs of embeddings.

    ``sum_{i<j} v_i . v_j``, computed as ``sum_d ((sum_i v_id)^2 - sum_i v_id^2) / 2``: Rendle 2010,
    "Factorization machines" (ICDM), lemma 3.1, and Guo et al. 2017, "DeepFM: A
    factorization-machine based neural network for CTR prediction" (arXiv:1703.04247), equation 2.

    Args:
        compat: "torchrec" treats every number of the inputs as a feature of width 1, as TorchRec's
            module does: ``((sum x)^2 - sum x^2) / 2`` over all numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> vectors = jnp.array([[[1.0, 2.0], [3.0, 4.0]]])
        >>> FactorizationMachine()([vectors]).tolist()  # 1 * 3 + 2 * 4
        [[11.0]]
        >>> FactorizationMachine(compat="torchrec")([vectors]).tolist()
        [[35.0]]
    """

    def __init__(self, *, compat: Literal["torchrec"] | None = None):
        self.compat = compat

    def __call__(
        self, embeddings: Sequence[Float[AnyArray, "batch *_"]]
    ) -> Float[Array, "batch 1"]:
        """Return the second-order term of each sample.

        Args:
            embeddings: Arrays of ``[batch, dim]`` (one feature) or ``[batch, features, dim]``. With
                ``compat="torchrec"`` arrays of any widths and ranks.

        Returns:
            ``[batch, 1]``; sums are computed in float32 or wider.

        Raises:
            ValueError: ``embeddings`` is empty, or the arrays differ in ``dim``.
        """
        if self.compat == "torchrec":
            vectors = flatten_embeddings(embeddings)[:, :, None]
        else:
            vectors = _stack(embeddings)
        # The square of the sum has every pair twice and every square once. So two sums replace n^2
        # products. Their difference is much smaller than they are, and 16 bits would lose it.
        wide = vectors.astype(jnp.promote_types(vectors.dtype, jnp.float32))
        total = wide.sum(axis=1)
        pairs = (total * total - (wide * wide).sum(axis=1)) / 2
        return pairs.sum(axis=1, keepdims=True).astype(vectors.dtype)


def _stack(embeddings: Sequence[Float[AnyArray, "batch *_"]]) -> Float[Array, "batch n dim"]:
    shapes = [array.shape for array in embeddings]
    if not shapes or len({shape[-1] for shape in shapes}) > 1 or {len(s) for s in shapes} - {2, 3}:
        raise ValueError(
            "embeddings are [batch, dim] or [batch, features, dim] with one dim, "
            f"got the shapes {shapes}"
        )
    return jnp.concatenate(
        [jnp.asarray(array).reshape(array.shape[0], -1, array.shape[-1]) for array in embeddings],
        axis=1,
    )


class DeepFM(ClickModel):
    """Predicts clicks with a factorization machine and a deep network over the same embeddings.

    ``logit = linear(x) + sum_{i<j} v_i . v_j + MLP(v_1, ..., v_n)``: Guo et al. 2017, "DeepFM: A
    factorization-machine based neural network for CTR prediction" (arXiv:1703.04247), equations 1
    to 4. A dense feature has an embedding too, which is multiplied by its value.

    TorchRec's module of the same name is only the deep network: `MLP` over `flatten_embeddings`.

    Args:
        embeddings: Tables of the embeddings ``v``, all of one width, ``dim``.
        linear: Tables of width 1 for the same features: the weights of the linear part.
        num_dense: Number of dense features.
        deep_layer_sizes: Layers of the deep network, at least two; the last is 1.
        dropout_rate: Share of the deep network's hidden units that is dropped in training.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the logits and of the three terms; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values, and of dropout.

    Raises:
        ValueError: Tables differ in width, a table of the linear part is wider than 1, or the deep
            network does not end with 1 or has no hidden layer.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> def collection(prefix, dim):
        ...     return jaxrec.EmbeddingBagCollection(
        ...         [jaxrec.EmbeddingBagConfig(f"{prefix}_{name}", 100, dim, feature_names=[name])
        ...          for name in ("user", "item")], rngs=rngs)
        >>> model = DeepFM(
        ...     collection("v", 8), collection("w", 1), deep_layer_sizes=(16, 1), rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(None, ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        linear: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        deep_layer_sizes: Sequence[int],
        dropout_rate: float = 0.0,
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_logit_layer("deep_layer_sizes", deep_layer_sizes)
        logit_dtype = dtype if logit_dtype is None else logit_dtype
        self.dim = common_width("DeepFM", embeddings.configs)
        self.embeddings = embeddings
        self.linear = LinearPart(
            linear, num_dense=num_dense, dtype=logit_dtype, param_dtype=param_dtype, rngs=rngs
        )
        # Small, since the products of all pairs of dense features add up: with a squared norm of 1,
        # standardized features would begin with log-odds of -10 to 10.
        self.dense_embeddings = nnx.data(
            nnx.Param(
                nnx.initializers.normal(0.01)(rngs.params(), (num_dense, self.dim), param_dtype)
            )
            if num_dense
            else None
        )
        self.interaction = FactorizationMachine()
        # The last layer is a head of its own, since it computes in the logits' type.
        self.deep = MLP(
            (num_features(embeddings) + num_dense) * self.dim,
            deep_layer_sizes[:-1],
            activation=_relu_and_dropout(dropout_rate, rngs),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.head = nnx.Linear(
            deep_layer_sizes[-2], 1, dtype=logit_dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.dtype = dtype
        self.logit_dtype = logit_dtype

    def lookup(
        self, features: KeyedJaggedArray
    ) -> tuple[Float[Array, "batch tables"], Float[Array, "batch columns"]]:
        """Return the linear part's weights and the pooled embeddings, which `logits` takes."""
        return self.linear.lookup(features), jnp.asarray(self.embeddings(features).values)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: tuple[Float[Array, "batch tables"], Float[Array, "batch columns"]],
    ) -> Float[Array, " batch"]:
        weights, pooled = embedded
        linear = self.linear.logits(dense, weights)
        # All tables have one width, so the pooled columns are the features' vectors side by side.
        fields = pooled.reshape(pooled.shape[0], -1, self.dim)
        if self.dense_embeddings is not None:
            values, vectors, fields = promote(self.dtype, dense, self.dense_embeddings[...], fields)
            fields = jnp.concatenate([fields, values[:, :, None] * vectors[None]], axis=1)
        deep = self.head(self.deep(flatten_embeddings([fields])))[:, 0]
        # The machine's sums can be large and cancel, so they are computed in the logits' type.
        (fields,) = promote(self.logit_dtype, fields)
        return linear + self.interaction([fields])[:, 0] + deep


def _relu_and_dropout(rate: float, rngs: nnx.Rngs) -> Callable[[Array], Array]:
    if rate == 0:
        return nnx.relu
    return nnx.Sequential(nnx.relu, nnx.Dropout(rate, rngs=rngs))


class FMInteractionArch(nnx.Module):
    """Concatenates the dense vector, a deep network's output and a factorization machine's.

    Both see all vectors. TorchRec's module of that name, the interaction of `SimpleDeepFMNN`.

    Args:
        in_features: Columns of all vectors together, the dense one included.
        deep_fm_dimension: Columns of the deep network's output.
        compat: As for `FactorizationMachine`.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernel's first values.

    Example:
        >>> import jax.numpy as jnp
        >>> arch = FMInteractionArch(27 * 16, 5, rngs=nnx.Rngs(0))
        >>> arch(jnp.ones((4, 16)), jnp.ones((4, 26, 16))).shape
        (4, 22)
    """

    def __init__(
        self,
        in_features: int,
        deep_fm_dimension: int,
        *,
        compat: Literal["torchrec"] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.deep = MLP(
            in_features, (deep_fm_dimension,), dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.fm = FactorizationMachine(compat=compat)
        self.dtype = dtype

    def __call__(
        self, dense: Float[Array, "batch dim"], sparse: Float[Array, "batch features dim"]
    ) -> Float[Array, "batch columns"]:
        """Combine ``[batch, dim]`` and ``[batch, features, dim]``.

        Returns:
            ``[batch, dim + deep_fm_dimension + 1]``.
        """
        dense, sparse = promote(self.dtype, dense, sparse)
        vectors = [dense, sparse]
        deep = self.deep(flatten_embeddings(vectors))
        return jnp.concatenate([dense, deep, self.fm(vectors)], axis=1)


class SimpleDeepFMNN(ClickModel):
    """Predicts clicks from dense features and bags of ids, with a factorization machine.

    TorchRec's model of that name: two layers embed the dense features, `FMInteractionArch` combines
    them with the tables' vectors, and one layer computes the logit. It is a variant of Guo et al.
    2017 (arXiv:1703.04247); `DeepFM` is the paper's model.

    Args:
        embeddings: The tables, all of one width, ``dim``.
        num_dense: Number of dense features.
        hidden_layer_size: Columns of the first dense layer; the second has ``dim``.
        deep_fm_dimension: Columns of the deep network's output.
        compat: "torchrec" makes the model return probabilities, as TorchRec's does although it
            documents logits, and is passed to `FactorizationMachine`.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: The tables differ in width.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = SimpleDeepFMNN(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...                        hidden_layer_size=16, deep_fm_dimension=4, rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int,
        hidden_layer_size: int,
        deep_fm_dimension: int,
        compat: Literal["torchrec"] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.dim = common_width("SimpleDeepFMNN", embeddings.configs)
        self.num_dense = num_dense
        self.compat = compat
        self.embeddings = embeddings
        self.dense_arch = MLP(num_dense, (hidden_layer_size, self.dim), **types)
        self.interaction = FMInteractionArch(
            (num_features(embeddings) + 1) * self.dim, deep_fm_dimension, compat=compat, **types
        )
        self.head = nnx.Linear(self.dim + deep_fm_dimension + 1, 1, **types)

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"] | None, features: KeyedJaggedArray
    ) -> Float[Array, " batch"]:
        """Return the logits of a batch, ``[batch]``; probabilities with ``compat="torchrec"``."""
        logits = super().__call__(dense, features)
        return nnx.sigmoid(logits) if self.compat == "torchrec" else logits

    def logits(
        self, dense: Float[AnyArray, "batch num_dense"], embedded: Float[Array, "batch columns"]
    ) -> Float[Array, " batch"]:
        check_dense(dense, self.num_dense, embedded.shape[0])
        sparse = embedded.reshape(embedded.shape[0], -1, self.dim)
        return self.head(self.interaction(self.dense_arch(dense), sparse))[:, 0]
