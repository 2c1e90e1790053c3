"""Times pooled lookup and fused update of embedding tables.

Usage: python -m benchmarks.embedding [--shapes FILE] [--threads N] [--seconds S]
                                      [--implementation NAME]
Prints one JSON line per shape and optimizer: milliseconds (minimum and median) of the pooled (sum)
lookup, a jitted call on arrays that are on the device, and of the backward pass, from the gradient
of the result to updated tables with the ids sorted on the way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tyro

_SHAPES = pathlib.Path(__file__).with_name("shapes.json")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time, and how.

    Attributes:
        shapes: JSON file of shapes.
        threads: Processor cores to use.
        seconds: Time for each figure.
        implementation: One of jaxrec.embed.kernels' implementations; None: the one it chooses.
    """

    shapes: pathlib.Path = _SHAPES
    threads: int = 2
    seconds: float = 3.0
    implementation: str | None = None


def draw_ids(rng: np.random.Generator, shape: dict[str, Any]) -> np.ndarray:
    """``[T, B * L]`` ids, as the peers draw them."""
    count = shape["B"] * shape["L"]
    if shape["ids"] == "uniform":
        return rng.integers(0, shape["V"], (shape["T"], count))
    uniform = rng.random((shape["T"], count))
    return np.minimum(shape["V"] ** uniform - 1, shape["V"] - 1).astype(np.int64)


def timed(call: Callable[[], None], seconds: float) -> list[float]:
    """[minimum, median] milliseconds of a call."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 4:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return [min(times[1:]), float(np.median(times[1:]))]


def main(options: Options) -> None:
    # XLA takes one thread for each core that the process may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    if options.implementation:
        os.environ["JAXREC_KERNELS"] = options.implementation
    for shape in json.loads(options.shapes.read_text())["shapes"]:
        for name in ("sgd", "rowwise_adagrad"):
            print(json.dumps(measure(shape, name, options)), flush=True)


def measure(shape: dict[str, Any], optimizer_name: str, options: Options) -> dict[str, Any]:
    # Imported here, after the environment is set: JAX counts the cores when it is imported.
    import jax
    import jax.numpy as jnp

    import jaxrec
    from jaxrec.embed import kernels

    rng = np.random.default_rng(0)
    tables, rows, dim, batch, bag = (shape[key] for key in "TVDBL")
    ids = jnp.asarray(draw_ids(rng, shape).reshape(-1), jnp.int32)
    lengths = jnp.full(tables * batch, bag, jnp.int32)
    layout = kernels.BagLayout(
        id_starts=tuple(range(0, tables * batch * bag, batch * bag)),
        capacities=(batch * bag,) * tables,
        length_starts=tuple(range(0, tables * batch, batch)),
        strides=(batch,) * tables,
        row_offsets=tuple(range(0, tables * rows, rows)),
        row_counts=(rows,) * tables,
        means=(False,) * tables,
    )
    optimizer = getattr(jaxrec.optim, optimizer_name)(0.01)
    gradient = jnp.asarray(rng.standard_normal((batch * tables, dim), dtype=np.float32))
    table = jax.random.normal(jax.random.key(0), (tables * rows, dim))
    state = optimizer.init(tables * rows, dim)

    @jax.jit
    def forward(table, ids, lengths):
        return kernels.pooled_lookup(table, ids, lengths, None, layout, jnp.float32)

    def backward(table, state, ids, lengths, gradient, step):
        lookups = kernels.flatten_bags(ids, lengths, None, layout, table.shape[0])
        return kernels.fused_update(table, state, lookups, gradient, optimizer, step)

    step = jax.jit(backward, donate_argnums=(0, 1))
    lookup_ms = timed(lambda: forward(table, ids, lengths).block_until_ready(), options.seconds)
    held = (table, state)
    del table, state

    def update() -> None:
        nonlocal held
        held = step(*held, ids, lengths, gradient, jnp.int32(0))
        jax.block_until_ready(held)

    backward_ms = timed(update, options.seconds)
    return {
        "peer": "jaxrec",
        "shape": shape["name"],
        "optimizer": optimizer_name,
        "forward_ms": lookup_ms,
        "backward_ms": backward_ms,
        "implementation": options.implementation or "default",
    }


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
