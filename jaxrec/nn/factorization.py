"""The factorization machine: all pairs of features, through their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.ragged.arrays import AnyArray


def flatten_embeddings(
    embeddings: Sequence[Float[AnyArray, "batch *_"]],
) -> Float[Array, "batch columns"]:
    """Concatenate embeddings of ``[batch, ...]``, flattened, into one ``[batch, columns]``.

    An `MLP` of it is TorchRec's DeepFM module, the deep half of that model.

    Raises:
        ValueError: There are none.

    Example:
        >>> import jax.numpy as jnp
        >>> flatten_embeddings([jnp.ones((2, 3, 4)), jnp.ones((2, 4))]).shape
        (2, 16)
    """
    if not embeddings:
        raise ValueError("there are no embeddings; give at least one array of [batch, ...]")
    return jnp.concatenate(
        [jnp.asarray(array).reshape(array.shape[0], -1) for array in embeddings], axis=1
    )


class FactorizationMachine(nnx.Module):
    """The sum over all pairs of features of the dot products of their embeddings.

    ``sum_{i<j} v_i . v_j``, computed as ``sum_d ((sum_i v_id)^2 - sum_i v_id^2) / 2``: Rendle 2010,
    "Factorization machines" (ICDM), lemma 3.1, and Guo et al. 2017, "DeepFM: A
    factorization-machine based neural network for CTR prediction" (arXiv:1703.04247), equation 2.

    Args:
        compat: "torchrec" takes every number of the inputs for a feature of one dimension, as
            TorchRec's module does: ``((sum x)^2 - sum x^2) / 2`` over all of them.

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
            embeddings: Arrays of ``[batch, dim]``, one feature, or ``[batch, features, dim]``.

        Returns:
            ``[batch, 1]``; sums are taken in float32 or wider.

        Raises:
            ValueError: There are none, or they differ in ``dim`` (with ``compat="torchrec"`` they
                may, and have any rank).
        """
        if self.compat == "torchrec":
            vectors = flatten_embeddings(embeddings)[:, :, None]
        else:
            vectors = _stack(embeddings)
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
