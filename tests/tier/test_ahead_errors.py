"""Batches that a loop over `ahead` refuses, and loops that end early."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Dynamic, ahead
from jaxrec.tier.planning.tier import tier_of
from tests.tier import sums
from tests.tier.loops import (
    resident_rows,
    train,
)
from tests.tier.rows.test_transfer import BadStore


def test_a_model_without_vocabulary():
    with pytest.raises(
        TypeError, match=r"the model has no table with an open vocabulary or a cache; .*make"
    ):
        ahead(sums.Sums(66), [])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("look_ahead", [0, -1, True, 1.5, "4"], ids=repr)
def test_look_ahead_is_positive(look_ahead):
    model = sums.make_sums(66, Dynamic())
    message = f"look_ahead is an integer of 1 or more, got {look_ahead!r}"
    with pytest.raises(ValueError, match=message):
        ahead(model, [], look_ahead)


def errors_of_batches():
    batch = sums.make_batch([[1], [2]] + [[]] * 6)
    return {
        "on_a_device": (
            jax.tree.map(
                jax.numpy.asarray, (KeyedJaggedArray.from_lists({"item": [[1]]}), batch[1])
            ),
            TypeError,
            "ids get their rows on the host, but the batch is on a device; .* without shard_batch",
        ),
        "without_ids": ({"labels": batch[1]}, TypeError, "a batch is a pytree with a Keyed.* dict"),
        "with_rows": (
            next(iter(ahead(sums.make_sums(66, Dynamic()), [batch]))),
            ValueError,
            "feature 'item' of the batch has rows already, not ids; give jaxrec.tier.ahead each",
        ),
    }


BATCH_ERRORS = ("on_a_device", "without_ids", "with_rows")


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", BATCH_ERRORS)
def test_batches_of_another_kind(name, is_training):
    batch, error, message = errors_of_batches()[name]
    model = sums.make_sums(66, Dynamic(admit_after=1))
    before = tier_of(model).vocabularies[0].vocabulary.state()
    with pytest.raises(error, match=message):
        list(ahead(model, [batch], is_training=is_training))
    for key, array in tier_of(model).vocabularies[0].vocabulary.state().items():
        np.testing.assert_array_equal(array, before[key])
    # The model trains on.
    train(model, [sums.make_batch([[1], [2]] + [[]] * 6)])


def test_more_ids_than_rows():
    model = sums.make_sums(1 + 20, Dynamic(store="memory://"))
    optimizer = sums.make_optimizer(model)
    good = [sums.make_batch([[10 * i + j] for j in range(8)]) for i in range(3)]
    for batch in ahead(model, good[:2], 1):
        sums.step(model, optimizer, batch)
    vocabulary = tier_of(model).vocabularies[0].vocabulary
    before, rows = vocabulary.state(), resident_rows(model)
    message = (
        "feature 'item', sample 4: no row of table item is left for id 24: the batch has 8 new "
        "ids, and 4 of the 20 rows for ids are not in use by it or by the 2 batches under way. "
        r"Give the table 25 rows or more \(num_embeddings\), or .*admit_after"
    )
    with pytest.raises(ValueError, match=message):
        list(ahead(model, good[2:], 1))
    for name, array in vocabulary.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert resident_rows(model) == rows
    # Fewer ids fit; then the others are no longer in use.
    few = [sums.make_batch([[30 + i]] + [[]] * 7) for i in range(4)]
    for batch in ahead(model, [*few, good[2]], 1):
        sums.step(model, optimizer, batch)
    assert set(resident_rows(model)) >= {20, 21, 22, 23, 24, 25, 26, 27}


@pytest.mark.parametrize("id_bits", [32, 64])
def test_a_model_refuses_ids(id_bits):
    model = sums.make_sums(66, Dynamic())
    features = KeyedJaggedArray.from_lists({"item": [[1], [2]]}, id_bits=id_bits)
    message = "feature 'item' have an open vocabulary, and the batch has its ids, not its rows"
    with pytest.raises((TypeError, ValueError), match=message if id_bits == 32 else "item|64"):
        model(features)
    with pytest.raises((TypeError, ValueError), match=message if id_bits == 32 else "item|64"):
        sums.forward(model, (features, None))


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("taken", [0, 1])
def test_another_thread_takes_a_batch(taken, is_training):
    model = sums.make_sums(66, Dynamic())
    iterator = ahead(model, sums.make_stream(4, 20), is_training=is_training)
    for _ in range(taken):
        next(iterator)
    errors = []

    def take():
        try:
            next(iterator)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "only the thread that called it may take batches" in errors[0]


def test_two_loops_train_one_model():
    model = sums.make_sums(66, Dynamic())
    first = ahead(model, sums.make_stream(9, 20))
    next(first)
    second = ahead(model, sums.make_stream(9, 20, seed=1))
    message = "another jaxrec.tier.ahead was begun, .* end one training loop before the next"
    with pytest.raises(RuntimeError, match=message):
        list(zip(second, first, strict=False))
    first.close()
    second.close()
    train(model, sums.make_stream(9, 20))


PROGRAM = """
import numpy as np
from flax import nnx
import jaxrec

rng = np.random.default_rng(0)
config = jaxrec.EmbeddingBagConfig("item", 20, 4)
model = jaxrec.tier.make(
    jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)),
    {"item": jaxrec.tier.Dynamic(store="memory://")},
)
batches = [
    jaxrec.KeyedJaggedArray.from_lists({"item": rng.choice(60, (2, 1)).tolist()}, id_bits=64)
    for _ in range(60)
]
iterator = jaxrec.tier.ahead(model, batches)
for _ in range(25):
    model(next(iterator))
print("end")
"""


@pytest.mark.slow
def test_a_program_ends_though_its_iterator_was_not_closed():
    """Rows that are to come back from the store wait for others that will never be sent there."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=environment,
    )
    assert (result.stdout, result.stderr) == ("end\n", "")


@pytest.mark.parametrize("bad", ["put", "get"])
def test_a_store_that_fails(bad):
    model = sums.make_sums(2 + 64, Dynamic(store=BadStore(bad)))
    with pytest.raises(RuntimeError, match=r"BadStore\(\): OSError.*the last checkpoint is whole"):
        train(model, sums.make_stream(60, 300))


def test_an_error_of_the_batches_comes_in_its_place():
    def batches():
        yield from sums.make_stream(3, 20)
        raise OSError("no such file")

    model = sums.make_sums(66, Dynamic())
    taken = []
    with pytest.raises(OSError, match="no such file"):
        taken.extend(None for _ in ahead(model, batches()))
    tier_of(model).settle(model)
    assert tier_of(model)._pending.after(0) == []


@pytest.mark.filterwarnings("always")
def test_a_table_that_thrashes():
    model = sums.make_sums(2 + 40, Dynamic())
    with pytest.warns(UserWarning, match="the table item thrashes: .* in the last .* batches"):
        train(model, [sums.make_batch([[8 * i + j] for j in range(8)]) for i in range(30)])
