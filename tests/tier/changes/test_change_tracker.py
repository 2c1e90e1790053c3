"""Changes that a tracker gives bring a copy of yesterday's tables up to date."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.mesh import shard_batch
from jaxrec.tier import ChangeTracker
from tests.fuzz import max_examples
from tests.tier import models
from tests.tier.changes.models import (
    NAMES,
    PLACEMENTS,
    assert_same,
    brought_up_to_date,
    draw_batch,
    ids_in,
    make_plain,
    tables_of,
)

# Small tables lose rows often.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_copy_is_brought_up_to_date(placement):
    model, mesh = make_plain(PLACEMENTS[placement])
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    copy = tables_of(model)
    tracker = ChangeTracker(model, consumers=("publisher", "checkpoint"))
    assert tracker.tables == NAMES
    rng = np.random.default_rng(0)
    batches = [draw_batch(rng) for _ in range(7)]
    for number, (features, labels) in enumerate(tracker.watch(batches)):
        if mesh is not None:
            features, labels = shard_batch((features, labels), mesh)
        models.train_step(model, optimizer, features, labels)
        if number in (2, 3, 6):
            before = {2: 0, 3: 3, 6: 4}[number]
            changes = tracker.changes("publisher", with_rows=True, with_state=True)
            expected = ids_in(batches[before : number + 1])
            assert {name: each.ids.tolist() for name, each in changes.items()} == expected
            brought_up_to_date(copy, changes)
            assert_same(copy, tables_of(model))
    changes = tracker.changes("checkpoint")
    assert {name: each.ids.tolist() for name, each in changes.items()} == ids_in(batches)
    assert all(each.rows is None and each.state is None for each in changes.values())
    for consumer in tracker.consumers:
        assert all(not each.ids.size for each in tracker.changes(consumer).values())


@pytest.fixture(scope="module")
def plain_model():
    return make_plain()[0]


@given(data=st.data())
@settings(max_examples=max_examples(20))
def test_consumers_have_positions_of_their_own(plain_model, data):
    consumers = [f"c{i}" for i in range(data.draw(st.sampled_from([1, 3, 9])))]
    held = data.draw(st.integers(0, 3))
    tracker = ChangeTracker(plain_model, consumers, ahead=held)
    unread = {consumer: set() for consumer in consumers}
    recent = []
    for _ in range(data.draw(st.integers(0, 12))):
        if data.draw(st.booleans()):
            bags = data.draw(st.lists(st.lists(st.integers(0, 59), max_size=4), min_size=1))
            tracker.record((jaxrec.KeyedJaggedArray.from_lists({"item": bags}),))
            ids = {i for bag in bags for i in bag}
            recent.append(ids)
            for each in unread.values():
                each |= ids
        else:
            consumer = data.draw(st.sampled_from(consumers))
            changes = tracker.changes(consumer)
            for name in ("deep/item", "wide/item"):
                assert changes[name].ids.tolist() == sorted(unread[consumer])
            assert not changes["user"].ids.size
            unread[consumer] = set().union(*recent[max(0, len(recent) - held) :])
    state = tracker.state()
    for consumer, ids in unread.items():
        assert state[consumer]["wide/item"]["ids"].tolist() == sorted(ids)
    other = ChangeTracker(plain_model, [*consumers[::-1], "new"])
    other.load_state(state)
    for consumer, ids in (unread | {"new": set()}).items():
        assert other.changes(consumer)["wide/item"].ids.tolist() == sorted(ids)


def test_marks():
    model, _ = make_plain()
    tracker = ChangeTracker(model, ["c"])
    model.deep.load_rows("user", [3, 9], np.ones((2, 8)))
    tracker.mark("user", [9, 3, 9])
    tracker.mark("age")
    changes = tracker.changes("c", with_rows=True)
    assert changes["user"].ids.tolist() == [3, 9]
    assert (changes["user"].rows == 1).all()
    assert changes["user"].state is None
    assert changes["age"].ids.tolist() == list(range(50))
    assert not changes["deep/item"].ids.size
    tracker.mark("user", [1])
    state = tracker.changes("c", with_state=True)["user"]
    assert state.rows is None
    assert state.state.keys() == {"first_moment", "second_moment"}


def test_ids_beyond_a_table_are_skipped():
    """Such a step is NaN and changes nothing."""
    tracker = ChangeTracker(make_plain()[0], ["c"])
    features = jaxrec.KeyedJaggedArray.from_lists({"item": [[70, 3]], "user": [[45]]})
    tracker.record(features)
    changes = tracker.changes("c")
    assert changes["deep/item"].ids.tolist() == [3]
    assert changes["user"].ids.tolist() == []
    assert changes["age"].ids.tolist() == [45]


ERRORS = {
    "no_consumers": (lambda model: ChangeTracker(model, []), ValueError, "1 to 64 distinct names"),
    "one_text": (lambda model: ChangeTracker(model, "c"), ValueError, "distinct names .* got 'c'"),
    "repeated": (lambda model: ChangeTracker(model, ["a", "a"]), ValueError, "distinct names"),
    "ahead": (lambda model: ChangeTracker(model, ["c"], ahead=-1), ValueError, "0 or more, got -1"),
    "no_model": (lambda model: ChangeTracker({}, ["c"]), TypeError, "model is an nnx.Module, got"),
    "no_tables": (
        lambda model: ChangeTracker(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), ["c"]),
        TypeError,
        "the model has no tables",
    ),
    "consumer": (
        lambda model: ChangeTracker(model, ["c"]).changes("d"),
        KeyError,
        "no consumer is named 'd'; there are 'c'",
    ),
    "table": (
        lambda model: ChangeTracker(model, ["c"]).mark("item"),
        KeyError,
        "no table is named 'item'; there are 'deep/item', 'user', 'age', 'fixed', 'wide/item'",
    ),
    "ids": (
        lambda model: ChangeTracker(model, ["c"]).mark("user", [40]),
        ValueError,
        "table 'user' has the rows 0 to 39, got id 40",
    ),
    "on_a_device": (
        lambda model: ChangeTracker(model, ["c"]).record(
            jax.tree.map(jnp.asarray, draw_batch(np.random.default_rng(0)))
        ),
        TypeError,
        "reads ids on the host, but the batch is on a device",
    ),
    "one_batch": (
        lambda model: next(
            iter(ChangeTracker(model, ["c"]).watch(draw_batch(np.random.default_rng(0))[0]))
        ),
        TypeError,
        "batches must be an iterable of batches",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, plain_model, unchecked):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message):
        call(plain_model)


def test_maps_in_the_compiled_step_are_refused():
    config = jaxrec.EmbeddingBagConfig("item", 100, 4)
    collection = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    model = jaxrec.tier.managed_collision.ManagedCollisionEmbeddingBagCollection(
        collection, {"item": jaxrec.tier.managed_collision.MultiProbeConfig(100)}, rngs=nnx.Rngs(0)
    )
    with pytest.raises(TypeError, match="gives rows to ids in the compiled step"):
        ChangeTracker(model, ["c"])


def test_a_failure_leaves_the_position(plain_model, monkeypatch):
    tracker = ChangeTracker(plain_model, ["c"])
    tracker.mark("user", [3])

    def fail(*arguments, **options):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("jaxrec.embed.rows.Rows.read", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            tracker.changes("c", with_rows=True)
    assert tracker.changes("c")["user"].ids.tolist() == [3]
