"""The synthetic multi-hot data of MLPerf's DLRM benchmark, which makes several ids of each id."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int, Integer

from jaxrec.ragged import KeyedJaggedArray

# MLPerf DLRM v2 (DCN) on Criteo 1TB: ids per sample, and rows of the table, of each feature.
MLPERF_SIZES = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip
MLPERF_TABLE_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108,
    36,
)  # fmt: skip

PARETO_SHAPE = 0.25


@dataclasses.dataclass(frozen=True)
class MultiHot:
    """Replaces each id of a feature by several ids: itself and others that are drawn once.

    The same id always becomes the same bag, in all batches and all processes. The ids equal those
    of MLPerf's reference (``multi_hot.py`` of facebookresearch/dlrm). Each feature's table of ids
    takes ``4 * table_rows * size`` bytes.

    Attributes:
        keys: Names of the features.
        sizes: Number of ids per sample of each feature.
        table_rows: Number of rows of each feature's table.
        distribution: Distribution of the drawn ids: "uniform", or "pareto" modulo the rows.
        seed: Seed of the generator; MLPerf's is 0.

    Raises:
        ValueError: ``keys``, ``sizes`` and ``table_rows`` differ in length, or a number is below 1.

    Example:
        >>> multi_hot = MultiHot(("a", "b"), sizes=(3, 1), table_rows=(10, 5))
        >>> batch = multi_hot(np.array([[7, 2], [7, 4]]))
        >>> [bag[0] for bag in batch["a"].to_lists()], batch["b"].to_lists()
        ([7, 7], [[2], [4]])
    """

    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    table_rows: tuple[int, ...]
    distribution: Literal["uniform", "pareto"] = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.sizes) == len(self.table_rows):
            raise ValueError(
                f"each of {len(self.keys)} features has a size and a table, but there are "
                f"{len(self.sizes)} sizes and {len(self.table_rows)} tables"
            )
        if min(self.sizes, default=1) < 1 or min(self.table_rows, default=1) < 1:
            raise ValueError(f"sizes and table_rows are 1 or more, got {self}")

    @functools.cached_property
    def tables(self) -> tuple[Int[np.ndarray, "rows size"], ...]:
        """For each feature ``[table_rows, size]`` int32; row ``i`` has the ids for id ``i``."""
        # One stream of NumPy's legacy generator for all features, as in the reference: the ids
        # depend on the order of the draws.
        stream = np.random.RandomState(self.seed)
        return tuple(
            np.concatenate(
                [np.arange(rows, dtype=np.int32)[:, None], self._drawn(stream, rows, size - 1)],
                axis=1,
            )
            for rows, size in zip(self.table_rows, self.sizes, strict=True)
        )

    def _drawn(self, stream: np.random.RandomState, rows: int, size: int) -> np.ndarray:
        if self.distribution == "uniform":
            return stream.randint(0, rows, size=(rows, size)).astype(np.int32)
        drawn = stream.pareto(PARETO_SHAPE, size=(rows, size))
        # The reference converts floats beyond int32, which gives -2^31 on x86 and other numbers on
        # other processors: all get x86's here.
        drawn = np.where(drawn < 2**31, drawn, -(2.0**31)).astype(np.int32)
        return drawn % np.int32(rows)

    def __call__(self, ids: Integer[np.ndarray, "batch features"]) -> KeyedJaggedArray:
        """Make a batch with several ids per sample.

        Args:
            ids: One id per sample and feature, below ``table_rows``.

        Raises:
            ValueError: An id is outside its table.
        """
        bags = {}
        for feature, key in enumerate(self.keys):
            column = ids[:, feature]
            if len(column) and not 0 <= column.min() <= column.max() < self.table_rows[feature]:
                raise ValueError(
                    f"feature {key!r}: ids reach from {column.min()} to {column.max()}, but its "
                    f"table has {self.table_rows[feature]} rows"
                )
            bags[key] = self.tables[feature][column]
        return KeyedJaggedArray.from_dense(bags, capacities=self.capacities(len(ids)))

    def capacities(self, batch_size: int) -> Sequence[int]:
        """Return the capacity of each feature of a batch: all bags have their full length."""
        return tuple(batch_size * size for size in self.sizes)
