"""Batches of random ids and numbers, for benchmarks and tests."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrec.data.clicks import ClickBatch
from jaxrec.data.pipeline import ordered_map
from jaxrec.data.shuffled import Shard
from jaxrec.ragged import KeyedJaggedArray

# Number of batches of a set that has no end.
ENDLESS = 1 << 62


@dataclasses.dataclass(frozen=True)
class RandomBatches:
    """Random batches by number: uniform ids, normal dense features, labels 0 and 1.

    TorchRec's RandomRecDataset. Batch ``i`` depends only on the arguments and on ``i``, so that a
    resumed run continues with the batch of its step. All batches have one shape: capacities hold
    the largest batch. `GeneratedLog` has labels that a model can learn.

    Attributes:
        keys: Names of the features.
        batch_size: Number of samples of a batch of this process.
        hash_sizes: Number of ids of each feature, one number for all or one for each.
        ids_per_feature: Largest number of ids of a sample, likewise.
        min_ids: Smallest number of ids of a sample, likewise; None: ``ids_per_feature``, so that
            all bags have one length.
        num_dense: Number of dense features.
        num_batches: Number of batches; None: there is no end.
        num_distinct: Number of batches after which they repeat; they are made once and stay in
            memory. None: each is made anew.
        is_weighted: Whether ids have weights, uniform in [0, 1).
        seed: Seed of all numbers.
        shard: Number of this process and of all processes; each has other batches.

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
        for key, low, high in zip(self.keys, self._min_ids, self._max_ids, strict=True):
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

    @property
    def _min_ids(self) -> tuple[int, ...]:
        return self.min_ids if isinstance(self.min_ids, tuple) else ()

    @property
    def _max_ids(self) -> tuple[int, ...]:
        return self.ids_per_feature if isinstance(self.ids_per_feature, tuple) else ()

    @property
    def capacities(self) -> tuple[int, ...]:
        """Capacity of each feature's ids."""
        return tuple(self.batch_size * count for count in self._max_ids)

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: There is no end.
        """
        if self.num_batches is None:
            raise TypeError("RandomBatches without num_batches have no end, and no length")
        return self.num_batches

    def __getitem__(self, index: int) -> ClickBatch:
        """Make batch ``index``.

        Raises:
            IndexError: There are fewer batches, or the index is negative.
        """
        end = ENDLESS if self.num_batches is None else self.num_batches
        if not 0 <= index < end:
            raise IndexError(f"there are {end} batches, and no batch {index}")
        if self.num_distinct is None:
            return self._make(int(index))
        number = int(index) % self.num_distinct
        if number not in self._kept:  # two threads may make one batch, with the same numbers
            self._kept[number] = self._make(number)
        return self._kept[number]

    def _make(self, index: int) -> ClickBatch:
        state = [self.seed, index, self.shard.index, self.shard.count]
        rng = np.random.Generator(np.random.SFC64(state))
        samples = self.batch_size
        lengths = [
            rng.integers(low, high + 1, samples, np.int32)
            for low, high in zip(self._min_ids, self._max_ids, strict=True)
        ]
        sizes = self.hash_sizes if isinstance(self.hash_sizes, tuple) else ()
        ids = [
            rng.integers(0, rows, length.sum(), np.int32)
            for rows, length in zip(sizes, lengths, strict=True)
        ]
        weights = [rng.random(part.size, np.float32) for part in ids] if self.is_weighted else None
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
        index = 0
        while self.num_batches is None or index < self.num_batches:
            yield self[index]
            index += 1

    def from_batch(
        self, start: int = 0, *, threads: int = 2, prefetch: int = 4
    ) -> Iterator[ClickBatch]:
        """Yield the batches from ``start`` on, which threads make ahead; see `BatchSource`."""
        end = ENDLESS if self.num_batches is None else self.num_batches
        with concurrent.futures.ThreadPoolExecutor(threads, "batches") as pool:
            yield from ordered_map(self.__getitem__, range(start, end), pool, ahead=prefetch)
