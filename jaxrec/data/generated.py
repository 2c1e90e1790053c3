"""Generated data: a random click log with known click probabilities, and batches of random ids."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from jaxrec.data.clicks import ClickBatch, Clicks
from jaxrec.data.pipeline import made_ahead
from jaxrec.data.shuffled import Shard
from jaxrec.data.transforms import NUM_DENSE, check_tables, log_counts
from jaxrec.ragged import KeyedJaggedArray, hash_ids

# Rows made at once. It is part of what a seed means: another number gives another log.
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

# Standard deviation of the log-odds, and each part's share of their variance. With these and the
# bias about three rows in ten are clicks.
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
    - for four pairs of features, the dot product of the hidden vectors of both ids,
    - a line and a parabola over each dense feature,
    - for two dense features, the feature times a slope that depends on an id.

    Some features have no effect. Labels are drawn with the resulting probabilities. Ranking by the
    probabilities therefore has the best reachable AUC, about 0.855. A model without interactions
    reaches 0.79.

    Attributes:
        num_rows: Number of rows. The first 1,000 rows of a longer log are the same.
        seed: Seed of the rows and of the hidden effects.
        table_rows: Number of ids of each of the 26 categorical features.
        id_bits: 32: ids are row indices. 64: ids are int64 hashes of the row indices, with another
            hash function for each feature.
        num_dense: Number of dense features, 13.

    Raises:
        ValueError: ``num_rows`` or the rows of a table are below 1, ``seed`` is negative, there are
            not 26 tables, or ``id_bits`` is neither 32 nor 64.

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
        check_tables("a generated log", self.table_rows, self.id_bits)

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """Yield the rows ``[start, stop)`` in order; see `ClickLog`."""
        for index in range(start // CHUNK_ROWS, -(-stop // CHUNK_ROWS)):
            first = index * CHUNK_ROWS
            yield self._chunk(index)[max(start - first, 0) : min(stop - first, CHUNK_ROWS)]

    def _chunk(self, index: int) -> Clicks:
        # A generator for each chunk: held-out rows at the end are read without making the rows
        # before them.
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
    """Draw int32 ids ``[rows, tables]``; id ``k`` has a probability of about ``1 / (k + 1)``."""
    # The inverse of the distribution function: u becomes (n + 1)^u - 1.
    exponents = np.log(np.array(table_rows, np.float32) + 1)
    ids = (np.exp(rng.random((rows, len(table_rows)), np.float32) * exponents) - 1).astype(np.int32)
    # float32 may round the last ids of a table up to its number of rows.
    return np.minimum(ids, np.array(table_rows, np.int32) - 1)


@functools.lru_cache(maxsize=4)
def _hashes(table_rows: tuple[int, ...]) -> tuple[Int[np.ndarray, " ids"], ...]:
    """Return for each feature the raw ids of its row indices, int64 ``[table_rows]``."""
    return tuple(
        hash_ids(np.arange(rows), None, seed=table).view(np.int64)
        for table, rows in enumerate(table_rows)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Truth:
    """The log-odds of a click: the sum of four parts, each shifted to mean 0 and scaled.

    Attributes:
        effects: ``[ids]`` effect of each id, tables one after another.
        starts: ``[tables]`` position of each table's first id in ``effects``.
        vectors: For each of `PAIRS`, ``[table_rows, 2]`` vectors of both tables.
        slopes: For each of `GATES`, ``[table_rows]`` slopes of the dense feature.
        curves: ``[2, num_dense]`` factors of a line and a parabola over the dense features.
        offsets: Mean of each part.
        scales: Factor of each part.
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
        log_odds = np.full(len(ids), BIAS, np.float32)
        for name, part in self.parts(dense, ids).items():
            log_odds += self.scales[name] * (part - self.offsets[name])
        return log_odds

    def parts(
        self, dense: Float[np.ndarray, "rows num_dense"], ids: Int[np.ndarray, "rows tables"]
    ) -> dict[str, Float[np.ndarray, " rows"]]:
        """Compute the parts of the log-odds by name, ``[rows]``, before offset and scale."""
        # About the mean and standard deviation of `log_counts` of the counts of `_chunk`.
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
    # Chunks use [seed, index]: no log has 2^62 chunks, so that this stream is apart from theirs.
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


# Number of batches of a set that has no end.
ENDLESS = 1 << 62


@dataclasses.dataclass(frozen=True)
class RandomBatches:
    """Random batches by number: uniform ids, normal dense features, labels 0 and 1.

    TorchRec's RandomRecDataset. Batch ``i`` depends only on the arguments and on ``i``, so that a
    resumed run continues with the batch of its step. All batches have one shape, with capacities
    for the largest possible bags. Labels are random; `GeneratedLog` has labels that a model can
    learn.

    Attributes:
        keys: Names of the features.
        batch_size: Number of samples of a batch of this process.
        hash_sizes: Number of ids of each feature: one number for all features, or one for each.
        ids_per_feature: Largest number of ids of a sample, for all features or for each.
        min_ids: Smallest number of ids of a sample, for all features or for each. None: the same as
            ``ids_per_feature``, so that all bags of a feature have one length.
        num_dense: Number of dense features.
        num_batches: Number of batches; None: the batches have no end.
        num_distinct: Number of different batches, which repeat in order and stay in memory. None:
            all batches differ.
        is_weighted: Whether ids have weights, uniform in [0, 1).
        seed: Seed of all numbers.
        shard: Number of this process and of all processes. Processes have different batches.

    Raises:
        ValueError: A number is outside its range, keys repeat, or lists differ in length from the
            keys.

    Example:
        >>> batches = RandomBatches(("user", "item"), batch_size=3, hash_sizes=(5, 9), num_dense=2,
        ...     ids_per_feature=4, min_ids=1, num_batches=10)
        >>> len(batches), batches[7].features.strides, batches[7].features.capacities
        (10, (3, 3), (12, 12))
        >>> resumed = next(batches.from_batch(7))
        >>> bool((resumed.dense == batches[7].dense).all())
        True
    """

    keys: tuple[str, ...]
    batch_size: int
    hash_sizes: int | tuple[int, ...] = 100
    ids_per_feature: int | tuple[int, ...] = 2
    min_ids: int | tuple[int, ...] | None = None
    num_dense: int = 50
    num_batches: int | None = None
    num_distinct: int | None = None
    is_weighted: bool = False
    seed: int = 0
    shard: Shard = dataclasses.field(default_factory=Shard)
    _kept: dict[int, ClickBatch] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(self.keys))
        if len(set(self.keys)) < len(self.keys):
            raise ValueError(f"RandomBatches: keys occur more than once in {self.keys}")
        least = {"batch_size": 1, "num_dense": 0, "num_batches": 0, "num_distinct": 1, "seed": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is None and name in ("num_batches", "num_distinct"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ValueError(
                    f"RandomBatches: {name} is an integer of {smallest} or more, got {value!r}"
                )
        if self.min_ids is None:
            object.__setattr__(self, "min_ids", self.ids_per_feature)
        for name, smallest in {"hash_sizes": 1, "ids_per_feature": 0, "min_ids": 0}.items():
            object.__setattr__(self, name, self._for_each_key(name, smallest))
        for key, _, low, high in self._of_keys():
            if low > high:
                raise ValueError(
                    f"RandomBatches: feature {key!r} has min_ids of {low}, above its "
                    f"ids_per_feature of {high}"
                )

    def _for_each_key(self, name: str, smallest: int) -> tuple[int, ...]:
        given = getattr(self, name)
        values = tuple(given) if isinstance(given, Sequence) else (given,) * len(self.keys)
        if len(values) != len(self.keys):
            raise ValueError(
                f"RandomBatches: {name} has {len(values)} numbers for {len(self.keys)} keys"
            )
        for key, value in zip(self.keys, values, strict=True):
            is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not is_int or not smallest <= value < 2**31:
                raise ValueError(
                    f"RandomBatches: {name} of feature {key!r} is an integer from {smallest} to "
                    f"2**31 - 1, got {value!r}"
                )
        return tuple(map(int, values))

    def _of_keys(self) -> list[tuple[str, int, int, int]]:
        """Return each feature's key, hash size, and smallest and largest number of ids a sample."""
        numbers: Any = (self.keys, self.hash_sizes, self.min_ids, self.ids_per_feature)
        return list(zip(*numbers, strict=True))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Capacity of each feature's ids."""
        return tuple(self.batch_size * most for *_, most in self._of_keys())

    @property
    def _end(self) -> int:
        return ENDLESS if self.num_batches is None else self.num_batches

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: ``num_batches`` is None: the batches have no end.
        """
        if self.num_batches is None:
            raise TypeError("RandomBatches without num_batches have no end, and no length")
        return self.num_batches

    def __getitem__(self, index: int) -> ClickBatch:
        """Make batch ``index``.

        Raises:
            IndexError: There are fewer batches, or the index is negative.
        """
        if not 0 <= index < self._end:
            raise IndexError(f"there are {self._end} batches, and no batch {index}")
        if self.num_distinct is None:
            return self._make(int(index))
        number = int(index) % self.num_distinct
        if number not in self._kept:  # two threads may make one batch, with the same numbers
            self._kept[number] = self._make(number)
        return self._kept[number]

    def _make(self, index: int) -> ClickBatch:
        # All that makes a batch differ from others seeds its generator, so that `_make` needs no
        # state: threads call it, and a resumed run starts at any index.
        state = [self.seed, index, self.shard.index, self.shard.count]
        rng = np.random.Generator(np.random.SFC64(state))
        samples = self.batch_size
        of_keys = self._of_keys()
        lengths = [rng.integers(low, high + 1, samples, np.int32) for _, _, low, high in of_keys]
        ids = [
            rng.integers(0, rows, length.sum(), np.int32)
            for (_, rows, *_), length in zip(of_keys, lengths, strict=True)
        ]
        weights = [rng.random(part.size, np.float32) for part in ids] if self.is_weighted else None
        # np.concatenate refuses an empty list, which a set without keys has.
        nothing = [np.zeros(0, np.int32)]
        features = KeyedJaggedArray.from_lengths(
            self.keys,
            np.concatenate(nothing + ids),
            np.concatenate(nothing + lengths),
            None if weights is None else np.concatenate([np.zeros(0, np.float32), *weights]),
            capacities=self.capacities,
        )
        return ClickBatch(
            rng.standard_normal((samples, self.num_dense), np.float32),
            features,
            rng.integers(0, 2, samples).astype(np.float32),
            np.ones(samples, np.float32),
        )

    def __iter__(self) -> Iterator[ClickBatch]:
        return map(self.__getitem__, range(self._end))

    def from_batch(
        self, start: int = 0, *, threads: int = 2, prefetch: int = 4
    ) -> Iterator[ClickBatch]:
        """Yield the batches from ``start`` on; threads make them ahead, as `BatchSource` does."""
        return made_ahead(self.__getitem__, range(start, self._end), threads, prefetch)
