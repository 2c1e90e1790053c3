"""Full ranking: the rank of each wanted item among all items, and the metrics of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrec.train.models.kind import LOSS, Measure, ModelKind

# Number of ranks that count.
K = 10

# Largest number of scores that are computed at once.
_SCORES = 1 << 24


class RankingModel(ModelKind):
    """A model that ranks all items for each held-out row, by dot products of vectors.

    The loss's output ``sums`` has the number of samples, the sum of their losses and that of their
    weights.
    """

    @property
    def measures(self) -> tuple[Measure, ...]:
        return (
            Measure(f"ndcg@{K}", f"NDCG@{K}", "max"),
            Measure(f"recall@{K}", f"recall@{K}", "max"),
            Measure("mrr", "MRR", "max"),
        )

    def running_values(
        self, sums: Float[np.ndarray, " n"], samples: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, float]:
        _, loss, weights = sums.tolist()
        return {LOSS.name: loss / weights if weights else float("nan")}

    def refuse_export(self) -> str | None:
        return (
            f"model.name {self.name} ranks items, and exported models predict each row by itself; "
            "load it in a program, by jaxrec.train.load_model"
        )


def full_ranks(
    queries: Float[np.ndarray, "queries dim"],
    items: Float[np.ndarray, "items dim"],
    wanted: Int[np.ndarray, " queries"],
    left_out: Callable[[slice], Sequence[np.ndarray]] | None = None,
) -> Int[np.ndarray, " queries"]:
    """Return the rank of each query's item among all items, from 1.

    Items are ranked by the dot product with the query; those with the score of the wanted item rank
    before it. ``wanted`` are rows of ``items``; -1 is an item that is not among them, and ranks
    last, after all items. ``left_out`` returns for each query of a slice the rows of items that are
    not ranked, apart from the wanted one; None: all items are ranked.
    """
    each = max(1, _SCORES // max(len(items), 1))
    placed = jnp.asarray(items)
    ranks = [np.zeros(0, np.int64)]
    for start in range(0, len(queries), each):
        part = slice(start, start + each)
        # The last part is padded, so that one program serves all.
        padding = max(0, start + each - len(queries)) if start else 0
        query = np.pad(queries[part], [(0, padding), (0, 0)])
        item = np.pad(wanted[part], (0, padding))
        not_ranked = left_out(part) if left_out else ()
        # A power of two, for few programs. JAX drops what is written beyond the last item.
        width = 1 << (max([1, *map(len, not_ranked)]) - 1).bit_length()
        others = np.full((len(query), width), len(items), np.int32)
        for row, own in enumerate(not_ranked):
            others[row, : len(own)] = np.where(own == item[row], len(items), own)
        ranks.append(np.asarray(_ranks(query, placed, item, others))[: len(wanted[part])])
    return np.where(wanted < 0, len(items) + 1, np.concatenate(ranks))


@jax.jit
def _ranks(queries: Array, items: Array, wanted: Array, left_out: Array) -> Array:
    scores = queries @ items.T
    own = jnp.take_along_axis(scores, jnp.maximum(wanted, 0)[:, None], axis=1)
    scores = scores.at[jnp.arange(len(queries))[:, None], left_out].set(-jnp.inf, mode="drop")
    # "Not lower" and not ">=": a model whose scores are NaN must not look good.
    return (~(scores < own)).sum(axis=1)


def rank_values(
    ranks: Int[np.ndarray, " queries"], weights: Float[np.ndarray, " queries"]
) -> dict[str, float]:
    """Return recall, NDCG and MRR of the ranks of one wanted item of each query.

    ``recall@k`` is the share of ranks up to ``k``; ``ndcg@k`` the mean of ``1 / log2(rank + 1)`` of
    these, 0 for others; ``mrr`` the mean of ``1 / rank`` (Sun et al. 2019, arXiv:1904.06690,
    section 4.2).
    """
    is_hit = ranks <= K
    values = {
        f"ndcg@{K}": is_hit / np.log2(ranks + 1.0),
        f"recall@{K}": is_hit.astype(np.float64),
        "mrr": 1.0 / ranks,
    }
    total = weights.sum()
    return {
        name: float((weights * each).sum() / total) if total else float("nan")
        for name, each in values.items()
    }
