"""Packing of ids on the host into batches of few different shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrec.data.padding import WeightedBatch, pad_batch
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.capacity import grow_capacities


class Packer:
    """Packs ids into batches whose capacities only grow, so that few programs compile.

    Args:
        keys: Names of the features of every batch, in order.
        capacities: Initial capacities of some features, such as `usual_capacity`.
        id_bits: 32: ids are row indices. 64: ids are raw, integers or strings, for
            `jaxrec.tier.ahead`; see `jaxrec.ragged.PackOptions`.

    Example:
        >>> pack = Packer(("history", "negatives"))
        >>> batch = pack(history=[[1, 2], [3]], negatives=np.array([[4], [5]]))
        >>> batch.capacity_per_key
        {'history': 8, 'negatives': 2}
        >>> pack(history=[list(range(9)), []]).capacity_per_key
        {'history': 12, 'negatives': 8}
        >>> pack(history=[[1], [2]]).capacity_per_key
        {'history': 12, 'negatives': 8}
    """

    def __init__(
        self,
        keys: Sequence[str],
        capacities: Mapping[str, int] | None = None,
        *,
        id_bits: Literal[32, 64] = 32,
    ):
        self.keys = tuple(keys)
        self.id_bits: Literal[32, 64] = id_bits
        self.capacities = grow_capacities({}, capacities or {})

    def __call__(
        self, **columns: Sequence[Sequence[Any] | np.ndarray] | np.ndarray
    ) -> KeyedJaggedArray:
        """Make a batch of some features; bags of the other features are empty.

        Args:
            columns: For each feature the ids of each sample. The capacity of a matrix, which has
                equally many ids for each sample, is exactly its size, without padding.

        Raises:
            ValueError: A feature is not among the keys, or numbers of samples differ.
        """
        if unknown := [key for key in columns if key not in self.keys]:
            raise ValueError(f"the features of these batches are {self.keys}, got {unknown}")
        size = len(next(iter(columns.values()), ()))
        rows = {key: list(columns.get(key, [()] * size)) for key in self.keys}
        exact = {
            key: found.size
            for key, found in columns.items()
            if isinstance(found, np.ndarray) and found.ndim == 2
        }
        batch = KeyedJaggedArray.from_lists(rows, capacities=exact, id_bits=self.id_bits)
        ragged = {k: n for k, n in batch.capacity_per_key.items() if k not in exact}
        self.capacities = grow_capacities(self.capacities, ragged)
        return batch.with_capacities(self.capacities | exact)

    def batches(
        self, batch_size: int, **columns: Sequence[Sequence[Any] | np.ndarray] | np.ndarray
    ) -> Iterator[WeightedBatch]:
        """Yield all samples in batches of one size; the last one is padded by `pad_batch`.

        Example:
            >>> pack = Packer(("history",))
            >>> for batch, weights in pack.batches(2, history=[[1], [2, 3], [4]]):
            ...     print(batch["history"].to_lists(), weights)
            [[1], [2, 3]] [1. 1.]
            [[4], []] [1. 0.]
        """
        count = len(next(iter(columns.values()), ()))
        for start in range(0, count, batch_size):
            rows = slice(start, start + batch_size)
            batch = self(**{key: column[rows] for key, column in columns.items()})
            yield pad_batch(batch, batch_size)


def usual_capacity(lengths: Sequence[int] | np.ndarray, batch_size: int) -> int:
    """Return a capacity for nearly every batch: the mean and four standard deviations.

    Args:
        lengths: Number of ids of each sample that batches are drawn from.
        batch_size: Number of samples of a batch.

    Example:
        >>> usual_capacity([1, 1, 3, 3], batch_size=100)
        240
    """
    return int(batch_size * np.mean(lengths) + 4 * batch_size**0.5 * np.std(lengths))
