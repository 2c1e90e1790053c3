"""Lookups of rows that the devices do not hold are counted; there are none."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.tier import Cached, Dynamic, MissCounter, ahead, make
from jaxrec.tier.planning.batch_ids import BatchIds
from jaxrec.tier.planning.batch_order import ForeseenBatch
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.checkpoint import restore, save
from tests.tier import models
from tests.tier.vocabulary.test_cached import NAMES, make_cached, make_stream


def num_ids(batches, *keys: str) -> int:
    return sum(models.ids_of(features, key).size for features, _ in batches for key in keys)


def test_no_lookup_misses(tmp_path):
    """In training, evaluation, and after a checkpoint that is restored."""
    batches, others = make_stream(40), make_stream(5, seed=1)
    model = make_cached("rowwise_adagrad", rows=100)
    counter = MissCounter(model)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    for number, batch in enumerate(ahead(model, batches, look_ahead=2), 1):
        models.train_step(model, optimizer, *batch)
        if number == 20:
            list(ahead(model, others, is_training=False))
            save(tmp_path, model, optimizer, batches=number)
    restore(model, tmp_path, optimizer)
    list(ahead(model, batches[20:], look_ahead=2))
    assert counter.misses == dict.fromkeys(NAMES, 0)
    seen = [*batches, *others, *batches[20:]]
    assert counter.lookups == {
        "item": num_ids(seen, "item"),
        "item_wide": num_ids(seen, "item"),
        "query": num_ids(seen, "query", "context"),
    }
    assert tier_of(model).statistics()["query"]["evicted"] > 100


@pytest.mark.filterwarnings("ignore:.* thrashes")
def test_unknown_ids_do_not_miss():
    batches, _ = models.stream(20, 400)
    tables = dict.fromkeys(NAMES, Dynamic(admit_after=2))
    model = make(lambda: models.Ranker(171, "sgd"), tables)
    counter = MissCounter(model)
    list(ahead(model, batches, look_ahead=2))
    list(ahead(model, batches, is_training=False))
    assert counter.misses == dict.fromkeys(NAMES, 0)
    assert tier_of(model).statistics()["query"]["refused"] > 0


def test_moves_that_are_lost_are_misses():
    model = make_cached("sgd")
    counter, tier = MissCounter(model), tier_of(model)
    batches = make_stream(10)
    taken = ahead(model, batches, look_ahead=9)
    next(taken)
    give_up = time.monotonic() + 20
    while tier.order.last_planned < 10 and time.monotonic() < give_up:
        time.sleep(0.01)
    tier._pending.clear()
    list(taken)
    before = set(models.ids_of(batches[0][0], "item").tolist())
    later = np.concatenate([models.ids_of(features, "item") for features, _ in batches[1:]])
    assert counter.misses["item"] == sum(i not in before for i in later.tolist()) > 0


def test_rows_of_other_ids_are_misses():
    model = make(lambda: models.Ranker(6000, "sgd"), dict.fromkeys(NAMES, Cached(300)))
    counter, tier = MissCounter(model), tier_of(model)
    (batch,) = make_stream(1)
    ids = BatchIds.of(batch, tier.vocabularies, None)
    planned = tier.plan(ForeseenBatch(batch, ids), held=2)
    features, labels = planned.batch
    swapped = features._with(values=np.where(features.values == 0, 1, 0).astype(np.int32))
    tier.apply(model, planned)
    assert counter.misses == dict.fromkeys(NAMES, 0)
    counter.given(dataclasses.replace(planned, batch=(swapped, labels)))
    assert all(counter.misses.values())


def test_models_without_tiers_are_refused():
    with pytest.raises(TypeError, match=r"MissCounter is for a model of jaxrec\.tier\.make"):
        MissCounter(models.Ranker(10, "sgd"))
