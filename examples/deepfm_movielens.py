"""DeepFM on MovieLens 100K: will somebody like this film?

Trains `jaxrec.nn.DeepFM` on who rated what (4 stars and more is a like), from the user, the film,
age, sex and occupation, the film's year and its genres, a bag of one to six. Ratings are split
80/10/10 at random; the test AUC is that of the epoch that is best on the validation part. Prints it
for three seeds and their median, about 0.79.

    python examples/deepfm_movielens.py --data ml-100k

The directory has GroupLens's files (https://grouplens.org/datasets/movielens/100k) or RecBole's.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time

import numpy as np
import optax
import pyarrow as pa
import pyarrow.compute as pc
import tyro
from flax import nnx

import jaxrec
from jaxrec.data import DataError, movielens_movies, movielens_ratings, movielens_users
from jaxrec.metrics import auc
from jaxrec.train import compile_step


@dataclasses.dataclass(frozen=True)
class Settings:
    data: pathlib.Path
    """Directory of the data set."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each of split, first values, order and dropout."""
    dim: int = 32
    hidden: tuple[int, ...] = (128, 64)
    dropout_rate: float = 0.5
    batch_size: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    """Of tables, decoupled."""
    epochs: int = 30
    patience: int = 3
    """Epochs without a better validation AUC, after which training ends."""


def number(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Numbers from 0 for distinct values; a missing one is a value too."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole.dictionary_encode(null_encoding="encode").indices


def read(path: pathlib.Path) -> tuple[pa.Table, np.ndarray]:
    """The ids of each field of each rating, of genres a list; and 1 for those that are a like."""
    ratings, films, users = movielens_ratings(path), movielens_movies(path), movielens_users(path)
    film = films.take(pc.index_in(ratings["movie_id"], films["movie_id"]))
    user = users.take(pc.index_in(ratings["user_id"], users["user_id"]))
    genres = film["genres"].combine_chunks()
    ids = {
        "user": number(user["user_id"]),
        "item": number(film["movie_id"]),
        "age": pc.divide(user["age"], 5),
        "gender": number(user["gender"]),
        "occupation": number(user["occupation"]),
        "year": number(film["year"]),
        "genres": pa.ListArray.from_arrays(genres.offsets, number(genres.flatten())),
    }
    return pa.table(ids), (ratings["rating"].to_numpy() >= 4).astype(np.float32)


def make_model(settings: Settings, sizes: dict[str, int], seed: int) -> jaxrec.nn.DeepFM:
    rngs = nnx.Rngs(seed)

    def tables(prefix: str, dim: int) -> jaxrec.EmbeddingBagCollection:
        configs = [
            jaxrec.EmbeddingBagConfig(
                f"{prefix}_{field}", size, dim, (field,), pooling="mean",
                initializer=nnx.initializers.normal(0.01),
            )
            for field, size in sizes.items()
        ]  # fmt: skip
        optimizer = jaxrec.optim.adam(settings.learning_rate, weight_decay=settings.weight_decay)
        return jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=rngs)

    return jaxrec.nn.DeepFM(
        tables("v", settings.dim), tables("w", 1), deep_layer_sizes=(*settings.hidden, 1),
        dropout_rate=settings.dropout_rate, rngs=rngs,
    )  # fmt: skip


def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(None, features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def train(settings: Settings, ids: pa.Table, likes: np.ndarray, seed: int) -> float:
    """The test AUC at the epoch that is best in validation."""
    rng, size = np.random.default_rng(seed), settings.batch_size
    parts = [len(likes) * 8 // 10, len(likes) * 9 // 10]
    training, validation, test = np.split(rng.permutation(len(likes)), parts)
    whole = jaxrec.KeyedJaggedArray.from_arrow(ids)
    model = make_model(settings, {f: int(whole[f].values.max()) + 1 for f in whole.keys}, seed)
    optimizer = jaxrec.Optimizer(model, optax.adam(settings.learning_rate))
    step = compile_step(train_step, model, optimizer)
    score = nnx.jit(lambda model, features: model(None, features))

    def pack(rows: np.ndarray) -> jaxrec.KeyedJaggedArray:
        room = {"genres": 6 * len(rows)}  # no film has more
        return jaxrec.KeyedJaggedArray.from_arrow(ids.take(rows), capacities=room)

    def evaluate(rows: np.ndarray) -> float:
        model.eval()
        value = auc(np.asarray(score(model, pack(rows))), likes[rows])
        model.train()
        return value

    best, most, waited = 0.0, 0.0, 0
    for epoch in range(1, settings.epochs + 1):
        training = rng.permutation(training)
        for start in range(0, len(training) - size + 1, size):
            rows = training[start : start + size]
            loss = step(pack(rows), likes[rows])
        found = evaluate(validation)
        print(f"  epoch {epoch}: loss {loss:.4f}, validation AUC {found:.4f}", flush=True)
        if found > most:
            best, most, waited = evaluate(test), found, 0
        elif (waited := waited + 1) == settings.patience:
            break
    return best


def main(settings: Settings) -> dict[int, float]:
    try:
        ids, likes = read(settings.data)
    except (OSError, DataError) as error:
        raise SystemExit(f"MovieLens cannot be read: {error}") from None
    found, begun = {}, time.perf_counter()
    for seed in settings.seeds:
        found[seed] = train(settings, ids, likes, seed)
        print(f"seed {seed}: test AUC {found[seed]:.4f}")
    median, seconds = np.median([*found.values()]), time.perf_counter() - begun
    print(f"median test AUC {median:.4f} in {seconds:.0f} s")
    return found


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
