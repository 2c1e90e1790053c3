"""HSTU ranker: which of several candidates will a user click, given what came before, in order?

Histories are generated. Each item has a genre, and a user clicks mostly on candidates of the genre
that follows that of the newest event: genre 3 after genre 2. So the clicks depend on the order of a
history, and a model of the bag of its items cannot know them. Attention is semi-local: in each
layer a token sees the event before it. Noise bounds every model's AUC; the best possible one is
printed beside the ranker's. At the end histories are encoded once and their candidates scored
against the cache, with the scores of one pass.

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
from jaxrec.metrics import auc
from jaxrec.nn import HSTURanker, RankerFeatures, Task
from jaxrec.train import compile_step

CLICK = 1  # bit of an action
GENRES = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 300
    batch_size: int = 128
    num_items: int = 40
    max_history: int = 20
    candidates: int = 4
    """Candidates of each user."""
    dim: int = 32
    num_layers: int = 2
    window: int = 1
    """Events before it that a token sees in a layer, and a candidate before the history's end."""
    learning_rate: float = 5e-3
    seed: int = 0


def make_model(settings: Settings) -> HSTURanker:
    rngs = nnx.Rngs(settings.seed)
    table = jaxrec.EmbeddingConfig(
        "item", settings.num_items, settings.dim, feature_names=("history", "candidate")
    )
    return HSTURanker(
        jaxrec.EmbeddingCollection([table], optimizer=jaxrec.optim.adam(3e-3), rngs=rngs),
        RankerFeatures(
            {"history": "candidate"}, times=("time", "now"), actions=("action", "label")
        ),
        [Task("click", bit=CLICK)],
        dim=settings.dim,
        num_layers=settings.num_layers,
        num_heads=2,
        max_length=settings.max_history + settings.candidates,
        max_attention_length=settings.window,
        num_positions=settings.max_history + 2,
        num_times=64,
        token_hidden_dim=32,
        item_hidden_dim=32,
        task_hidden_sizes=(32,),
        block_size=32,
        rngs=rngs,
    )


def draw_batch(settings: Settings, step: int) -> tuple[jaxrec.KeyedJaggedArray, np.ndarray]:
    """A batch, and the true probability of a click on each candidate."""
    rng, size = np.random.default_rng([settings.seed, step]), settings.batch_size
    lengths = rng.integers(1, settings.max_history + 1, size)
    history = [rng.integers(0, settings.num_items, length) for length in lengths]
    wanted = np.array([(row[-1] + 1) % GENRES for row in history])
    # Every second candidate has the genre that the user wants now.
    fits = rng.random((size, settings.candidates)) < 0.5
    genre = np.where(fits, wanted[:, None], rng.integers(0, GENRES, fits.shape))
    item = rng.integers(0, settings.num_items // GENRES, fits.shape) * GENRES + genre
    probability = np.where(genre == wanted[:, None], 0.85, 0.15)
    times = [1_000_000 + np.cumsum(rng.integers(1, 9000, length + 1)) for length in lengths]
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {
            "history": history,
            "time": [row[:-1] for row in times],
            "action": [rng.integers(0, 2, length) for length in lengths],
            "candidate": item,
            "now": [[row[-1]] * settings.candidates for row in times],
            "label": (rng.random(fits.shape) < probability).astype(int) * CLICK,
        },
        capacities=capacities(settings),
    )
    return batch, probability.ravel()


def capacities(settings: Settings) -> dict[str, int]:
    """One capacity for all batches, so that one program serves them."""
    events = settings.batch_size * settings.max_history
    targets = settings.batch_size * settings.candidates
    return dict.fromkeys(("history", "time", "action"), events) | dict.fromkeys(
        ("candidate", "now", "label"), targets
    )


def train_step(model, optimizer, batch):
    (loss, _), gradients = jaxrec.value_and_grad(lambda model: model.loss(batch), has_aux=True)(
        model
    )
    optimizer.update(model, gradients)
    return loss


def evaluate(settings: Settings, model: HSTURanker) -> dict[str, float]:
    predict = nnx.jit(lambda model, batch: model(batch)[:, 0])
    model.eval()
    labels, scores, best = [], [], []
    for step in range(20):
        batch, probability = draw_batch(settings, 10**6 + step)
        labels.append(np.asarray(batch["label"].values) > 0)
        scores.append(np.asarray(predict(model, jax.device_put(batch))))
        best.append(probability)
    label = np.concatenate(labels)
    return {
        "AUC": float(auc(np.concatenate(scores), label)),
        "best possible AUC": float(auc(np.concatenate(best), label)),
    }


def serve(settings: Settings, model: HSTURanker) -> float:
    """Encode histories once, score their candidates; return the difference to one pass."""
    batch = jax.device_put(draw_batch(settings, 2 * 10**6)[0])
    history, targets = (
        batch.select(keys) for keys in (["history", "time", "action"], ["candidate", "now"])
    )
    request_times = batch["now"].values.reshape(settings.batch_size, -1)[:, -1]
    encode = nnx.jit(lambda model, *args: model.encode(args[0], request_times=args[1]))
    score = nnx.jit(lambda model, *args: model.score(*args, longest=settings.candidates))
    whole = nnx.jit(lambda model, batch: model(batch))(model, batch)
    cache = encode(model, history, request_times)
    return float(abs(score(model, cache, targets) - whole).max())


def main(settings: Settings) -> dict[str, float]:
    model = make_model(settings)
    optimizer = jaxrec.Optimizer(model, optax.adam(settings.learning_rate))
    step, begun, losses = compile_step(train_step, model, optimizer), time.perf_counter(), []
    for count in range(settings.steps):
        losses.append(float(step(draw_batch(settings, count)[0])))
        if (count + 1) % 100 == 0:
            recent = np.mean(losses[-100:])
            print(f"step {count + 1}: loss {recent:.4f}, {time.perf_counter() - begun:.0f} s")
    found = evaluate(settings, model) | {"difference with a cache": serve(settings, model)}
    print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
