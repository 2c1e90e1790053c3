"""The training loop over batches whose ids get rows, compared with a dict of rows."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import tracemalloc

import jax
import numpy as np
import pytest

from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Dynamic, ahead, default_row, lfu, shared, zeros
from jaxrec.tier.tier import tier_of
from jaxrec.train import RoutedSteps
from tests.tier import sums
from tests.tier.test_transfer import BadStore

UNKNOWN = {"zeros": zeros(), "default": default_row(), "shared": shared(3)}


def train(model, batches, *, place=None, look_ahead=2):
    optimizer = sums.make_optimizer(model)
    return [
        np.asarray(sums.step(model, optimizer, batch))
        for batch in ahead(model, batches, look_ahead, place=place)
    ]


def resident_rows(model) -> dict[int, list[float]]:
    """The row of each resident id."""
    ids, rows = tier_of(model).vocabularies[0].vocabulary.map.items()
    table = np.asarray(model.embeddings.table("item"))[rows]
    return dict(zip(ids.tolist(), table.tolist(), strict=True))


def assert_same(outputs, expected):
    for number, (found, wanted) in enumerate(zip(outputs, expected, strict=True), 1):
        np.testing.assert_allclose(found, wanted, atol=1e-4, err_msg=f"batch {number}")


def joined(numbers: tuple[int, ...]) -> str:
    return "_".join(map(str, numbers))


def wait_until_planned(tier, number: int) -> None:
    for _ in range(2000):
        if tier._last_planned >= number:
            return
        time.sleep(0.01)
    raise TimeoutError


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
    assert tier._last_planned == len(batches)


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


# Errors.


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


# A run for ever.


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
