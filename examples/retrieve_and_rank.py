"""Retrieve and rank: two towers and an index find candidates, and a ranker orders them.

A user's next item is of one of two categories and near the user's price level. Two towers are
trained to find such items, and a DLRM with the prices among its inputs to order them. Both are
exported. The item tower's artifact and the table of items make an index (faiss), and from then on
no training code is used: the user tower's artifact makes the vector of a request, the index returns
100 of 20,000 items, and the ranker's artifact scores them. The example prints how many of the exact
top 100 the index finds, how often the next item is among the first 10 before and after ranking,
and the latency of both stages for requests of one user. Expect recall of the index above 0.9, and
more next items among the first 10 after ranking. Needs faiss-cpu: pip install 'jaxrec[retrieval]'

    python examples/retrieve_and_rank.py
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time

import numpy as np
import optax
import pyarrow as pa
import tyro
from flax import nnx

import jaxrec
from jaxrec.nn import DLRM, MLP, EmbeddingTower, TwoTower, in_batch_softmax_loss
from jaxrec.serve import Neighbours
from jaxrec.train import compile_step

TEMPERATURE = 0.1  # of the towers' softmax
OPTIONS = 4  # popular items, of which a user takes the one of the nearest price
NEGATIVES = 3  # items for each next item that the ranker is trained on


@dataclasses.dataclass(frozen=True)
class Settings:
    num_items: int = 20_000
    num_categories: int = 200
    history: int = 10
    dim: int = 32
    batch_size: int = 1024
    tower_steps: int = 600
    ranker_steps: int = 600
    k: int = 100
    """Items that the index returns for a request."""
    queries: int = 1000
    kind: str = "IVF128,Flat"
    """Kind of the index, of which ``parameters`` are those of a search."""
    parameters: str = "nprobe=24"
    directory: pathlib.Path | None = None
    """Where the models and the index are kept; a temporary directory by default."""
    seed: int = 0


class Log:
    """Users who take popular items of two categories, near a price level of their own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rng = np.random.default_rng(settings.seed)
        self.price = self.rng.random(settings.num_items, np.float32)
        weights = 1 / (10 + np.arange(settings.num_items // settings.num_categories))
        self.popularity = weights / weights.sum()  # of item `category + num_categories * rank`

    @property
    def items(self) -> pa.Table:
        """All items: the ids that the tower reads, and the price, which the ranker reads too."""
        ids = np.arange(self.settings.num_items, dtype=np.int32)
        category = ids % self.settings.num_categories
        return pa.table({"item": ids, "category": category, "price": self.price})

    def popular(self, category: np.ndarray) -> np.ndarray:
        """Draw an item of each category by its popularity."""
        rank = self.rng.choice(len(self.popularity), category.shape, p=self.popularity)
        return (category + self.settings.num_categories * rank).astype(np.int32)

    def any_of(self, category: np.ndarray) -> np.ndarray:
        """Draw an item of each category, each item alike."""
        rank = self.rng.integers(0, len(self.popularity), category.shape)
        return (category + self.settings.num_categories * rank).astype(np.int32)

    def draw(self, users: int) -> np.ndarray:
        """Return ``[users, history + 1]`` items; the last is the next one."""
        settings = self.settings
        tastes = self.rng.integers(0, settings.num_categories, (2, users, 1))
        which = self.rng.integers(0, 2, (users, settings.history + 1))
        category = np.where(which, *tastes)[..., None].repeat(OPTIONS, axis=2)
        options, level = self.popular(category), self.rng.random((users, 1, 1))
        nearest = np.abs(self.price[options] - level).argmin(axis=2)
        return np.take_along_axis(options, nearest[..., None], axis=2)[..., 0]


def table(name: str, rows: int, dim: int) -> jaxrec.EmbeddingBagConfig:
    return jaxrec.EmbeddingBagConfig(name, rows, dim, pooling="mean", initializer="normal")


def train_towers(settings: Settings, log: Log) -> TwoTower:
    rngs, optimizer = nnx.Rngs(settings.seed), jaxrec.optim.adagrad(0.1)

    def tower(**rows: int) -> EmbeddingTower:
        tables = [table(name, count, settings.dim) for name, count in rows.items()]
        embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs)
        sizes = (64, settings.dim)
        mlp = MLP(settings.dim * len(tables), sizes, activation_on_last=False, rngs=rngs)
        return EmbeddingTower(embeddings, mlp)

    model = TwoTower(
        tower(history=settings.num_items),
        tower(item=settings.num_items, category=settings.num_categories),
    )

    def train_step(model, optimizer, features, ids, log_q):
        def loss_fn(model):
            queries, items = model(features)
            return in_batch_softmax_loss(
                queries, items, ids=ids, log_q=log_q, temperature=TEMPERATURE
            ).mean()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    step = compile_step(train_step, model, jaxrec.Optimizer(model, optax.adam(1e-3)))
    shares = log.popularity / settings.num_categories
    for count in range(1, settings.tower_steps + 1):
        rows = log.draw(settings.batch_size)
        following = rows[:, -1]
        log_q = np.log(shares[following // settings.num_categories]).astype(np.float32)
        loss = step(item_features(settings, following, rows[:, :-1]), following, log_q)
        if count % 200 == 0:
            print(f"towers, step {count}: loss {loss:.4f}", flush=True)
    return model


def item_features(
    settings: Settings, items: np.ndarray, history: np.ndarray
) -> jaxrec.KeyedJaggedArray:
    category = items % settings.num_categories
    ids = {"item": items, "category": category, "history": history}
    return jaxrec.KeyedJaggedArray.from_dense(ids)


def prices(price: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return ``[samples, 3]``: an item's price, the mean of the user's items, the distance."""
    return np.stack([price, mean, np.abs(price - mean)], axis=1).astype(np.float32)


def train_ranker(settings: Settings, log: Log) -> DLRM:
    rngs = nnx.Rngs(settings.seed + 1)
    rows = {"item": settings.num_items, "category": settings.num_categories}
    tables = [table(*each, 16) for each in (rows | {"history": settings.num_items}).items()]
    model = DLRM(
        jaxrec.EmbeddingBagCollection(tables, optimizer=jaxrec.optim.adagrad(0.1), rngs=rngs),
        num_dense=3,
        bottom_layer_sizes=(32, 16),
        top_layer_sizes=(32, 1),
        rngs=rngs,
    )

    def train_step(model, optimizer, dense, features, labels):
        def loss_fn(model):
            logits = model(dense, features)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    step = compile_step(train_step, model, jaxrec.Optimizer(model, optax.adam(1e-3)))
    samples = 1 + NEGATIVES
    labels = np.tile(np.float32([1] + [0] * NEGATIVES), settings.batch_size)
    for count in range(1, settings.ranker_steps + 1):
        rows = log.draw(settings.batch_size)
        history = rows[:, :-1]
        # All items of a category are drawn alike: drawn by popularity, they would teach the ranker
        # that popular items are as likely as others.
        other = log.any_of(history[:, :NEGATIVES] % settings.num_categories)
        shown = np.concatenate([rows[:, -1:], other], axis=1).reshape(-1)
        mean = log.price[history].mean(axis=1).repeat(samples)
        features = item_features(settings, shown, history.repeat(samples, axis=0))
        loss = step(prices(log.price[shown], mean), features, labels)
        if count % 200 == 0:
            print(f"ranker, step {count}: loss {loss:.4f}", flush=True)
    return model


def export_all(
    settings: Settings, log: Log, towers: TwoTower, ranker: DLRM, directory: pathlib.Path
) -> None:
    rows = log.draw(64)
    example = item_features(settings, rows[:, -1], rows[:, :-1])
    jaxrec.serve.export(
        towers,
        directory / "users",
        function=TwoTower.query,
        example=example.select(["history"]),
        batch_sizes=(1, 64),
    )
    jaxrec.serve.export(
        towers,
        directory / "items",
        function=TwoTower.candidate,
        example=example.select(["item", "category"]),
        batch_sizes=(1024,),
    )
    jaxrec.serve.export(
        ranker,
        directory / "ranker",
        example=(np.zeros((64, 3), np.float32), example),
        batch_sizes=(settings.k, 64 * settings.k),
    )
    jaxrec.serve.write_index(
        directory / "items", log.items, kind=settings.kind, parameters=settings.parameters
    )


class Recommender:
    """Both stages, from the files of a directory alone."""

    def __init__(self, directory: pathlib.Path, k: int) -> None:
        self.k = k
        self.users = jaxrec.serve.load(directory / "users")
        self.ranker = jaxrec.serve.load(directory / "ranker")
        self.index = jaxrec.serve.load_index(directory / "items.index", model=directory / "items")
        columns = ("item", "category", "price")
        self.item, self.category, self.price = (
            self.index.items[name].to_numpy() for name in columns
        )

    def vectors(self, history: np.ndarray) -> np.ndarray:
        return self.users.predict(jaxrec.KeyedJaggedArray.from_dense({"history": history}))

    def retrieve(self, history: np.ndarray) -> Neighbours:
        """Return ``k`` items of the index for each user."""
        return self.index.search(self.vectors(history), self.k)

    def rank(self, history: np.ndarray, candidates: Neighbours) -> np.ndarray:
        """Return the rows of the candidates, ``[users, k]``, the best of the ranker first."""
        rows = candidates.rows.reshape(-1)  # -1 where the index found fewer
        mean = self.price[history].mean(axis=1).repeat(self.k)
        ids = {"item": self.item[rows], "category": self.category[rows]}
        ids["history"] = history.repeat(self.k, axis=0)
        features = jaxrec.KeyedJaggedArray.from_dense(ids)
        scores = self.ranker.predict(prices(self.price[rows], mean), features)
        scores = np.where(rows < 0, -np.inf, scores).reshape(-1, self.k)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(candidates.rows, order, axis=1)


def share_in(rows: np.ndarray, following: np.ndarray) -> float:
    """Share of users whose next item is among some rows; an item's row is its id here."""
    return float((rows == following[:, None]).any(axis=1).mean())


def latencies(settings: Settings, recommender: Recommender, history: np.ndarray) -> None:
    """Print the time of both stages for one user after the other."""
    times: dict[str, list[float]] = {"retrieve": [], "rank": []}
    for number in range(len(history)):
        one = history[number : number + 1]
        begun = time.perf_counter()
        candidates = recommender.retrieve(one)
        between = time.perf_counter()
        recommender.rank(one, candidates)
        times["retrieve"].append(between - begun)
        times["rank"].append(time.perf_counter() - between)
    for stage, seconds in times.items():
        p50, p99 = 1e6 * np.percentile(seconds[min(20, len(seconds) // 2) :], (50, 99))
        print(f"{stage} {settings.k} of one user: p50 {p50:.0f} us, p99 {p99:.0f} us")


def main(settings: Settings) -> dict[str, float]:
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise SystemExit("the index is faiss's: pip install 'jaxrec[retrieval]'") from None
    with tempfile.TemporaryDirectory() as temporary:
        directory = settings.directory or pathlib.Path(temporary)
        log = Log(settings)
        towers, ranker = train_towers(settings, log), train_ranker(settings, log)
        export_all(settings, log, towers, ranker, directory)
        recommender = Recommender(directory, settings.k)
        # The same vectors in an index that compares each of them.
        jaxrec.serve.write_index(directory / "items", log.items, directory / "exact.index")
        exact = jaxrec.serve.load_index(directory / "exact.index")

        rows = log.draw(settings.queries)
        history, following = rows[:, :-1], rows[:, -1]
        candidates = recommender.retrieve(history)
        ranked = recommender.rank(history, candidates)
        true = exact.search(recommender.vectors(history), settings.k).rows
        shared = [len(np.intersect1d(*both)) for both in zip(candidates.rows, true, strict=True)]
        figures = {
            f"index recall@{settings.k}": float(np.mean(shared)) / settings.k,
            f"next item in top {settings.k}": share_in(candidates.rows, following),
            "next item in first 10, by the towers": share_in(candidates.rows[:, :10], following),
            "next item in first 10, by the ranker": share_in(ranked[:, :10], following),
        }
        print("\n".join(f"{name}: {value:.4f}" for name, value in figures.items()))
        latencies(settings, recommender, history[:500])
    return figures


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
