"""Models that are published, what they hold, and publishers that are killed at random moments."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.fs as pafs
from flax import nnx

import jaxrec
from jaxrec.tier import (
    Cached,
    ChangeTracker,
    Dynamic,
    Subscriber,
    ahead,
    default_row,
    make,
    publish,
    shared,
)
from jaxrec.tier.deltas.folder import VersionFolder
from jaxrec.tier.planning.tier import tier_of
from tests.tier import models

# Of the models that are killed.
NUMBERED_ROWS, DIM, BATCH = 3000, 32, 400


OPEN = ("item", "query", "item_wide")
NAMES = np.random.default_rng(0).integers(-(2**63), 2**63, 90)
ROWS = 64  # for ids of up to three batches of 4 samples with up to 3 ids for each of two features


def open_model(kind, optimizer="adam", seed=None, rows=ROWS):
    settings_of = {
        "lost": Dynamic(),
        "stored": Dynamic(store="memory://", unknown=shared(3)),
        "default": Dynamic(admit_after=2, unknown=default_row()),
    }
    return make(
        lambda: models.Ranker(rows, optimizer), dict.fromkeys(OPEN, settings_of[kind]), seed=seed
    )


class Fixed(nnx.Module):
    """A table with few or all rows on the device, and a plain one."""

    def __init__(self, optimizer):
        config = jaxrec.EmbeddingBagConfig
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [config("user", 90, 4, initializer="normal"), config("age", 10, 4)],
            optimizer=models.OPTIMIZERS[optimizer],
            rngs=nnx.Rngs(0),
        )
        self.over = nnx.Linear(8, 1, rngs=nnx.Rngs(1))

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def fixed_model(kind, optimizer="adam", seed=None):
    if kind == "plain":
        return Fixed(optimizer)
    return make(lambda: Fixed(optimizer), {"user": Cached(rows=40)}, seed=seed)


@functools.cache
def trained_model(kind):
    """A model that tests train one after another, so that its step is compiled once."""
    return fixed_model(kind) if kind in ("plain", "cached") else open_model(kind)


def draw_open(rng):
    data = {
        key: [NAMES[rng.integers(0, 90, n)] for n in rng.integers(0, 3, 4)]
        for key in ("item", "query", "context")
    }
    data["age"] = [[int(age)] for age in rng.integers(0, 10, 4)]
    capacities = dict.fromkeys(data, 12)
    features = jaxrec.KeyedJaggedArray.from_lists(data, id_bits=64, capacities=capacities)
    return features, rng.integers(0, 2, 4).astype(np.float32)


def draw_fixed(rng):
    data = {
        "user": [rng.integers(0, 90, n).tolist() for n in rng.integers(0, 3, 4)],
        "age": [[int(age)] for age in rng.integers(0, 10, 4)],
    }
    features = jaxrec.KeyedJaggedArray.from_lists(data, capacities=dict.fromkeys(data, 8))
    return features, rng.integers(0, 2, 4).astype(np.float32)


def collections(model):
    """The collections of a model by path."""
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, jaxrec.EmbeddingBagCollection | jaxrec.EmbeddingCollection)
    }


def dense(model):
    """All variables but the tables, by path, on the host."""
    arrays = {}
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.Not(jaxrec.embed.TableVariable))):
        for inner, leaf in jax.tree.leaves_with_path(value.get_value()):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            arrays["/".join(map(str, (*path, *inner)))] = np.asarray(leaf)
    return arrays


def bits(array):
    array = np.ascontiguousarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def assert_same(copy, model, *, with_state=False, ids=NAMES):
    """All rows by id, the ids that have a row, and all other variables."""
    tier = tier_of(model)
    of_tier = () if tier is None else [(v, t) for v in tier.vocabularies for t in v.tables]
    is_open = {(t.collection, t.config.name) for v, t in of_tier if v.num_ids is None}
    for path, collection in collections(model).items():
        other = collections(copy)[path]
        for config in collection.configs:
            wanted = ids if (path, config.name) in is_open else np.arange(config.num_embeddings)
            rows = [each.rows(config.name, wanted) for each in (collection, other)]
            np.testing.assert_array_equal(*map(bits, rows), err_msg=config.name)
            if with_state:
                has_row = wanted
                if (path, config.name) in is_open:
                    has_row = np.array(sorted(ids_now(model, config.name)), np.int64)
                states = [each.row_state(config.name, has_row) for each in (collection, other)]
                for name, state in states[0].items():
                    np.testing.assert_array_equal(bits(state), bits(states[1][name]))
    for name in {config_name for _, config_name in is_open}:
        assert ids_now(copy, name) == ids_now(model, name)
    for name, variable in dense(model).items():
        np.testing.assert_array_equal(bits(variable), bits(dense(copy)[name]), err_msg=name)


def ids_now(model, name):
    """The ids that have a row, in the table or in its store."""
    (each,) = [v for v in tier_of(model).vocabularies if name in v.name.split("+")]
    ids = set(each.vocabulary.map.items()[0].tolist())
    if each.transfer is not None:
        for stored, _ in each.transfer.store.scan():
            ids |= set(stored.tolist())
    return ids


def steps(model, optimizer, tracker, batches):
    loop = ahead(model, batches, look_ahead=1) if tier_of(model) else tracker.watch(batches)
    for x, y in loop:
        models.train_step(model, optimizer, x, jnp.asarray(y))


def contents(model):
    """All arrays of a model, tables as they lie on the devices."""
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model)) if hasattr(x, "dtype")]


def assert_contents(model, before):
    for array, other in zip(contents(model), before, strict=True):
        np.testing.assert_array_equal(array, other)


def copy_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    shutil.copytree(source, target)


class NoMoves(pafs.LocalFileSystem):
    """A disk that is full when a file is renamed."""

    def move(self, source, target):
        raise OSError(28, "the disk is full")


class Numbered(nnx.Module):
    """A model that says which version it is, in each row that a version sets."""

    def __init__(self):
        config = jaxrec.EmbeddingConfig("item", NUMBERED_ROWS, DIM, initializer="zeros")
        self.items = jaxrec.EmbeddingCollection([config], rngs=nnx.Rngs(0))
        self.number = nnx.Param(jax.numpy.zeros(1000))

    def set_version(self, version, ids=None):
        ids = np.arange(NUMBERED_ROWS) if ids is None else ids
        self.items.load_rows("item", ids, np.repeat(state_of(version)[ids, None], DIM, 1))
        self.number.set_value(jax.numpy.full(1000, float(version)))

    def assert_version(self, version):
        expected = np.repeat(state_of(version)[:, None], DIM, 1)
        np.testing.assert_array_equal(np.asarray(self.items.table("item")), expected)
        np.testing.assert_array_equal(np.asarray(self.number[...]), version)


def batch_of(version: int) -> np.ndarray:
    """Return the ids of rows that a version sets."""
    return np.sort(np.random.default_rng(version).permutation(NUMBERED_ROWS)[:BATCH])


def state_of(version: int) -> np.ndarray:
    """Return the number in each row, ``[NUMBERED_ROWS]``."""
    state = np.zeros(NUMBERED_ROWS, np.float32)
    for each in range(1, version + 1):
        state[batch_of(each)] = each
    return state


# Imports once, then makes a publisher for each line of its input.
_SERVER = """
import os, sys
sys.path.append(sys.argv[1])
from tests.tier.deltas import models as deltas
for line in sys.stdin:
    child = os.fork()
    if not child:
        deltas.publish_forever(line.strip())
    os.waitpid(child, 0)
    deltas.say("dead")
"""


def say(*words: object) -> None:
    """Write a line in one piece, whenever this process is killed."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def publish_forever(directory: str) -> None:
    """Publish versions after those that are there, until killed."""
    jax.config.update("jax_platforms", "cpu")
    model = Numbered()
    version = max((name.version for name in VersionFolder(directory).names()), default=0)
    model.set_version(version)
    tracker = ChangeTracker(model, ["publisher"])
    say("begun", os.getpid())
    while True:
        version += 1
        model.set_version(version, batch_of(version))
        tracker.mark("item", batch_of(version))
        assert publish(model, directory, tracker=tracker, full_every=4).version == version
        say("published", version)


def kill_repeatedly(directory: pathlib.Path, kills: int, seed: int = 0) -> int:
    """Kill publishers of a folder, compare copies with versions; return the last version's number.

    Raises:
        AssertionError: A copy is no version.
    """
    rng, copy = np.random.default_rng(seed), Numbered()
    subscriber = Subscriber(copy, directory)
    root = pathlib.Path(__file__).parents[3]
    command = [sys.executable, "-P", "-W", "ignore", "-c", _SERVER, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        for number in range(kills):
            print(directory, file=server.stdin, flush=True)
            line = server.stdout.readline().split()
            assert line[:1] == ["begun"], line
            if number % 3:  # others are killed in their first version, or before
                assert server.stdout.readline().split()[:1] == ["published"]
            before = subscriber.version
            deadline = time.monotonic() + rng.uniform(0.02, 0.4)
            while time.monotonic() < deadline:  # also while versions are written and removed
                subscriber.update()
                copy.assert_version(subscriber.version)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line[1]), signal.SIGKILL)
            while (words := server.stdout.readline().split()) != ["dead"]:
                assert words[0] == "published"
            names = VersionFolder(directory).names()
            subscriber.update()
            assert subscriber.version == (names[-1].version if names else 0) >= before
            copy.assert_version(subscriber.version)
            fresh = Numbered()
            if names:
                Subscriber(fresh, directory).update()
                fresh.assert_version(names[-1].version)
        server.stdin.close()
    return subscriber.version


def publish_and_train(model, directory, draw, rounds=4, number=3, **options):
    """Train and publish; yield after each version, with what was published."""
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker = ChangeTracker(model, ["publisher"])
    rng = np.random.default_rng(1)
    yield publish(model, directory, tracker=tracker, **options)
    for _ in range(rounds):
        steps(model, optimizer, tracker, [draw(rng) for _ in range(number)])
        yield publish(model, directory, tracker=tracker, **options)
