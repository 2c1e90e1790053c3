"""Padding ids and max pooling where a tier gives rows to ids: as in tables with all rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed.batch_checks import bad_id_of_batch
from jaxrec.tier import Cached, ChangeTracker, Dynamic, ahead, close, make

pytestmark = pytest.mark.jax_version

ROWS, PAD, TX = 40, 0, optax.sgd(0.1)


class Model(nnx.Module):
    def __init__(self):
        rngs, optimizer = nnx.Rngs(0), jaxrec.optim.adam(0.1, weight_decay=0.1)
        bags = [
            jaxrec.EmbeddingBagConfig(name, ROWS, 4, pooling=name, padding_id=PAD)
            for name in ("mean", "max")
        ]
        self.bags = jaxrec.EmbeddingBagCollection(bags, optimizer=optimizer, rngs=rngs)
        self.single = jaxrec.EmbeddingCollection(
            [jaxrec.EmbeddingConfig("single", ROWS, 4, padding_id=PAD)],
            optimizer=optimizer,
            rngs=rngs,
        )
        self.over = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, features):
        rows = self.single(features)["single"].values
        # A row that stands for nothing is zeros, and so adds nothing here.
        return self.over(self.bags(features).values).sum() + jnp.sum(rows**2)


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, features):
    loss, gradients = jaxrec.value_and_grad(lambda model: model(features))(model)
    optimizer.update(model, gradients)
    return loss


def batches():
    rng = np.random.default_rng(0)
    for start in (0, 10, 20, 5):  # a cache of 24 rows evicts some of them
        yield jaxrec.KeyedJaggedArray.from_lists(
            {
                name: [
                    np.where(rng.random(n) < 0.4, PAD, rng.integers(start, start + 12, n)).tolist()
                    for n in rng.integers(0, 5, 8)
                ]
                for name in ("mean", "max", "single")
            },
            capacities=dict.fromkeys(("mean", "max", "single"), 40),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [Cached(24, "memory://"), Dynamic()], ids=["cached", "dynamic"]
)
def test_training_equals_whole_tables(settings):
    names = ("mean", "max", "single")
    whole, model = Model(), make(Model, dict.fromkeys(names, settings))
    optimizer = jaxrec.Optimizer(whole, TX)
    expected = [float(step(whole, optimizer, batch)) for batch in batches()]
    optimizer = jaxrec.Optimizer(model, TX)
    changes = ChangeTracker(model, ("all",))  # it reads the batches that have rows already
    losses = []
    for batch in ahead(model, batches()):
        assert bad_id_of_batch(model, batch) is None
        losses.append(float(step(model, optimizer, batch)))
    for name, changed in changes.changes("all").items():
        assert changed.ids.size > 10, name
        assert PAD not in changed.ids, name
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    if isinstance(settings, Cached):
        for name, module in (("max", "bags"), ("single", "single")):
            rows = getattr(model, module).rows(name, np.arange(ROWS))
            np.testing.assert_allclose(
                rows, getattr(whole, module).table(name), rtol=1e-4, atol=1e-6
            )
            np.testing.assert_array_equal(rows[PAD], 0)
        model.bags.load_table("max", np.ones((ROWS, 4)))
        np.testing.assert_array_equal(model.bags.rows("max", [PAD, 1])[:, 0], [0, 1])
    close(model)
