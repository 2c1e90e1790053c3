"""Rows of a click log as batches of one static shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxrec.data.clicks import Clicks
from jaxrec.data.padding import pad_batch
from jaxrec.ragged import KeyedJaggedArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ClickBatch:
    """What a training step takes.

    Attributes:
        dense: ``[batch, num_dense]`` float32.
        features: The ids, none in padding.
        labels: ``[batch]`` float32.
        weights: ``[batch]`` float32: 1 or the sample's weight, 0 where the sample is padding.
    """

    dense: Float[Array | np.ndarray, "batch num_dense"]
    features: KeyedJaggedArray
    labels: Float[Array | np.ndarray, " batch"]
    weights: Float[Array | np.ndarray, " batch"]


def batches(
    chunks: Iterable[Clicks], batch_size: int, keys: tuple[str, ...], at_least: int = 0
) -> Iterator[ClickBatch]:
    """Cut rows into batches of equal size, the last one padded by `pad_batch`.

    Args:
        chunks: Rows, in pieces of any size.
        batch_size: Samples of a batch.
        keys: Names of the categorical features, in the order of the columns of ids.
        at_least: Batches to make; where the rows make fewer, the last ones are padding alone.

    Example:
        >>> from jaxrec.data import GeneratedLog
        >>> rows = GeneratedLog(num_rows=10).chunks(0, 10)
        >>> [batch.weights.sum().item() for batch in batches(rows, 4, ("a",) * 26)]
        [4.0, 4.0, 2.0]
    """
    left: list[Clicks] = []
    made = 0
    for chunk in chunks:
        rows = Clicks.concatenate([*left, chunk]) if left else chunk
        full = len(rows) - len(rows) % batch_size
        for start in range(0, full, batch_size):
            yield _batch(rows[start : start + batch_size], batch_size, keys)
        made += full // batch_size
        left = [rows[full:]] if full < len(rows) else []
    if left:
        yield _batch(left[0], batch_size, keys)
        made += 1
    for _ in range(made, at_least):
        yield _batch(rows[:0], batch_size, keys)


def _batch(rows: Clicks, batch_size: int, keys: tuple[str, ...]) -> ClickBatch:
    features = KeyedJaggedArray(
        np.ascontiguousarray(rows.ids.T).reshape(-1),
        np.ones(rows.ids.size, np.int32),
        keys=keys,
        capacities=(len(rows),) * len(keys),
        strides=(len(rows),) * len(keys),
    )
    if len(rows) < batch_size:
        features = features.with_capacities((batch_size,) * len(keys))
    (dense, features, labels), weights = pad_batch((rows.dense, features, rows.labels), batch_size)
    return ClickBatch(dense, features, labels, weights)
