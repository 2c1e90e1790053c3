"""Sizes, options and batches of the benchmarks that time DeepFM and DCN-v2.

Imported as a neighbour by scripts that run in a peer's environment, without jaxrec.
"""

import argparse
import json
import time

import numpy as np

# Row counts of the Criteo Kaggle data set.
ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
KEYS = [f"c{i}" for i in range(26)]
NUM_DENSE, DIM = 13, 16

# DeepFM: layers of the dense features, then of the deep network.
HIDDEN = 512

# DCN-v2: layers of the dense features, of the deep network, and of the cross network.
BOTTOM, TOP = (512, 256, DIM), (512, 256, 1)
CROSS_LAYERS, LOW_RANK = 3, 64

RATE = 0.01


def make_parser(description):
    """Return the parser of the options that all have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=("deepfm", "dcn_v2"), default="deepfm")
    parser.add_argument("--optimizer", choices=("sgd", "adagrad"), default="sgd")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-rows", type=int, default=0, help="of a table; 0: no bound")
    return parser


def row_counts(options):
    return [min(rows, options.max_rows or rows) for rows in ROWS]


def draw_batches(options, count=8):
    """Return ``count`` batches of dense features, ids ``[tables, batch]`` and labels."""
    rng = np.random.default_rng(0)
    size = options.batch
    return [
        (
            rng.standard_normal((size, NUM_DENSE), dtype=np.float32),
            np.stack(
                [
                    np.minimum(rows ** rng.random(size) - 1, rows - 1).astype(np.int64)
                    for rows in row_counts(options)
                ]
            ),
            rng.integers(0, 2, size).astype(np.float32),
        )
        for _ in range(count)
    ]


def time_steps(step, batches, options, peer):
    """Call ``step`` with batches in turn, five times to warm up, and print the times."""
    times = []
    for number in range(options.steps + 5):
        start = time.perf_counter()
        step(*batches[number % len(batches)])
        times.append((time.perf_counter() - start) * 1e3)
    median = float(np.median(times[5:]))
    line = {"peer": peer, "model": f"{options.model}, {options.optimizer}", "batch": options.batch}
    line["step_ms"] = [min(times[5:]), median]
    line["samples_per_second"] = options.batch / median * 1e3
    print(json.dumps(line), flush=True)
