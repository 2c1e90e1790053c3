"""A `jaxrec.train.Trainer` trains and evaluates models with open vocabularies."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import Dynamic, ahead, default_row, make, zeros
from jaxrec.tier.planning.tier import tier_of
from tests.tier import models

pytestmark = pytest.mark.jax_version

NAMES = ("item", "query", "item_wide")


def loss_of(model, batch):
    features, labels = batch
    logits = model(features)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), {"logits": logits}


def make_model(mesh, rows=130, **settings):
    def made():
        tables = dict.fromkeys(NAMES, Dynamic(**settings))
        return make(lambda: models.Ranker(rows, "rowwise_adagrad"), tables)

    if mesh is None:
        return made()
    placements = dict.fromkeys((*NAMES, "age"), jaxrec.mesh.row_wise())
    return jaxrec.shard(made, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)


def make_trainer(mesh, model, **options):
    if mesh is not None:
        options["place"] = functools.partial(jaxrec.mesh.shard_batch, mesh=mesh)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    return jaxrec.train.Trainer(model=model, optimizer=optimizer, loss=loss_of, **options)


class Record(jaxrec.train.Callback):
    """Keeps the losses."""

    def __init__(self):
        self.losses = []

    def on_step_end(self, trainer, result):
        self.losses.append(result.loss)


@pytest.fixture(params=[1, 8], ids=["one_device", "eight_devices"])
def mesh(request):
    return None if request.param == 1 else jax.make_mesh((8,), ("data",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"semi_synchronous": True}], ids=["synchronous", "semi_synchronous"]
)
def test_evicted_rows_return_as_they_left(mesh, options):
    batches, _ = models.stream(30, 200, samples=8)
    # Half of the ids have no row: what they read must be zero though steps change that row.
    settings = {"admit_after": 2, "unknown": zeros(), "counters": 1 << 14}
    losses = {}
    for rows, on, store in ((130, mesh, "memory://"), (202, None, None)):
        model = make_model(on, rows, store=store, **settings)
        losses[rows] = Record()
        make_trainer(on, model, callbacks=[losses[rows]], **options).train(batches)
        evicted = tier_of(model).statistics()["query"]["evicted"]
        assert evicted == 0 if store is None else evicted > 20
    np.testing.assert_allclose(losses[130].losses, losses[202].losses, rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_several_batches(mesh):
    batches, _ = models.stream(12, 120, samples=8)
    model = make_model(mesh)
    trainer = make_trainer(mesh, model, accumulate=2)
    assert trainer.train(batches) == 6


@pytest.mark.slow
@pytest.mark.parametrize("unknown", [zeros(), default_row()], ids=["zeros", "default_row"])
def test_evaluation_admits_nobody(mesh, unknown):
    batches, _ = models.stream(6, 120, samples=8)
    others, _ = models.stream(4, 100, samples=8, seed=5)
    model = make_model(mesh, unknown=unknown)
    trainer = make_trainer(mesh, model)
    trainer.train(batches)
    before = tier_of(model).statistics()
    table = np.asarray(model.embeddings.table("item"))
    values = trainer.evaluate(others)
    assert tier_of(model).statistics() == before
    np.testing.assert_array_equal(model.embeddings.table("item"), table)
    evaluate = nnx.jit(lambda model, batch: loss_of(model, batch)[0])
    losses = [float(evaluate(model, x)) for x in ahead(model, others, is_training=False)]
    assert values["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    trainer.train(batches)  # training goes on
