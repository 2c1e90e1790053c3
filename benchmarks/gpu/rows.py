"""Times `jaxrec.EmbeddingCollection`'s lookups, one row an id, and their updates on one GPU.

    python -m benchmarks.gpu.rows triton
    python -m benchmarks.gpu.rows reference --dry-run     # on the CPU, small

The shapes are those under "rows" in ``shapes.json``. Prints a JSON line for each optimizer and

* forward: the rows of all ids, and what the update needs of the batch;
* backward: the update from the rows' gradients, with its sort;
* evaluation: the rows alone.

`benchmarks.gpu.peer_tbe` times FBGEMM's tables without pooling on the same ids. The exit status is
1 if a call failed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrec
from benchmarks.gpu.measure import SECTOR, figures, shapes_of
from benchmarks.peer_shapes import draw_ids
from jaxrec.embed import apply_gradients, init_tables, lookup
from jaxrec.embed.kernels import use_kernels

OPTIMIZERS = {"sgd": jaxrec.optim.sgd(0.1), "adam": jaxrec.optim.adam(0.1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("implementation")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no shape begins")
    parser.add_argument("--dry-run", action="store_true", help="run small shapes on this machine")
    options = parser.parse_args()
    end, failures = time.monotonic() + options.seconds, 0
    for shape in shapes_of("rows", is_small=options.dry_run):
        for name in ("adam",) if options.dry_run else OPTIMIZERS:
            start = {"kind": "time", "implementation": options.implementation}
            start |= {"shape": shape["name"]}
            if time.monotonic() > end:
                left_out = start | {"kind": "left out", "primitive": f"rows {name}"}
                print(json.dumps(left_out), flush=True)
                continue
            with use_kernels(options.implementation, "reference"):
                for line in measure(shape, name):
                    print(json.dumps(start | line), flush=True)
                    failures += "exception" in line
    sys.exit(failures > 0)


def measure(shape: dict[str, Any], optimizer: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a shape and an optimizer."""
    keys = [f"f{i}" for i in range(shape["T"])]
    configs = [
        jaxrec.EmbeddingConfig(f"t_{key}", shape["V"], shape["D"], feature_names=(key,))
        for key in keys
    ]
    tables: Any = init_tables(configs, OPTIMIZERS[optimizer], jax.random.key(0))
    ids = draw_ids(shape)
    features = jax.device_put(
        jaxrec.KeyedJaggedArray.from_lengths(
            keys, ids.reshape(-1).astype(np.int32), np.ones(ids.size, np.int32)
        )
    )
    forward = jax.jit(lookup)
    evaluate = jax.jit(lambda tables, features: lookup(tables, features)[0])
    backward = jax.jit(apply_gradients, donate_argnums=0)
    activations, residuals = forward(tables, features)
    gradients = jax.tree.map(lambda rows: jnp.full_like(rows, 1e-3), activations)
    del activations
    held = [tables]
    del tables  # The update takes its memory.

    def update() -> Any:
        held[0] = backward(held[0], residuals, gradients, 1)
        return held[0]

    row, unique = 4 * shape["D"], sum(np.unique(of_table).size for of_table in ids)
    fixed = ids.size * (row + 4)  # rows out or gradients in, and ids
    read = fixed + unique * row, fixed + ids.size * row
    state = sum(_row_bytes(array.shape) for array in jax.tree.leaves(held[0].state))
    written = (fixed + 2 * unique * (row + state),) * 2
    calls: tuple[tuple[str, Callable[[], Any], tuple[int, int]], ...] = (
        ("forward", lambda: forward(held[0], features), read),
        ("backward", update, written),
        ("evaluation", lambda: evaluate(held[0], features), read),
    )
    for name, call, traffic in calls:
        yield figures(f"rows {name} {optimizer}", call, traffic)


def _row_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes that memory moves for one row's state, of an array of a shape."""
    return max(4 * math.prod(shape[1:]), SECTOR) if shape else 0


if __name__ == "__main__":
    main()
