"""The training loop over batches whose ids get rows, compared with a dict of rows."""

from __future__ import annotations

import gc
import itertools
import tracemalloc

import jax
import numpy as np
import pytest

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Dynamic, ahead, default_row, lfu, shared, zeros
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train import RoutedSteps
from tests.tier import sums
from tests.tier.loops import (
    assert_same,
    joined,
    resident_rows,
    train,
    wait_until_planned,
)

UNKNOWN = {"zeros": zeros(), "default": default_row(), "shared": shared(3)}


CASES = [
    ("zeros", None, 1, "one_device"),
    ("zeros", "memory://", 1, "one_device"),
    ("zeros", None, 8, "eight_devices"),
    ("default", "memory://", 1, "one_device"),
    ("default", None, 2, "two_devices"),
    ("shared", None, 1, "one_device"),
    ("shared", "memory://", 2, "two_devices"),
]


@pytest.mark.parametrize(
    ("unknown", "store", "devices"),
    [case[:3] for case in CASES],
    ids=[f"{unknown}-{'store' if store else 'lost'}-{on}" for unknown, store, _, on in CASES],
)
def test_training_agrees_with_a_dict(unknown, store, devices):
    settings = Dynamic(unknown=UNKNOWN[unknown], store=store, admit_after=2)
    mesh = sums.make_mesh(devices)
    batches = sums.make_stream(60, 150, seed=devices)
    model = sums.make_sums(66, settings, mesh)
    outputs = train(model, batches, place=sums.place_on(mesh))
    oracle = sums.SumsOracle(66, settings, held=4)
    assert_same(outputs, [oracle.step(batch) for batch in batches])
    summary = tier_of(model).statistics()["item"]
    assert summary["evicted"] > 30
    assert summary["refused"] > 50
    assert {key: summary[key] for key in oracle.vocabulary.counts} == oracle.vocabulary.counts


@pytest.mark.parametrize("devices", [1, 2])
def test_capacities_are_remembered_for_the_model(devices):
    """Over several loops, for training and evaluation."""
    mesh = sums.make_mesh(devices)
    model = sums.make_sums(66, Dynamic(), mesh)
    rng = np.random.default_rng(0)
    batches = [
        KeyedJaggedArray.from_lists(
            {key: [[7] * n for n in rng.geometric(0.1, 16)] for key in ("item", "a", "b")},
            id_bits=64,
        )
        for _ in range(20)
    ]
    assert len({batch.capacities for batch in batches}) > 8
    shapes = set()
    for is_training in (True, True, False):
        for batch, given in zip(
            ahead(model, batches, is_training=is_training), batches, strict=True
        ):
            shapes.add((batch.capacities, batch.values.shape))
            lengths = np.asarray(batch.lengths).reshape(devices, 3, -1).swapaxes(0, 1)
            np.testing.assert_array_equal(lengths.reshape(-1), given.lengths)
    assert len(shapes) <= 3


def test_zeros_stay_zeros_for_routed_steps():
    """A routed step takes the next batch before it changes the row that its own batch read."""
    mesh = sums.make_mesh(2)
    settings = Dynamic(admit_after=2)
    batches = sums.make_stream(30, 150)
    model = sums.make_sums(66, settings, mesh)
    optimizer = sums.make_optimizer(model)
    steps = RoutedSteps(sums.step_of, lambda model, batch: model(batch[0]), model, optimizer)
    taken = ahead(model, batches, 2, place=sums.place_on(mesh))
    outputs = [np.asarray(output) for _, output in steps(taken)]
    oracle = sums.SumsOracle(66, settings, held=4)
    assert_same(outputs, [oracle.step(batch) for batch in batches])


def test_zeros_stay_zeros_where_an_evaluation_comes_between_routed_steps():
    mesh = sums.make_mesh(2)
    settings = Dynamic(admit_after=2)
    batches = sums.make_stream(20, 150)
    model = sums.make_sums(66, settings, mesh)
    optimizer = sums.make_optimizer(model)
    steps = RoutedSteps(sums.step_of, lambda model, batch: model(batch[0]), model, optimizer)
    place = sums.place_on(mesh)
    oracle = sums.SumsOracle(66, settings, held=4)
    others = sums.make_stream(1, 150, seed=9)
    for number, (_, output) in enumerate(steps(ahead(model, batches, 2, place=place))):
        assert_same([output], [oracle.step(batches[number])])
        if number % 3 == 2:
            for batch in ahead(model, others, 2, place=place, is_training=False):
                sums.forward(model, batch)


# Batches planned ahead.


@pytest.mark.parametrize("store", [None, "memory://"], ids=["lost", "store"])
@pytest.mark.parametrize("parts", [(5, 40), (5, 1, 1, 0, 40), (1, 0, 2, 3, 40)], ids=joined)
def test_a_run_that_was_broken_off_goes_on(parts, store):
    batches = sums.make_stream(40, 150)
    settings = Dynamic(admit_after=2, eviction=lfu(), store=store)
    model = sums.make_sums(66, settings)
    optimizer = sums.make_optimizer(model)
    outputs = []
    for part in parts:
        for batch in itertools.islice(ahead(model, batches[len(outputs) :], 3), part):
            outputs.append(np.asarray(sums.step(model, optimizer, batch)))
    oracle = sums.SumsOracle(66, settings, held=5, policy="lfu")
    assert_same(outputs, [oracle.step(batch) for batch in batches])


def test_few_of_the_planned_batches_are_planned_again():
    """The second loop looks less far ahead, and ends before it has seen all that were planned."""
    settings = Dynamic(admit_after=2)
    batches = sums.make_stream(40, 60)
    model = sums.make_sums(130, settings)
    tier = tier_of(model)
    optimizer = sums.make_optimizer(model)
    oracle = sums.SumsOracle(130, settings, held=0)
    taken = 0
    for look_ahead, count in ((8, 2), (1, 1), (1, 2), (8, 40)):
        for batch in ahead(model, batches[taken:], look_ahead):
            assert_same([sums.step(model, optimizer, batch)], [oracle.step(batches[taken])])
            taken += 1
            count -= 1
            if look_ahead == 8:
                wait_until_planned(tier, min(len(batches), taken + 6))
            if not count:
                break
    assert taken == len(batches)
    assert tier.order.last_planned == len(batches)


def test_other_batches_after_a_break():
    """Ids that were planned and never came keep their rows; the others get theirs."""
    settings = Dynamic()
    model = sums.make_sums(130, settings)
    optimizer = sums.make_optimizer(model)
    first, second = sums.make_stream(10, 40), sums.make_stream(10, 40, seed=1)
    oracle = sums.SumsOracle(130, settings, held=4)
    for batch in itertools.islice(ahead(model, first, 2), 3):
        sums.step(model, optimizer, batch)
    for batch in first[:3]:
        oracle.step(batch)
    outputs = [np.asarray(sums.step(model, optimizer, batch)) for batch in ahead(model, second, 2)]
    assert_same(outputs, [oracle.step(batch) for batch in second])


@pytest.mark.parametrize("look_ahead", [1, 2, 7])
def test_look_ahead_changes_no_result_where_none_is_evicted(look_ahead):
    batches = sums.make_stream(15, 40)
    model = sums.make_sums(130, Dynamic())
    oracle = sums.SumsOracle(130, Dynamic(), held=0)
    outputs = train(model, batches, look_ahead=look_ahead)
    assert_same(outputs, [oracle.step(batch) for batch in batches])


def test_batches_are_pytrees():
    """Several collections of features, in any container, beside arrays that stay as they are."""
    model = sums.make_sums(66, Dynamic())
    features, weights = sums.make_batch([[2**60], [2**60, 7]] + [[]] * 6)
    other, _ = sums.make_batch([[7], [8]] + [[]] * 6)
    (batch,) = ahead(model, [{"features": features, "rest": [weights, other, None, "text"]}])
    assert batch["rest"][0] is weights
    assert batch["rest"][2:] == [None, "text"]
    rows = batch["features"]["item"].to_lists(), batch["rest"][1]["item"].to_lists()
    assert rows[0][0][0] == rows[0][1][0]
    assert rows[0][1][1] == rows[1][0][0]
    assert len({rows[0][0][0], rows[1][0][0], rows[1][1][0]}) == 3
    assert batch["features"].values.dtype == np.int32


def test_ids_of_32_bits():
    model = sums.make_sums(66, Dynamic())
    features = KeyedJaggedArray.from_lists({"item": [[5], [2**31 - 1, 5]]})
    (rows,) = ahead(model, [features])
    assert rows["item"].to_lists()[0][0] == rows["item"].to_lists()[1][1]
    ids, _ = tier_of(model).vocabularies[0].vocabulary.map.items()
    assert ids.tolist() == [5, 2**31 - 1]


def test_no_batches():
    model = sums.make_sums(66, Dynamic())
    assert list(ahead(model, [])) == []
    assert list(ahead(model, [], is_training=False)) == []


def test_an_empty_batch():
    model = sums.make_sums(66, Dynamic(admit_after=2, store="memory://"))
    outputs = train(model, [sums.make_batch([[]] * 8)] * 3)
    assert_same(outputs, [np.zeros((8, sums.DIM))] * 3)


# Evaluation.


@pytest.mark.parametrize("devices", [1, 2], ids=["one_device", "two_devices"])
@pytest.mark.parametrize("unknown", UNKNOWN.values(), ids=UNKNOWN)
def test_evaluation_changes_nothing(unknown, devices):
    mesh = sums.make_mesh(devices)
    settings = Dynamic(unknown=unknown, admit_after=2)
    batches, others = sums.make_stream(20, 100), sums.make_stream(6, 200, seed=3)
    model = sums.make_sums(66, settings, mesh)
    place = sums.place_on(mesh)
    train(model, batches, place=place)
    oracle = sums.SumsOracle(66, settings, held=4)
    for batch in batches:
        oracle.step(batch)
    vocabulary = tier_of(model).vocabularies[0].vocabulary
    before, totals = vocabulary.state(), tier_of(model).statistics()
    rows = resident_rows(model)
    outputs = [
        np.asarray(sums.forward(model, batch))
        for batch in ahead(model, others, is_training=False, place=place)
    ]
    assert_same(outputs, [oracle.sums(batch) for batch in others])
    for name, array in vocabulary.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert tier_of(model).statistics() == totals
    assert resident_rows(model) == rows


def test_evaluation_within_training():
    """It reads what the batches taken so far have left, not what is planned."""
    settings = Dynamic(unknown=default_row(), admit_after=2, store="memory://")
    batches, others = sums.make_stream(40, 150), sums.make_stream(3, 150, seed=2)
    model = sums.make_sums(66, settings)
    optimizer = sums.make_optimizer(model)
    oracle = sums.SumsOracle(66, settings, held=6)
    for number, batch in enumerate(ahead(model, batches)):
        output = sums.step(model, optimizer, batch)
        assert_same([output], [oracle.step(batches[number])])
        if number % 5 == 0:
            outputs = [sums.forward(model, x) for x in ahead(model, others, is_training=False)]
            assert_same(outputs, [oracle.sums(x) for x in others])


def test_training_within_evaluation():
    settings = Dynamic(admit_after=2)
    batches, others = sums.make_stream(12, 150), sums.make_stream(12, 150, seed=2)
    model = sums.make_sums(66, settings)
    optimizer = sums.make_optimizer(model)
    oracle = sums.SumsOracle(66, settings, held=6)
    training = ahead(model, batches)
    for number, batch in enumerate(ahead(model, others, is_training=False)):
        assert_same([sums.forward(model, batch)], [oracle.sums(others[number])])
        output = sums.step(model, optimizer, next(training))
        assert_same([output], [oracle.step(batches[number])])
    training.close()


# A run for ever.


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2], ids=["one_device", "two_devices"])
def test_nothing_compiles_and_memory_stays_after_the_first_batches(devices, caplog):
    mesh = sums.make_mesh(devices)
    model = sums.make_sums(130, Dynamic(admit_after=2, unknown=zeros(), counters=500), mesh)
    optimizer = sums.make_optimizer(model)
    names = itertools.count(1000)

    def unbounded():
        rng = np.random.default_rng(0)
        for _ in range(160):
            fresh = next(names)
            bags = [[fresh, fresh, int(i)] for i in rng.integers(0, 60, 4)] + [[-fresh]] + [[]] * 3
            yield sums.make_batch(bags)

    arrays, sizes = [], []
    with jax.log_compiles():
        for number, batch in enumerate(ahead(model, unbounded(), place=sums.place_on(mesh))):
            sums.step(model, optimizer, batch)
            if number == 80:
                caplog.clear()
                tracemalloc.start()
            if number in (90, 150):
                gc.collect()  # also what earlier tests left
                arrays.append(len(jax.live_arrays()))
                sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert tier_of(model).statistics()["item"]["evicted"] > 20
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA" in r.getMessage()]
    assert compiled == []
    assert arrays[1] - arrays[0] <= 25  # a few batches are on their way
    assert sizes[1] - sizes[0] < 300_000
