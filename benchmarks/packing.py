"""How long ids take from host data to a packed batch.

    python -m benchmarks.packing --ids 10_000_000

Prints one JSON line for each kind of input: seconds (the best of several runs) and ids a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrec.ragged import KeyedJaggedArray

FEATURES = 20
MEAN_LENGTH = 20
ROWS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ids", type=int, default=10_000_000, help="ids of the whole batch")
    parser.add_argument("--repeats", type=int, default=5, help="runs, of which the best counts")
    arguments = parser.parse_args()
    for name, pack in packers(arguments.ids).items():
        seconds = best_time(pack, arguments.repeats)
        ids = int(pack().lengths.sum())
        line = {"input": name, "ids": ids, "seconds": seconds, "ids_per_second": ids / seconds}
        print(json.dumps(line), flush=True)


def packers(num_ids: int) -> dict[str, Callable[[], KeyedJaggedArray]]:
    """For each kind of input a function that packs about ``num_ids`` ids of it."""
    rng = np.random.default_rng(0)
    keys = [f"f{feature}" for feature in range(FEATURES)]
    batch = num_ids // (FEATURES * MEAN_LENGTH)
    bounds = dict.fromkeys(keys, ROWS)
    lengths = rng.integers(0, 2 * MEAN_LENGTH + 1, FEATURES * batch)
    values = rng.integers(0, ROWS, lengths.sum())
    weights = rng.random(values.size, np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    bags = [values[start:end] for start, end in itertools.pairwise(offsets)]
    arrays = {key: bags[i * batch : (i + 1) * batch] for i, key in enumerate(keys)}
    lists = {key: [bag.tolist() for bag in column] for key, column in arrays.items()}
    dense = {key: rng.integers(0, ROWS, (batch, MEAN_LENGTH)) for key in keys}
    return {
        "flat": lambda: KeyedJaggedArray.from_lengths(keys, values, lengths, bounds=bounds),
        "flat_weighted": lambda: KeyedJaggedArray.from_lengths(
            keys, values, lengths, weights, bounds=bounds
        ),
        "dense": lambda: KeyedJaggedArray.from_dense(dense, bounds=bounds),
        "arrow": arrow_packer(keys, values, offsets, batch, bounds),
        "lists_of_arrays": lambda: KeyedJaggedArray.from_lists(arrays, bounds=bounds),
        "nested_lists": lambda: KeyedJaggedArray.from_lists(lists, bounds=bounds),
    }


def arrow_packer(
    keys: list[str],
    values: np.ndarray,
    offsets: np.ndarray,
    batch: int,
    bounds: dict[str, int],
) -> Callable[[], KeyedJaggedArray]:
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for index, key in enumerate(keys):
        ends = offsets[index * batch : (index + 1) * batch + 1]
        ids = pa.array(values[ends[0] : ends[-1]])
        columns[key] = pa.ListArray.from_arrays(pa.array((ends - ends[0]).astype(np.int32)), ids)
    table = pa.table(columns)
    return lambda: KeyedJaggedArray.from_arrow(table, bounds=bounds)


def best_time(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
