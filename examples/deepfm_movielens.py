"""DeepFM on MovieLens 100K: will somebody like this film?

Trains `jaxrec.nn.DeepFM` on who rated what (4 stars and more is a like), from the user, the film,
age, sex and occupation, the film's year and its genres, a bag of one to six. Ratings are split
80/10/10 at random; the test AUC is that of the epoch that is best on the validation part. Prints it
for three seeds and their median, about 0.79.

    python examples/deepfm_movielens.py --data ml-100k     # ml-100k.inter, .item and .user

The files are those of RecBole's layout (tab-separated, typed headers): https://recbole.io/dataset_list
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import time

import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.metrics import auc
from jaxrec.train import compile_step

FIELDS = ("user", "item", "age", "gender", "occupation", "year", "genres")


@dataclasses.dataclass(frozen=True)
class Settings:
    data: pathlib.Path
    """Path of the three files without their endings."""
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


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Ratings as columns: a matrix of ids a field, negative where a bag is shorter than others."""

    ids: dict[str, np.ndarray]
    likes: np.ndarray
    sizes: dict[str, int]

    def batch(self, rows: np.ndarray) -> tuple[jaxrec.KeyedJaggedArray, np.ndarray]:
        columns = [self.ids[field][rows] for field in FIELDS]
        features = jaxrec.KeyedJaggedArray.from_lengths(
            list(FIELDS),
            np.concatenate([column[column >= 0] for column in columns]),
            np.concatenate([(column >= 0).sum(axis=1) for column in columns]),
            capacities={f: len(rows) * c.shape[1] for f, c in zip(FIELDS, columns, strict=True)},
        )
        return features, self.likes[rows]


def read_table(path: pathlib.Path) -> dict[str, list[str]]:
    """The columns of a file, by their names without types."""
    with open(path, encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    columns = zip(*rows, strict=True)
    return {name.split(":")[0]: list(c) for name, c in zip(names, columns, strict=True)}


def numbered(values: list[str]) -> np.ndarray:
    """``[n, 1]`` numbers from 0 for distinct values."""
    return np.unique(values, return_inverse=True)[1].astype(np.int32)[:, None]


def read(path: pathlib.Path) -> Ratings:
    ratings, films, users = (
        read_table(path.with_suffix(f".{e}")) for e in ("inter", "item", "user")
    )
    genres = sorted({genre for film in films["class"] for genre in film.split()})
    bags = np.full((len(films["class"]), 6), -1, np.int32)
    for film, names in enumerate(films["class"]):
        found = [genres.index(genre) for genre in names.split()][:6]
        bags[film, : len(found)] = found
    place_of_user = {user: place for place, user in enumerate(users["user_id"])}
    place_of_film = {film: place for place, film in enumerate(films["item_id"])}
    user = np.array([place_of_user[user] for user in ratings["user_id"]], np.int32)
    film = np.array([place_of_film[film] for film in ratings["item_id"]], np.int32)
    ids = {
        "user": user[:, None],
        "item": film[:, None],
        "age": np.array(users["age"], np.int32)[user, None] // 5,
        "gender": numbered(users["gender"])[user],
        "occupation": numbered(users["occupation"])[user],
        "year": numbered(films["release_year"])[film],
        "genres": bags[film],
    }
    likes = (np.array(ratings["rating"], np.float32) >= 4).astype(np.float32)
    return Ratings(ids, likes, {field: int(ids[field].max()) + 1 for field in FIELDS})


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
        tables("v", settings.dim),
        tables("w", 1),
        hidden_layer_sizes=settings.hidden,
        dropout_rate=settings.dropout_rate,
        rngs=rngs,
    )


def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def train(settings: Settings, ratings: Ratings, seed: int) -> float:
    """The test AUC at the epoch that is best in validation."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(ratings.likes))
    training, validation, test = np.split(order, [len(order) * 8 // 10, len(order) * 9 // 10])
    model = make_model(settings, ratings.sizes, seed)
    optimizer = jaxrec.Optimizer(model, optax.adam(settings.learning_rate))
    step, score = compile_step(train_step, model, optimizer), nnx.jit(lambda model, x: model(x))

    def evaluate(rows: np.ndarray) -> float:
        model.eval()
        features, labels = ratings.batch(rows)
        value = auc(np.asarray(score(model, features)), labels)
        model.train()
        return value

    best, most, waited = 0.0, 0.0, 0
    for epoch in range(1, settings.epochs + 1):
        training = rng.permutation(training)
        for start in range(0, len(training) - settings.batch_size + 1, settings.batch_size):
            loss = step(*ratings.batch(training[start : start + settings.batch_size]))
        found = evaluate(validation)
        print(f"  epoch {epoch}: loss {loss:.4f}, validation AUC {found:.4f}", flush=True)
        if found > most:
            best, most, waited = evaluate(test), found, 0
        elif (waited := waited + 1) == settings.patience:
            break
    return best


def main(settings: Settings) -> dict[int, float]:
    ratings, found, begun = read(settings.data), {}, time.perf_counter()
    for seed in settings.seeds:
        found[seed] = train(settings, ratings, seed)
        print(f"seed {seed}: test AUC {found[seed]:.4f}")
    seconds = time.perf_counter() - begun
    print(f"median test AUC {np.median(list(found.values())):.4f} in {seconds:.0f} s")
    return found


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
