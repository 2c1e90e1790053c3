"""How fast histories are read, packed and dealt to devices, on one core.

Usage: python -m benchmarks.sequences [--users 20000]

Writes a generated log in the columns of Yambda to a Parquet file, with a power law of events for
each user, and prints one JSON line a measurement. Times are processor time of this process, all
threads together.

- ``group``: `jaxrec.data.write_histories`, a row for each event to a row for each user; events a
  second.
- ``scan``: the lengths of all requests, which the first use of `jaxrec.data.SequenceBatches` reads;
  events of the file a second.
- ``plan``: which requests are in which batch, for an epoch on eight devices; requests a second.
- ``batches``: all batches of an epoch; requests, and events of their histories, a second. And
  the work of the slowest device over the mean, as requests come and as they are dealt.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from jaxrec.data import (
    BatchShape,
    EventGroups,
    ParquetGroups,
    RequestLimits,
    SequenceBatches,
    imbalance,
    write_histories,
    yambda_schema,
)
from jaxrec.data.sequences.packing import attention_work


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    users: int = 20_000
    events: int = 200
    """Smallest number of events of a user."""
    history: int = 1024
    candidates: int = 16
    rows: int = 32
    """Rows of a device."""
    devices: int = 8
    steps: int = 4
    """Batches that are dealt together."""
    seed: int = 0


def write_log(options: Options, path: pathlib.Path) -> int:
    """Write a log with a row for each event; return the number of events."""
    rng = np.random.default_rng(options.seed)
    lengths = np.minimum(options.events * (1 + rng.pareto(1.5, options.users)), 20_000).astype(int)
    total = int(lengths.sum())
    kinds = pa.array(["listen", "like"])
    table = pa.table(
        {
            "uid": np.repeat(np.arange(options.users, dtype=np.uint32), lengths),
            "timestamp": rng.integers(0, 26_000_000 // 5, total).astype(np.uint32) * 5,
            "item_id": (rng.pareto(1.0, total) * 1000).clip(0, 9_390_000).astype(np.uint32),
            "is_organic": rng.integers(0, 2, total).astype(np.uint8),
            "played_ratio_pct": rng.integers(0, 101, total).astype(np.uint16),
            "track_length_seconds": rng.integers(60, 400, total).astype(np.uint32),
            "event_type": pa.DictionaryArray.from_arrays(
                (rng.random(total) < 0.05).astype(np.int8), kinds
            ),
        }
    )
    pq.write_table(table.sort_by([("uid", "ascending"), ("timestamp", "ascending")]), path)
    return total


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a function and the seconds of processor time that it took."""
    begun = time.process_time()
    result = function()
    return result, time.process_time() - begun


def main(options: Options) -> None:
    """Measure, and print a JSON line for each part."""
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        total = write_log(options, directory / "log.parquet")
        log = ParquetGroups((directory / "log.parquet",))
        _, seconds = timed(lambda: write_histories(log, directory / "users"))
        say("group", events=total, events_per_second=total / seconds)
        shape = BatchShape(
            options.rows,
            options.rows * options.history // 2,
            options.rows * options.candidates,
            options.devices,
            options.steps,
        )
        groups = EventGroups(
            ParquetGroups.of_directory(directory / "users"),
            yambda_schema(9_390_001, num_users=1 << 20),
            RequestLimits(options.history, options.candidates),
        )
        source = SequenceBatches(groups, shape, seed=0)
        counts, seconds = timed(lambda: source.counts)
        say("scan", **dataclasses.asdict(counts), events_per_second=total / seconds)
        steps, seconds = timed(lambda: len(source))
        say("plan", batches=steps, requests_per_second=counts.requests / seconds)
        _, seconds = timed(lambda: [None for batch in source.from_batch()])
        say(
            "batches",
            requests_per_second=counts.requests / seconds,
            candidates_per_second=counts.candidates / seconds,
            events_per_second=counts.events / seconds,
            ms_per_batch=1000 * seconds / steps,
            **balance(source, steps, shape),
        )


def balance(source: SequenceBatches, steps: int, shape: BatchShape) -> dict[str, float]:
    """Return the work of the slowest device over the mean, before and after dealing."""
    work = []
    for number in range(min(steps, 64)):
        batch = source[number]
        lengths = (np.asarray(batch[key].lengths) for key in ("item_id", "candidate_item_id"))
        work.append(attention_work(*lengths))
    dealt = np.stack(work)
    rng = np.random.default_rng(0)
    mixed = np.stack([rng.permutation(each) for each in dealt])

    def slowest(amounts: np.ndarray) -> float:
        order = np.arange(amounts.size).reshape(len(amounts), shape.devices, shape.rows)
        return imbalance(amounts.ravel(), order)

    return {"slowest_as_they_come": slowest(mixed), "slowest_dealt": slowest(dealt)}


def say(name: str, **values: float) -> None:
    """Print a measurement as a JSON line."""
    rounded = {key: round(x, 3) if isinstance(x, float) else x for key, x in values.items()}
    print(json.dumps({"measure": name, **rounded}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
