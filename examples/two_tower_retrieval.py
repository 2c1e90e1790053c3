"""Two-tower retrieval: train, export item vectors, search them through an approximate index.

A user tower (the items that the user had) and an item tower (the item and its category) are trained
so that their dot product finds what comes next, by an in-batch softmax with the logQ correction and
one hard negative each, an item of the same category. Then the vectors of all items go into an index
of nearest neighbours (faiss: inverted lists, of which a few are searched), and the example prints
how much of the exact top k the index finds, how often the item that came next is in it, and how
long a query takes both ways. Expect recall of the index above 0.9, and next items in the top 100 of
20,000 far more often than the 0.005 of chance. Needs faiss-cpu: pip install 'jaxrec[examples]'

    python examples/two_tower_retrieval.py
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.nn import MLP, EmbeddingTower, TwoTower, in_batch_softmax_loss
from jaxrec.train import compile_step

TEMPERATURE = 0.1  # of the softmax


@dataclasses.dataclass(frozen=True)
class Settings:
    num_items: int = 20_000
    num_categories: int = 200
    history: int = 10
    dim: int = 32
    batch_size: int = 1024
    steps: int = 600
    k: int = 100
    queries: int = 2000
    lists: int = 128
    """Inverted lists of the index, of which ``probes`` are searched for a query."""
    probes: int = 24
    seed: int = 0


def popularity(settings: Settings) -> np.ndarray:
    """Of each rank within a category; item ``category + num_categories * rank`` has it."""
    weights = 1 / (10 + np.arange(settings.num_items // settings.num_categories))
    return weights / weights.sum()


def items_of(settings: Settings, rng: np.random.Generator, category: np.ndarray) -> np.ndarray:
    """A popular item of each category."""
    shares = popularity(settings)
    rank = rng.choice(len(shares), category.shape, p=shares)
    return (category + settings.num_categories * rank).astype(np.int32)


def draw(settings: Settings, rng: np.random.Generator, users: int) -> np.ndarray:
    """``[users, history + 1]`` items of two categories a user; the last is what comes next."""
    own = rng.integers(0, settings.num_categories, (2, users, 1))
    which = rng.integers(0, 2, (users, settings.history + 1))
    return items_of(settings, rng, np.where(which, *own))


def pack(settings: Settings, items: np.ndarray, history: np.ndarray | None = None):
    """Items (with their categories), and users' histories."""
    ids = {"item": items, "category": items % settings.num_categories}
    return jaxrec.KeyedJaggedArray.from_dense(
        ids | ({} if history is None else {"history": history})
    )


def make_model(settings: Settings) -> TwoTower:
    rngs, optimizer = nnx.Rngs(settings.seed), jaxrec.optim.adagrad(0.1)

    def tower(*tables: jaxrec.EmbeddingBagConfig) -> EmbeddingTower:
        embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs)
        sizes = (64, settings.dim)
        mlp = MLP(settings.dim * len(tables), sizes, activation_on_last=False, rngs=rngs)
        return EmbeddingTower(embeddings, mlp)

    def table(name: str, rows: int) -> jaxrec.EmbeddingBagConfig:
        config = jaxrec.EmbeddingBagConfig
        return config(name, rows, settings.dim, pooling="mean", initializer="normal")

    return TwoTower(
        tower(table("history", settings.num_items)),
        tower(table("item", settings.num_items), table("category", settings.num_categories)),
    )


def train_step(model, optimizer, features, hard, ids, log_q):
    def loss_fn(model):
        queries, items = model(features)
        negatives = model.candidate(hard)[:, None]
        return in_batch_softmax_loss(
            queries, items, ids=ids, log_q=log_q, hard_negatives=negatives, temperature=TEMPERATURE
        ).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def train(settings: Settings, rng: np.random.Generator) -> TwoTower:
    model = make_model(settings)
    step = compile_step(train_step, model, jaxrec.Optimizer(model, optax.adam(1e-3)))
    shares = popularity(settings) / settings.num_categories
    for count in range(1, settings.steps + 1):
        rows = draw(settings, rng, settings.batch_size)
        wanted = rows[:, -1]
        hard = pack(settings, items_of(settings, rng, wanted % settings.num_categories))
        log_q = np.log(shares[wanted // settings.num_categories]).astype(np.float32)
        users = pack(settings, wanted, rows[:, :-1])
        loss = step(users, hard, wanted, log_q)
        if count % 100 == 0:
            print(f"step {count}: loss {loss:.4f}", flush=True)
    return model


def main(settings: Settings) -> dict[str, float]:
    try:
        import faiss
    except ImportError:
        raise SystemExit("the index is faiss's: pip install 'jaxrec[examples]'") from None
    rng, k = np.random.default_rng(settings.seed), settings.k
    model = train(settings, rng)
    vectors = np.asarray(model.candidate(pack(settings, np.arange(settings.num_items))))
    rows = draw(settings, rng, settings.queries)
    queries = np.asarray(model.query(pack(settings, rows[:, -1], rows[:, :-1])))

    found, figures, kinds = {}, {}, {"exact": "Flat", "index": f"IVF{settings.lists},Flat"}
    for name, kind in kinds.items():
        index = faiss.index_factory(settings.dim, kind, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        if name == "index":
            index.nprobe = settings.probes
        begun = time.perf_counter()
        found[name] = index.search(queries, k)[1]
        seconds = time.perf_counter() - begun
        print(f"{name}: {1e6 * seconds / len(queries):.0f} us a query")
        is_in = (found[name] == rows[:, -1:]).any(axis=1)
        figures[f"next item in {name} top {k}"] = float(is_in.mean())
    shared = [len(np.intersect1d(*both)) for both in zip(*found.values(), strict=True)]
    figures[f"index recall@{k}"] = float(np.mean(shared)) / k
    print("\n".join(f"{name}: {value:.4f}" for name, value in figures.items()))
    return figures


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
