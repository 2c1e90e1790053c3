"""The step of tables with a few rows on the devices beside that of whole tables."""

from __future__ import annotations

import dataclasses
import json
import resource
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

import jaxrec
from benchmarks.vocabulary_step import Model, Run, quantiles
from jaxrec.data import Pipeline
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Cached, farthest, lfu, lru
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train import put_batch


@dataclasses.dataclass(frozen=True)
class Cache:
    """Step time with a cache over that of tables in memory."""

    batch: int = 2048
    """Samples of a step."""
    features: int = 26
    """Features, each with a table."""
    bag: int = 10
    """Ids of a sample, for each feature."""
    rows: int = 400_000
    """Rows of a table."""
    cached: float = 0.1
    """Share of the rows that are on the device."""
    dim: int = 64
    """Columns of a table."""
    exponent: float = 1.05
    """The i-th most frequent id is drawn with a probability proportional to i**-exponent."""
    stores: tuple[str, ...] = ("memory", "file")
    """Stores beside the whole tables: memory, file, rocksdb."""
    farthest: int = 0
    """Batches that the policy `farthest` looks ahead, before `lfu`; 0: `lru` alone."""
    steps: int = 10
    """Steps of a round."""
    rounds: int = 7
    """Rounds, in which the models take turns."""
    distinct: int = 64
    """Batches, which then come again."""

    def run(self) -> None:
        jaxrec.keep_freed_memory()
        with tempfile.TemporaryDirectory() as directory:
            whole = Run(Model(self), Pipeline(self.batches(), put_batch, ahead=4))
            # One store at a time: another's threads may still write while the whole tables train.
            for store in self.stores:
                self.compare({"whole": whole, store: self.cached_run(store, directory)})
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"peak_megabytes": round(megabytes)}))

    def compare(self, runs: dict[str, Run]) -> None:
        for run in runs.values():
            run.train(max(self.distinct, 4 * self.steps))  # each row has come once
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                times[name].append(run.train(self.steps))
        for name, of_run in times.items():
            wall, processor = (1e3 * statistics.median(each) for each in zip(*of_run, strict=True))
            line: dict[str, Any] = {"rows": name, "step_ms": round(wall, 2)}
            line["processor_ms"] = round(processor, 2)
            ratios = np.transpose(np.array(of_run) / np.array(times["whole"]))
            line |= {"ratio": quantiles(ratios[0]), "processor_ratio": quantiles(ratios[1])}
            if (tier := tier_of(runs[name].model)) is not None:
                tables = tier.statistics().values()
                hits, lookups = (sum(each[key] for each in tables) for key in ("hits", "lookups"))
                line["hit_rate"] = round(hits / lookups, 4)
            print(json.dumps(line), flush=True)

    def cached_run(self, store: str, directory: str) -> Run:
        eviction = farthest(self.farthest, lfu()) if self.farthest else lru()
        tables = {
            f"f{i}": Cached(
                round(self.cached * self.rows),
                "memory://" if store == "memory" else f"{store}://{directory}/{store}{i}",
                eviction,
            )
            for i in range(self.features)
        }
        model = jaxrec.tier.make(lambda: Model(self), tables)
        return Run(model, jaxrec.tier.ahead(model, self.batches(), place=put_batch))

    def batches(self) -> Iterator[Any]:
        """Yield batches of power-law ids without end; frequent rows are scattered over a table."""
        rng = np.random.default_rng(0)
        keys = [f"f{i}" for i in range(self.features)]
        lengths = np.full(self.features * self.batch, self.bag, np.int32)
        shares = np.cumsum(np.arange(1, self.rows + 1) ** -self.exponent)
        scattered = rng.permutation(self.rows)
        labels = rng.integers(0, 2, self.batch).astype(np.float32)
        pool = [
            scattered[np.searchsorted(shares, shares[-1] * rng.random(lengths.size * self.bag))]
            for _ in range(self.distinct)
        ]
        while True:
            for ids in pool:
                yield KeyedJaggedArray.from_lengths(keys, ids, lengths), labels
