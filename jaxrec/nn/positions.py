"""Learned weights by an id's position in its bag, and lookups with feature processors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.embed.config import TableConfig
from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray, complete_cumsum, lengths_range
from jaxrec.ragged.arrays import AnyArray, each_device, take
from jaxrec.ragged.offsets import without_padding


def positions_in_rows(column: JaggedArray) -> Int32[Array, "*devices capacity"]:
    """Return the position of each element in its row: 0, 1, 2, ...; 0 at padding.

    A column on a mesh has one more axis in front, over the devices, and so has the result.

    Example:
        >>> positions_in_rows(JaggedArray.from_lists([[7, 8], [], [9]], capacity=4)).tolist()
        [0, 1, 0, 0]
    """
    return each_device(lambda lengths: lengths_range(lengths, column.capacity), column.lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def take_positions(
    vectors: Float[Array, "positions dim"], lengths: Int32[AnyArray, "*devices rows"], capacity: int
) -> Float[Array, "*devices capacity dim"]:
    """Return the vector of each element's position in its row; NaN past the last vector.

    Elements of padding have vector 0, and send it no gradient.
    """
    return _taken(vectors, lengths, capacity)


def _taken(vectors, lengths, capacity):
    places = each_device(lambda lengths: lengths_range(lengths, capacity), lengths)
    return take(vectors, places, fill_value=jnp.nan)


# The gradient of `take` is a scatter. GPUs add it by atomics, in another order on every run, and
# every row adds to the first positions. There each position reads its elements of all rows instead.
def _take_forward(vectors, lengths, capacity):
    # Not `take_positions`: `jax.hessian` differentiates this function in forward mode.
    return _taken(vectors, lengths, capacity), (vectors, lengths)


def _take_backward(capacity, residuals, cotangent):
    vectors, lengths = residuals

    def scattered(lengths: Array, cotangent: Array) -> Array:
        cotangent = without_padding(cotangent, complete_cumsum(lengths))
        places = each_device(lambda lengths: lengths_range(lengths, capacity), lengths)
        _, vjp = jax.vjp(lambda vectors: take(vectors, places), vectors)
        return vjp(cotangent)[0]

    def gathered(lengths: Array, cotangent: Array) -> Array:
        sum_rows = functools.partial(_sum_positions, vectors.shape[0])
        sums = each_device(sum_rows, lengths, cotangent)
        sums = sums if sums.ndim == vectors.ndim else sums.sum(axis=0)
        return sums.astype(vectors.dtype)

    gradient = jax.lax.platform_dependent(lengths, cotangent, cpu=scattered, default=gathered)
    return gradient, None


take_positions.defvjp(_take_forward, _take_backward)


def _sum_positions(
    count: int, lengths: Int32[Array, " rows"], values: Float[Array, "capacity dim"]
) -> Float[Array, "positions dim"]:
    """Return the sum over the rows of each position's elements, for the first ``count`` positions.

    Example: ``[[1], [2], [4]]`` of rows with lengths 2 and 1 give ``[[5], [2]]``.
    """
    place = jnp.arange(count, dtype=jnp.int32)[:, None]
    starts = complete_cumsum(lengths)[None, :-1]
    index = jnp.where(place < lengths[None], starts + place, values.shape[0])
    wide = jnp.promote_types(values.dtype, jnp.float32)
    return jnp.sum(take(values, index), axis=1, dtype=wide)


class PositionWeightedModule(nnx.Module):
    """Weighs each id of a column by a learned weight of its position in its bag.

    TorchRec's module of that name.

    Args:
        max_feature_length: Number of positions.
        param_dtype: Type of the weights; they start as ones.

    Example:
        >>> column = JaggedArray.from_lists([[7, 8], [9]])
        >>> PositionWeightedModule(4)(column).weights.tolist()[:3]
        [1.0, 1.0, 1.0]
    """

    def __init__(self, max_feature_length: int, *, param_dtype: DTypeLike = jnp.float32):
        if max_feature_length < 1:
            raise ValueError(f"max_feature_length is 1 or more, got {max_feature_length}")
        self.position_weight = nnx.Param(jnp.ones(max_feature_length, param_dtype))

    def __call__(self, column: JaggedArray) -> JaggedArray:
        """Return the column with the weights of its positions, times its own weights if any.

        Raises:
            ValueError: A bag is longer than ``max_feature_length``. Under jit the weights past it
                become NaN instead.
        """
        return dataclasses.replace(column, weights=self.weights(column, "the column"))

    def weights(self, column: JaggedArray, name: str) -> Float[Array, "*devices capacity"]:
        """Return the weights of a column's ids; errors call the column ``name``."""
        # Compiled code cannot raise an error. A clipped position would silently train a wrong
        # weight; NaN reaches the loss, where it is seen.
        count = self.position_weight.shape[0]
        if not isinstance(column.lengths, jax.core.Tracer):
            longest = int(np.max(np.asarray(column.lengths), initial=0))
            if longest > count:
                raise ValueError(
                    f"{name} has a bag of {longest} ids, but position weights for {count}; cut the "
                    "bags or give a larger max_feature_length"
                )
        weights = take(self.position_weight[...], positions_in_rows(column), fill_value=jnp.nan)
        if column.weights is None:
            return weights
        return weights * without_padding(column.weights, complete_cumsum(column.lengths))


class PositionWeightedModuleCollection(nnx.Module):
    """Weighs each id of a batch by a learned weight of its position in its bag, key by key.

    A feature processor: a function from batch to batch that runs before a weighted lookup (see
    `FeatureProcessedEmbeddingBagCollection`). TorchRec's module of that name, and its
    PositionWeightedProcessor.

    Args:
        max_feature_lengths: Number of positions by key. Ids of other keys keep their weight, or get
            weight 1 if the batch has no weights.
        param_dtype: Type of the weights; they start as ones.

    Example:
        >>> batch = KeyedJaggedArray.from_lists({"history": [[7, 8], [9]], "user": [[1], [2]]})
        >>> weighted = PositionWeightedModuleCollection({"history": 10})(batch)
        >>> weighted["history"].weights.tolist()[:3]
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self, max_feature_lengths: Mapping[str, int], *, param_dtype: DTypeLike = jnp.float32
    ):
        self.position_weights = nnx.Dict(
            {
                key: PositionWeightedModule(length, param_dtype=param_dtype)
                for key, length in max_feature_lengths.items()
            }
        )

    def __call__(self, features: KeyedJaggedArray) -> KeyedJaggedArray:
        """Return the batch with weights.

        Raises:
            KeyError: The batch lacks a key.
            ValueError: A bag is longer than its key's number of positions. Under jit the weights
                past it become NaN instead.
        """
        if missing := [key for key in self.position_weights if key not in features.keys]:
            raise KeyError(f"the batch lacks {missing}, which have position weights")
        weights = []
        for key, column in features.to_dict().items():
            if key in self.position_weights:
                own = self.position_weights[key].weights(column, f"feature {key!r}")
            elif column.weights is not None:
                own = jnp.asarray(column.weights)
            else:
                own = jnp.ones_like(column.values, jnp.float32)
            weights.append(own.astype(jnp.float32))
        return dataclasses.replace(features, weights=jnp.concatenate(weights, axis=-1))


class FeatureProcessedEmbeddingBagCollection(nnx.Module):
    """A weighted lookup after a feature processor; TorchRec's module of that name.

    Args:
        embeddings: A collection with ``is_weighted=True``.
        processor: Function from batch to batch that sets the weights, such as
            `PositionWeightedModuleCollection`.

    Raises:
        ValueError: The collection is not weighted.

    Example:
        >>> import jaxrec
        >>> embeddings = jaxrec.EmbeddingBagCollection(
        ...     [jaxrec.EmbeddingBagConfig("history", 100, 8)], is_weighted=True, rngs=nnx.Rngs(0))
        >>> module = FeatureProcessedEmbeddingBagCollection(
        ...     embeddings, PositionWeightedModuleCollection({"history": 10}))
        >>> batch = KeyedJaggedArray.from_lists({"history": [[7, 8], [9]]})
        >>> module(batch)["history"].shape
        (2, 8)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        processor: Callable[[KeyedJaggedArray], KeyedJaggedArray],
    ):
        if not embeddings.is_weighted:
            raise ValueError(
                "the collection ignores the weights that feature processors give; make it with "
                "is_weighted=True"
            )
        self.embeddings = embeddings
        self.processor = processor

    @property
    def configs(self) -> tuple[TableConfig, ...]:
        """The tables' configurations, in order."""
        return self.embeddings.configs

    def __call__(self, features: KeyedJaggedArray) -> KeyedArray:
        """Return the pooled embeddings of the processed batch, as `EmbeddingBagCollection` does."""
        return self.embeddings(self.processor(features))
