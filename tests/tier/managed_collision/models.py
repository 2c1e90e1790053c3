"""Models with managed collisions, batches for them, and their training step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.tier.managed_collision import (
    LFUEvictionPolicy,
    LRUEviction,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MultiProbeConfig,
    SortedMapConfig,
)

BATCH, SLOTS, DIM = 8, 12, 4

SORTED = SortedMapConfig(history_size=100, policy=LFUEvictionPolicy(), eviction_interval=2)
PROBED = MultiProbeConfig(2, 4, LRUEviction(0))
OPT_IN = MultiProbeConfig(2, 4, LRUEviction(0), opt_in_prob=60, percent_reserved_slots=20)


class Ranker(nnx.Module):
    """Two tables with one sorted map and one feature in both, a probed table, a plain one."""

    def __init__(self, seed=0, is_pooled=True, probed=PROBED, initializer="ones", rows=SLOTS):
        rngs = nnx.Rngs(seed)
        config = jaxrec.EmbeddingBagConfig if is_pooled else jaxrec.EmbeddingConfig
        tables = [
            config("wide", rows, DIM, feature_names=("item", "liked"), initializer=initializer),
            config("deep", rows, 8, feature_names=("item",), initializer=initializer),
            config("user", SLOTS, DIM, initializer=initializer),
            config("hour", 24, DIM, initializer=initializer),
        ]
        maps = {("wide", "deep"): SORTED, "user": probed}
        options = {"return_remapped_features": True, "rngs": rngs}
        adagrad = jaxrec.optim.rowwise_adagrad(0.1)
        if is_pooled:
            plain = jaxrec.EmbeddingBagCollection(tables, optimizer=adagrad, rngs=rngs)
            self.embeddings = ManagedCollisionEmbeddingBagCollection(plain, maps, **options)
            self.plain = self.embeddings.embedding_bag_collection
        else:
            plain = jaxrec.EmbeddingCollection(tables, optimizer=adagrad, rngs=rngs)
            self.embeddings = ManagedCollisionEmbeddingCollection(plain, maps, **options)
            self.plain = self.embeddings.embedding_collection
        self.over = nnx.Linear(20 + DIM, 1, rngs=rngs)
        self.is_pooled = is_pooled

    def __call__(self, features):
        embeddings, remapped = self.embeddings(features)
        if self.is_pooled:
            return self.over(embeddings.values)[..., 0], remapped
        pooled = [jnp.sum(each.values, axis=(-2, -1)) for each in embeddings.values()]
        return sum(pooled), remapped


def make_batch(rng, ids_per_bag=3):
    def bags(ids):
        return [ids(rng.integers(ids_per_bag + 1)).tolist() for _ in range(BATCH)]

    features = {
        "hour": bags(lambda n: rng.integers(24, size=n)),
        "user": bags(lambda n: rng.integers(40, size=n) * 10**11 + 3),
        "item": bags(lambda n: rng.zipf(1.3, size=n) % 2**40 + 2**50),
        "liked": bags(lambda n: rng.zipf(1.3, size=n) % 2**40 + 2**50),
    }
    capacities = dict.fromkeys(features, BATCH * ids_per_bag)
    return jaxrec.KeyedJaggedArray.from_lists(features, id_bits=64, capacities=capacities)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, features):
    def loss_fn(model):
        logits, remapped = model(features)
        return (logits**2).mean(), remapped

    (loss, remapped), gradients = jaxrec.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return loss, remapped


TX = optax.sgd(0.1)  # with one object for all, programs are compiled once


def make(**options):
    model = Ranker(**options)
    return model, jaxrec.Optimizer(model, TX)


def contents(*nodes):
    """All arrays that are not in tables, and the tables by name with their state."""
    arrays = {}
    for node in nodes:
        for path, variable in nnx.to_flat_state(nnx.state(node)):
            if not isinstance(variable, jaxrec.embed.TableVariable):
                value = variable.get_value()
                is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
                value = jax.random.key_data(value) if is_key else value
                arrays[(type(node).__name__, *path)] = np.asarray(value)
    model = nodes[0]
    for table in model.plain.configs:
        arrays[table.name] = np.asarray(model.plain.table(table.name))
        for name, state in model.plain.table_state(table.name).items():
            arrays[table.name, name] = np.asarray(state)
    return arrays


def assert_same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if value.dtype.kind == "f" and tolerance:
            np.testing.assert_allclose(value, b[name], **tolerance, err_msg=str(name))
        else:
            np.testing.assert_array_equal(value, b[name], err_msg=str(name))
