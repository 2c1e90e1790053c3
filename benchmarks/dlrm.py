"""Times one training step of DLRM with the row counts of the Criteo Kaggle data set.

Usage: python -m benchmarks.dlrm [--batch 2048] [--threads 2] [--steps 40] [--max-rows 0]
26 tables of 16 columns; bottom MLP 512-256-64-16, top MLP 512-256-1; row-wise Adagrad on tables,
Adagrad on the rest. Prints one JSON line: milliseconds (minimum, median) and samples per second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time

import numpy as np
import tyro

ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        batch: Samples in a batch.
        threads: Processor cores to use.
        steps: Steps to time, five more to warm up.
        max_rows: Bound on a table's rows; 0 for none.
        chunks: Whether the dense part is computed by `jaxrec.nn.sum_in_chunks`.
        implementation: Implementation of the embedding kernels; None: the one that is chosen.
    """

    batch: int = 2048
    threads: int = 2
    steps: int = 40
    max_rows: int = 0
    chunks: bool = True
    implementation: str | None = None


def main(options: Options) -> None:
    # XLA takes one thread for each core that the process may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    if options.implementation:
        os.environ["JAXREC_KERNELS"] = options.implementation
    import jax
    import optax
    from flax import nnx

    import jaxrec

    jaxrec.keep_freed_memory()

    rows = [min(count, options.max_rows) if options.max_rows else count for count in ROWS]
    keys = [f"c{i}" for i in range(26)]
    rngs = nnx.Rngs(0)
    embeddings = jaxrec.EmbeddingBagCollection(
        [
            jaxrec.EmbeddingBagConfig(f"t{key}", count, 16, feature_names=(key,))
            for key, count in zip(keys, rows, strict=True)
        ],
        optimizer=jaxrec.optim.rowwise_adagrad(0.01),
        rngs=rngs,
    )
    model = jaxrec.nn.DLRM(
        embeddings,
        num_dense=13,
        bottom_layer_sizes=(512, 256, 64, 16),
        top_layer_sizes=(512, 256, 1),
        rngs=rngs,
    )
    optimizer = jaxrec.Optimizer(model, optax.adagrad(0.01))

    def losses(model, dense, embedded, labels):
        return optax.sigmoid_binary_cross_entropy(model.logits(dense, embedded), labels)

    def train_step(model, optimizer, dense, features, labels):
        def loss_fn(model):
            embedded = model.lookup(features)
            if not options.chunks:
                return losses(model, dense, embedded, labels).mean()
            total, _ = jaxrec.nn.sum_in_chunks(losses, model, dense, embedded, labels)
            return total / options.batch

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    rng = np.random.default_rng(0)
    batches = []
    for _ in range(8):
        draws = (np.minimum(r ** rng.random(options.batch) - 1, r - 1) for r in rows)
        ids = np.concatenate(list(draws)).astype(np.int64)
        features = jaxrec.KeyedJaggedArray.from_lengths(
            keys, ids, np.ones(26 * options.batch, np.int32)
        )
        dense = rng.standard_normal((options.batch, 13), dtype=np.float32)
        labels = rng.integers(0, 2, options.batch).astype(np.float32)
        batches.append(jax.device_put((dense, features, labels)))

    step = jaxrec.train.compile_step(train_step, model, optimizer)
    times = []
    for i in range(options.steps + 5):
        start = time.perf_counter()
        jax.block_until_ready(step(*batches[i % 8]))
        jax.block_until_ready(embeddings.tables.get_value())
        times.append((time.perf_counter() - start) * 1e3)
    median = float(np.median(times[5:]))
    line = {"peer": "jaxrec_dlrm", "batch": options.batch, "step_ms": [min(times[5:]), median]}
    print(json.dumps(line | {"samples_per_second": options.batch / median * 1e3}))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
