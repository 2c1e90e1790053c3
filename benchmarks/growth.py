"""Time of a training step of tables as the work grows, with the bound that memory sets.

Usage: python -m benchmarks.growth [--only batch bag tables rows devices] [--output NAME]
Prints a JSON line for each point: the median time of a step (lookup, the mean of squares as the
loss, fused update), the bound, and the seconds that compiling took. With --output it also writes
NAME.json and the picture NAME.png. Parts that are in NAME.json and not in --only stay there.

The bound is the time in which the bytes of a step's rows and gradients are read and written at the
rate at which random rows are read::

    bytes = distinct * (3 * row + 2 * state) + 2 * bags * row + 2 * 4 * ids

A lookup reads each distinct row of a batch, and an update reads and writes the row and its
optimizer state. A lookup writes each bag's sum and an update reads its gradient. Both read the ids.
``row`` is ``4 * dim`` bytes, and ``state`` 4 bytes for row-wise Adagrad and 0 for SGD. The rate is
measured on the same tables: lookups of bags of 128 uniform ids, 2**20 ids in all, which write next
to nothing. Small tables are read from caches.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks.mesh import Workload

Part = Literal["batch", "bag", "tables", "rows", "devices"]

# Ways to train many tables, each a function of benchmarks.growth_ways.
WAYS = ("fused", "separate collections", "nnx.Embed with optax")


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points that differ in one size.

    Attributes:
        name: What the picture says.
        sizes: The sizes.
        workload: The workload of a size.
        way: One of `WAYS`, or the sharding type for several devices, after a colon the exchange.
    """

    name: str
    sizes: tuple[int, ...]
    workload: Callable[[int], Workload]
    way: str = "fused"


def _onehot(batch: int) -> Workload:
    return Workload("one id a bag", batch=batch, tables=26, bag=1, skew=1)


def _bags(batch: int) -> Workload:
    return Workload("bags of 20", batch=batch, tables=8, bag=20, skew=1)


def _bag(bag: int) -> Workload:
    return Workload("bag", batch=2048, tables=4, bag=bag, skew=1, rows=1_000_000)


def _tables(tables: int) -> Workload:
    return Workload("tables", batch=512, tables=tables, bag=4, skew=1, rows=10_000, dim=16)


def _narrow(rows: int) -> Workload:
    return Workload("rows", batch=8192, tables=1, bag=10, skew=1, rows=rows, dim=8)


def _wide(rows: int) -> Workload:
    return dataclasses.replace(_narrow(rows), dim=32)


def _onehot_on_devices(devices: int) -> Workload:
    return Workload("one id a bag", batch=8192, tables=32, bag=1, skew=1)


def _bags_on_devices(devices: int) -> Workload:
    return Workload("bags of 20", batch=2048, tables=16, bag=20, skew=1)


_BATCHES = tuple(2**power for power in range(8, 17))
_HALF_DECADES = tuple(round(10 ** (power / 2)) for power in range(8, 17))
_DEVICES = (1, 2, 4, 8, 16)

CURVES: dict[Part, tuple[Curve, ...]] = {
    "batch": (
        Curve("26 tables, one id", _BATCHES, _onehot),
        Curve("8 tables, bags of 20", _BATCHES, _bags),
    ),
    "bag": (Curve("4 tables, batch 2,048", (1, 2, 5, 10, 20, 50, 100, 200, 500), _bag),),
    "tables": tuple(Curve(way, (1, 3, 10, 30, 100, 300, 1000), _tables, way) for way in WAYS),
    # The largest first: smaller tables take the memory that it leaves.
    "rows": (
        Curve("8 columns", _HALF_DECADES[::-1], _narrow),
        Curve("32 columns", _HALF_DECADES[::-1], _wide),
    ),
    "devices": (
        Curve("one id, table-wise", _DEVICES, _onehot_on_devices, "table_wise"),
        Curve("one id, row-wise", _DEVICES, _onehot_on_devices, "row_wise:rows"),
        Curve("bags of 20, table-wise", _DEVICES, _bags_on_devices, "table_wise"),
        Curve("bags of 20, row-wise sums", _DEVICES, _bags_on_devices, "row_wise:pooled"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        only: Parts to measure.
        seconds: Seconds of each point, at least five steps.
        largest: Points of a larger size are left out; 0: none is.
        memory: Points whose tables, with their optimizer state, take more than this number of GB
            are left out.
        output: File name without its ending, for the figures and the picture.
    """

    only: tuple[Part, ...] = tuple(CURVES)
    seconds: float = 0.5
    largest: int = 0
    memory: float = 4.5
    output: pathlib.Path | None = None


def main(options: Options) -> None:
    parts: dict[str, Any] = {}
    if options.output is not None and options.output.with_suffix(".json").exists():
        parts = json.loads(options.output.with_suffix(".json").read_text())
    for part in options.only:
        begun = time.perf_counter()
        parts[part] = [line for number in range(len(CURVES[part]))
                       for line in measure_curve(part, number, options)]  # fmt: skip
        print(f"{part}: {time.perf_counter() - begun:.0f} s", flush=True)
        if options.output is not None:
            in_order = {name: parts[name] for name in CURVES if name in parts}
            lines = [f'"{name}": [\n' + ",\n".join(map(json.dumps, of_part)) + "\n]"
                     for name, of_part in in_order.items()]  # fmt: skip
            text = "{\n" + ",\n".join(lines) + "\n}\n"
            options.output.with_suffix(".json").write_text(text)
    if options.output is not None:
        from benchmarks.growth_picture import draw

        draw(parts, options.output.with_suffix(".png"))


def measure_curve(part: Part, number: int, options: Options) -> Iterator[dict[str, Any]]:
    """Yield the points of a curve, which other processes measure.

    A process measures all points, or one if the number of devices differs.
    """
    curve = CURVES[part][number]
    sizes = [
        size
        for size in curve.sizes
        if (not options.largest or size <= options.largest)
        and table_bytes(curve.workload(size)) <= options.memory * 1e9
    ]
    of_processes = [(size, [size]) for size in sizes] if part == "devices" else [(1, sizes)]
    spawn = multiprocessing.get_context("spawn")
    for devices, of_process in of_processes:
        with concurrent.futures.ProcessPoolExecutor(1, spawn, _begin, (devices,)) as process:
            for size in of_process:
                yield process.submit(measure, part, number, size, options.seconds).result()


def table_bytes(workload: Workload) -> int:
    """Return the bytes of the tables with the state of row-wise Adagrad."""
    return sum(workload.row_counts) * (4 * workload.dim + 4)


def _begin(devices: int) -> None:
    """Prepare a process: before JAX's first use its number of devices is chosen."""
    import jax

    import jaxrec

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jaxrec.keep_freed_memory()


def measure(part: Part, number: int, size: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a point, and print them."""
    import jax

    from benchmarks import growth_ways

    curve = CURVES[part][number]
    workload = curve.workload(size)
    state, step, batches = growth_ways.make(workload, curve.way)
    begun = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, batches[0]).compile()
    compile_seconds = time.perf_counter() - begun
    times: list[float] = []
    end = None
    while end is None or len(times) < 7 or time.perf_counter() < end:
        start = time.perf_counter()
        state, loss = compiled(state, batches[len(times) % len(batches)])
        jax.block_until_ready((state, loss))
        times.append((time.perf_counter() - start) * 1e3)
        end = end or time.perf_counter() + seconds
    state_bytes = 0 if part == "tables" else 4
    is_one = curve.way == "fused"
    rate = growth_ways.read_rate(workload, state if is_one else None)
    line = {
        "curve": curve.name,
        part: size,
        "step_ms": round(float(np.median(times[2:])), 3),
        "least_ms": round(min(times[2:]), 3),
        "bound_ms": round(least_bytes(workload, state_bytes) / rate * 1e3, 3),
        "read_gb_s": round(rate / 1e9, 1),
        "compile_s": round(compile_seconds, 1),
    }
    print(json.dumps({"part": part} | line), flush=True)
    return line


def least_bytes(workload: Workload, state_bytes: int) -> int:
    """Return the bytes that a step must move; the formula is above."""
    drawn = workload.draw(0)
    distinct = sum(np.unique(ids).size for ids in drawn)
    row, bags = 4 * workload.dim, workload.batch * workload.tables
    return distinct * (3 * row + 2 * state_bytes) + 2 * bags * row + 2 * 4 * bags * workload.bag


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
