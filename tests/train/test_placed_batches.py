"""Batches on the devices, for models with and without open vocabularies."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.placed_batches import placed_batches

CONFIG = jaxrec.EmbeddingBagConfig("item", 20, 4)


def plain():
    return jaxrec.EmbeddingBagCollection([CONFIG], rngs=nnx.Rngs(0))


def with_open_vocabulary():
    return jaxrec.tier.make(plain, {"item": jaxrec.tier.Dynamic()})


def batches(id_bits):
    for number in range(5):
        yield jaxrec.KeyedJaggedArray.from_lists({"item": [[number], [7]]}, id_bits=id_bits)


def doubled(features):
    ids = [[2 * i for i in bag] for bag in features["item"].to_lists()]
    return jaxrec.KeyedJaggedArray.from_lists({"item": ids}, id_bits=64)


@pytest.mark.parametrize("stages", [(), (doubled,), (doubled, doubled)], ids=len)
def test_stages_come_before_rows_and_rows_before_the_devices(stages):
    model, placed = with_open_vocabulary(), []
    with placed_batches(
        model, batches(64), *stages, place=lambda x: placed.append(x) or x, is_training=True
    ) as ready:
        assert list(ready) == placed
    (each,) = tier_of(model).vocabularies
    factor = 2 ** len(stages)
    ids = [factor * i for i in (0, 7, 1, 7, 2, 7, 3, 7, 4, 7)]
    rows = each.vocabulary.find(np.array(ids), batch=10)
    assert (rows > 0).all()
    np.testing.assert_array_equal(
        np.concatenate([features["item"].to_lists() for features in placed]).ravel(), rows
    )


def test_ids_of_plain_tables_stay():
    with placed_batches(
        plain(), batches(32), doubled, place=lambda features: features, is_training=True
    ) as ready:
        ids = [features["item"].to_lists() for features in ready]
    assert ids == [[[2 * number], [14]] for number in range(5)]


def test_an_evaluation_gives_no_rows():
    model = with_open_vocabulary()
    with placed_batches(model, batches(64), place=lambda x: x, is_training=False) as ready:
        assert [features["item"].to_lists() for features in ready] == [[[0], [0]]] * 5
    assert len(tier_of(model).vocabularies[0].vocabulary) == 0


@pytest.mark.parametrize("make", [plain, with_open_vocabulary])
def test_threads_end_with_the_context(make):
    before = threading.active_count()
    id_bits = 32 if make is plain else 64
    with placed_batches(
        make(), batches(id_bits), lambda x: x, place=lambda x: x, is_training=True
    ) as ready:
        next(ready)
        assert threading.active_count() > before
    assert threading.active_count() == before
