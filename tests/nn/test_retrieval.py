"""Softmax losses are the formulas in float64; two towers meet in a dot product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.nn import EmbeddingTower, TwoTower, in_batch_softmax_loss, sampled_softmax_loss

N, M, DIM, HARD = 5, 7, 4, 2


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cross_entropy(own, others):
    """Of one score against itself and others, in float64."""
    scores = np.array([own, *others], np.float64)
    return np.log(np.exp(scores - own).sum())


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "logq"])
@pytest.mark.parametrize("with_ids", [False, True], ids=["no-ids", "ids"])
def test_sampled_softmax(corrected, with_ids):
    queries, positives, negatives = draw(N, DIM), draw(N, DIM, seed=1), draw(M, DIM, seed=2)
    log_q = [-np.abs(draw(size, seed=3)) for size in (N, M)] if corrected else [None, None]
    ids = [np.arange(N, dtype=np.int32), np.arange(M, dtype=np.int32) + 3]
    given = {}
    if corrected:
        given |= {"positive_log_q": log_q[0], "negative_log_q": log_q[1]}
    if with_ids:
        given |= {"positive_ids": ids[0], "negative_ids": ids[1]}
    found = sampled_softmax_loss(queries, positives, negatives, temperature=0.5, **given)
    for n in range(N):
        own = queries[n] @ positives[n] / 0.5 - (log_q[0][n] if corrected else 0)
        others = [
            queries[n] @ negatives[m] / 0.5 - (log_q[1][m] if corrected else 0)
            for m in range(M)
            if not (with_ids and ids[0][n] == ids[1][m])
        ]
        np.testing.assert_allclose(found[n], cross_entropy(own, others), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hard", [False, True], ids=["in-batch", "hard-negatives"])
def test_in_batch_softmax(hard):
    queries, candidates = draw(N, DIM), draw(N, DIM, seed=1)
    log_q, ids = -np.abs(draw(N, seed=2)), np.array([4, 9, 4, 1, 2], np.int32)
    negatives = draw(N, HARD, DIM, seed=3) if hard else None
    found = in_batch_softmax_loss(
        queries, candidates, log_q=log_q, ids=ids, hard_negatives=negatives, temperature=0.2
    )
    for n in range(N):
        own = queries[n] @ candidates[n] / 0.2 - log_q[n]
        others = [queries[n] @ candidates[m] / 0.2 - log_q[m] for m in range(N) if ids[m] != ids[n]]
        if hard:
            others += [queries[n] @ negatives[n, k] / 0.2 for k in range(HARD)]
        np.testing.assert_allclose(found[n], cross_entropy(own, others), rtol=1e-5, atol=1e-6)


def test_logq_makes_the_gradient_that_of_all_candidates():
    """Over many draws with q, the corrected gradient is near the full softmax's; without, not."""
    rng, items = np.random.default_rng(0), draw(30, DIM, seed=1)
    q = rng.dirichlet(np.full(30, 0.3)) * 0.9 + 0.1 / 30
    query, positive = draw(1, DIM, seed=2), items[:1]

    def full(query):
        scores = (query @ items.T)[0]
        return jax.nn.logsumexp(scores) - scores[0]

    drawn = rng.choice(30, (400, 200), p=q)

    def sampled(query, ids, log_q, with_log_q):
        # The positive is in the full sum once, and so are log(200 q) draws of each candidate.
        given = (
            {"positive_log_q": jnp.zeros(1), "negative_log_q": log_q[ids] + np.log(200)}
            if with_log_q
            else {}
        )
        return sampled_softmax_loss(
            query,
            positive,
            jnp.asarray(items)[ids],
            positive_ids=jnp.zeros(1, jnp.int32),
            negative_ids=ids.astype(jnp.int32),
            **given,
        )[0]

    expected = jax.grad(full)(jnp.asarray(query))
    log_q = jnp.asarray(np.log(q), jnp.float32)
    distances = {}
    for with_log_q in (True, False):
        of_draw = jax.grad(lambda x, ids, on=with_log_q: sampled(x, ids, log_q, on))
        mean = jax.jit(jax.vmap(of_draw, in_axes=(None, 0)))(query, drawn).mean(0)
        distances[with_log_q] = float(np.abs(mean - expected).max())
    assert distances[True] < 0.05 < 0.2 < distances[False]


def test_halves_of_a_pair():
    x = draw(2, DIM)
    with pytest.raises(ValueError, match="positive_log_q and negative_log_q come together"):
        sampled_softmax_loss(x, x, x, positive_log_q=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="positive_ids and negative_ids come together"):
        sampled_softmax_loss(x, x, x, negative_ids=np.zeros(2, np.int32))


def two_tower(normalize):
    rngs = nnx.Rngs(0)

    def tower(name):
        tables = [jaxrec.EmbeddingBagConfig(name, 10, DIM)]
        return EmbeddingTower(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), lambda x: 3 * x)

    return TwoTower(tower("user"), tower("item"), normalize=normalize)


def test_towers_are_separate_and_normalized():
    ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], []], "item": [[3], [4, 5]]})
    model = two_tower(normalize=True)
    queries, candidates = model(ids)
    np.testing.assert_allclose(np.linalg.norm(candidates, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(queries[1], 0)  # an empty bag has no direction
    rows = np.asarray(model.candidate_tower.embeddings.table("item"), np.float64)
    expected = rows[4] + rows[5]
    np.testing.assert_allclose(candidates[1], expected / np.linalg.norm(expected), rtol=1e-5)
    np.testing.assert_array_equal(model.candidate(ids), candidates)
    plain, _ = two_tower(normalize=False)(ids)
    np.testing.assert_allclose(plain[0], 3 * model.query_tower.embeddings.table("user")[1])
