"""Times one training step of DeepFM or DCN-v2 with the row counts of the Criteo Kaggle data set.

Usage: python -m benchmarks.click_models [--model dcn_v2] [--batch 2048] [--threads 2] [--steps 40]
13 dense features and 26 tables of 16 columns, one id each; SGD, or
Adagrad with --optimizer adagrad, for all parameters. The models are TorchRec's:
`SimpleDeepFMNN` with layers of 512, `DLRM_DCN` with three cross layers of rank 64. Prints one JSON
line: milliseconds (minimum, median) and samples per second.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from benchmarks import peer_click_shapes as shapes


def main() -> None:
    options = shapes.make_parser(__doc__).parse_args()
    # XLA takes one thread for each core that the process may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    import jax
    import optax

    import jaxrec

    jaxrec.keep_freed_memory()
    model = make_model(options)
    optimizer = jaxrec.Optimizer(model, getattr(optax, options.optimizer)(shapes.RATE))

    def losses(model, dense, embedded, labels):
        return optax.sigmoid_binary_cross_entropy(model.logits(dense, embedded), labels)

    def train_step(model, optimizer, dense, features, labels):
        def loss_fn(model):
            embedded = model.lookup(features)
            total, _ = jaxrec.nn.sum_in_chunks(losses, model, dense, embedded, labels)
            return total / options.batch

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    compiled = jaxrec.train.compile_step(train_step, model, optimizer)

    def step(*batch):
        jax.block_until_ready((compiled(*batch), model.embeddings.tables.get_value()))

    lengths = np.ones(len(shapes.KEYS) * options.batch, np.int32)
    batches = [
        (dense, jaxrec.KeyedJaggedArray.from_lengths(shapes.KEYS, ids.reshape(-1), lengths), labels)
        for dense, ids, labels in shapes.draw_batches(options)
    ]
    shapes.time_steps(step, jax.device_put(batches), options, "jaxrec")


def make_model(options: Any) -> Any:
    """Return the model with its tables."""
    from flax import nnx

    import jaxrec

    rngs = nnx.Rngs(0)
    tables = [
        jaxrec.EmbeddingBagConfig(f"t{key}", rows, shapes.DIM, feature_names=(key,))
        for key, rows in zip(shapes.KEYS, shapes.row_counts(options), strict=True)
    ]
    optimizer = getattr(jaxrec.optim, options.optimizer)(shapes.RATE)
    embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs)
    if options.model == "deepfm":
        return jaxrec.nn.SimpleDeepFMNN(
            embeddings,
            num_dense=shapes.NUM_DENSE,
            hidden_layer_size=shapes.HIDDEN,
            deep_fm_dimension=shapes.HIDDEN,
            rngs=rngs,
        )
    return jaxrec.nn.DLRM_DCN(
        embeddings,
        num_dense=shapes.NUM_DENSE,
        bottom_layer_sizes=shapes.BOTTOM,
        top_layer_sizes=shapes.TOP,
        dcn_num_layers=shapes.CROSS_LAYERS,
        dcn_low_rank_dim=shapes.LOW_RANK,
        rngs=rngs,
    )


if __name__ == "__main__":
    main()
