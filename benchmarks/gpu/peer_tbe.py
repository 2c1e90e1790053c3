"""Times FBGEMM's table-batched embeddings on one GPU, as `benchmarks.gpu.measure` times jaxrec.

    PEER_PYTHON -m benchmarks.gpu.peer_tbe [--only SHAPE] [--cpu --shrink 1000]

Needs torch and fbgemm-gpu, and nothing of jaxrec or JAX. Prints a JSON line for each shape and
primitive. ``ms`` is the minimum and median over rounds of calls between two CUDA events;
``device_ms`` is the same with the GPU held back while the calls are launched, so that it never
waits for the host. For an update both time the backward call alone, which sorts and updates.
Ids are int32, and their bounds are not checked. The exit status is 1 if a call failed.
"""

import argparse
import gc
import json
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

OPTIMIZERS = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
ROUNDS = 10
HELD_CYCLES = 20_000_000  # about 10 ms, in which calls are launched
HELD_CALLS = 8


def main():
    shapes = json.loads(pathlib.Path(__file__).with_name("shapes.json").read_text())["shapes"]
    names = [shape["name"] for shape in shapes]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=names, help="name of the shape to time; all if not given")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, to show that it works")
    parser.add_argument("--shrink", type=int, default=1, help="divide rows and batches by this")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    failures = 0
    for shape in shapes:
        if options.only not in (None, shape["name"]):
            continue
        shape = shape | {key: max(shape[key] // options.shrink, 2) for key in "VB"}
        for primitive, measure in measurements(shape, device):
            line = {"kind": "time", "implementation": "fbgemm", "shape": shape["name"]}
            try:
                line |= {"primitive": primitive, **measure()}
            except Exception as exception:
                failures += 1
                message = f"{type(exception).__name__}: {exception}"[:300]
                line |= {"primitive": primitive, "exception": message}
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
        *((f"fused_update {optimizer}", update_by(optimizer)) for optimizer in OPTIMIZERS),
    ]


def module(shape, optimizer, device):
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
        pooling_mode=PoolingMode.SUM,
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


def lookup(tables, shape, device):
    arguments = batch(shape, device)
    with torch.no_grad():
        return timed(lambda _: tables(*arguments), device)


def update(tables, shape, device):
    arguments = batch(shape, device)
    gradient = torch.randn(shape["B"], shape["T"] * shape["D"], device=device)
    return timed(
        lambda pooled: pooled.backward(gradient), device, prepare=lambda: tables(*arguments)
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
