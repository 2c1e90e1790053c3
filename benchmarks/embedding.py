"""Times pooled lookup and fused update of embedding tables.

Usage: python -m benchmarks.embedding [--shapes FILE] [--threads N] [--seconds S]
           [--implementation NAME] [--only SHAPE ...] [--pooling sum mean max]
Prints one JSON line per shape, pooling and optimizer: milliseconds (minimum and median) of the
pooled lookup, a jitted call on arrays that are on the device, and of the backward pass, from the
gradient of the result to updated tables with the ids sorted on the way. Memory is kept for the next
step, as `jaxrec train` does (`jaxrec.keep_freed_memory`).

The lookup of pooling "max" is that of training, which notes the winners. Beside the times there are
the bytes that the passes must move: each row that a lookup reads, the results with their winners,
and in the backward pass the gradients, and each row that occurs, read and written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import tyro

from benchmarks.shapes import SHAPES, Batch, Shape, read_shapes


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement.

    Attributes:
        shapes: JSON file of shapes.
        threads: Processor cores to use.
        seconds: Time for each figure.
        implementation: One of jaxrec.embed.kernels' implementations; None: the one it chooses.
        only: Names of the shapes to time; none: all.
        pooling: Kinds of pooling; none: sums, or means for shapes that say so.
    """

    shapes: pathlib.Path = SHAPES
    threads: int = 2
    seconds: float = 3.0
    implementation: str | None = None
    only: tuple[str, ...] = ()
    pooling: tuple[Literal["sum", "mean", "max"], ...] = ()


def main(options: Options) -> None:
    # XLA takes one thread for each core that the process may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    if options.implementation:
        os.environ["JAXREC_KERNELS"] = options.implementation
    for shape in read_shapes(options.shapes):
        if options.only and shape.name not in options.only:
            continue
        for pooling in options.pooling or ("mean" if shape.mean else "sum",):
            for name in ("sgd", "rowwise_adagrad"):
                line = measure(shape, name, options.seconds, pooling)
                print(json.dumps(line), flush=True)


def measure(shape: Shape, optimizer_name: str, seconds: float, pooling: str) -> dict[str, Any]:
    """The figures of a shape, as they are printed."""
    # Imported here, after the environment is set: JAX counts the cores when it is imported.
    import jax
    import jax.numpy as jnp

    import jaxrec
    from jaxrec.embed import kernels
    from jaxrec.embed.first_values import initialize_rows

    jaxrec.keep_freed_memory()
    takes_max = pooling == "max"
    drawn = dataclasses.replace(shape, mean=pooling == "mean").draw()
    layout = kernels.BagLayout(**drawn.layout_fields(), takes_max=takes_max)
    ids, lengths = jnp.asarray(drawn.ids), jnp.asarray(drawn.lengths)
    weights = None if drawn.weights is None else jnp.asarray(drawn.weights)
    batch = (ids, lengths, weights)
    num_rows = drawn.num_rows
    # As collections make theirs.
    zeros = kernels.new_rows(jnp.zeros(shape.D, shape.dtype), num_rows)
    key = jax.random.key_data(jax.random.key(0))
    table = initialize_rows(zeros, key, "normal", 0, num_rows)
    gradient = jax.random.normal(jax.random.key(1), (drawn.num_bags, shape.D))
    optimizer = getattr(jaxrec.optim, optimizer_name)(0.01)
    first = optimizer.init(1, shape.D)
    state = {key: kernels.new_rows(array[0], num_rows) for key, array in first.items()}
    jax.block_until_ready((table, state, gradient))

    @jax.jit
    def forward(table, batch):
        if takes_max:
            return kernels.max_lookup(table, *batch[:2], layout, "float32")
        return kernels.pooled_lookup(table, *batch, layout, "float32"), None

    def backward(table, state, batch, gradient, winners, step):
        lookups = kernels.flatten_bags(*batch, layout, num_rows)
        if takes_max:
            gradient = kernels.max_gradients(winners, gradient, lookups.bags)
            lookups = kernels.Lookups(lookups.rows, None, None)
        return kernels.fused_update(table, state, lookups, gradient, optimizer, step)

    step = jax.jit(backward, donate_argnums=(0, 1))
    operands = (*batch[:2], layout) if takes_max else (*batch, layout)
    primitive = "max_lookup" if takes_max else "pooled_lookup"
    chosen = kernels.describe(primitive, table, *operands, "float32").chosen
    forward_ms = timed(lambda: jax.block_until_ready(forward(table, batch)), seconds)
    _, winners = forward(table, batch)
    held = (table, state)
    del table, state

    def update() -> None:
        nonlocal held
        held = step(*held, batch, gradient, winners, jnp.int32(0))
        jax.block_until_ready(held)

    backward_ms = timed(update, seconds)
    return {
        "peer": "jaxrec",
        "shape": shape.name,
        "pooling": pooling,
        "optimizer": optimizer_name,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "forward_bytes": forward_bytes(drawn, takes_max),
        "backward_bytes": backward_bytes(drawn, takes_max),
        "implementation": chosen[jax.default_backend()],
    }


def forward_bytes(drawn: Batch, takes_max: bool) -> int:
    """The rows of a lookup, its ids, and its results, with their winners if it takes maxima."""
    row = drawn.shape.D * np.dtype(drawn.shape.dtype).itemsize
    of_bags = drawn.num_bags * drawn.shape.D * 4
    return int(drawn.lengths.sum()) * (row + 4) + of_bags * (2 if takes_max else 1)


def backward_bytes(drawn: Batch, takes_max: bool) -> int:
    """The gradients of bags, with their winners, the ids, and the rows that occur, twice."""
    shape = drawn.shape
    row = shape.D * np.dtype(shape.dtype).itemsize
    of_bags = drawn.num_bags * shape.D * 4
    # The features of a shape have ids of tables of their own.
    tables = np.repeat(np.arange(shape.T), drawn.capacities)
    unique = len(np.unique(tables * shape.V + drawn.ids))
    return drawn.ids.size * 4 + of_bags * (2 if takes_max else 1) + 2 * unique * row


def timed(call: Callable[[], None], seconds: float) -> list[float]:
    """[minimum, median] milliseconds of a call, after a first one that compiles."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return [min(times), float(np.median(times))]


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
