"""A random click log with known click probabilities."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jaxrec.data.clicks import Clicks
from jaxrec.data.transforms import NUM_CATEGORICAL, NUM_DENSE, log_counts
from jaxrec.ragged import hash_ids

CHUNK_ROWS = 1 << 16

# Rows of the tables: a few large and many small tables, as in Criteo's log.
TABLE_ROWS = (
    250, 100, 500, 400, 60, 20, 300, 80, 4, 350, 200, 450, 150,
    25, 180, 320, 10, 120, 70, 5, 380, 16, 15, 220, 40, 50,
)  # fmt: skip

# Pairs of categorical features that interact by the dot product of vectors of their ids.
PAIRS = ((5, 13), (8, 21), (16, 19), (22, 5))
VECTOR_DIM = 2

# Pairs of a dense feature and a categorical feature that its effect depends on.
GATES = ((0, 24), (5, 13))

# Standard deviation of the log-odds, and shares of their variance.
SCORE_STD = 1.8
SHARES = {"ids": 0.5, "pairs": 0.2, "dense": 0.25, "gates": 0.05}
BIAS = -1.2

# Features without effect: dense features from this one on, and every second table of more rows.
INFORMATIVE_DENSE = 6
SMALL_TABLE = 25

# Share of missing counts.
MISSING = 0.15


@dataclasses.dataclass(frozen=True)
class GeneratedLog:
    """A random click log with known click probabilities.

    Each row has 13 counts, some of them missing, and 26 ids that follow a power law: id ``k`` of a
    table occurs about ``1 / k`` as often as the first id. The log-odds of a click are the sum of

    - an effect of each id,
    - dot products of hidden vectors of the ids of four pairs of features,
    - a curve over each dense feature,
    - products of two dense features with a slope that depends on an id.

    Some features have no effect. Labels are drawn with the resulting probabilities, so that ranking
    by the probabilities has the best reachable AUC, about 0.855. A model without interactions
    reaches 0.79.

    Attributes:
        num_rows: Number of rows. A row does not depend on this number.
        seed: Seed of the rows and of the hidden effects.
        table_rows: Number of ids of each of the 26 categorical features.
        id_bits: 32: ids are row indices. 64: ids are their 64-bit hashes, int64, another hash for
            each feature.

    Raises:
        ValueError: The number of tables is not 26, a number is below 1, or ``id_bits`` is neither
            32 nor 64.

    Example:
        >>> log = GeneratedLog(num_rows=1000, seed=1)
        >>> clicks = next(log.chunks(0, 1000))
        >>> clicks.dense.shape, clicks.ids.shape
        ((1000, 13), (1000, 26))
    """

    num_rows: int
    seed: int = 0
    table_rows: tuple[int, ...] = TABLE_ROWS
    id_bits: Literal[32, 64] = 32
    num_dense: int = dataclasses.field(default=NUM_DENSE, init=False)

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.seed < 0:
            raise ValueError(
                "a generated log has num_rows of 1 or more and a seed of 0 or more; "
                f"got num_rows={self.num_rows}, seed={self.seed}"
            )
        if len(self.table_rows) != NUM_CATEGORICAL or min(self.table_rows) < 1:
            raise ValueError(
                f"a generated log has {NUM_CATEGORICAL} tables of 1 row or more; "
                f"got table_rows={self.table_rows}"
            )

        if self.id_bits not in (32, 64):
            raise ValueError(f"id_bits is {self.id_bits!r}; expected 32 or 64")

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """Yield the rows ``[start, stop)`` in order; see `ClickLog`."""
        for index in range(start // CHUNK_ROWS, -(-stop // CHUNK_ROWS)):
            first = index * CHUNK_ROWS
            yield self._chunk(index)[max(start - first, 0) : min(stop - first, CHUNK_ROWS)]

    def _chunk(self, index: int) -> Clicks:
        rng = np.random.Generator(np.random.SFC64([self.seed, index]))
        truth = _truth(self.seed, self.table_rows)
        counts = np.exp(rng.standard_normal((CHUNK_ROWS, NUM_DENSE), np.float32) * 1.2 + 2)
        counts = np.where(
            rng.random(counts.shape, np.float32) < MISSING, 0, counts.astype(np.int32)
        )
        dense = log_counts(counts)
        ids = power_law_ids(rng, CHUNK_ROWS, self.table_rows)
        probabilities = 1 / (1 + np.exp(-truth.log_odds(dense, ids).astype(np.float64)))
        labels = (rng.random(CHUNK_ROWS) < probabilities).astype(np.float32)
        if self.id_bits == 64:
            of_tables = zip(_hashes(self.table_rows), ids.T, strict=True)
            ids = np.stack([hashes[of_table] for hashes, of_table in of_tables], axis=1)
        return Clicks(labels, dense, ids, probabilities)


def power_law_ids(
    rng: np.random.Generator, rows: int, table_rows: tuple[int, ...]
) -> Int[np.ndarray, "rows tables"]:
    """Draw ids of each table with probabilities of about ``1 / (id + 1)``."""
    exponents = np.log(np.array(table_rows, np.float32) + 1)
    ids = (np.exp(rng.random((rows, len(table_rows)), np.float32) * exponents) - 1).astype(np.int32)
    return np.minimum(ids, np.array(table_rows, np.int32) - 1)


@functools.lru_cache(maxsize=4)
def _hashes(table_rows: tuple[int, ...]) -> tuple[Int[np.ndarray, " ids"], ...]:
    """Return the raw ids of each feature."""
    return tuple(
        hash_ids(np.arange(rows), None, seed=table).view(np.int64)
        for table, rows in enumerate(table_rows)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Truth:
    """The log-odds of a click as a function of the features.

    Attributes:
        effects: ``[ids]`` effect of each id, tables one after another.
        starts: ``[tables]`` position of each table's first id in ``effects``.
        vectors: For each of `PAIRS` the vectors of both tables' ids.
        slopes: For each of `GATES` the slope of the dense feature for each id.
        curves: ``[2, num_dense]`` factors of a line and a parabola over the dense features.
        offsets: Mean of each part by name, which is subtracted.
        scales: Factor of each part by name.
    """

    effects: Float[np.ndarray, " ids"]
    starts: Int[np.ndarray, " tables"]
    vectors: tuple[tuple[Float[np.ndarray, "_ dim"], Float[np.ndarray, "_ dim"]], ...]
    slopes: tuple[Float[np.ndarray, " _"], ...]
    curves: Float[np.ndarray, "2 num_dense"]
    offsets: dict[str, float]
    scales: dict[str, float]

    def log_odds(
        self, dense: Float[np.ndarray, "rows num_dense"], ids: Int[np.ndarray, "rows tables"]
    ) -> Float[np.ndarray, " rows"]:
        """Compute the log-odds of each row."""
        log_odds = np.full(len(ids), BIAS, np.float32)
        for name, part in self.parts(dense, ids).items():
            log_odds += self.scales[name] * (part - self.offsets[name])
        return log_odds

    def parts(
        self, dense: Float[np.ndarray, "rows num_dense"], ids: Int[np.ndarray, "rows tables"]
    ) -> dict[str, Float[np.ndarray, " rows"]]:
        """Compute the parts of the log-odds by name, before offset and scale."""
        x = (dense - 2.3) / 0.9
        line, parabola = self.curves
        return {
            "ids": self.effects[ids + self.starts].sum(axis=1),
            "pairs": sum(
                np.einsum("rd,rd->r", first[ids[:, f]], second[ids[:, g]])
                for (f, g), (first, second) in zip(PAIRS, self.vectors, strict=True)
            ),
            "dense": x @ line + np.minimum(x * x, 4) @ parabola,
            "gates": sum(
                x[:, j] * slopes[ids[:, f]]
                for (j, f), slopes in zip(GATES, self.slopes, strict=True)
            ),
        }


@functools.lru_cache(maxsize=4)
def _truth(seed: int, table_rows: tuple[int, ...]) -> Truth:
    rng = np.random.Generator(np.random.SFC64([seed, 1 << 62]))

    def normal(*shape: int) -> Float[np.ndarray, "..."]:
        return rng.standard_normal(shape, np.float32)

    curves = normal(2, NUM_DENSE) * np.array([[1.0], [0.5]], np.float32)
    curves[:, INFORMATIVE_DENSE:] = 0
    truth = Truth(
        effects=np.concatenate(
            [
                normal(rows) * (table % 2 == 0 or rows <= SMALL_TABLE)
                for table, rows in enumerate(table_rows)
            ]
        ),
        starts=np.cumsum((0, *table_rows[:-1]), dtype=np.int32),
        vectors=tuple(
            (normal(table_rows[f], VECTOR_DIM), normal(table_rows[g], VECTOR_DIM)) for f, g in PAIRS
        ),
        slopes=tuple(normal(table_rows[f]) for _, f in GATES),
        curves=curves,
        offsets={},
        scales={},
    )
    # Scale each part to its share of the variance, measured on a sample of rows.
    dense = log_counts(np.exp(normal(CHUNK_ROWS, NUM_DENSE) * 1.2 + 2).astype(np.int32))
    for name, part in truth.parts(dense, power_law_ids(rng, CHUNK_ROWS, table_rows)).items():
        truth.offsets[name] = float(part.mean())
        truth.scales[name] = SCORE_STD * (SHARES[name] ** 0.5) / max(float(part.std()), 1e-6)
    return truth
