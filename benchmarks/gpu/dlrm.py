"""Times whole training steps of jaxrec on one GPU: DLRM, DLRM-DCNv2 and SASRec.

    python -m benchmarks.gpu.dlrm [--steps dlrm_kaggle_8192 ...] [--kernels mosaic reference]
    python -m benchmarks.gpu.dlrm --dry-run          # on the CPU, small
    python -m benchmarks.gpu.dlrm --losses           # losses of small steps

`benchmarks.gpu.peer_dlrm` times the same models in PyTorch with TorchRec and FBGEMM.
`benchmarks.gpu.step_shapes` has the sizes. Prints a JSON line for each step: milliseconds of steps
that follow one another (minimum and median over rounds), of the host alone until a step is
launched, and of the GPU's kernels, with their number; the peak of memory that the compiled step
needs; and the size of the model. Small steps start from fixed parameters, and print the losses that
the peers' script prints with ``--losses``. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.step_models import StepModel, batch_of, make, train_step_of
from benchmarks.gpu.step_shapes import (
    PRECISIONS,
    STEPS,
    Step,
    chosen_steps,
    layer_gflop,
    parameter_values,
    table_values,
)
from benchmarks.gpu.timing import host_ms, profile, timed
from jaxrec.embed.kernels import use_kernels
from jaxrec.train import compile_step
from jaxrec.train.step import CompiledStep

BATCHES = 4  # different ones, which the steps take in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", nargs="*", choices=STEPS, help="names of the steps; default all")
    parser.add_argument(
        "--kernels", nargs="*", default=[], help="in order of preference; default: what is chosen"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32")
    parser.add_argument("--table-gb", type=float, default=32.0, help="most GB of a model's tables")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no step begins")
    parser.add_argument("--dry-run", action="store_true", help="run small steps on this machine")
    parser.add_argument("--losses", action="store_true", help="losses of small steps alone")
    options = parser.parse_args()
    end, failures = time.monotonic() + options.seconds, 0
    is_small = options.dry_run or options.losses
    precision = "tensorfloat32" if options.precision == "tf32" else "float32"
    with contextlib.ExitStack() as stack:
        # A step is compiled to be asked for its memory, and again to run: the second time is a
        # read of this cache.
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        stack.enter_context(jax.default_matmul_precision(precision))
        if options.kernels:
            stack.enter_context(use_kernels(*options.kernels))
        for step in chosen_steps(options.steps, options.table_gb, is_small=is_small):
            line: dict[str, Any] = {"kind": "step", "shape": step.name}
            line |= {"implementation": " ".join(("jaxrec", *options.kernels))}
            if time.monotonic() > end:
                print(json.dumps(line | {"kind": "left out"}), flush=True)
                continue
            try:
                made = make(step)
                if is_small:
                    set_parameters(made)
                compiled = compile_step(train_step_of(step), made.model, made.optimizer)
                if is_small:
                    line["losses"] = [float(compiled(*batch_of(step, seed))) for seed in range(3)]
                if not options.losses:
                    line |= measure(step, compiled)
                line |= describe(step, made)
            except Exception as exception:
                failures += 1
                line |= {"exception": f"{type(exception).__name__}: {exception}"[:300]}
            print(json.dumps(line | {"precision": options.precision}), flush=True)
    sys.exit(failures > 0)


def set_parameters(made: StepModel) -> None:
    """Give a model the parameters that the peers' script gives it."""
    for number, (parameter, is_transposed) in enumerate(made.parameters):
        shape = parameter.get_value().shape
        values = parameter_values(number, shape[::-1] if is_transposed else shape)
        parameter.set_value(jnp.asarray(values.T if is_transposed else values))
    for number, config in enumerate(made.tables.configs):
        shape = config.num_embeddings, config.embedding_dim
        made.tables.load_table(config.name, table_values(number, shape))


def measure(step: Step, compiled: CompiledStep) -> dict[str, Any]:
    """Return the times of a step and its peak of memory."""
    batches = [jax.device_put(batch_of(step, seed)) for seed in range(BATCHES)]
    position = 0

    def call() -> Any:
        nonlocal position
        position += 1
        return compiled(*batches[position % BATCHES])

    memory = compiled.lower(*batches[0]).compile().memory_analysis()
    figures: dict[str, Any] = timed(call) | {"host_ms": host_ms(call)}
    if jax.default_backend() == "gpu":
        (kernels,) = profile([call])
        figures |= {"device_ms": kernels.total_ms, "launches": round(kernels.launches)}
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return figures | {"peak_gb": peak / 1e9}


def describe(step: Step, made: StepModel) -> dict[str, Any]:
    """Return the size of a model, to compare it with the peers'."""
    shapes = [parameter.get_value().shape for parameter, _ in made.parameters]
    return {
        "card": jax.devices()[0].device_kind,
        "made_with": f"JAX {jax.__version__}",
        "parameters": sum(map(math.prod, shapes)),
        "layer_gflop": layer_gflop(step, shapes),
        "table_gb": step.table_bytes / 1e9,
    }


if __name__ == "__main__":
    main()
