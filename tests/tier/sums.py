"""A model whose training is easy to follow by hand: sums of rows that begin as ones."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Dynamic, make
from tests.tier.vocabulary_oracle import POLICIES, Oracle

DIM, RATE, SAMPLES, BAG = 4, 0.125, 8, 3
CAPACITY = SAMPLES * BAG


class Sums(nnx.Module):
    """One table; the outputs are sums of its rows."""

    def __init__(self, rows: int):
        config = jaxrec.EmbeddingBagConfig("item", rows, DIM, initializer="ones")
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [config], optimizer=jaxrec.optim.sgd(RATE), rngs=nnx.Rngs(0)
        )

    def __call__(self, features):
        return self.embeddings(features).values


def make_sums(rows: int, settings: Dynamic, mesh: jax.sharding.Mesh | None = None) -> Sums:
    def made():
        return make(lambda: Sums(rows), {"item": settings})

    if mesh is None:
        return made()
    plan = jaxrec.plan.ShardingPlan.from_dict({"item": jaxrec.mesh.row_wise()})
    return jaxrec.shard(made, plan, mesh)


def make_mesh(devices: int) -> jax.sharding.Mesh | None:
    """A mesh; None for one device, and of two where programs of eight take long to compile."""
    if devices == 1:
        return None
    return jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])


def place_on(mesh: jax.sharding.Mesh | None):
    """Puts a batch on a mesh, always in arrays of one size."""
    if mesh is None:
        return None
    capacities = {"item": CAPACITY // mesh.devices.size}
    return functools.partial(jaxrec.mesh.shard_batch, mesh=mesh, capacities=capacities)


def step_of(model, optimizer, batch):
    """A step whose gradient of a row is the sum of its samples' weights; returns the outputs."""
    features, weights = batch

    def loss_fn(model):
        outputs = model(features)
        return (outputs * weights[:, None]).sum(), outputs

    (_, outputs), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return outputs


step = nnx.jit(step_of, donate_argnums=(0, 1))
forward = nnx.jit(lambda model, batch: model(batch[0]))


def make_optimizer(model) -> jaxrec.Optimizer:
    return jaxrec.Optimizer(model, optax.sgd(RATE))


def make_batch(bags: list[list[int]], weights: list[float] | None = None):
    features = KeyedJaggedArray.from_lists(
        {"item": bags}, id_bits=64, capacities={"item": CAPACITY}
    )
    return features, np.array(weights or [1.0] * len(bags), np.float32)


def make_stream(steps: int, vocabulary: int, seed: int = 0):
    """Batches of ids whose popularity drifts."""
    rng = np.random.default_rng(seed)
    names = rng.integers(-(2**63), 2**63, vocabulary)
    batches = []
    for number in range(steps):
        bags = [
            [int(names[(i + number) % vocabulary]) for i in rng.zipf(1.3, n)]
            for n in rng.integers(0, BAG + 1, SAMPLES)
        ]
        batches.append(make_batch(bags, rng.integers(-2, 3, SAMPLES).tolist()))
    return batches


class SumsOracle:
    """The same model with rows in a dict.

    Args:
        rows: Rows of the table.
        settings: Its settings.
        held: Number of batches whose rows stay.
        policy: Name of the policy.
    """

    def __init__(self, rows: int, settings: Dynamic, held: int, policy: str = "lru"):
        self.vocabulary = Oracle(rows, settings, POLICIES[policy], lambda: 0.0)
        self.held, self.settings, self.batch = held, settings, 0
        self.values: dict[object, np.ndarray] = {}
        self.stored: dict[int, np.ndarray] = {}

    def keys(self, ids: list[int]) -> list[object]:
        """What each id reads: its own row, or that of unknown ids."""
        kind = self.settings.unknown.kind
        return [
            i
            if i in self.vocabulary.residents
            else (kind, self.vocabulary.unknown_row(i) if kind == "shared" else 0)
            for i in ids
        ]

    def sums(self, batch) -> np.ndarray:
        ones = np.ones(DIM, np.float32)
        outputs = np.zeros((SAMPLES, DIM), np.float32)
        for sample, bag in enumerate(batch[0]["item"].to_lists()):
            for key in self.keys(bag):
                if key != ("zeros", 0):
                    outputs[sample] += self.values.get(key, ones)
        return outputs

    def admit(self, batch) -> None:
        """Give rows to the ids of a batch."""
        self.batch += 1
        ids = [i for bag in batch[0]["item"].to_lists() for i in bag]
        changes = self.vocabulary.assign(ids, self.batch, self.held)
        for i in changes["evicted_ids"]:
            row = self.values.pop(i, None)
            if row is not None:
                self.stored[i] = row
        for i in changes["new_ids"]:
            if self.settings.store is not None and i in self.stored:
                self.values[i] = self.stored[i]

    def update(self, *batches) -> None:
        for features, weights in batches:
            for bag, weight in zip(features["item"].to_lists(), weights, strict=True):
                for key in self.keys(bag):
                    row = self.values.get(key, np.ones(DIM, np.float32))
                    self.values[key] = row - RATE * weight

    def step(self, batch) -> np.ndarray:
        self.admit(batch)
        outputs = self.sums(batch)
        self.update(batch)
        return outputs
