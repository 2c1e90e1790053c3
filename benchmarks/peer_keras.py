"""Times one training step of DeepFM or DCN-v2 in Keras with TensorFlow.

The models are those of `benchmarks.click_models`. Needs an environment with tensorflow or
tensorflow-cpu.

Usage: TF_PYTHON benchmarks/peer_keras.py [--model dcn_v2] [--batch 2048] [--threads 2]
                                          [--one-table] [--xla]
The step is a `tf.function`, and each table an Embedding layer. With --one-table all are one layer,
whose ids have offsets.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


import keras
import numpy as np
import peer_click_shapes as shapes
import tensorflow as tf

OPTIMIZERS = {"sgd": keras.optimizers.SGD, "adagrad": keras.optimizers.Adagrad}


class Tables(keras.layers.Layer):
    """Embeddings ``[batch, tables, dim]`` of ids ``[batch, tables]``."""

    def __init__(self, rows, is_one):
        super().__init__()
        sizes = [sum(rows)] if is_one else rows
        self.tables = [keras.layers.Embedding(size, shapes.DIM) for size in sizes]
        self.offsets = np.cumsum([0, *rows[:-1]], dtype=np.int64) if is_one else None

    def call(self, ids):
        if self.offsets is not None:
            return self.tables[0](ids + self.offsets)
        columns = tf.unstack(ids, axis=1)
        return tf.stack([table(x) for table, x in zip(self.tables, columns, strict=True)], axis=1)


class LowRankCross(keras.layers.Layer):
    """``x0 * (W V x + b) + x``."""

    def build(self, shapes_of):
        columns = shapes_of[0][-1]
        self.narrow = keras.layers.Dense(shapes.LOW_RANK, use_bias=False)
        self.wide = keras.layers.Dense(columns)
        self.narrow.build((None, columns))
        self.wide.build((None, shapes.LOW_RANK))

    def call(self, inputs):
        first, x = inputs
        return first * self.wide(self.narrow(x)) + x


def dense_layers(x, sizes):
    for size in sizes:
        x = keras.layers.Dense(size, "relu")(x)
    return x


def pairs(vectors):
    """The sum of the dot products of all pairs of vectors, ``[batch, 1]``."""
    total = tf.reduce_sum(vectors, axis=1)
    squares = tf.reduce_sum(vectors * vectors, axis=1)
    return tf.reduce_sum(total * total - squares, axis=1, keepdims=True) / 2


def make_model(options):
    dense = keras.Input((shapes.NUM_DENSE,))
    ids = keras.Input((len(shapes.KEYS),), dtype="int64")
    embedded = Tables(shapes.row_counts(options), options.one_table)(ids)
    bottom = (shapes.HIDDEN, shapes.DIM) if options.model == "deepfm" else shapes.BOTTOM
    vector = dense_layers(dense, bottom)
    first = keras.layers.Reshape((1, shapes.DIM))(vector)
    vectors = keras.layers.Concatenate(axis=1)([first, embedded])
    flat = keras.layers.Flatten()(vectors)
    if options.model == "deepfm":
        deep = keras.layers.Dense(shapes.HIDDEN, "relu")(flat)
        fm = keras.layers.Lambda(pairs, output_shape=(1,))(vectors)
        top = keras.layers.Concatenate()([vector, deep, fm])
    else:
        top = flat
        for _ in range(shapes.CROSS_LAYERS):
            top = LowRankCross()([flat, top])
        top = dense_layers(top, shapes.TOP[:-1])
    return keras.Model([dense, ids], keras.layers.Dense(1)(top))


def make_step(options):
    """Return the training step; the gradients of tables are `tf.IndexedSlices`."""
    model = make_model(options)
    optimizer = OPTIMIZERS[options.optimizer](shapes.RATE)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(jit_compile=options.xla)
    def update(dense, ids, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model([dense, ids], training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return lambda *batch: update(*batch).numpy()


def main():
    parser = shapes.make_parser(__doc__)
    parser.add_argument("--one-table", action="store_true", help="one layer for all tables")
    parser.add_argument("--xla", action="store_true", help="compile the step by XLA")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    batches = [
        tuple(map(tf.constant, (dense, np.ascontiguousarray(ids.T), labels[:, None])))
        for dense, ids, labels in shapes.draw_batches(options)
    ]
    name = f"keras{', one table' * options.one_table}{', XLA' * options.xla}"
    shapes.time_steps(make_step(options), batches, options, name)


if __name__ == "__main__":
    main()
