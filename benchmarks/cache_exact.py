"""Losses, rows and optimizer state with caches beside those of whole tables.

See `benchmarks.tier`, whose command ``exact`` this is.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import tempfile
from typing import Any

from benchmarks.row_stores import redis_server
from jaxrec.train.devices import simulate_cpus


@dataclasses.dataclass(frozen=True)
class Exact:
    """Runs of a DLRM with a twentieth of its rows on the devices, by store and optimizer."""

    steps: int = 200
    """Training steps of each run."""
    rows: int = 20_000
    """Rows of each of four tables."""
    stores: tuple[str, ...] = ("memory", "file", "rocksdb", "redis", "memory+rocksdb")
    """Where the other rows are."""
    optimizers: tuple[str, ...] = ("sgd", "rowwise_adagrad", "adam")
    """Row optimizers."""
    devices: tuple[int, ...] = (1, 8)
    """Numbers of simulated devices; rows of the tables are spread over them."""
    tolerance: float = 1e-6
    """Largest difference of losses on several devices from those on one."""

    def run(self) -> None:
        simulate_cpus(max(self.devices))
        from tests.tier import exact_runs

        # With seed 0 and row-wise Adagrad an input of a ReLU is 8e-9 on one device, -5e-8 on eight.
        sizes = exact_runs.Sizes(steps=self.steps, rows=self.rows, seed=1)
        num_wrong = 0
        with tempfile.TemporaryDirectory() as name, redis_server(name) as port:
            for optimizer, devices in itertools.product(self.optimizers, self.devices):
                whole = on_one = exact_runs.train_whole(sizes, optimizer)
                if devices > 1:
                    whole = exact_runs.train_whole(sizes, optimizer, devices)
                for store in self.stores:
                    if store == "redis" and port is None:
                        continue
                    path = str(pathlib.Path(name, f"{store}-{optimizer}-{devices}"))
                    found = exact_runs.train_cached(
                        sizes, optimizer, store, path, port or 0, devices
                    )
                    line: dict[str, Any] = {"store": store, "optimizer": optimizer}
                    line["devices"] = devices
                    line["differences"] = differences = exact_runs.compare(found, whole)
                    line["from_one_device"] = from_one = exact_runs.compare(found, on_one)
                    for key in ("hit_rate", "fetched", "written"):
                        line[key] = round(found.statistics[key], 4)
                    line |= {"lookups": found.lookups, "misses": found.misses}
                    is_same = max(differences.values()) == 0 and not found.misses
                    num_wrong += not is_same or from_one["losses"] > self.tolerance
                    print(json.dumps(line), flush=True)
        if num_wrong:
            raise SystemExit(f"{num_wrong} runs differ from those of whole tables")
