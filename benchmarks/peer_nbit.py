"""Times pooled lookups of FBGEMM's quantized embedding bags on CPUs.

As `benchmarks.quantized` times jaxrec's. Needs an environment with torch and fbgemm-gpu-cpu.

Usage: PEER_PYTHON benchmarks/peer_nbit.py [--shapes FILE] [--threads N] [--seconds S]
                                            [--only SHAPE]
"""

import json
import logging
import time

logging.disable(logging.WARNING)

import fbgemm_gpu  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
from fbgemm_gpu.split_embedding_configs import SparseType  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (  # noqa: E402
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (  # noqa: E402
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from peer_shapes import chosen_shapes, draw_ids, parse_options  # noqa: E402

TYPES = {"int8": SparseType.INT8, "int4": SparseType.INT4}


def main():
    options = parse_options(seconds=2.0)
    torch.set_num_threads(options.threads)
    for shape in chosen_shapes(options):
        tables, rows, dim, batch, bag = (shape[key] for key in "TVDBL")
        ids = torch.from_numpy(draw_ids(shape).reshape(-1)).int()
        offsets = (torch.arange(tables * batch + 1) * bag).int()
        for name, kind in TYPES.items():
            bags = IntNBitTableBatchedEmbeddingBagsCodegen(
                [(f"t{i}", rows, dim, kind, EmbeddingLocation.HOST) for i in range(tables)],
                pooling_mode=PoolingMode.SUM,
                output_dtype=SparseType.FP32,
                device="cpu",
            )
            bags.fill_random_weights()
            walls, processor, end = [], [], time.perf_counter() + options.seconds
            bags(ids, offsets)
            while time.perf_counter() < end or len(walls) < 3:
                start, used = time.perf_counter(), time.process_time()
                bags(ids, offsets)
                walls.append((time.perf_counter() - start) * 1e3)
                processor.append((time.process_time() - used) * 1e3)
            figures = {
                "forward_ms": [min(walls), float(np.median(walls))],
                "processor_ms": [min(processor), float(np.median(processor))],
            }
            line = {"peer": "fbgemm_nbit", "shape": shape["name"], "type": name, **figures}
            print(json.dumps(line), flush=True)


main()
