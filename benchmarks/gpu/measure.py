"""Times one implementation on one GPU, beside the traffic that its work takes at least.

    python -m benchmarks.gpu.measure triton
    python -m benchmarks.gpu.measure torch                 # torch.nn.EmbeddingBag, the lookup alone
    python -m benchmarks.gpu.measure triton --dry-run      # interpreted on the CPU, small

Prints a JSON line for the card's own copy bandwidth, then one for each primitive and shape:
milliseconds (minimum and median over rounds of calls on resident arrays; an update runs in place
and flattens and sorts its lookups inside), the milliseconds of the card's kernels, all together
and each, without the time between them, their number, and the bytes that must move at least and at
most, with all repeated reads served by a cache or none. ``--seconds`` ends the run in time: shapes
that no longer begin have a line that says so. The exit status is 1 if a call failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.backends import BACKENDS, NAMES, module
from benchmarks.gpu.batches import TRAINED, Shape, bags_of, read_shapes
from benchmarks.gpu.check import refuses_table
from benchmarks.gpu.timing import profile, timed
from jaxrec import optim
from jaxrec.embed.formats import TableArray

SHAPES = pathlib.Path(__file__).with_name("shapes.json")
OPTIMIZERS = {"sgd": optim.sgd(0.01), "rowwise_adagrad": optim.rowwise_adagrad(0.01)}
SECTOR = 32  # bytes that the memory of an NVIDIA GPU moves at least
# Of a dry run, whose kernels are interpreted: its shapes, and what divides their rows and bags.
DRY_SHAPES = ("tbe_d64_trained_int8", "onehot_d16")
SHRINK = 20_000


def main() -> None:
    shapes = {shape.name: shape for shape in read_shapes(SHAPES)}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("implementation", choices=[*NAMES, "torch"])
    parser.add_argument("--shapes", nargs="*", choices=shapes, help="names; default all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no shape begins")
    parser.add_argument("--dry-run", action="store_true", help="run small shapes on this machine")
    arguments = parser.parse_args()
    end, failures = time.monotonic() + arguments.seconds, 0
    name, is_dry = arguments.implementation, arguments.dry_run
    if name == "torch":
        measure: Callable[[Shape], Iterable[dict[str, Any]]] = functools.partial(
            measure_torch, is_dry=is_dry
        )
    else:
        options = {"interpret": True} if is_dry and name in BACKENDS else {}
        rules = ("sgd",) if is_dry else tuple(OPTIMIZERS)
        measure = functools.partial(measure_kernels, name, rules, options)
        device = jax.devices()[0]
        line = {"kind": "card", "card": device.device_kind, "jax": jax.__version__}
        line |= {"copy_bytes_per_s": copy_bandwidth(SHRINK if is_dry else 1)}
        print(json.dumps(line), flush=True)
    for each in arguments.shapes or (DRY_SHAPES if is_dry else shapes):
        shape = _shrunk(shapes[each], SHRINK) if is_dry else shapes[each]
        start = {"implementation": name, "shape": each}
        if time.monotonic() > end:
            print(json.dumps({"kind": "left out", **start}), flush=True)
            continue
        for line in measure(shape):
            print(json.dumps({"kind": "time", **start, **line}), flush=True)
            failures += "exception" in line
    sys.exit(failures > 0)


def measure_kernels(
    name: str, rules: Sequence[str], options: dict[str, bool], shape: Shape
) -> Iterator[dict[str, Any]]:
    """Yield the lines of one implementation and shape; an error is one too."""
    implementation = module(name)
    table = resident_table(shape)
    if refuses_table(implementation, table):
        return
    batch = shape.batch_arrays()
    traffic = Traffic(shape)

    pool = jax.jit(
        lambda table, *batch: implementation.pooled_lookup(
            table, *batch, shape.layout, shape.dtype, **options
        )
    )
    yield figures("pooled_lookup", lambda: pool(table, *batch), traffic.lookup())
    if not _has_update(implementation, shape, table):
        return

    gradients = jax.random.normal(jax.random.key(1), (shape.layout.num_bags, shape.dim))
    gradients = gradients.astype(shape.dtype)
    flatten = functools.partial(implementation.flatten_bags, **options)
    for rule in rules:
        optimizer = OPTIMIZERS[rule]

        def step(
            table: Any, state: Any, *batch: Any, optimizer: optim.RowOptimizer = optimizer
        ) -> Any:
            lookups = flatten(*batch, shape.layout, shape.table_shape[0])
            return implementation.fused_update(
                table, state, lookups, gradients, optimizer, jnp.int32(1), **options
            )

        update = jax.jit(step, donate_argnums=(0, 1))
        tables = [(table, optimizer.init(*shape.table_shape))]
        del table

        def once(update: Callable = update, tables: list = tables) -> Any:
            tables[0] = update(*tables[0], *batch)
            return tables[0]

        bounds = traffic.update(sum(x.itemsize for x in tables[0][1].values() if x.ndim == 1))
        yield figures(f"fused_update {rule}", once, bounds)
        table = tables.pop()[0]


def _has_update(implementation: Any, shape: Shape, table: TableArray) -> bool:
    """Whether an implementation updates the rows of a table, and they are trained at all."""
    is_trained = shape.packed is None or shape.packed in TRAINED
    if not is_trained or not hasattr(implementation, "fused_update"):
        return False
    arguments = {"optimizer": optim.sgd(0.01), "state": {}}
    return not refuses_table(implementation, table, "fused_update", **arguments)


def resident_table(shape: Shape) -> TableArray:
    """Return stacked tables of normal rows, all equal: only the first is drawn, to save memory."""
    one = dataclasses.replace(shape, tables=1).table()
    repeat = jax.jit(lambda x: jnp.tile(x, (shape.tables,) + (1,) * (x.ndim - 1)))
    return jax.block_until_ready(jax.tree.map(repeat, one))


def measure_torch(shape: Shape, *, is_dry: bool) -> list[dict[str, Any]]:
    """``torch.nn.EmbeddingBag`` on the tables stacked into one, as fast as it can be had."""
    import torch

    if shape.packed is not None:
        return []
    device, dtype = "cpu" if is_dry else "cuda", getattr(torch, shape.dtype)
    table = torch.empty(shape.table_shape, dtype=dtype, device=device).normal_()
    _, rows, _, _ = bags_of(shape)
    ids = torch.from_numpy(rows.astype(np.int32)).to(device)
    offsets = torch.arange(0, shape.num_ids, shape.bag, dtype=torch.int32, device=device)
    pool = functools.partial(torch.nn.functional.embedding_bag, ids, table, offsets, mode="sum")
    times = timed(pool, wait=lambda _: is_dry or torch.cuda.synchronize())
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


def copy_bandwidth(shrink: int) -> float:
    """Bytes a second that the card reads and writes in a plain copy."""
    size = 2**30 // shrink
    source = jnp.zeros(size, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * source.nbytes / (timed(lambda: copy(source))["ms"][0] / 1e3)


def figures(primitive: str, call: Callable[[], Any], traffic: tuple[int, int]) -> dict[str, Any]:
    """Return the line of a call: its times, or the exception that it raised."""
    line: dict[str, Any] = {"primitive": primitive}
    try:
        line |= timed(call)
        if jax.default_backend() == "gpu":
            (kernels,) = profile([call])
            line |= {"device_ms": kernels.total_ms, "launches": round(kernels.launches)}
            line["kernels"] = {name: round(ms, 4) for name, ms in kernels.ms.items()}
    except Exception as exception:
        return line | {"exception": f"{type(exception).__name__}: {exception}"[:300]}
    return line | {"bytes": traffic}


def shapes_of(group: str, *, is_small: bool) -> list[dict[str, Any]]:
    """Return the shapes of a group of ``shapes.json`` that `Shape` does not describe."""
    shapes = json.loads(SHAPES.read_text())[group]
    if not is_small:
        return shapes
    return [shape | {key: max(shape[key] // SHRINK, 2) for key in "VB"} for shape in shapes]


def _shrunk(shape: Shape, factor: int) -> Shape:
    rows, batch = max(shape.rows // factor, 2), max(shape.batch // factor, 2)
    return dataclasses.replace(shape, rows=rows, batch=batch)


if __name__ == "__main__":
    main()
