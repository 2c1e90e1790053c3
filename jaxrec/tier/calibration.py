"""Calibration of caches: measured rates of assigning and moving rows, for the planner.

A model with caches takes batches from `jaxrec.tier.ahead` and computes no step. If every batch has
the same ids, a batch takes the time to assign rows. If a batch finds none of its ids on the
devices, all its rows move there and as many move back.
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

# Two tables, as a model has several: work that they share is then counted half for each.
_TABLES = 2
# Two widths and two numbers of ids, so that the time of a row and that of its bytes can be told
# apart.
_WIDTHS = (16, 64)
_IDS = (1 << 9, 1 << 12)
_ASSIGNED_IDS = (1 << 9, 1 << 12, 1 << 15)
# A measurement takes this many times the time of one operation's, since a batch takes long.
_BUDGETS = 8
# Number of batches of different ids, and how many of them fit a cache. The rows used longest ago
# are evicted, 1/32 of the cache at a time, so that a batch finds none of its ids and evicts as many
# rows as it brings.
_BLOCKS, _CACHED_BLOCKS = 64, 32
# Batches that are timed together: several times as many as wait ready, which cost no time.
_TIMED = 16


def calibrate_caches(
    topology: Topology,
    mesh: Mesh,
    *,
    seconds: float = 0.1,
    report: Callable[[Measurement], Any] = lambda measurement: None,
) -> Topology:
    """Return a topology with measured rates of assigning and of moving cached rows.

    Each measurement takes about ``8 * seconds``, and is given to ``report``.
    """
    # Stores in files lie in the directory for temporary files: its disk is the one measured.
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
    """Measurements on the devices of a mesh, with ``budget`` seconds for each."""

    mesh: Mesh
    budget: float
    report: Callable[[Measurement], Any]

    def assign(self) -> Rate:
        """Measure how long planning takes for batches whose ids all have their rows."""
        measurements = []
        for ids in _ASSIGNED_IDS:
            seconds = self._seconds_of_table(_WIDTHS[0], [np.arange(ids)], ids, "memory://")
            measurements.append(self._note(Measurement("assign", ids, 0, seconds)))
        return fit(measurements)

    def moves(self, operation: str, store: str, assign: Rate) -> Rate:
        """Measure moves of rows to and from a row store, without the time of the assignment.

        ``operation`` is a field of `Topology`, ``store`` the store's URL with ``{table}`` in it.
        """
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
        """Return the shortest seconds of a batch and table, for batches of the ids in ``blocks``.

        The tables have ``width`` columns, ``rows`` rows on the devices and the others in a store.
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
            # Two rounds first: in the first rows get first values and are evicted, in the second
            # they come back from the store.
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
    """Take ``count`` batches from an iterator; return the seconds that this takes."""
    start = time.perf_counter()
    for _ in itertools.islice(batches, count):
        pass
    return time.perf_counter() - start
