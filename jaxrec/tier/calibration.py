"""Calibration of caches: measured rates of the tier's work on the devices at hand.

A model of tables with caches takes batches from `jaxrec.tier.ahead`, and no step is computed. Where
each batch has the ids of the one before, the time of a batch is that of the assignment of rows.
Where each batch misses all of its ids, rows move to the devices and as many back.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrec.embed import EmbeddingBagCollection, EmbeddingBagConfig
from jaxrec.mesh import row_wise, shard
from jaxrec.optim import rowwise_adagrad
from jaxrec.plan import Rate, ShardingPlan, TableCache, Topology
from jaxrec.plan.calibration import Measurement, fit
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier.lookahead import ahead
from jaxrec.tier.model_tiers import close

_TABLES = 2
_WIDTHS = (16, 64)
_IDS = (1 << 9, 1 << 12)
_ASSIGNED_IDS = (1 << 9, 1 << 12, 1 << 15)
# Measurements take this many times as long as those of one operation, since batches take long.
_BUDGETS = 8
# Batches of different ids, and the number of them that a cache has. The rows used longest ago are
# evicted, 1/32 of the cache at a time, so that a batch finds none of its own and evicts as many.
_BLOCKS, _CACHED_BLOCKS = 64, 32
# Batches that are timed together: several times those that wait ready.
_TIMED = 16


def calibrate_caches(
    topology: Topology,
    mesh: Mesh,
    *,
    seconds: float = 0.1,
    report: Callable[[Measurement], Any] = lambda measurement: None,
) -> Topology:
    """Return a topology with measured rates of tables with caches.

    Rows move to and from host memory, and to and from files in the directory for temporary files.

    Args:
        topology: The devices.
        mesh: The same devices.
        seconds: Time for each measurement.
        report: Called with each measurement.
    """
    bench = _Bench(mesh, seconds, report)
    assign = bench.assign()
    host_moves = bench.moves("host_moves", "memory://", assign)
    with tempfile.TemporaryDirectory() as directory:
        store_moves = bench.moves("store_moves", f"file://{directory}/{{table}}", assign)
    return dataclasses.replace(
        topology, assign=assign, host_moves=host_moves, store_moves=store_moves
    )


@dataclasses.dataclass(frozen=True)
class _Bench:
    """Measurements on the devices of a mesh; see `calibrate_caches` for the attributes."""

    mesh: Mesh
    budget: float
    report: Callable[[Measurement], Any]

    def assign(self) -> Rate:
        """Give rows to ids that have them already."""
        measurements = []
        for ids in _ASSIGNED_IDS:
            seconds = self._seconds_of_table(_WIDTHS[0], [np.arange(ids)], ids, "memory://")
            measurements.append(self._note(Measurement("assign", ids, 0, seconds)))
        return fit(measurements)

    def moves(self, operation: str, store: str, assign: Rate) -> Rate:
        """Move rows to and from a row store; subtract the assignment."""
        measurements = []
        for number, (width, ids) in enumerate(itertools.product(_WIDTHS, _IDS)):
            blocks = np.split(np.arange(_BLOCKS * ids), _BLOCKS)
            url = store.replace("{table}", f"{number}/{{table}}")
            seconds = self._seconds_of_table(width, blocks, _CACHED_BLOCKS * ids, url)
            bytes, known = ids * (width + 1) * 4, assign.seconds(items=ids)
            measurements.append(self._note(Measurement(operation, ids, bytes, seconds, known)))
        return fit(measurements)

    def _seconds_of_table(
        self, width: int, blocks: Sequence[np.ndarray], rows: int, store: str
    ) -> float:
        """Return the shortest time of a batch, for one table.

        Args:
            width: Columns of a table.
            blocks: Ids of the batches, which take turns.
            rows: Rows of the cache.
            store: URL of the row store.
        """
        names = [f"t{i}" for i in range(_TABLES)]
        size = max(int(block[-1]) + 1 for block in blocks)
        tables = [EmbeddingBagConfig(name, size, width) for name in names]
        plan = ShardingPlan.from_dict(
            dict.fromkeys(names, row_wise()), dict.fromkeys(names, TableCache(rows, store))
        )
        model = shard(
            lambda: EmbeddingBagCollection(tables, optimizer=rowwise_adagrad(), rngs=nnx.Rngs(0)),
            plan,
            self.mesh,
        )
        batches = [
            KeyedJaggedArray.from_dense(dict.fromkeys(names, block[:, None])) for block in blocks
        ]
        taken = ahead(model, itertools.cycle(batches), place=lambda batch: batch)
        try:
            # Rows get their first values, are evicted, and come back.
            _take(taken, 2 * len(batches) + _TIMED)
            least, end = float("inf"), time.perf_counter() + _BUDGETS * self.budget
            while True:
                least = min(least, _take(taken, _TIMED))
                if time.perf_counter() >= end:
                    return least / _TIMED / _TABLES
        finally:
            taken.close()
            close(model)

    def _note(self, measurement: Measurement) -> Measurement:
        self.report(measurement)
        return measurement


def _take(batches: Iterator[Any], count: int) -> float:
    """Take some batches; return the seconds."""
    start = time.perf_counter()
    for _ in itertools.islice(batches, count):
        pass
    return time.perf_counter() - start
