"""Rows of click logs, and batches of one shape made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrec.data.padding import pad_batch
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.raw_ids import as_raw


@dataclasses.dataclass(frozen=True, eq=False)
class Clicks:
    """Rows of a click log, in host memory.

    Attributes:
        labels: ``[rows]`` float32, 1 for a click and 0 for none.
        dense: ``[rows, num_dense]`` float32.
        ids: ``[rows, num_tables]``: int32 row indices, or int64 raw ids.
        probabilities: ``[rows]`` float64, the true probabilities of a click; None: unknown.
    """

    labels: Float[np.ndarray, " rows"]
    dense: Float[np.ndarray, "rows num_dense"]
    ids: Int[np.ndarray, "rows num_tables"]
    probabilities: Float[np.ndarray, " rows"] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | np.ndarray) -> Clicks:
        known = self.probabilities
        return Clicks(
            self.labels[rows],
            self.dense[rows],
            self.ids[rows],
            None if known is None else known[rows],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Clicks]) -> Clicks:
        """Concatenate the rows of several parts; probabilities are known if all parts have them."""
        known = [part.probabilities for part in parts if part.probabilities is not None]
        return cls(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate(known) if len(known) == len(parts) else None,
        )


class ClickLog(Protocol):
    """A click log that can be read from any row.

    Attributes:
        num_rows: Number of rows.
        num_dense: Number of dense features.
        table_rows: Number of rows of each categorical feature's table.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def num_dense(self) -> int: ...

    @property
    def table_rows(self) -> tuple[int, ...]: ...

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """Yield the rows ``[start, stop)`` in order, in chunks of some ten thousand rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ClickBatch:
    """A batch of samples for a model that predicts clicks.

    Attributes:
        dense: ``[batch, num_dense]`` float32.
        features: The ids of the categorical features; bags of padding are empty.
        labels: ``[batch]`` float32, 0 or 1, or the standardized number to predict; ``[batch,
            labels]`` if there are several.
        weights: ``[batch]`` float32, the weights of the samples; 0 for padding.
    """

    dense: Float[Array | np.ndarray, "batch num_dense"]
    features: KeyedJaggedArray
    labels: Float[Array | np.ndarray, "batch *labels"]
    weights: Float[Array | np.ndarray, " batch"]


def batches(
    chunks: Iterable[Clicks],
    batch_size: int,
    keys: tuple[str, ...],
    at_least: int = 0,
    *,
    id_bits: Literal[32, 64] = 32,
) -> Iterator[ClickBatch]:
    """Yield batches of equal size; the last one is padded by `pad_batch`.

    Args:
        chunks: Chunks of rows of any size.
        batch_size: Number of samples of a batch.
        keys: Names of the categorical features, in the order of the columns of ids.
        at_least: Smallest number of batches. Batches beyond the last row have only padding, so that
            all processes make equally many.
        id_bits: 32: ids are row indices. 64: ids are raw, for `jaxrec.tier.ahead`.

    Example:
        >>> from jaxrec.data import GeneratedLog
        >>> rows = GeneratedLog(num_rows=10).chunks(0, 10)
        >>> [batch.weights.sum().item() for batch in batches(rows, 4, ("a",) * 26)]
        [4.0, 4.0, 2.0]
    """
    left: list[Clicks] = []
    made = 0
    for chunk in chunks:
        # Rows that did not fill a batch come before the rows of the next chunk.
        rows = Clicks.concatenate([*left, chunk]) if left else chunk
        full = len(rows) - len(rows) % batch_size
        for start in range(0, full, batch_size):
            yield _batch(rows[start : start + batch_size], batch_size, keys, id_bits)
        made += full // batch_size
        left = [rows[full:]] if full < len(rows) else []
    if left:
        yield _batch(left[0], batch_size, keys, id_bits)
        made += 1
    for _ in range(made, at_least):
        yield _batch(rows[:0], batch_size, keys, id_bits)


def _batch(rows: Clicks, batch_size: int, keys: tuple[str, ...], id_bits: int) -> ClickBatch:
    # Key-major, as a KeyedJaggedArray has its values. One id a sample: lengths are known.
    values = np.ascontiguousarray(rows.ids.T).reshape(-1)
    features = KeyedJaggedArray(
        as_raw(values.astype(np.int64, copy=False)) if id_bits == 64 else values,
        np.ones(rows.ids.size, np.int32),
        keys=keys,
        capacities=(len(rows),) * len(keys),
        strides=(len(rows),) * len(keys),
    )
    if len(rows) < batch_size:
        features = features.with_capacities((batch_size,) * len(keys))
    (dense, features, labels), weights = pad_batch((rows.dense, features, rows.labels), batch_size)
    return ClickBatch(dense, features, labels, weights)
