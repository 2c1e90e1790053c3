"""Speed and accuracy of open vocabularies and of tables beyond memory.

Usage: python -m benchmarks.tier ids [--resident 10_000_000] [--peer-python PATH]
       python -m benchmarks.tier step
       python -m benchmarks.tier stream [--output benchmarks/results/vocabulary_stream]
       python -m benchmarks.tier cache
       python -m benchmarks.tier plan [--output benchmarks/results/plan_caches.json]
       python -m benchmarks.tier stores [--directory PATH]
       python -m benchmarks.tier kills [--kills 100]
       python -m benchmarks.tier exact
       python -m benchmarks.tier policies
       python -m benchmarks.tier huge [--directory PATH]
       python -m benchmarks.tier sizes [--output benchmarks/results/cache_sizes]

``ids`` prints one JSON line for each measure and each contender: ids a second of processor time on
one core, from the median of several rounds.

- ``hits``: lookups of ids drawn uniformly from the resident ones. `jaxrec.tier.ids.id_map.IdMap`,
  pandas's ``Index.get_indexer`` where it is installed, and a ``dict`` in a list comprehension take
  turns. TorchRec's MCHManagedCollisionModule comes last; PATH is the Python of an environment that
  has it.
- ``misses``: batches of new ids for a full map. Each batch is looked up, and its distinct missing
  ids get slots; whenever there are too few free slots, the least recently used 5 % are evicted.
  ``parts_ms`` are the milliseconds of a batch by operation. TorchRec's module evicts the least
  recently used ids after each batch.
- ``distinct``, ``smallest``, ``record_uses``: single operations beside NumPy's.

``step`` trains 26 tables of 64 columns with open vocabularies and the same as plain tables, on
batches of one generator, in turn. Of the lookups 1 % are of ids that never came before. The plain
tables get row indices. It prints the milliseconds of a step, wall-clock and processor time, with
all that makes the batch; medians of the rounds; and the ratios of the rounds.

``cache`` trains 26 tables of 64 columns with a tenth of their rows on the device and the others in
stores, and the same tables whole, on the same batches of power-law ids, in turn. It prints what
``step`` prints, and the peak of the process's memory.

``plan`` calibrates this machine, and plans six tables for machines whose memory is twice to a
quarter of the tables' bytes. It carries the plans out, and prints the milliseconds of a step that
the planner predicts beside those measured: the least of all rounds, the median, and the median of
processor time; and the rows that each table misses in a step, measured and predicted.

``stream`` trains on 10**9 possible ids whose popularity drifts; ids have weights of their own in
the true model. Three models take turns, on equally many rows: with an open vocabulary that admits
ids after two sightings, with one that admits all, and with hashed ids. It prints the memory of the
process, the normalized entropy of predictions before each update beside that of the true
probabilities, and step times; in the end those of the first and of the last thousand steps: the
median of wall-clock time, and the mean of processor time. ``--output`` writes a file and a picture.

``stores`` prints records a second that each row store writes and reads, in batches of 20,000
records of 260 bytes, beside its client used directly with the same batches: ``numpy.memmap``,
rocksdict with the same options, and MSET and MGET of redis-py. The two take turns. ``ratio`` is of
wall-clock times, ``processor_ratio`` of processor times of this process; above 1 the store is
faster.

``kills`` kills writers of each durable store by SIGKILL at random moments, opens the store, and
compares each record with what was written: none may be a mixture, and only those of the batch that
was being written may be old, new or (``file``) absent. Every third time a snapshot is loaded.

``exact`` trains a DLRM with a twentieth of its rows on the devices and the others in each store,
with each row optimizer, on one device and on eight simulated ones, and the same with whole tables.
It prints the largest differences of losses, and of rows and optimizer state, as shares of the
numbers or, below 1, as differences: from whole tables on as many devices, and on one. It ends with
an error if there is a difference from whole tables on as many devices, if losses differ by more
than 1e-6 from those on one, or if a row that a batch reads was not on the device.

``policies`` prints hit rates of eviction policies by the share of the rows in the cache, and the
processor time in which a batch gets its rows; no device takes part.

``huge`` trains a table of 4 billion rows of 64 columns over a file, saves it, and restores it into
another file. It prints steps a second, the memory of the process, and the bytes on the disk; it
ends with an error if rows or losses of the restored model differ.

``sizes`` prints what ``cache`` prints for caches of several sizes. ``--output`` writes a file and a
picture.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from benchmarks.cache_exact import Exact
from benchmarks.cache_policies import Policies
from benchmarks.cache_sizes import Sizes
from benchmarks.cache_step import Cache
from benchmarks.huge_table import Huge
from benchmarks.plan_caches import Plans
from benchmarks.row_stores import Kills, Stores
from benchmarks.vocabulary_step import Step
from benchmarks.vocabulary_stream import Stream
from jaxrec.tier.ids import reference
from jaxrec.tier.ids.batch_ops import distinct, record_uses, smallest
from jaxrec.tier.ids.id_map import IdMap

_HERE = pathlib.Path(__file__).parent
_LARGEST = 2**63 - 2


@dataclasses.dataclass(frozen=True)
class Ids:
    """Speed of id maps and batch operations."""

    resident: int = 10_000_000
    """Ids in the map, which is full."""
    batch: int = 500_000
    """Ids of a batch."""
    evicted: float = 0.05
    """Share of the slots that is evicted at a time."""
    rounds: int = 9
    """Batches of each measure."""
    peer_python: pathlib.Path | None = None
    """Python of an environment with torch, torchrec and fbgemm-gpu-cpu."""

    def run(self) -> None:
        rng = np.random.default_rng(0)
        resident = np.unique(rng.integers(0, _LARGEST, self.resident + self.resident // 1000))
        resident = rng.permutation(resident)[: self.resident]
        self.time_hits(resident, rng)
        self.time_misses(resident, rng)
        self.time_operations(rng)
        if self.peer_python is not None:
            sizes = [f"--{name}={getattr(self, name)}" for name in ("resident", "batch", "rounds")]
            command = [str(self.peer_python), str(_HERE / "peer_ids.py"), *sizes]
            subprocess.run(command, check=True)

    def report(self, peer: str, measure: str, seconds: list[float], **others: Any) -> None:
        line = {"peer": peer, "measure": measure, "resident": self.resident, "batch": self.batch}
        line |= {"ids_per_second": round(self.batch / statistics.median(seconds)), **others}
        print(json.dumps(line), flush=True)

    def time_hits(self, resident: np.ndarray, rng: np.random.Generator) -> None:
        ids = IdMap(resident.size, threads=1)
        ids.insert(resident, np.arange(resident.size, dtype=np.int32))
        contenders: dict[str, Callable[[np.ndarray], Any]] = {"jaxrec": ids.find}
        try:
            import pandas

            contenders["pandas"] = pandas.Index(resident).get_indexer
        except ImportError:
            pass
        slots = dict(zip(resident.tolist(), range(resident.size), strict=True))
        contenders["dict"] = lambda batch: [slots.get(each, -1) for each in batch.tolist()]
        times = defaultdict(list)
        for _ in range(self.rounds + 1):  # pandas makes its hash table in the first round
            sample = rng.integers(0, resident.size, self.batch)
            batch = resident[sample]
            for name, find in contenders.items():
                found, seconds = timed(find, batch)
                assert np.array_equal(found, sample)
                times[name].append(seconds)
        self.report("jaxrec", "hits", times.pop("jaxrec")[1:], bytes_per_id=ids.nbytes / len(ids))
        for name, rounds in times.items():
            self.report(name, "hits", rounds[1:])

    def time_misses(self, resident: np.ndarray, rng: np.random.Generator) -> None:
        ids, slot_ids = IdMap(resident.size, threads=1), resident.copy()
        ids.insert(resident, np.arange(resident.size, dtype=np.int32))
        last_use = np.zeros(resident.size, np.uint64)
        free = np.empty(0, np.int32)
        times, parts = [], defaultdict(list)
        for step in range(1, self.rounds + 1):
            batch = rng.integers(0, _LARGEST, self.batch)
            took = defaultdict(float)

            def call(function: Callable, *arguments: Any, took: dict = took) -> Any:
                result, seconds = timed(function, *arguments)
                took[function.__name__] += seconds
                return result

            start = time.process_time()
            slots = call(ids.find, batch)
            new = call(distinct, batch[slots < 0])[0]
            while free.size < new.size:
                count = max(1, round(self.evicted * resident.size))
                victims = call(smallest, last_use, None, count)
                call(ids.remove, slot_ids[victims])
                last_use[victims] = _LARGEST  # free slots are not evicted again
                free = np.concatenate([free, victims])
            taken, free = free[: new.size], free[new.size :]
            call(ids.insert, new, taken)
            slot_ids[taken] = new
            last_use[taken] = step
            times.append(time.process_time() - start)
            for name, seconds in took.items():
                parts[name].append(seconds)
        median_ms = {name: round(1e3 * statistics.median(each), 1) for name, each in parts.items()}
        self.report("jaxrec", "misses", times, parts_ms=median_ms)

    def time_operations(self, rng: np.random.Generator) -> None:
        num_chosen = round(self.evicted * self.resident)
        keys = rng.integers(0, 2**64, self.resident, np.uint64)
        eligible = rng.random(self.resident) < 0.9
        batch = (self.resident ** rng.random(self.batch)).astype(np.int64)  # few ids come often
        slots = batch.astype(np.int32) - 1
        counts, last_use = np.zeros(self.resident, np.uint32), np.zeros(self.resident, np.int64)

        def record_in_numpy() -> None:
            np.add.at(counts, slots, np.uint32(1))
            last_use[slots] = 1

        operations: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {
            "distinct": (
                self.batch,
                lambda: distinct(batch),
                lambda: reference.distinct(batch),
            ),
            "smallest": (
                self.resident,
                lambda: smallest(keys, eligible, num_chosen),
                lambda: reference.smallest(keys, eligible, num_chosen),
            ),
            "record_uses": (
                self.batch,
                lambda: record_uses(slots, 1, counts, last_use),
                record_in_numpy,
            ),
        }
        for name, (size, *contenders) in operations.items():
            times = [[timed(each)[1] for each in contenders] for _ in range(self.rounds)]
            for peer, seconds in zip(("jaxrec", "numpy"), np.median(times, axis=0), strict=True):
                line = {"peer": peer, "measure": name, "size": size, "ms": round(1e3 * seconds, 2)}
                print(json.dumps(line), flush=True)


def timed(function: Callable, *arguments: Any) -> tuple[Any, float]:
    """Return what a function returns, and the seconds of processor time that it takes."""
    start = time.process_time()
    result = function(*arguments)
    return result, time.process_time() - start


if __name__ == "__main__":
    commands = {
        "ids": Ids,
        "step": Step,
        "stream": Stream,
        "cache": Cache,
        "plan": Plans,
        "stores": Stores,
        "kills": Kills,
        "exact": Exact,
        "policies": Policies,
        "huge": Huge,
        "sizes": Sizes,
    }
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__).run()
