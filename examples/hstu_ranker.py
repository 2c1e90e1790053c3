"""HSTU ranker: which of several tracks will a user play, given what they heard before, and when?

The log is generated (`jaxrec.data.GeneratedEvents`). A user plays mostly tracks of one genre: the
one after that of the newest event, or the same one if that event is long ago. So plays depend on
the order and on the times of a history. The best possible AUC is printed beside the ranker's, and
the best ones of models that do not know the order, or the times. At the end histories are encoded
once and their candidates scored against the cache, with the scores of one pass.

    python examples/hstu_ranker.py
"""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.data import GeneratedEvents
from jaxrec.metrics import auc
from jaxrec.nn import HSTURanker, RankerFeatures, TargetTask
from jaxrec.train import compile_step

PLAYED = 1  # bit of an action
HELD_OUT = 20  # batches


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 600
    batch_size: int = 128
    num_items: int = 100
    max_history: int = 20
    dim: int = 32
    num_layers: int = 2
    window: int = 1
    """Events before it that a token sees in a layer, and a candidate before the history's end."""
    learning_rate: float = 5e-3
    """Decays to 0 along a cosine."""
    seed: int = 0


def make_log(settings: Settings) -> GeneratedEvents:
    """Users for training, and later ones for evaluation."""
    return GeneratedEvents(
        num_users=(settings.steps + HELD_OUT) * settings.batch_size,
        seed=settings.seed,
        num_items=settings.num_items,
        max_history=settings.max_history,
    )


def make_model(settings: Settings, log: GeneratedEvents, rate: optax.Schedule) -> HSTURanker:
    rngs = nnx.Rngs(settings.seed)
    table = jaxrec.EmbeddingConfig(
        "item", log.num_items, settings.dim, feature_names=("history", "candidate")
    )
    return HSTURanker(
        jaxrec.EmbeddingCollection([table], optimizer=jaxrec.optim.adam(rate), rngs=rngs),
        RankerFeatures(
            {"history": "candidate"}, times=("time", "now"), actions=("action", "label")
        ),
        [TargetTask("played", bit=PLAYED)],
        dim=settings.dim,
        num_layers=settings.num_layers,
        num_heads=2,
        max_length=log.max_history + log.num_candidates,
        max_attention_length=settings.window,
        num_positions=log.max_history + 2,
        num_times=64,
        token_hidden_dim=32,
        item_hidden_dim=32,
        task_hidden_sizes=(32,),
        block_size=32,
        rngs=rngs,
    )


def draw_batch(settings: Settings, log: GeneratedEvents, step: int) -> jaxrec.KeyedJaggedArray:
    first = step * settings.batch_size
    return log.requests(first, first + settings.batch_size).batch(log.max_history)


def train_step(model, optimizer, batch):
    (loss, _), gradients = jaxrec.value_and_grad(lambda model: model.loss(batch), has_aux=True)(
        model
    )
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def predict(model, batch):
    return model(batch)


def evaluate(settings: Settings, log: GeneratedEvents, model: HSTURanker) -> float:
    """AUC of users after those of the training."""
    model.eval()
    batches = [draw_batch(settings, log, settings.steps + i) for i in range(HELD_OUT)]
    scores = [np.asarray(predict(model, batch))[:, 0] for batch in batches]
    labels = [batch["label"].values & PLAYED for batch in batches]
    return auc(np.concatenate(scores), np.concatenate(labels))


def serve(settings: Settings, log: GeneratedEvents, model: HSTURanker) -> float:
    """Encode histories once, score their candidates; return the difference to one pass."""
    batch = jax.device_put(draw_batch(settings, log, settings.steps))
    history, targets = (
        batch.select(keys) for keys in (["history", "time", "action"], ["candidate", "now"])
    )
    request_times = batch["now"].values.reshape(settings.batch_size, -1)[:, -1]
    encode = nnx.jit(lambda model, *args: model.encode(args[0], request_times=args[1]))
    score = nnx.jit(lambda model, *args: model.score(*args, longest=log.num_candidates))
    cache = encode(model, history, request_times)
    return float(abs(score(model, cache, targets) - predict(model, batch)).max())


def main(settings: Settings) -> dict[str, float]:
    log = make_log(settings)
    rate = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    model = make_model(settings, log, rate)
    optimizer = jaxrec.Optimizer(model, optax.adam(rate))
    step, begun, losses = compile_step(train_step, model, optimizer), time.perf_counter(), []
    for count in range(settings.steps):
        losses.append(float(step(draw_batch(settings, log, count))))
        if (count + 1) % 100 == 0:
            recent = np.mean(losses[-100:])
            print(f"step {count + 1}: loss {recent:.4f}, {time.perf_counter() - begun:.0f} s")
    found = {
        "AUC": evaluate(settings, log, model),
        "best possible AUC": log.best_auc,
        "without the order": log.order_blind_auc,
        "without times": log.time_blind_auc,
        "difference with a cache": serve(settings, log, model),
    }
    print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
