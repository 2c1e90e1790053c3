"""Times one implementation on one GPU, beside the traffic that its work takes at least.

    python -m benchmarks.gpu.measure triton
    python -m benchmarks.gpu.measure torch      # torch.nn.EmbeddingBag, the lookup alone

Prints a JSON line for the card's own copy bandwidth, then one for each primitive and shape:
milliseconds (minimum and median over rounds of calls on resident arrays; an update runs in place
and flattens and sorts its lookups inside), the milliseconds of the card's kernels, all together
and each, without the time between them, and the bytes that must move at least and at most, with
all repeated reads served by a cache or none. The exit status is 1 if a call failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.batches import Shape, bags_of, read_shapes
from benchmarks.gpu.check import IMPLEMENTATIONS, refuses_table
from benchmarks.gpu.device_time import kernel_times
from jaxrec import optim
from jaxrec.embed.formats import TableArray

SHAPES = read_shapes(pathlib.Path(__file__).with_name("shapes.json"))
OPTIMIZERS = {"sgd": optim.sgd(0.01), "rowwise_adagrad": optim.rowwise_adagrad(0.01)}
SECTOR = 32  # bytes that the memory of an NVIDIA GPU moves at least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("implementation", choices=[*IMPLEMENTATIONS, "torch"])
    parser.add_argument(
        "--shapes",
        nargs="*",
        choices=[x.name for x in SHAPES],
        help="names of the shapes; default all",
    )
    parser.add_argument("--shrink", type=int, default=1, help="divide rows and batches by this")
    arguments = parser.parse_args()
    name = arguments.implementation
    measure = measure_torch if name == "torch" else functools.partial(measure_kernels, name)
    if name != "torch":
        device = jax.devices()[0]
        line = {"kind": "card", "card": device.device_kind, "jax": jax.__version__}
        print(json.dumps(line | {"copy_bytes_per_s": copy_bandwidth(arguments.shrink)}), flush=True)
    failures = 0
    for shape in SHAPES:
        if arguments.shapes and shape.name not in arguments.shapes:
            continue
        for line in measure(_shrunk(shape, arguments.shrink)):
            line = {"kind": "time", "implementation": name, "shape": shape.name} | line
            print(json.dumps(line), flush=True)
            failures += "exception" in line
    sys.exit(failures > 0)


def measure_kernels(name: str, shape: Shape) -> list[dict[str, Any]]:
    """The lines of one implementation and shape; an error is one too."""
    implementation = IMPLEMENTATIONS[name]
    table = resident_table(shape)
    if refuses_table(implementation, table):
        return []
    batch = shape.batch_arrays()
    traffic = Traffic(shape)
    lines = []

    pool = jax.jit(
        lambda table, *batch: implementation.pooled_lookup(table, *batch, shape.layout, shape.dtype)
    )
    lines.append(_line("pooled_lookup", lambda: pool(table, *batch), traffic.lookup()))
    if not hasattr(implementation, "fused_update") or shape.packed is not None:
        return lines

    gradients = jax.random.normal(jax.random.key(1), (shape.layout.num_bags, shape.dim))
    gradients = gradients.astype(shape.dtype)
    flatten = implementation.flatten_bags
    for name, optimizer in OPTIMIZERS.items():

        def step(
            table: Any, state: Any, *batch: Any, optimizer: optim.RowOptimizer = optimizer
        ) -> Any:
            lookups = flatten(*batch, shape.layout, shape.table_shape[0])
            return implementation.fused_update(
                table, state, lookups, gradients, optimizer, jnp.int32(1)
            )

        update = jax.jit(step, donate_argnums=(0, 1))
        tables = [(table, optimizer.init(*shape.table_shape))]
        del table

        def once(update: Callable = update, tables: list = tables) -> Any:
            tables[0] = update(*tables[0], *batch)
            return tables[0]

        bounds = traffic.update(sum(x.itemsize for x in tables[0][1].values() if x.ndim == 1))
        lines.append(_line(f"fused_update {name}", once, bounds))
        table = tables.pop()[0]
    return lines


def resident_table(shape: Shape) -> TableArray:
    """Return stacked tables of normal rows, all equal: only the first is drawn, to save memory."""
    one = dataclasses.replace(shape, tables=1).table()
    repeat = jax.jit(lambda x: jnp.tile(x, (shape.tables,) + (1,) * (x.ndim - 1)))
    return jax.block_until_ready(jax.tree.map(repeat, one))


def measure_torch(shape: Shape) -> list[dict[str, Any]]:
    """``torch.nn.EmbeddingBag`` on the tables stacked into one, as fast as it can be had."""
    import torch

    if shape.packed is not None:
        return []
    dtype = getattr(torch, shape.dtype)
    table = torch.empty(shape.table_shape, dtype=dtype, device="cuda").normal_()
    _, rows, _, _ = bags_of(shape)
    ids = torch.from_numpy(rows.astype(np.int32)).cuda()
    offsets = torch.arange(0, shape.num_ids, shape.bag, dtype=torch.int32, device="cuda")
    pool = functools.partial(torch.nn.functional.embedding_bag, ids, table, offsets, mode="sum")
    times = timed(pool, wait=lambda _: torch.cuda.synchronize())
    return [{"primitive": "pooled_lookup", **times, "bytes": Traffic(shape).lookup()}]


class Traffic:
    """Bytes that a batch's lookups and updates must move: fewest and most."""

    def __init__(self, shape: Shape):
        rows = bags_of(shape)[1]
        self.lookups, self.unique = rows.size, np.unique(rows).size
        self.bags, self.row = shape.layout.num_bags, shape.row_format.row_bytes(shape.dim)
        self.bag = shape.dim * jnp.dtype(shape.dtype).itemsize

    def lookup(self) -> tuple[int, int]:
        """Rows in, pooled rows out, ids and lengths in."""
        fixed = self.bags * (self.bag + 4) + 4 * self.lookups
        return fixed + self.unique * self.row, fixed + self.lookups * self.row

    def update(self, state: int) -> tuple[int, int]:
        """Rows and their state in and out, gradients of bags in; without the sort."""
        fixed = self.unique * (2 * self.row + (2 * SECTOR if state else 0)) + 4 * self.lookups
        return fixed + self.bags * self.row, fixed + self.lookups * self.row


def timed(
    call: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready, rounds: int = 10
) -> dict[str, list[float]]:
    """Minimum and median over rounds of a call's milliseconds; calls overlap their dispatch."""
    wait(call())
    start = time.perf_counter()
    wait(call())
    calls = int(min(max(0.05 / (time.perf_counter() - start), 1), 200))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return {"ms": [min(times), float(np.median(times))]}


def copy_bandwidth(shrink: int) -> float:
    """Bytes a second that the card reads and writes in a plain copy."""
    size = 2**30 // shrink
    source = jnp.zeros(size, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * source.nbytes / (timed(lambda: copy(source))["ms"][0] / 1e3)


def _line(primitive: str, call: Callable[[], Any], traffic: tuple[int, int]) -> dict[str, Any]:
    line: dict[str, Any] = {"primitive": primitive}
    try:
        line |= timed(call)
        if jax.default_backend() == "gpu":
            (kernels,) = kernel_times([call])
            line["device_ms"] = sum(kernels.values())
            line["kernels"] = {name: round(ms, 4) for name, ms in kernels.items()}
    except Exception as exception:
        return line | {"exception": f"{type(exception).__name__}: {exception}"[:300]}
    return line | {"bytes": traffic}


def _shrunk(shape: Shape, factor: int) -> Shape:
    rows, batch = max(shape.rows // factor, 2), max(shape.batch // factor, 2)
    values = {**vars(shape), "rows": rows, "batch": batch}
    return Shape(**values)


if __name__ == "__main__":
    main()
