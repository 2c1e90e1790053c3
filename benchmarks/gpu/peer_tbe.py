"""Times FBGEMM's table-batched embeddings on one GPU, as `benchmarks.gpu.measure` times jaxrec.

    PEER_PYTHON -m benchmarks.gpu.peer_tbe [--only SHAPE ...]
    PEER_PYTHON -m benchmarks.gpu.peer_tbe --dry-run      # on the CPU, small

Needs torch and fbgemm-gpu, and nothing of jaxrec or JAX. Prints a JSON line for each shape and
primitive; the shapes under "rows" are tables without pooling, as in `benchmarks.gpu.rows`. ``ms``
is the minimum and median over rounds of calls between two CUDA events; ``device_ms`` is the same
with the GPU held back while the calls are launched, so that it never waits for the host. For an
update both time the backward call alone, which sorts and updates.
Ids are int32, and their bounds are not checked. ``--seconds`` ends the run in time: shapes that no
longer begin have a line that says so. The exit status is 1 if a call failed.
"""

import argparse
import gc
import json
import math
import pathlib
import sys
import time

import fbgemm_gpu  # noqa: F401  # loads the libraries
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.peer_shapes import draw_ids

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
POOLED_OPTIMIZERS = ("sgd", "rowwise_adagrad")
ROW_OPTIMIZERS = ("sgd", "adam")
ROUNDS = 10
SHRINK = 20_000  # divides rows and bags in a dry run
HELD_CYCLES = 20_000_000  # about 10 ms, in which calls are launched
HELD_CALLS = 8


def main():
    groups = json.loads(pathlib.Path(__file__).with_name("shapes.json").read_text())
    shapes = {shape["name"]: shape for shape in groups["shapes"]}
    rows = {shape["name"]: shape for shape in groups["rows"]}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=[*rows, *shapes], help="names; default all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then no shape begins")
    parser.add_argument("--dry-run", action="store_true", help="run small shapes on the CPU")
    options = parser.parse_args()
    end, failures = time.monotonic() + options.seconds, 0
    device = torch.device("cpu" if options.dry_run else "cuda")
    for name in options.only or [*rows, *shapes]:
        shape = shapes[name] if name in shapes else rows[name]
        if options.dry_run:
            shape = shape | {key: max(shape[key] // SHRINK, 2) for key in "VB"}
        start = {"implementation": "fbgemm", "shape": name}
        if time.monotonic() > end:
            print(json.dumps({"kind": "left out", **start}), flush=True)
            continue
        calls = row_calls(shape, device) if name in rows else measurements(shape, device)
        for primitive, measure in calls:
            line = {"kind": "time", **start, "primitive": primitive}
            try:
                line |= measure()
            except Exception as exception:
                failures += 1
                line |= {"exception": f"{type(exception).__name__}: {exception}"[:300]}
            print(json.dumps(line), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    sys.exit(failures > 0)


def measurements(shape, device):
    """Return FBGEMM's primitives for a shape, each with the function that times it."""
    packed, dtype = shape.get("packed"), shape.get("dtype", "float32")
    if packed == "int8":
        return [("pooled_lookup", lambda: lookup(int8_module(shape, device), shape, device))]
    if packed is not None or dtype != "float32":
        return []

    def update_by(optimizer):
        return lambda: update(module(shape, optimizer, device), shape, device)

    return [
        ("pooled_lookup", lambda: lookup(module(shape, "sgd", device), shape, device)),
        *((f"fused_update {optimizer}", update_by(optimizer)) for optimizer in POOLED_OPTIMIZERS),
    ]


def row_calls(shape, device):
    """Return the calls of tables without pooling, each with the function that times it."""

    def calls_of(optimizer):
        def tables(is_training=True):
            return module(shape, optimizer, device, PoolingMode.NONE).train(is_training)

        return (
            (f"rows forward {optimizer}", lambda: lookup(tables(), shape, device, has_tape=True)),
            (f"rows backward {optimizer}", lambda: update(tables(), shape, device)),
            (f"rows evaluation {optimizer}", lambda: lookup(tables(False), shape, device)),
        )

    # FBGEMM has no Adam for CPUs.
    optimizers = ROW_OPTIMIZERS if device.type == "cuda" else ROW_OPTIMIZERS[:1]
    return [call for optimizer in optimizers for call in calls_of(optimizer)]


def module(shape, optimizer, device, pooling=PoolingMode.SUM):
    on_cpu = device.type == "cpu"
    location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(shape["V"], shape["D"], location, compute)] * shape["T"],
        optimizer=OPTIMIZERS[optimizer],
        learning_rate=0.01,
        eps=1e-8,
        weights_precision=SparseType.FP32,
        output_dtype=SparseType.FP32,
        pooling_mode=pooling,
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.NONE,
        embedding_table_index_type=torch.int32,
        embedding_table_offset_type=torch.int32,
        device=device,
    )


def int8_module(shape, device):
    location = EmbeddingLocation.HOST if device.type == "cpu" else EmbeddingLocation.DEVICE
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("", shape["V"], shape["D"], SparseType.INT8, location)] * shape["T"],
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
        indices_dtype=torch.int32,
    )
    tables.initialize_weights()
    return tables


def batch(shape, device):
    """Return ids and offsets."""
    ids = torch.from_numpy(draw_ids(shape).reshape(-1).astype(np.int32))
    offsets = torch.arange(0, ids.numel() + 1, shape["L"], dtype=torch.int32)
    return ids.to(device), offsets.to(device)


def lookup(tables, shape, device, has_tape=False):
    """Time a lookup, with or without the record that a backward pass needs."""
    arguments = batch(shape, device)
    with torch.set_grad_enabled(has_tape):
        return timed(lambda _: tables(*arguments), device)


def update(tables, shape, device):
    arguments = batch(shape, device)
    gradient = torch.full_like(tables(*arguments), 1e-3)
    return timed(
        lambda looked_up: looked_up.backward(gradient), device, prepare=lambda: tables(*arguments)
    )


def timed(call, device, prepare=lambda: None):
    """Return the times of a call, whose argument is made anew, outside of the time, for each."""
    if device.type == "cpu":
        return {"ms": [cpu_time(call, prepare)] * 2}
    call(prepare())
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(prepare())
    torch.cuda.synchronize()
    calls = int(min(max(0.05 / (time.perf_counter() - start), 1), 200))
    return {
        "ms": fastest_and_median(call, prepare, calls, 0),
        "device_ms": fastest_and_median(call, prepare, min(calls, HELD_CALLS), HELD_CYCLES),
    }


def fastest_and_median(*arguments):
    rounds = [round_time(*arguments) for _ in range(ROUNDS)]
    return [min(rounds), float(np.median(rounds))]


def round_time(call, prepare, calls, cycles):
    """Return the milliseconds of a call, by events, with the GPU held for some cycles before."""
    torch.cuda.synchronize()
    if cycles:
        torch.cuda._sleep(cycles)
    pairs = []
    for _ in range(calls):
        argument = prepare()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(argument)
        end.record()
        pairs.append((start, end))
        del argument
    torch.cuda.synchronize()
    return sum(start.elapsed_time(end) for start, end in pairs) / calls


def cpu_time(call, prepare):
    argument = prepare()
    start = time.perf_counter()
    call(argument)
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
