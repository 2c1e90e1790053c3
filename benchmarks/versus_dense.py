"""A table of jaxrec beside the usual Flax way: `nnx.Embed` with optax over all parameters.

Usage: python -m benchmarks.versus_dense [--shape.rows 2000000] [--shape.dim 64]
    [--shape.batch 4096] [--shape.bag 4] [--seconds 5]

Prints one JSON line per way and optimizer: milliseconds of a training step (minimum, median) and
bytes that the compiled step holds at once; then the ratios.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import tyro

import jaxrec
from benchmarks.training import Shape, compile_step, dense_step, fused_step, time_step

PAIRS = {
    "sgd": (jaxrec.optim.sgd(0.01), optax.sgd(0.01)),
    "adagrad": (jaxrec.optim.adagrad(0.01), optax.adagrad(0.01)),
    "adam": (jaxrec.optim.adam(0.01), optax.adam(0.01)),
}


def main(shape: Shape, seconds: float = 5.0) -> None:
    for name, (rows, tx) in PAIRS.items():
        fused = measure(name, "jaxrec", *fused_step(shape, rows), shape, seconds)
        dense = measure(name, "nnx.Embed", *dense_step(shape, tx), shape, seconds)
        ratios = {key: round(dense[key] / fused[key], 2) for key in ("step_ms", "peak_bytes")}
        print(json.dumps({"optimizer": name, "nnx.Embed over jaxrec": ratios}), flush=True)


def measure(
    optimizer: str, way: str, state: Any, step: Callable, shape: Shape, seconds: float
) -> dict[str, float]:
    compiled = compile_step(state, step, shape)
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    times = time_step(state, compiled, shape, seconds)
    figures = {"step_ms": float(np.median(times)), "peak_bytes": peak}
    line = {"optimizer": optimizer, "way": way, "step_ms": [min(times), figures["step_ms"]]}
    print(json.dumps(line | {"peak_bytes": peak}), flush=True)
    return figures


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
