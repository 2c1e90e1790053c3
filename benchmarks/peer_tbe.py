"""Times FBGEMM's table-batched embedding and torch.nn.EmbeddingBag.

As `benchmarks.embedding` times jaxrec. Needs an environment with torch and fbgemm-gpu-cpu.

Usage: PEER_PYTHON benchmarks/peer_tbe.py [--shapes FILE] [--threads N] [--seconds S]
                                            [--only SHAPE]
"""

import json
import logging
import time

logging.disable(logging.WARNING)

import fbgemm_gpu  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # noqa: E402
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (  # noqa: E402
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from peer_shapes import chosen_shapes, draw_ids, parse_options  # noqa: E402

OPTIMIZERS = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


def summary(times):
    """[minimum, median] milliseconds, the first call left out."""
    times = np.asarray(times[1:]) * 1e3
    return [float(times.min()), float(np.median(times))]


def time_fbgemm(shape, name, ids, seconds):
    tables, rows, dim, batch, bag = (shape[key] for key in "TVDBL")
    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * tables,
        optimizer=OPTIMIZERS[name],
        learning_rate=0.01,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    offsets = torch.arange(tables * batch + 1) * bag
    gradient = torch.randn(batch, tables * dim)
    flat, forward, backward = ids.reshape(-1), [], []
    end = time.perf_counter() + 2 * seconds
    while time.perf_counter() < end or len(forward) < 4:
        start = time.perf_counter()
        pooled = bags(flat, offsets)
        middle = time.perf_counter()
        pooled.backward(gradient)
        backward.append(time.perf_counter() - middle)
        forward.append(middle - start)
    return {"forward_ms": summary(forward), "backward_ms": summary(backward)}


def time_embedding_bag(shape, ids, seconds):
    tables, rows, dim, batch, bag = (shape[key] for key in "TVDBL")
    bags = [torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for _ in range(tables)]
    offsets, times = torch.arange(batch) * bag, []
    end = time.perf_counter() + seconds
    with torch.no_grad():
        while time.perf_counter() < end or len(times) < 4:
            start = time.perf_counter()
            torch.cat([bags[i](ids[i], offsets) for i in range(tables)], 1)
            times.append(time.perf_counter() - start)
    return {"forward_ms": summary(times)}


def main():
    options = parse_options(seconds=3.0)
    torch.set_num_threads(options.threads)
    for shape in chosen_shapes(options):
        ids = torch.from_numpy(draw_ids(shape))
        for name in OPTIMIZERS:
            figures = time_fbgemm(shape, name, ids, options.seconds)
            line = {"peer": "fbgemm_tbe", "shape": shape["name"], "optimizer": name, **figures}
            print(json.dumps(line), flush=True)
        figures = time_embedding_bag(shape, ids, options.seconds)
        line = {"peer": "nn.EmbeddingBag", "shape": shape["name"], **figures}
        print(json.dumps(line), flush=True)


main()
