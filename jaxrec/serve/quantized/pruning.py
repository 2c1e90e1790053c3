"""Rules that choose the rows of a table to prune: the smallest ones, or those used least."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxrec.embed.store import TableStore
from jaxrec.embed.taps import tapped_modules
from jaxrec.ragged import KeyedJaggedArray


@dataclasses.dataclass(frozen=True, eq=False)
class Pruning(abc.ABC):
    """Rule that chooses the rows of a table to prune, by a score of each row.

    Attributes:
        share: Share of the rows to prune, those of the lowest scores; None: ``threshold`` decides.
        threshold: Largest score of a pruned row; None: ``share`` decides.
    """

    share: float | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.threshold is None):
            raise ValueError(
                f"pruning takes share= or threshold=, got share={self.share} and "
                f"threshold={self.threshold}"
            )
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share} is not between 0 and 1")
        if self.threshold is not None and not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold} is not 0 or more")

    @abc.abstractmethod
    def scores(self, store: TableStore, name: str) -> np.ndarray:
        """Return the score of each row of a table, ``[num_embeddings]``.

        Args:
            store: The store that has the table.
            name: Name of the table.
        """

    def kept(self, store: TableStore, name: str) -> np.ndarray:
        """Return which rows of a table remain, bool ``[num_embeddings]``.

        Args:
            store: The store that has the table.
            name: Name of the table.
        """
        scores = self.scores(store, name)
        if self.share is None:
            # A row with a NaN remains, so that quantization names it.
            return ~(scores <= self.threshold)
        # Among rows of equal score the later ones are pruned first, so that the choice is the same
        # on every run.
        by_score = np.lexsort((-np.arange(scores.size), scores))
        is_kept = np.ones(scores.size, np.bool_)
        is_kept[by_score[: int(self.share * scores.size)]] = False
        return is_kept


@dataclasses.dataclass(frozen=True, eq=False)
class PruningByNorm(Pruning):
    """`Pruning` by the Euclidean norm of each row; see `by_norm`."""

    def scores(self, store: TableStore, name: str) -> np.ndarray:
        parts = [np.linalg.norm(rows.astype(np.float32), axis=1) for _, rows in store.parts(name)]
        return np.concatenate(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class PruningByFrequency(Pruning):
    """`Pruning` by the number of uses of each row, ``[num_embeddings]``; see `by_frequency`."""

    counts: np.ndarray = dataclasses.field(kw_only=True)

    def scores(self, store: TableStore, name: str) -> np.ndarray:
        (config,) = (config for config in store.configs if config.name == name)
        if self.counts.shape != (config.num_embeddings,):
            raise ValueError(
                f"table {name!r} has {config.num_embeddings} rows, but by_frequency got counts of "
                f"shape {list(self.counts.shape)}; give a count for each row"
            )
        return self.counts


def by_norm(*, share: float | None = None, threshold: float | None = None) -> Pruning:
    """Prune the rows of the smallest Euclidean norm, by a share or a threshold.

    Row-wise pruning as in FBGEMM's ``embedding_bag_rowwise_prune``, with the norm as indicator.

    Args:
        share: Share of the rows to prune, from 0 to 1.
        threshold: Largest norm of a pruned row.

    Raises:
        ValueError: Both arguments are given or neither, or one is out of range.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=1000, embedding_dim=64)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> small = jaxrec.serve.quantize(model, prune={"user": by_norm(share=0.3)})
        >>> small.tables.get_value().num_bytes("user") / (1000 * 68)  # 68 bytes a row of int8
        0.7047...
    """
    return PruningByNorm(share, threshold)


def by_frequency(
    counts: Any, *, share: float | None = None, threshold: float | None = None
) -> Pruning:
    """Prune the rows that are used least, by a share or a threshold.

    Args:
        counts: Number of uses of each row, ``[num_embeddings]``, such as `count_ids` returns.
        share: Share of the rows to prune, from 0 to 1.
        threshold: Largest count of a pruned row: 0 prunes the rows that were never used.

    Raises:
        ValueError: Both ``share`` and ``threshold`` are given or neither, one is out of range, or
            the counts are not numbers of 0 or more with one axis.

    Example:
        >>> rule = by_frequency(np.array([5, 0, 1]), threshold=0)
        >>> rule.counts.tolist()
        [5, 0, 1]
    """
    array = np.asarray(counts)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not (array >= 0).all():
        raise ValueError(
            "counts are numbers of 0 or more, one for each row of the table, got an array of "
            f"{array.dtype} with shape {list(array.shape)}"
        )
    return PruningByFrequency(share, threshold, counts=array)


def count_ids(model: nnx.Module, batches: Iterable[Any]) -> dict[str, np.ndarray]:
    """Count how often each row of a model's tables occurs in batches.

    Args:
        model: The model.
        batches: Any pytrees with `jaxrec.KeyedJaggedArray`s on the host or on one device. A batch
            may lack features of the model.

    Returns:
        Counts by table, int64 ``[num_embeddings]``, over all features that read the table.

    Raises:
        ValueError: An id is outside of its table.

    Example:
        >>> import jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=4, embedding_dim=2)
        >>> model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 3], [3]]})
        >>> count_ids(model, [batch])
        {'user': array([0, 1, 0, 2])}
    """
    configs = [
        config
        for module in tapped_modules(model).values()
        for config in module.tables.get_value().configs
    ]
    counts = {config.name: np.zeros(config.num_embeddings, np.int64) for config in configs}
    for batch in batches:
        leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, KeyedJaggedArray))
        columns = {
            key: column
            for leaf in leaves
            if isinstance(leaf, KeyedJaggedArray)
            for key, column in leaf.to_dict().items()
        }
        for config in configs:
            for feature in config.feature_names:
                if feature not in columns:
                    continue
                column = columns[feature]
                ids = np.asarray(column.values)[: int(np.sum(column.lengths))]
                if ids.size and not 0 <= ids.min() <= ids.max() < config.num_embeddings:
                    raise ValueError(
                        f"feature {feature!r} has ids from {ids.min()} to {ids.max()}, but table "
                        f"{config.name!r} has {config.num_embeddings} rows"
                    )
                counts[config.name] += np.bincount(ids, minlength=config.num_embeddings)
    return counts
