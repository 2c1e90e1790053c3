"""Two-tower retrieval: train, export item vectors, search them through an approximate index.

A user tower (the items that the user had) and an item tower (the item and its category) are trained
so that their dot product finds what comes next, by an in-batch softmax with the logQ correction and
one hard negative each, an item of the same category. Then the vectors of all items go into an index
of nearest neighbours (faiss: inverted lists, of which a few are searched), and the example prints
how much of the exact top k the index finds, how often the item that came next is in it, and how
long a query takes both ways. Expect recall of the index above 0.9, and next items in the top 100 of
20,000 far more often than the 0.005 of chance.

    pip install 'jaxrec[examples]'                # faiss-cpu
    python examples/two_tower_retrieval.py
"""

from __future__ import annotations

import dataclasses
import time

import faiss
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.nn import MLP, EmbeddingTower, TwoTower, in_batch_softmax_loss
from jaxrec.train import compile_step

ITEM = ("item", "category")


@dataclasses.dataclass(frozen=True)
class Settings:
    num_items: int = 20_000
    num_categories: int = 200
    history: int = 10
    """Items of each user."""
    dim: int = 32
    batch_size: int = 1024
    steps: int = 600
    temperature: float = 0.1
    k: int = 100
    queries: int = 2000
    lists: int = 128
    """Inverted lists of the index, of which ``probes`` are searched for a query."""
    probes: int = 24
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class World:
    """Items of categories, unequally popular; a user has items of two categories."""

    category: np.ndarray
    popularity: np.ndarray
    members: list[np.ndarray]

    @classmethod
    def make(cls, settings: Settings) -> World:
        rng = np.random.default_rng(settings.seed)
        category = rng.integers(0, settings.num_categories, settings.num_items).astype(np.int32)
        popularity = 1 / (10 + rng.permutation(settings.num_items))
        members = [np.flatnonzero(category == c) for c in range(settings.num_categories)]
        return cls(category, popularity / popularity.sum(), members)

    def draw(self, rng: np.random.Generator, users: int, history: int) -> np.ndarray:
        """``[users, history + 1]`` items, the last of them what comes next."""
        found = np.empty((users, history + 1), np.int32)
        filled = [c for c, items in enumerate(self.members) if len(items)]
        for user in range(users):
            own = np.concatenate([self.members[c] for c in rng.choice(filled, 2)])
            share = self.popularity[own] / self.popularity[own].sum()
            found[user] = rng.choice(own, history + 1, p=share)
        return found

    def alike(self, rng: np.random.Generator, items: np.ndarray) -> np.ndarray:
        """For each item one of its category."""
        return np.array([rng.choice(self.members[self.category[i]]) for i in items], np.int32)


def make_model(settings: Settings) -> TwoTower:
    rngs, optimizer = nnx.Rngs(settings.seed), jaxrec.optim.adagrad(0.1)

    def tower(*tables: jaxrec.EmbeddingBagConfig) -> EmbeddingTower:
        embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs)
        sizes = (64, settings.dim)
        mlp = MLP(settings.dim * len(tables), sizes, activation_on_last=False, rngs=rngs)
        return EmbeddingTower(embeddings, mlp)

    def table(name: str, rows: int, pooling: str = "sum") -> jaxrec.EmbeddingBagConfig:
        return jaxrec.EmbeddingBagConfig(
            name, rows, settings.dim, pooling=pooling, initializer="normal"
        )

    return TwoTower(
        tower(table("history", settings.num_items, "mean")),
        tower(table("item", settings.num_items), table("category", settings.num_categories)),
    )


def pack(world: World, items: np.ndarray, history: np.ndarray | None = None):
    """Items (with their categories), and users' histories."""
    bags = {"item": items[:, None], "category": world.category[items][:, None]}
    if history is not None:
        bags["history"] = history
    return jaxrec.KeyedJaggedArray.from_lists({key: ids.tolist() for key, ids in bags.items()})


def make_step(settings: Settings):
    def train_step(model, optimizer, features, hard, ids, log_q):
        def loss_fn(model):
            queries, items = model(features)
            return in_batch_softmax_loss(
                queries,
                items,
                ids=ids,
                log_q=log_q,
                hard_negatives=model.candidate(hard)[:, None],
                temperature=settings.temperature,
            ).mean()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    return train_step


def export_items(model: TwoTower, world: World, batch_size: int) -> np.ndarray:
    """``[num_items, dim]`` vectors of all items."""
    encode, count = nnx.jit(lambda model, x: model.candidate(x)), len(world.category)
    parts = []
    for start in range(0, count, batch_size):
        items = np.arange(start, start + batch_size) % count  # the last batch is filled up
        parts.append(np.asarray(encode(model, pack(world, items))))
    return np.concatenate(parts)[:count]


def search(index: faiss.Index, queries: np.ndarray, k: int) -> tuple[np.ndarray, float]:
    """``[queries, k]`` items, and microseconds a query."""
    start = time.perf_counter()
    found = index.search(queries, k)[1]
    return found, 1e6 * (time.perf_counter() - start) / len(queries)


def main(settings: Settings) -> dict[str, float]:
    world, rng = World.make(settings), np.random.default_rng(settings.seed + 1)
    model = make_model(settings)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-3))
    step = compile_step(make_step(settings), model, optimizer)
    for count in range(1, settings.steps + 1):
        rows = world.draw(rng, settings.batch_size, settings.history)
        following = rows[:, -1]
        log_q = np.log(world.popularity[following]).astype(np.float32)
        hard = pack(world, world.alike(rng, following))
        loss = step(pack(world, following, rows[:, :-1]), hard, following, log_q)
        if count % 100 == 0:
            print(f"step {count}: loss {loss:.4f}", flush=True)

    vectors = export_items(model, world, settings.batch_size)
    exact = faiss.IndexFlatIP(settings.dim)
    exact.add(vectors)
    approximate = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(settings.dim), settings.dim, settings.lists, faiss.METRIC_INNER_PRODUCT
    )
    approximate.train(vectors)
    approximate.add(vectors)
    approximate.nprobe = settings.probes

    rows = world.draw(rng, settings.queries, settings.history)
    queries = np.asarray(model.query(pack(world, rows[:, -1], rows[:, :-1])))
    truth, slow = search(exact, queries, settings.k)
    found, fast = search(approximate, queries, settings.k)
    shared = [len(np.intersect1d(a, b)) for a, b in zip(truth, found, strict=True)]
    figures = {
        f"index recall@{settings.k}": float(np.mean(shared)) / settings.k,
        f"next item in exact top {settings.k}": float((truth == rows[:, -1:]).any(1).mean()),
        f"next item in index top {settings.k}": float((found == rows[:, -1:]).any(1).mean()),
    }
    for name, value in figures.items():
        print(f"{name}: {value:.4f}")
    print(f"{slow:.0f} us a query by exact search, {fast:.0f} us by the index")
    return figures


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
