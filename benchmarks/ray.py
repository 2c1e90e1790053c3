"""Training from a Ray data set of two encoding workers, beside reading in the training process.

Usage: python -m benchmarks.ray [--rows 20000000] [--workers 2] [--kill worker trainer]

Generates a click log as Parquet files, learns the encoder and trains a model for an epoch, by two
readers: ``files`` reads and encodes in the training process, ``ray`` learns and encodes in workers
of a local cluster. Both keep the order of the rows, so that both AUCs must be equal. ``--kill``
repeats ``ray`` and kills a worker that encodes, or the training process in the middle of the epoch,
which then goes on from its last checkpoint. Prints a JSON line for each run: rows a second while
learning and while training, seconds of the training process's processor time in training, and the
AUC of the held-out rows. Ray comes by pip install 'jaxrec[ray]'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

SIZES = {"user": 300_000, "item": 50_000, "city": 1_000}
PART_ROWS = 500_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--readers", nargs="*", default=["files", "ray"])
    parser.add_argument("--kill", nargs="*", default=[], choices=["worker", "trainer"])
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.run:
        return run(options, *options.run)
    with tempfile.TemporaryDirectory() as directory:
        write_rows(pathlib.Path(directory), options.rows)
        runs = [(reader, "") for reader in options.readers]
        runs += [("ray", kill) for kill in options.kill]
        for reader, kill in runs:
            print(json.dumps(measure(options, directory, reader, kill)), flush=True)


def write_rows(directory: pathlib.Path, rows: int) -> None:
    """Write parts of a log whose labels follow from the values, and held-out rows."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    effects = {name: rng.normal(0, 1, size) for name, size in SIZES.items()}
    names = {name: pa.array([f"{name}_{n}" for n in range(SIZES[name])]) for name in SIZES}
    (directory / "training").mkdir()
    for number, start in enumerate(range(0, rows + PART_ROWS // 5, PART_ROWS)):
        is_held_out = start >= rows
        count = PART_ROWS // 5 if is_held_out else min(PART_ROWS, rows - start)
        ids = {
            name: np.exp(rng.random(count) * np.log(size)).astype(np.int64)
            for name, size in SIZES.items()
        }
        price = rng.lognormal(3, 1, count).round(2)
        logit = sum(effects[name][ids[name]] for name in SIZES) + 0.5 * np.log(price) - 2
        columns: dict[str, Any] = {name: names[name].take(ids[name]) for name in SIZES}
        columns["user"] = ids["user"]
        label = (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.int8)
        table = pa.table({"label": label, "price": price, **columns})
        name = "held_out" if is_held_out else f"training/{number:05d}"
        pq.write_table(table, directory / f"{name}.parquet", row_group_size=PART_ROWS // 4)


def measure(options: argparse.Namespace, directory: str, reader: str, kill: str) -> dict:
    """Run a reader in a process of its own, and again if that is killed; return its figures."""
    command = [sys.executable, "-m", "benchmarks.ray", "--run", directory, reader, kill]
    for name in ("rows", "workers", "batch_size"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    while True:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode == 0:
            return {"reader": reader, "killed": kill, **json.loads(done.stdout.splitlines()[-1])}
        if not (kill == "trainer" and done.returncode == -signal.SIGKILL):
            raise SystemExit(f"{reader} ended with exit code {done.returncode}")


class Reader(NamedTuple):
    encoder: Any
    batches: Any


def files_reader(directory: pathlib.Path, options: argparse.Namespace, schema: Any) -> Reader:
    from jaxrec.data import BatchSource, ParquetGroups, learn_encoder
    from jaxrec.data.encoder import EncodedGroups

    paths = tuple(sorted(directory.iterdir()))
    groups = ParquetGroups(paths, schema.columns, dictionaries=True)
    encoder = learn_encoder(schema, groups)
    size = options.batch_size
    source = BatchSource(
        EncodedGroups(groups, encoder), size, lambda rows: encoder.pack(rows, size)
    )
    return Reader(encoder, source)


class DiesOnce:
    """An encoder whose process kills itself in its third call, unless a file says that it did."""

    def __init__(self, encoder: Any, mark: pathlib.Path):
        self.encoder, self.mark, self.calls = encoder, mark, 0

    def __call__(self, rows: Any) -> Any:
        self.calls += 1
        if self.calls == 3 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.encoder(rows)


def ray_reader(
    directory: pathlib.Path, options: argparse.Namespace, schema: Any, mark: pathlib.Path | None
) -> Reader:
    import ray.data

    from jaxrec.data import EncoderLearner, ray_batches

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    rows = ray.data.read_parquet(str(directory)).select_columns(list(schema.columns))
    learner = EncoderLearner(schema)
    parts = rows.map_batches(
        learner, batch_format="pyarrow", batch_size=None, concurrency=options.workers
    )
    encoder = learner.encoder(parts.iter_batches(batch_format="pyarrow", batch_size=None))
    function = encoder if mark is None else DiesOnce(encoder, mark)
    encoded = rows.map_batches(
        function, batch_format="pyarrow", batch_size=1 << 16, concurrency=options.workers
    )
    size = options.batch_size
    batches = ray_batches(encoded, size, lambda rows: encoder.pack(rows, size), rows=rows.count())
    return Reader(encoder, batches)


def run(options: argparse.Namespace, directory: str, reader: str, kill: str) -> None:
    import jax
    import numpy as np
    import optax
    import pyarrow.parquet as pq
    from flax import nnx

    import jaxrec
    from jaxrec.data import Schema
    from jaxrec.metrics.areas import auc
    from jaxrec.train import CheckpointManager, SaveCheckpoints, Trainer

    root = pathlib.Path(directory)
    training = root / "training"
    schema = Schema.from_dict(
        {
            "label": "label",
            "dense": {"price": {"transform": "log1p"}},
            "categorical": list(SIZES),
        }
    )
    with contextlib.ExitStack() as stack:
        if reader == "ray":
            import ray

            ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
            stack.callback(ray.shutdown)
        started = time.perf_counter()
        mark = root / f"{kill}.killed"
        if reader == "ray":
            encoder, batches = ray_reader(
                training, options, schema, mark if kill == "worker" else None
            )
        else:
            encoder, batches = files_reader(training, options, schema)
        learned = time.perf_counter() - started

        class Model(nnx.Module):
            """A linear model: an effect for each value, and one for the price."""

            def __init__(self, rngs: nnx.Rngs):
                self.embeddings = jaxrec.EmbeddingBagCollection(
                    [jaxrec.EmbeddingBagConfig(n, x, 4) for n, x in encoder.table_rows.items()],
                    optimizer=jaxrec.optim.rowwise_adagrad(learning_rate=0.1),
                    rngs=rngs,
                )
                self.over = nnx.Linear(4 * len(SIZES) + 1, 1, rngs=rngs)

            def __call__(self, batch: Any) -> jax.Array:
                pooled = self.embeddings(batch.features).values
                return self.over(jax.numpy.concatenate([pooled, batch.dense], axis=1))[:, 0]

        def loss(model: Any, batch: Any) -> Any:
            losses = optax.sigmoid_binary_cross_entropy(model(batch), batch.labels)
            return (batch.weights * losses).sum() / batch.weights.sum(), {}

        model = Model(nnx.Rngs(0))
        callbacks: list[Any] = []
        checkpoints = root / "checkpoints"
        if kill == "trainer":
            manager = stack.enter_context(CheckpointManager(checkpoints))
            callbacks.append(SaveCheckpoints(manager, every=max(len(batches) // 8, 1)))
        trainer = Trainer(
            model=model,
            optimizer=jaxrec.Optimizer(model, optax.adam(1e-2)),
            loss=loss,
            callbacks=callbacks,
        )
        first = trainer.restore(checkpoints).batches if mark.exists() and callbacks else 0
        assert first is not None
        source: Iterator[Any] = batches.from_batch(first)
        if kill == "trainer" and not mark.exists():
            source = dying(source, len(batches) // 2, mark)
        started, processor = time.perf_counter(), time.process_time()
        trainer.train(source)
        trainer.wait()
        seconds = time.perf_counter() - started
        line = {
            "rows": options.rows,
            "first_batch": first,
            "learned_rows_per_s": round(options.rows / learned),
            "trained_rows_per_s": round((len(batches) - first) * options.batch_size / seconds),
            "processor_seconds": round(time.process_time() - processor, 1),
        }
        if kill == "worker":
            assert mark.exists(), "no worker was killed"
        held_out = encoder.batch(pq.read_table(root / "held_out.parquet"))
        scores = np.asarray(nnx.jit(lambda model, batch: model(batch))(model, held_out))
        line["auc"] = round(auc(scores, held_out.labels, held_out.weights), 6)
        print(json.dumps(line))


def dying(batches: Iterator[Any], at: int, mark: pathlib.Path) -> Iterator[Any]:
    """Yield batches, and kill this process at batch ``at``."""
    for number, batch in enumerate(batches):
        if number == at:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


if __name__ == "__main__":
    main()
