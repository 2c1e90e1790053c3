"""Losses, rows and optimizer state with caches beside those of whole tables.

See `benchmarks.tier`, whose command ``exact`` this is.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import tempfile

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
    """Largest difference on several devices; on one device there must be none."""

    def run(self) -> None:
        simulate_cpus(max(self.devices))
        from tests.tier import exact_runs

        sizes = exact_runs.Sizes(steps=self.steps, rows=self.rows)
        num_wrong = 0
        with tempfile.TemporaryDirectory() as name, redis_server(name) as port:
            for optimizer, devices in itertools.product(self.optimizers, self.devices):
                on_one = exact_runs.train_whole(sizes, optimizer)
                alike = on_one
                if devices > 1:
                    alike = exact_runs.train_whole(sizes, optimizer, devices)
                for store in self.stores:
                    if store == "redis" and port is None:
                        continue
                    path = str(pathlib.Path(name, f"{store}-{optimizer}-{devices}"))
                    found = exact_runs.train_cached(
                        sizes, optimizer, store, path, port or 0, devices
                    )
                    line = {"store": store, "optimizer": optimizer, "devices": devices}
                    line["differences"] = exact_runs.compare(found, on_one)
                    if devices > 1:
                        line["from_whole_on_as_many"] = exact_runs.compare(found, alike)
                    for key in ("hit_rate", "fetched", "written"):
                        line[key] = round(found.statistics[key], 4)
                    line |= {"lookups": found.lookups, "misses": found.misses}
                    most = 0 if devices == 1 else self.tolerance
                    is_good = max(line["differences"].values()) <= most and not found.misses
                    num_wrong += not is_good
                    print(json.dumps({**line, "is_good": is_good}), flush=True)
        if num_wrong:
            raise SystemExit(f"{num_wrong} runs differ from those of whole tables")
