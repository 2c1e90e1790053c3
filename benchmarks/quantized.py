"""Times pooled lookups of quantized tables, beside float32 tables and FBGEMM's quantized ones.

Usage: python -m benchmarks.quantized [--peer-python PATH] [--rounds 3] [--seconds 2] [--threads 2]
                                      [--only SHAPE ...]
PATH is the Python of an environment with torch and fbgemm-gpu-cpu; without it jaxrec alone is
timed. Each round times the row formats of a shape in turn, call by call, then FBGEMM's in a process
of its own. Prints a JSON line per round, shape and side: minimum and median milliseconds of the
pooled (sum) lookup with a float32 result, by the clock and of the processor; then a table of
ratios of the minima over all rounds. On a busy machine compare the processor's: they leave out the
time for which other processes run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

from benchmarks.shapes import SHAPES, Shape, read_shapes

TYPES = ("float32", "int8", "int4")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
        peer_python: Python of the peer's environment; None: do not time the peer.
        rounds: How often each side is timed.
        seconds: Time for each row format of a round.
        threads: Processor cores to use.
        only: Names of the shapes to time; none: all.
        shapes: JSON file of shapes.
    """

    peer_python: pathlib.Path | None = None
    rounds: int = 3
    seconds: float = 2.0
    threads: int = 2
    only: tuple[str, ...] = ()
    shapes: pathlib.Path = SHAPES


def main(options: Options) -> None:
    # XLA takes one thread for each core that the process may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    times: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for number in range(options.rounds):
        for shape in read_shapes(options.shapes):
            if options.only and shape.name not in options.only:
                continue
            lines = measure(shape, options.seconds)
            if options.peer_python is not None:
                lines += peer_lines(options, shape.name)
            for line in lines:
                load = round(os.getloadavg()[0], 2)
                print(json.dumps({"round": number, **line, "load": load}), flush=True)
                key = (line["shape"], line["peer"], line["type"])
                times[key].append((line["forward_ms"][0], line["processor_ms"][0]))
    print_ratios({key: np.min(values, axis=0) for key, values in times.items()})


def measure(shape: Shape, seconds: float) -> list[dict[str, Any]]:
    """Time all row formats of a shape, call by call in turn."""
    # Imported here, after the cores are set: JAX counts them when it is imported.
    import jax
    import jax.numpy as jnp

    import jaxrec
    from jaxrec.embed import kernels
    from jaxrec.embed.formats import FORMATS, as_table

    jaxrec.keep_freed_memory()
    drawn = shape.draw()
    layout = kernels.BagLayout(**drawn.layout_fields())
    batch = (jnp.asarray(drawn.ids), jnp.asarray(drawn.lengths), None)

    def packed_rows(row_format: Any) -> jax.Array:
        """Random rows, made some at a time as `jaxrec.serve.quantize` does."""
        width = row_format.width(shape.D)
        rows = kernels.new_rows(jnp.zeros(width, row_format.dtype), drawn.num_rows)
        some = jax.random.normal(jax.random.key(0), (min(drawn.num_rows, 50_000), shape.D))
        put = jax.jit(
            lambda rows, some, start: jax.lax.dynamic_update_slice_in_dim(rows, some, start, 0),
            donate_argnums=0,
        )
        for start in range(0, drawn.num_rows, len(some)):
            rows = put(rows, row_format.pack(some), jnp.int32(start))
        return rows

    calls: dict[str, Callable[[], Any]] = {}
    for name in TYPES:
        row_format = FORMATS[name]
        rows = packed_rows(row_format)
        table = rows if name == "float32" else as_table(rows, row_format, shape.D)
        look_up = jax.jit(
            lambda table, batch: kernels.pooled_lookup(table, *batch, layout, "float32")
        )
        calls[name] = lambda table=table, f=look_up: f(table, batch).block_until_ready()
    times = time_in_turn(calls, seconds)
    return [
        {"peer": "jaxrec", "shape": shape.name, "type": name, **figures}
        for name, figures in times.items()
    ]


def time_in_turn(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, dict[str, Any]]:
    """Minimum, median and processor milliseconds of each call."""
    walls: dict[str, list[float]] = {name: [] for name in calls}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for name, call in calls.items():
            start, used = time.perf_counter(), time.process_time()
            call()
            walls[name].append((time.perf_counter() - start) * 1e3)
            processor[name].append((time.process_time() - used) * 1e3)
    return {
        name: {
            "forward_ms": [min(walls[name]), float(np.median(walls[name]))],
            "processor_ms": [min(processor[name]), float(np.median(processor[name]))],
        }
        for name in calls
    }


def peer_lines(options: Options, shape: str) -> list[dict[str, Any]]:
    """The lines of the peer's process."""
    script = pathlib.Path(__file__).with_name("peer_nbit.py")
    command = [str(options.peer_python), str(script), f"--shapes={options.shapes}"]
    command += [f"--only={shape}", f"--threads={options.threads}", f"--seconds={options.seconds}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def print_ratios(best: dict[tuple[str, str, str], np.ndarray]) -> None:
    """Print jaxrec's times over those of float32 and of the peer, by clock and by processor."""
    columns = ("shape", "type", "jaxrec ms", "of float32", "of FBGEMM")
    print("| " + " | ".join([*columns, "processor ms", "of float32", "of FBGEMM"]) + " |")
    print("|---|---|---|---|---|---|---|---|")
    for (shape, peer, name), mine in best.items():
        if peer != "jaxrec" or name == "float32":
            continue
        others = [best[shape, "jaxrec", "float32"], best.get((shape, "fbgemm_nbit", name))]
        cells = [shape, name]
        for kind in range(2):
            ratios = [None if other is None else mine[kind] / other[kind] for other in others]
            numbers = [mine[kind], *ratios]
            cells += ["" if number is None else f"{number:.2f}" for number in numbers]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
