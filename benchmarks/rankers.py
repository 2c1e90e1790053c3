"""Compares rankers on one log: DLRM on the bag of a history, DIN, SASRec and the HSTU ranker.

Usage: python -m benchmarks.rankers [--data ml-100k] [--seeds 0 1 2] [--output NAME]
Without --data the log is `jaxrec.data.GeneratedEvents`, whose best AUCs are known. With it, a
directory of MovieLens (100K or 1M): does a user give a film four stars or more? Each row is a user
at one time, with a history and candidates. All models train on the same rows in the same order and
are tested on the same later ones. The step of a model is that with the best validation AUC. The
seed makes the log's users, the order of MovieLens' rows, and first values.

DLRM and DIN also read the time since the newest event, SASRec reads no times. Prints a JSON line
for each seed and model: test AUC, the best AUCs of the log, the step, and seconds of all processors
for the training. With --output it also writes the lines to NAME.json.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.data import GeneratedEvents, movielens_ratings
from jaxrec.metrics import auc
from jaxrec.nn import DIN, DLRM, HSTURanker, RankerFeatures, SASRec, TargetTask, candidate_scores
from jaxrec.train import compile_step

Batch = jaxrec.KeyedJaggedArray
PLAYED = 1  # bit of an action; for MovieLens, of four stars and more
EVENTS, CANDIDATES = ("history", "time", "action"), ("candidate", "now", "label")


@dataclasses.dataclass(frozen=True)
class Options:
    """The runs."""

    data: pathlib.Path | None = None
    """Directory or file of MovieLens; None: the generated log."""
    models: tuple[str, ...] = ("DLRM", "DIN", "SASRec", "HSTURanker")
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 1000
    batch_size: int = 128
    evaluations: int = 6
    """Times that the validation AUC is taken in a run."""
    dim: int = 32
    num_layers: int = 2
    learning_rate: float = 5e-3
    """Decays to 0 along a cosine."""
    dropout_rate: float = 0.0
    window: int = 1
    """Events before it that a token of the HSTU ranker sees in a layer; 0: all."""
    output: pathlib.Path | None = None
    """File name without its ending."""


@dataclasses.dataclass(frozen=True)
class Data:
    """One log's rows as batches of the features `EVENTS` and `CANDIDATES`, all of one shape.

    ``train`` gives the batch of a step. The last batch of ``validation`` and ``test`` is filled up
    with rows beyond their ``labels``. ``bounds`` are the best AUCs of the test rows.
    ``reads_actions`` says whether actions of the history tell something of the labels.
    """

    num_items: int
    max_history: int
    num_candidates: int
    train: Callable[[int], Batch]
    validation: HeldOut
    test: HeldOut
    bounds: dict[str, float]
    reads_actions: bool

    @property
    def num_rows(self) -> int:
        """Rows of a table of `history_ids`."""
        return self.num_items * (2 if self.reads_actions else 1)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Batches of one shape, the last filled up with rows beyond those of ``labels``."""

    batches: list[Batch]
    labels: np.ndarray

    def auc(self, score: Callable[[Batch], Any]) -> float:
        scores = np.concatenate([np.asarray(score(batch)) for batch in self.batches])
        return auc(scores[: len(self.labels)], self.labels)


def generated(options: Options, seed: int) -> Data:
    """The generated log; later users are for validation and testing."""
    size, held_out = options.batch_size, 32 * options.batch_size
    first, second, last = np.cumsum([options.steps * size, held_out, 2 * held_out]).tolist()
    log = GeneratedEvents(num_users=last, seed=seed)

    def batch(rows: range) -> Batch:
        return log.requests(rows.start, rows.stop).batch(log.max_history)

    tested = log.requests(second, last)

    def bound(probabilities: np.ndarray) -> float:
        return auc(probabilities.ravel(), tested.labels.ravel())

    return Data(
        log.num_items,
        log.max_history,
        log.num_candidates,
        lambda step: batch(range(step * size, (step + 1) * size)),
        *(
            HeldOut(
                [batch(range(i, i + size)) for i in range(start, stop, size)],
                log.requests(start, stop).labels.ravel(),
            )
            for start, stop in ((first, second), (second, last))
        ),
        {
            "best_auc": bound(tested.probabilities),
            "order_blind_auc": bound(tested.order_blind),
            "time_blind_auc": bound(tested.time_blind),
        },
        reads_actions=False,
    )


def movielens(options: Options, seed: int) -> Data:
    """Ratings in time: four at a time are the candidates after what the user rated before.

    A user's last two fours are for testing, the two before for validation.
    """
    max_history, each = 50, 4
    by_user = [("user_id", "ascending"), ("timestamp", "ascending")]
    ratings = movielens_ratings(options.data).sort_by(by_user)
    user, item, stars, seconds = (
        ratings[name].to_numpy() for name in ("user_id", "movie_id", "rating", "timestamp")
    )
    actions, seconds = (stars >= 4).astype(np.int32) * PLAYED, seconds.astype(np.int32)
    starts = np.flatnonzero(np.diff(user, prepend=-1))
    ends = np.append(starts[1:], len(user))
    # Fours from the newest to the oldest, as the first candidate and the start of its history.
    place, first, oldest = np.array(
        [
            (place, end - each * (place + 1), max(start, end - each * (place + 1) - max_history))
            for start, end in zip(starts, ends, strict=True)
            for place in range((end - start - 1) // each)
        ]
    ).T

    def pack(rows: np.ndarray) -> Batch:
        lengths, counts = first[rows] - oldest[rows], np.full(len(rows), each)
        events, shown = spans(oldest[rows], lengths), spans(first[rows], counts)
        # All candidates come at the time of the first.
        now = np.repeat(seconds[first[rows]], each)
        return batch_of(
            (item[events], seconds[events], actions[events]), lengths,
            (item[shown], now, actions[shown]), counts, max_history,
        )  # fmt: skip

    def held_out(rows: np.ndarray) -> HeldOut:
        labels = actions[spans(first[rows], np.full(len(rows), each))]
        full = np.resize(rows, (-(-len(rows) // size), size))
        return HeldOut([pack(each) for each in full], labels)

    size, rng = options.batch_size, np.random.default_rng(seed)
    train = np.flatnonzero(place >= 4)
    if not len(train):
        raise SystemExit(f"{options.data}: no user has {4 * each + each + 1} ratings")
    epochs = -(-options.steps * size // len(train))
    order = np.concatenate([rng.permutation(train) for _ in range(epochs)])
    return Data(
        int(item.max()) + 1,
        max_history,
        each,
        lambda step: pack(order[step * size : (step + 1) * size]),
        held_out(np.flatnonzero((place == 2) | (place == 3))),
        held_out(np.flatnonzero(place < 2)),
        {},
        reads_actions=True,
    )


def batch_of(
    events: tuple[np.ndarray, ...],
    lengths: np.ndarray,
    candidates: tuple[np.ndarray, ...],
    counts: np.ndarray,
    max_history: int,
) -> Batch:
    """Pack the columns of histories and of candidates."""
    return Batch.from_lengths(
        [*EVENTS, *CANDIDATES],
        np.concatenate([*events, *candidates]),
        np.concatenate([lengths] * 3 + [counts] * 3),
        capacities=dict.fromkeys(EVENTS, len(lengths) * max_history)
        | dict.fromkeys(CANDIDATES, len(candidates[0])),
    )


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions of several spans, one after the other."""
    return np.arange(lengths.sum()) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)


@dataclasses.dataclass(frozen=True)
class Ranker:
    """How a model is made, what it reads of a batch, and its logits of all candidates."""

    make: Callable[[Options, Data, nnx.Rngs], nnx.Module]
    read: Callable[[Data, Batch], Any]
    logits: Callable[[Any, Any], jax.Array]


def history_ids(data: Data, batch: Batch) -> np.ndarray:
    """Return the items of histories; an item that was played is another one, if actions matter."""
    actions = batch["action"].values if data.reads_actions else 0
    return batch["history"].values + data.num_items * actions


def sequences(data: Data, batch: Batch) -> Batch:
    """Return the features of SASRec: a row for each history."""
    items = batch.select(["history", "candidate"])
    values = np.concatenate([history_ids(data, batch), batch["candidate"].values])
    return dataclasses.replace(items, values=values)


def samples(data: Data, batch: Batch) -> tuple[np.ndarray, Batch]:
    """Return the features of DLRM and DIN, a row for each candidate: the gap, and the ids."""
    lengths, each = batch["history"].lengths, data.num_candidates
    ends = np.cumsum(lengths)
    repeated = np.repeat(lengths, each)
    ids = history_ids(data, batch)[spans(np.repeat(ends - lengths, each), repeated)]
    features = Batch.from_lengths(
        ["history", "candidate"],
        np.concatenate([ids, batch["candidate"].values]),
        np.concatenate([repeated, np.ones_like(repeated)]),
        capacities={"history": len(repeated) * data.max_history, "candidate": len(repeated)},
    )
    gap = batch["now"].values - np.repeat(batch["time"].values[ends - 1], each)
    return np.log1p(np.maximum(gap, 0)).astype(np.float32)[:, None] / 10, features


def rate(options: Options) -> optax.Schedule:
    return optax.cosine_decay_schedule(options.learning_rate, options.steps)


def items(options: Options, data: Data, rngs: nnx.Rngs) -> jaxrec.EmbeddingCollection:
    item = jaxrec.EmbeddingConfig("item", data.num_rows, options.dim, ("history", "candidate"))
    optimizer = jaxrec.optim.adam(rate(options))
    return jaxrec.EmbeddingCollection([item], optimizer=optimizer, rngs=rngs)


def make_dlrm(options: Options, data: Data, rngs: nnx.Rngs) -> DLRM:
    tables = [
        jaxrec.EmbeddingBagConfig(name, data.num_rows, options.dim, pooling="mean")
        for name in ("history", "candidate")
    ]
    optimizer = jaxrec.optim.adam(rate(options))
    return DLRM(
        jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs),
        num_dense=1,
        bottom_layer_sizes=(32, options.dim),
        top_layer_sizes=(64, 32, 1),
        rngs=rngs,
    )


def make_din(options: Options, data: Data, rngs: nnx.Rngs) -> DIN:
    return DIN(
        items(options, data, rngs),
        {"history": "candidate"},
        num_dense=1,
        attention_layer_sizes=(32, 16, 1),
        top_layer_sizes=(64, 32, 1),
        rngs=rngs,
    )


def make_sasrec(options: Options, data: Data, rngs: nnx.Rngs) -> SASRec:
    return SASRec(
        items(options, data, rngs),
        max_length=data.max_history,
        num_blocks=options.num_layers,
        dropout_rate=options.dropout_rate,
        block_size=32,
        rngs=rngs,
    )


def make_hstu(options: Options, data: Data, rngs: nnx.Rngs) -> HSTURanker:
    return HSTURanker(
        items(options, data, rngs),
        RankerFeatures(
            {"history": "candidate"}, times=("time", "now"), actions=("action", "label")
        ),
        [TargetTask("played", bit=PLAYED)],
        dim=options.dim,
        num_layers=options.num_layers,
        num_heads=2,
        max_length=data.max_history + data.num_candidates,
        max_attention_length=options.window,
        num_positions=data.max_history + 2,
        num_times=64,
        token_hidden_dim=32,
        item_hidden_dim=32,
        task_hidden_sizes=(32,),
        dropout_rate=options.dropout_rate,
        block_size=32,
        rngs=rngs,
    )


def sasrec_logits(model: SASRec, features: Batch) -> jax.Array:
    out = model(features)
    return candidate_scores(out["history"], out["candidate"].values).ravel()


RANKERS = {
    "DLRM": Ranker(make_dlrm, samples, lambda model, batch: model(*batch)),
    "DIN": Ranker(make_din, samples, lambda model, batch: model(*batch)),
    "SASRec": Ranker(make_sasrec, sequences, sasrec_logits),
    "HSTURanker": Ranker(
        make_hstu, lambda data, batch: batch, lambda model, batch: model(batch)[:, 0]
    ),
}


def train(options: Options, data: Data, name: str, seed: int) -> dict[str, Any]:
    """Train one model; return its test AUC at the step that is best in validation."""
    ranker = RANKERS[name]
    model = ranker.make(options, data, nnx.Rngs(seed))
    optimizer = jaxrec.Optimizer(model, optax.adam(rate(options)))

    def train_step(model, optimizer, batch, labels):
        def loss_fn(model):
            logits = ranker.logits(model, batch)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    step = compile_step(train_step, model, optimizer)
    logits = nnx.jit(ranker.logits)
    best = {"validation_auc": 0.0}
    begun = time.process_time()
    for count in range(1, options.steps + 1):
        batch = data.train(count - 1)
        labels = (batch["label"].values & PLAYED).astype(np.float32)
        step(ranker.read(data, batch), labels)
        if count * options.evaluations % options.steps < options.evaluations:
            model.eval()
            score = lambda batch: logits(model, ranker.read(data, batch))  # noqa: E731
            validation = data.validation.auc(score)
            if validation > best["validation_auc"]:
                best = {"auc": data.test.auc(score), "validation_auc": validation, "step": count}
            model.train()
    seconds = round(time.process_time() - begun)
    return {"seed": seed, "model": name, **best, **data.bounds, "cpu_seconds": seconds}


def main(options: Options) -> None:
    lines = []
    for seed in options.seeds:
        data = (movielens if options.data else generated)(options, seed)
        for name in options.models:
            line = train(options, data, name, seed)
            rounded = {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in line.items()
            }
            print(json.dumps(rounded), flush=True)
            lines.append(rounded)
    if options.output is not None:
        text = "[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n"
        options.output.with_suffix(".json").write_text(text)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
