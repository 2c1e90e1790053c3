"""Models that put a factorization machine beside a deep network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.click_model import common_width, num_features
from jaxrec.nn.dense import check_dense
from jaxrec.nn.dtypes import promote
from jaxrec.nn.factorization import FactorizationMachine, flatten_embeddings
from jaxrec.nn.linear import LinearPart
from jaxrec.nn.mlp import MLP, check_logit_layer
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class DeepFM(nnx.Module):
    """Predicts clicks by a factorization machine and a deep network over the same embeddings.

    ``logit = linear(x) + sum_{i<j} v_i . v_j + MLP(v_1, ..., v_n)``: Guo et al. 2017, "DeepFM: A
    factorization-machine based neural network for CTR prediction" (arXiv:1703.04247), equations 1
    to 4. A dense feature is a field whose embedding is scaled by its value.

    TorchRec's module of the same name is the deep network alone: `MLP` over `flatten_embeddings`.

    Args:
        embeddings: The tables of the fields' embeddings ``v``, all of one width, ``dim``.
        linear: Tables of width 1 for the same features: the weights of the linear part.
        num_dense: Number of dense features.
        deep_layer_sizes: Layers of the deep network; the last is 1.
        dropout_rate: Share of the deep network's hidden units that is dropped in training.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the logits and of the terms that they are the sum of; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values, and of dropout.

    Raises:
        ValueError: Tables differ in width, a table of the linear part is wider than 1, or the deep
            network does not end with 1.

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
        self.dense_embeddings = nnx.data(
            nnx.Param(
                nnx.initializers.normal(self.dim**-0.5)(
                    rngs.params(), (num_dense, self.dim), param_dtype
                )
            )
            if num_dense
            else None
        )
        self.interaction = FactorizationMachine()
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
            ValueError: ``dense`` is missing, or given to a model that has none.
        """
        return self.logits(dense, self.look_up(features))

    def look_up(
        self, features: KeyedJaggedArray
    ) -> tuple[Float[Array, "batch tables"], Float[Array, "batch columns"]]:
        """Return the linear part's weights and the pooled embeddings, which `logits` takes."""
        return self.linear.look_up(features), jnp.asarray(self.embeddings(features).values)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: tuple[Float[Array, "batch tables"], Float[Array, "batch columns"]],
    ) -> Float[Array, " batch"]:
        """Return the logits of samples whose embeddings are looked up.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            embedded: Result of `look_up`, or some rows of it (`sum_in_chunks`).

        Raises:
            ValueError: As for calls of the model.
        """
        weights, pooled = embedded
        linear = self.linear.logits(dense, weights)
        fields = pooled.reshape(pooled.shape[0], -1, self.dim)
        if self.dense_embeddings is not None:
            values, vectors, fields = promote(self.dtype, dense, self.dense_embeddings[...], fields)
            fields = jnp.concatenate([fields, values[:, :, None] * vectors[None]], axis=1)
        deep = self.head(self.deep(flatten_embeddings([fields])))[:, 0]
        (fields,) = promote(self.logit_dtype, fields)
        return linear + self.interaction([fields])[:, 0] + deep


def _relu_and_dropout(rate: float, rngs: nnx.Rngs) -> Callable[[Array], Array]:
    if rate == 0:
        return nnx.relu
    return nnx.Sequential(nnx.relu, nnx.Dropout(rate, rngs=rngs))


class FMInteractionArch(nnx.Module):
    """The dense vector, a deep network over all vectors, and their factorization machine.

    TorchRec's module of that name, with which `SimpleDeepFMNN` combines a sample's vectors.

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


class SimpleDeepFMNN(nnx.Module):
    """Predicts clicks from dense features and bags of ids, with a factorization machine.

    TorchRec's model of that name: two layers embed the dense features, `FMInteractionArch` combines
    them with the tables' vectors, and one layer makes a logit of it. Guo et al. 2017
    (arXiv:1703.04247) is its source; `DeepFM` follows the paper.

    Args:
        embeddings: The tables, all of one width, ``dim``.
        num_dense: Number of dense features.
        hidden_layer_size: Columns of the first dense layer; the second has ``dim``.
        deep_fm_dimension: Columns of the deep network's output.
        compat: "torchrec" takes the factorization machine over flattened numbers (see
            `FactorizationMachine`), and returns probabilities, as TorchRec's model does although
            it documents logits.
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
        self.dim = common_width("SimpleDeepFMNN", embeddings.configs)
        self.num_dense = num_dense
        self.compat = compat
        self.embeddings = embeddings
        self.dense_arch = MLP(
            num_dense,
            (hidden_layer_size, self.dim),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.interaction = FMInteractionArch(
            (num_features(embeddings) + 1) * self.dim,
            deep_fm_dimension,
            compat=compat,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.head = nnx.Linear(
            self.dim + deep_fm_dimension + 1, 1, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"], features: KeyedJaggedArray
    ) -> Float[Array, " batch"]:
        """Return the logits of a batch.

        Args:
            dense: ``[batch, num_dense]`` dense features.
            features: The batch's ids, of every feature that the tables read.

        Returns:
            ``[batch]`` logits, or probabilities with ``compat="torchrec"``.

        Raises:
            ValueError: ``dense`` has another number of columns, or of samples than the ids.
        """
        logits = self.logits(dense, self.look_up(features))
        return nnx.sigmoid(logits) if self.compat == "torchrec" else logits

    def look_up(self, features: KeyedJaggedArray) -> Float[Array, "batch columns"]:
        """Return the pooled embeddings of a batch, which `logits` takes."""
        return jnp.asarray(self.embeddings(features).values)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"],
        embedded: Float[Array, "batch columns"],
    ) -> Float[Array, " batch"]:
        """Return the logits of samples whose embeddings are looked up, whatever ``compat`` is.

        Args:
            dense: ``[batch, num_dense]`` dense features.
            embedded: Result of `look_up`, or some rows of it (`sum_in_chunks`).

        Raises:
            ValueError: As for calls of the model.
        """
        check_dense(dense, self.num_dense, embedded.shape[0])
        sparse = embedded.reshape(embedded.shape[0], -1, self.dim)
        return self.head(self.interaction(self.dense_arch(dense), sparse))[:, 0]
