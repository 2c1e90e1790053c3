"""Models that are published, what they hold, and publishers that are killed at random moments."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pyarrow.fs as pafs
from flax import nnx

import jaxrec
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import ChangeTracker, Dynamic, Subscriber, make, publish
from jaxrec.tier.deltas.folder import VersionFolder

ROWS, DIM, BATCH = 3000, 32, 400


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
        value = value.get_value()
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        arrays["/".join(map(str, path))] = np.asarray(value)
    return arrays


def contents(model):
    """All arrays of a model, tables as they lie on the devices."""
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model)) if hasattr(x, "dtype")]


def assert_contents(model, before):
    for array, other in zip(contents(model), before, strict=True):
        np.testing.assert_array_equal(array, other)


def sharded(devices, ranker, names, rows):
    """A model with open vocabularies on some devices."""

    def made():
        return make(lambda: ranker(rows, "adam"), dict.fromkeys(names, Dynamic()))

    if devices == 1:
        return made()
    mesh = jax.make_mesh((devices,), ("data",))
    placements = dict.fromkeys((*names, "age"), jaxrec.mesh.row_wise())
    placements["query"] = jaxrec.mesh.column_wise([0, 1])
    return jaxrec.shard(made, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)


def twice(draw, rng):
    """A batch of two others, as eight devices need it."""
    (first, labels), (second, other_labels) = draw(rng), draw(rng)
    data = {key: first[key].to_lists() + second[key].to_lists() for key in first.keys}
    capacities = {key: 2 * size for key, size in zip(first.keys, first.capacities, strict=True)}
    bits = 64 if first["age"].values.dtype == np.int64 else 32
    features = KeyedJaggedArray.from_lists(data, id_bits=bits, capacities=capacities)
    return features, np.concatenate([labels, other_labels])


def copy_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    shutil.copytree(source, target)


class NoMoves(pafs.LocalFileSystem):
    """A disk that is full when a file is renamed."""

    def move(self, source, target):
        raise OSError(28, "the disk is full")


class Numbered(nnx.Module):
    """A model that says which version it is, in each row that a version sets."""

    def __init__(self):
        config = jaxrec.EmbeddingConfig("item", ROWS, DIM, initializer="zeros")
        self.items = jaxrec.EmbeddingCollection([config], rngs=nnx.Rngs(0))
        self.number = nnx.Param(jax.numpy.zeros(1000))

    def set_version(self, version, ids=None):
        ids = np.arange(ROWS) if ids is None else ids
        self.items.load_rows("item", ids, np.repeat(state_of(version)[ids, None], DIM, 1))
        self.number.set_value(jax.numpy.full(1000, float(version)))

    def assert_version(self, version):
        expected = np.repeat(state_of(version)[:, None], DIM, 1)
        np.testing.assert_array_equal(np.asarray(self.items.table("item")), expected)
        np.testing.assert_array_equal(np.asarray(self.number[...]), version)


def batch_of(version: int) -> np.ndarray:
    """Return the ids of rows that a version sets."""
    return np.sort(np.random.default_rng(version).permutation(ROWS)[:BATCH])


def state_of(version: int) -> np.ndarray:
    """Return the number in each row, ``[ROWS]``."""
    state = np.zeros(ROWS, np.float32)
    for each in range(1, version + 1):
        state[batch_of(each)] = each
    return state


# Imports once, then makes a publisher for each line of its input.
_SERVER = """
import os, sys
sys.path.append(sys.argv[1])
from tests.tier import deltas
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
    say("ready", os.getpid())
    while True:
        version += 1
        model.set_version(version, batch_of(version))
        tracker.mark("item", batch_of(version))
        assert publish(model, directory, tracker=tracker, full_every=4).version == version


@dataclasses.dataclass
class Kills:
    """What happened to a folder.

    Attributes:
        versions: Number of versions that copies took over.
        unfinished: Number of versions that were being written.
        newest: Number of the last version.
    """

    versions: int = 0
    unfinished: int = 0
    newest: int = 0


def kill_repeatedly(directory: pathlib.Path, kills: int, seed: int = 0) -> Kills:
    """Kill publishers of a folder, and compare copies with the versions that they are.

    Raises:
        AssertionError: A copy is no version.
    """
    rng, result = np.random.default_rng(seed), Kills()
    copy = Numbered()
    subscriber = Subscriber(copy, directory)
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-P", "-W", "ignore", "-c", _SERVER, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        for _ in range(kills):
            print(directory, file=server.stdin, flush=True)
            line = server.stdout.readline().split()
            assert line[:1] == ["ready"], line
            before = subscriber.version
            deadline = time.monotonic() + rng.uniform(0.02, 0.3)
            while time.monotonic() < deadline:  # also while versions are written and removed
                result.versions += subscriber.update()
                copy.assert_version(subscriber.version)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line[1]), signal.SIGKILL)
            assert server.stdout.readline().split() == ["dead"]
            names = VersionFolder(directory).names()
            folders = {path.name for path in directory.iterdir() if path.is_dir()}
            result.unfinished += len(folders - {str(name) for name in names})
            result.versions += subscriber.update()
            assert subscriber.version == (names[-1].version if names else 0) >= before
            copy.assert_version(subscriber.version)
            fresh = Numbered()
            if names:
                Subscriber(fresh, directory).update()
                fresh.assert_version(names[-1].version)
            result.newest = subscriber.version
        server.stdin.close()
    return result
