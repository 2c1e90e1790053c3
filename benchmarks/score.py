"""AUC of DLRM, and the time to reach it, beside TorchRec's DLRM with the same hyperparameters.

Usage: python -m benchmarks.score --peer-python PATH [--data PATH] [--seeds 0 1 2] [--epochs 1]
--data takes what ``jaxrec train --data`` takes, or a directory with MovieLens: a rating of 4 or 5
is a click, and a random tenth is held out. Without it the log is generated. The data are read,
encoded and cut into batches as by ``jaxrec train``, and both train on the same batches in the same
order: row-wise Adagrad for tables, Adam for layers, rates that decay linearly to 0. First values
are each library's own: those that ``jaxrec train`` gives rows and their optimizer are left out.

Prints a JSON line for each seed and side: the AUC on the held-out rows at the end, and the seconds
of training until AUC first reached the lower of both sides' last AUCs, less 0.001. Seconds count
neither reading and evaluation nor the first step, in which jaxrec compiles (``first_step_s``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro
from flax import nnx

import jaxrec
from jaxrec.data import (
    ClickBatch,
    TableEncoder,
    movielens_movies,
    movielens_ratings,
    movielens_users,
)
from jaxrec.metrics import auc
from jaxrec.train.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jaxrec.train.datasets import run_batches, split_datasets
from jaxrec.train.features import is_parquet, learn_features, text_encoder
from jaxrec.train.model import make_kind, predict, table_configs
from jaxrec.train.models.dlrm import DLRMKind
from jaxrec.train.models.kind import ModelKind
from jaxrec.train.models.labels import click_loss


class PlainDLRM(DLRMKind):
    """DLRM whose rows and row optimizer begin as those of TorchRec do."""

    tables_of = ModelKind.tables_of
    row_optimizer = ModelKind.row_optimizer


_PEER = pathlib.Path(__file__).with_name("peer_score.py")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        peer_python: Python of an environment with torch, torchrec and fbgemm-gpu-cpu; None: jaxrec
            alone is trained.
        data: The data; None: a generated log.
        seeds: A run of both sides for each.
        rows: Training rows of the generated log.
        eval_rows: Its held-out rows.
        batch: Samples of a step.
        epochs: Passes over the training rows.
        evaluations: Evaluations of a run, evenly spread over its steps.
        threads: Processor cores to use.
    """

    peer_python: pathlib.Path | None = None
    data: pathlib.Path | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    rows: int = 2_000_000
    eval_rows: int = 200_000
    batch: int = 2048
    epochs: int = 1
    evaluations: int = 20
    threads: int = 2


@dataclasses.dataclass(frozen=True)
class Run:
    """Seconds of training before each evaluation, and its AUC."""

    seconds: Sequence[float]
    aucs: Sequence[float]
    first_step: float

    def figures(self, target: float) -> dict[str, Any]:
        """Return the last AUC and the time to the target, None if it was not reached."""
        reached = (s for s, value in zip(self.seconds, self.aucs, strict=True) if value >= target)
        figures = {"auc": self.aucs[-1], "target": target, "seconds_to_target": next(reached, None)}
        figures |= {"seconds": self.seconds[-1], "first_step_s": self.first_step}
        return {name: x if x is None else round(x, 4) for name, x in figures.items()}


def main(options: Options) -> None:
    # XLA takes one thread for each core that the process may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    jaxrec.keep_freed_memory()
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as directory:
            runs = compare(options, seed, pathlib.Path(directory))
        target = min(run.aucs[-1] for run in runs.values()) - 0.001
        for side, run in runs.items():
            line = {"seed": seed, "side": side, **run.figures(target)}
            print(json.dumps(line), flush=True)


def compare(options: Options, seed: int, directory: pathlib.Path) -> dict[str, Run]:
    """Train both sides on the batches of a seed."""
    path = options.data
    if path is not None and path.is_dir() and not list(path.glob("*.parquet")):
        path = directory / "movielens.parquet"
        pq.write_table(movielens_clicks(options.data, seed), path)
    config = TrainConfig(
        data=DataConfig(
            path=path,
            batch_size=options.batch,
            epochs=options.epochs,
            generated_rows=options.rows,
            generated_eval_rows=options.eval_rows,
        ),
        model=ModelConfig(name=PlainDLRM.name),
        optimizer=OptimizerConfig(learning_rate=0.004, table_learning_rate=0.1),
        seed=seed,
    )
    encoder = learn_features(config.data) if is_parquet(path) else None
    training, held_out = split_datasets(config, encoder=encoder)
    batches = list(run_batches(training, options.batch, options.epochs))
    held = list(held_out.batches(options.batch))
    labels = np.concatenate([batch.labels[batch.weights > 0] for batch in held])
    every = -(-len(batches) // options.evaluations)
    runs = {"jaxrec": train(config, encoder, batches, held, every)}
    if options.peer_python is not None:
        write_inputs(directory, config, encoder, batches, held, every, options.threads)
        command = [options.peer_python, _PEER, directory]
        subprocess.run(list(map(str, command)), check=True)
        with np.load(directory / "results.npz") as results:
            aucs = [auc(logits, labels) for logits in results["logits"]]
            runs["torchrec"] = Run(results["seconds"].tolist(), aucs, results["first_step"].item())
    return runs


def movielens_clicks(directory: pathlib.Path, seed: int) -> pa.Table:
    """Return ratings of films with their users, in random order; 4 and more is a click."""
    ratings, films, users = (
        read(directory) for read in (movielens_ratings, movielens_movies, movielens_users)
    )
    film = films.take(pc.index_in(ratings["movie_id"], films["movie_id"]))
    user = users.take(pc.index_in(ratings["user_id"], users["user_id"]))
    columns = {
        "label": pc.greater_equal(ratings["rating"], 4).cast(pa.int8()),
        "age": user["age"].cast(pa.float32()),
        "year": film["year"].cast(pa.float32()),
        "user": user["user_id"],
        "film": film["movie_id"],
        "gender": user["gender"],
        "occupation": user["occupation"],
        "genres": film["genres"],
    }
    order = np.random.default_rng(seed).permutation(len(ratings))
    return pa.table(columns).take(order)


def train(
    config: TrainConfig,
    encoder: TableEncoder | None,
    batches: Sequence[ClickBatch],
    held: Sequence[ClickBatch],
    every: int,
) -> Run:
    """Train jaxrec's model."""
    model, optimizer = make_kind(PlainDLRM(config, encoder or text_encoder(config)), len(batches))

    def update(model: Any, optimizer: Any, batch: ClickBatch) -> Any:
        loss, gradients = jaxrec.value_and_grad(lambda model: click_loss(model, batch)[0])(model)
        optimizer.update(model, gradients)
        return loss

    step = jaxrec.train.compile_step(update, model, optimizer)
    score = nnx.cached_partial(nnx.jit(predict), model)
    labels = np.concatenate([batch.labels[batch.weights > 0] for batch in held])
    seconds, aucs, spent, first_step = [], [], 0.0, 0.0
    placed = jax.device_put(list(batches))
    for start in range(0, len(placed), every):
        begun = time.perf_counter()
        for number, batch in enumerate(placed[start : start + every], start):
            loss = step(batch)
            if number == 0:
                jax.block_until_ready(loss)
                first_step = time.perf_counter() - begun
                begun = time.perf_counter()
        jax.block_until_ready((loss, nnx.state(model)))
        spent += time.perf_counter() - begun
        logits = [np.asarray(score(batch))[batch.weights > 0] for batch in held]
        seconds.append(spent)
        aucs.append(auc(np.concatenate(logits), labels))
    return Run(seconds, aucs, first_step)


def write_inputs(
    directory: pathlib.Path,
    config: TrainConfig,
    encoder: TableEncoder | None,
    batches: Iterable[ClickBatch],
    held: Iterable[ClickBatch],
    every: int,
    threads: int,
) -> None:
    """Write the files that `peer_score.py` reads: settings, and the batches without padding."""
    model: ModelConfig = config.model
    settings: dict[str, Any] = {
        "tables": [
            {"name": table.name, "rows": table.num_embeddings, "pooling": table.pooling}
            for table in table_configs(PlainDLRM(config, encoder or text_encoder(config)))
            if isinstance(table, jaxrec.EmbeddingBagConfig)  # all are
        ],
        "dim": model.embedding_dim,
        "bottom": [*model.bottom_layer_sizes, model.embedding_dim],
        "top": [*model.top_layer_sizes, 1],
        "rate": config.optimizer.learning_rate,
        "table_rate": config.optimizer.table_learning_rate,
        "seed": config.seed,
        "every": every,
        "threads": threads,
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    for name, of_split in (("training", batches), ("held_out", held)):
        arrays: dict[str, list[np.ndarray]] = {
            key: [] for key in ("sizes", "dense", "labels", "ids", "ids_of_batch", "lengths")
        }
        for batch in of_split:
            real = np.asarray(batch.weights) > 0
            bags = [batch.features[table["name"]] for table in settings["tables"]]
            lengths = [np.asarray(bag.lengths)[real] for bag in bags]
            ids = [
                np.asarray(bag.values)[: own.sum()] for bag, own in zip(bags, lengths, strict=True)
            ]
            arrays["sizes"].append(np.array([real.sum()]))
            arrays["dense"].append(np.asarray(batch.dense)[real])
            arrays["labels"].append(np.asarray(batch.labels)[real])
            arrays["ids"].extend(each.astype(np.int64) for each in ids)
            arrays["ids_of_batch"].append(np.array([sum(map(len, ids))]))
            arrays["lengths"].extend(each.astype(np.int32) for each in lengths)
        np.savez(directory / f"{name}.npz", **{k: np.concatenate(v) for k, v in arrays.items()})


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
