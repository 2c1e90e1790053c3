"""Retrieval: losses that rank a positive above negatives, and the two-tower model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray, on_auto_axes


def sampled_softmax_loss(
    queries: Float[AnyArray, "*devices n dim"],
    positives: Float[AnyArray, "*devices n dim"],
    negatives: Float[AnyArray, "*devices m dim"],
    *,
    positive_log_q: Float[AnyArray, "*devices n"] | None = None,
    negative_log_q: Float[AnyArray, "*devices m"] | None = None,
    positive_ids: Int[AnyArray, "*devices n"] | None = None,
    negative_ids: Int[AnyArray, "*devices m"] | None = None,
    temperature: float = 1.0,
) -> Float[Array, "*devices n"]:
    """Return the cross-entropy of each positive among itself and the sampled negatives.

    ``-log(exp(s_+) / (exp(s_+) + sum_j exp(s_j)))`` with ``s = query . candidate / temperature``.
    If negatives are drawn from a distribution ``q``, give ``log_q``: ``s - log q`` then takes the
    place of ``s``, and the gradient approximates that of the softmax over all candidates. Bengio
    and Senecal 2008, "Adaptive importance sampling to accelerate training of a neural probabilistic
    language model"; Yi et al. 2019, "Sampling-bias-corrected neural modeling for large corpus item
    recommendations", equation 3.

    Args:
        queries: ``[n, dim]``.
        positives: ``[n, dim]`` the positive candidate of each query.
        negatives: ``[m, dim]`` candidates that all queries share.
        positive_log_q: ``[n]`` logarithms of the positives' sampling probabilities; a constant may
            be added to all ``log_q``. None: not corrected.
        negative_log_q: ``[m]`` the same for the negatives.
        positive_ids: ``[n]`` ids of the positives. With ``negative_ids``, a query ignores negatives
            with the id of its positive.
        negative_ids: ``[m]`` ids of the negatives.
        temperature: Divides the scores.

    Returns:
        ``[n]`` losses, in float32 or wider. On a mesh all arrays have one more axis in front.

    Raises:
        ValueError: Only one of the ``log_q`` or of the ids is given.

    Example:
        >>> import jax.numpy as jnp
        >>> query = jnp.array([[1.0, 0.0]])
        >>> negatives = jnp.array([[0.0, 1.0], [1.0, 0.0]])
        >>> sampled_softmax_loss(query, query, negatives).round(3).tolist()  # log(2 + 1/e)
        [0.862...]
    """
    for name, pair in (
        ("log_q", (positive_log_q, negative_log_q)),
        ("ids", (positive_ids, negative_ids)),
    ):
        if (pair[0] is None) != (pair[1] is None):
            raise ValueError(f"positive_{name} and negative_{name} come together")
    wide = jnp.promote_types(jnp.result_type(queries, positives, negatives), jnp.float32)
    of_positives = jnp.einsum("...nd,...nd->...n", queries, positives, preferred_element_type=wide)
    of_negatives = jnp.einsum("...nd,...md->...nm", queries, negatives, preferred_element_type=wide)
    of_positives, of_negatives = of_positives / temperature, of_negatives / temperature
    if positive_log_q is not None and negative_log_q is not None:
        of_positives = of_positives - positive_log_q
        of_negatives = of_negatives - jnp.asarray(negative_log_q)[..., None, :]
    if positive_ids is not None and negative_ids is not None:
        same = jnp.asarray(positive_ids)[..., :, None] == jnp.asarray(negative_ids)[..., None, :]
        # Shapes are static, so a negative cannot be removed; its weight in the sum becomes zero.
        of_negatives = jnp.where(same, -jnp.inf, of_negatives)
    scores = jnp.concatenate([of_positives[..., None], of_negatives], axis=-1)
    return jax.nn.logsumexp(scores, axis=-1) - of_positives


def in_batch_softmax_loss(
    queries: Float[AnyArray, "batch dim"],
    candidates: Float[AnyArray, "batch dim"],
    *,
    log_q: Float[AnyArray, " batch"] | None = None,
    ids: Int[AnyArray, " batch"] | None = None,
    hard_negatives: Float[AnyArray, "batch k dim"] | None = None,
    temperature: float = 1.0,
) -> Float[Array, " batch"]:
    """Return the cross-entropy of each query's candidate among all candidates of the batch.

    The candidates of other samples are the negatives. Popular candidates are negatives more often,
    which ``log_q`` corrects: Yi et al. 2019, "Sampling-bias-corrected neural modeling for large
    corpus item recommendations" (RecSys), equation 3.

    Args:
        queries: ``[batch, dim]``.
        candidates: ``[batch, dim]``; row ``b`` is the positive of query ``b``.
        log_q: ``[batch]`` logarithms of the candidates' shares of the data; a constant may be added
            to all. None: not corrected.
        ids: ``[batch]`` ids of the candidates. A query ignores other samples' candidates with the
            id of its own.
        hard_negatives: ``[batch, k, dim]`` further negatives of each query, such as wrong
            candidates that rank high. Only their own query's softmax has them, without correction,
            since their ``q`` is unknown.
        temperature: Divides the scores.

    Returns:
        ``[batch]`` losses, in float32 or wider. On a mesh the whole batch is in the softmax.

    Example:
        >>> import jax.numpy as jnp
        >>> vectors = jnp.eye(2)
        >>> in_batch_softmax_loss(vectors, vectors).round(3).tolist()  # log(1 + 1/e)
        [0.313..., 0.313...]
    """
    # Every device's queries meet every device's candidates, so XLA has to gather the candidates:
    # over Explicit axes JAX would refuse that product.
    losses = functools.partial(_in_batch_losses, temperature=temperature)
    return on_auto_axes(losses, queries, candidates, log_q, ids, hard_negatives)


def _in_batch_losses(
    queries: AnyArray,
    candidates: AnyArray,
    log_q: AnyArray | None,
    ids: AnyArray | None,
    hard_negatives: AnyArray | None,
    *,
    temperature: float,
) -> Float[Array, " batch"]:
    wide = jnp.promote_types(jnp.result_type(queries, candidates), jnp.float32)
    scores = jnp.einsum("nd,md->nm", queries, candidates, preferred_element_type=wide) / temperature
    if log_q is not None:
        scores = scores - jnp.asarray(log_q)[None]
    # Each query's own score. Below, equal ids are masked off the diagonal only.
    own = jnp.einsum("nd,nd->n", queries, candidates, preferred_element_type=wide) / temperature
    if log_q is not None:
        own = own - log_q
    if ids is not None:
        ids = jnp.asarray(ids)
        others = ~jnp.eye(ids.shape[0], dtype=bool)
        scores = jnp.where((ids[:, None] == ids[None, :]) & others, -jnp.inf, scores)
    if hard_negatives is not None:
        hard = jnp.einsum("nd,nkd->nk", queries, hard_negatives, preferred_element_type=wide)
        scores = jnp.concatenate([scores, hard / temperature], axis=1)
    return jax.nn.logsumexp(scores, axis=1) - own


class TwoTower(nnx.Module):
    """A tower for queries and a tower for candidates; a score is the dot product of their outputs.

    So candidates' vectors can be computed ahead and searched by an index of nearest neighbours.
    Covington et al. 2016, "Deep neural networks for YouTube recommendations" (RecSys); Yi et al.
    2019, "Sampling-bias-corrected neural modeling for large corpus item recommendations" (RecSys),
    section 4.

    Args:
        query: Function from a batch to ``[batch, dim]``, such as `EmbeddingTower`.
        candidate: The same for candidates, with the same ``dim``.
        normalize: Whether vectors are scaled to length 1; use a temperature in the loss then. A
            vector of zeros stays zero.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> def tower(name):
        ...     tables = [jaxrec.EmbeddingBagConfig(name, 100, 8)]
        ...     embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        ...     mlp = jaxrec.nn.MLP(8, (16, 4), activation_on_last=False, rngs=rngs)
        ...     return jaxrec.nn.EmbeddingTower(embeddings, mlp)
        >>> model = TwoTower(tower("user"), tower("item"))
        >>> ids = KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3], [4]]})
        >>> queries, candidates = model(ids)
        >>> in_batch_softmax_loss(queries, candidates, temperature=0.1).shape
        (2,)
    """

    def __init__(
        self,
        query: Callable[[KeyedJaggedArray], Array],
        candidate: Callable[[KeyedJaggedArray], Array],
        *,
        normalize: bool = True,
    ):
        self.query_tower = query
        self.candidate_tower = candidate
        self.normalize = normalize

    def __call__(
        self, features: KeyedJaggedArray
    ) -> tuple[Float[Array, "batch dim"], Float[Array, "batch dim"]]:
        """Return the vectors of a batch's queries and candidates, ``[batch, dim]`` each."""
        return self.query(features), self.candidate(features)

    def query(self, features: KeyedJaggedArray) -> Float[Array, "batch dim"]:
        """Return the vectors of the queries, ``[batch, dim]``."""
        return self._scaled(self.query_tower(features))

    def candidate(self, features: KeyedJaggedArray) -> Float[Array, "batch dim"]:
        """Return the vectors of the candidates, ``[batch, dim]``."""
        return self._scaled(self.candidate_tower(features))

    def _scaled(self, vectors: Any) -> Array:
        if not self.normalize:
            return vectors
        wide = vectors.astype(jnp.promote_types(vectors.dtype, jnp.float32))
        # A vector of zeros (of an empty bag, say) has no direction. It stays, and gets no gradient;
        # the inner `where` keeps the square root's infinite one out.
        squares = (wide * wide).sum(axis=1, keepdims=True)
        length = jnp.sqrt(jnp.where(squares > 0, squares, 1))
        return jnp.where(squares > 0, wide / length, 0).astype(vectors.dtype)
