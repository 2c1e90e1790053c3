"""Changes of open vocabularies, restored models and whole training runs bring copies up to date."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.tier import ChangeTracker, ahead
from jaxrec.tier.planning.tier import tier_of
from tests.tier import models
from tests.tier.changes.models import (
    OPEN,
    SETTINGS,
    Copy,
    assert_same,
    brought_up_to_date,
    draw_batch,
    ids_now,
    make_open,
    make_plain,
    tables_of,
)

# Small tables lose rows often.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", SETTINGS)
def test_open_vocabularies(settings, devices):
    samples = 4 if devices == 1 else 8
    model = make_open(SETTINGS[settings], devices, rows=110 if devices == 1 else 192)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    copy, often = Copy(), Copy()
    tracker = ChangeTracker(model, ("seldom", "often"))
    batches, _ = models.stream(40, 300, samples=samples)
    loop = tracker.watch(ahead(model, batches, look_ahead=2))
    for number, (x, y) in enumerate(loop):
        models.train_step(model, optimizer, x, jnp.asarray(y))
        if number % 11 == 5:
            often.update(tracker.changes("often", with_rows=True))
            often.assert_current(model)
        if number == 20:
            copy.update(tracker.changes("seldom", with_rows=True))
            copy.assert_current(model)
    assert (settings == "refused") or tier_of(model).statistics()["query"]["evicted"] > 0
    for each, consumer in ((copy, "seldom"), (often, "often")):
        changes = tracker.changes(consumer, with_rows=True)
        each.update(changes)
        each.assert_current(model)
        for name in OPEN:
            assert each.rows[name].keys() == ids_now(model, name)
        has_removed = any(changes[name].removed.size for name in OPEN)
        assert has_removed or settings != "lost"
        assert not has_removed or settings != "stored"
        assert changes["age"].ids.size
    assert sorted(copy.unknown["query"]) == ([0, 1, 2] if settings == "refused" else [])


def test_plain_tables_of_an_open_model_are_recorded():
    model = make_open(SETTINGS["lost"])
    tracker = ChangeTracker(model, ["c"])
    batches, _ = models.stream(3, 60, samples=4)
    for taken, _ in enumerate(ahead(model, batches), 1):
        ages = {int(i) for x, _ in batches[:taken] for i in models.ids_of(x, "age")}
        state = tracker.state()["c"]  # which moves no position
        assert state["age"]["ids"].tolist() == sorted(ages)
        items = {int(i) for x, _ in batches[:taken] for i in models.ids_of(x, "item")}
        # Rows of later batches may have begun with their first values.
        assert items <= set(state["item"]["ids"].tolist())
    with pytest.raises(TypeError, match=r"recorded as jaxrec\.tier\.ahead yields"):
        tracker.record(batches[0])
    list(ahead(model, batches, is_training=False))
    tracker.changes("c")
    list(ahead(model, batches, is_training=False))
    assert not tracker.changes("c")["age"].ids.size


@pytest.mark.parametrize("settings", ["lost", "stored"])
def test_state_of_an_open_model(settings):
    """A tracker takes over the state of another, made before ids were evicted."""
    model = make_open(SETTINGS[settings])
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker = ChangeTracker(model, ["c"])
    batches, _ = models.stream(40, 300, samples=4)
    loop = ahead(model, batches, look_ahead=2)
    for number, (x, y) in enumerate(loop):
        models.train_step(model, optimizer, x, jnp.asarray(y))
        if number == 15:
            other = ChangeTracker(model, ["c"])
            state = tracker.state()
            other.load_state(state)
            assert_changes(other.state()["c"], state["c"])
    expected = tracker.changes("c")
    assert_changes({k: vars(v) for k, v in other.changes("c").items()}, state["c"], expected)


def assert_changes(found, state, changes=None):
    for name, kinds in state.items():
        for kind in ("ids", "removed"):
            if changes is None:
                np.testing.assert_array_equal(found[name][kind], kinds[kind])
            else:
                np.testing.assert_array_equal(found[name][kind], getattr(changes[name], kind))


def test_rows_that_a_file_brings(tmp_path):
    batches, names = models.stream(10, 60, samples=4)
    model, other = make_open(SETTINGS["lost"]), make_open(SETTINGS["lost"])
    list(ahead(model, batches))
    count = jaxrec.tier.export_rows(model, "item", tmp_path / "item.parquet")
    tracker = ChangeTracker(other, ["c"])
    jaxrec.tier.import_rows(other, "item", tmp_path / "item.parquet")
    changes = tracker.changes("c", with_rows=True)
    assert changes["item"].ids.size == count
    np.testing.assert_array_equal(
        changes["item"].rows, model.embeddings.rows("item", changes["item"].ids)
    )
    tracker.mark("item", names[:3])
    tracker.mark("query")
    marked = set(tracker.changes("c")["item"].ids.tolist())
    assert marked == set(names[:3].tolist()) & ids_now(other, "item")


def test_a_restored_model_has_changed(tmp_path):
    batches, _ = models.stream(12, 200, samples=4)
    model, other = make_open(SETTINGS["lost"]), make_open(SETTINGS["lost"])
    optimizers = [jaxrec.Optimizer(each, optax.sgd(0.1)) for each in (model, other)]
    list(ahead(model, batches[:6]))
    list(ahead(other, batches[6:]))
    with jaxrec.train.CheckpointManager(tmp_path / "run") as manager:
        manager.save(model, optimizers[0], batches=6)
    copy, tracker = Copy(), ChangeTracker(other, ["c"])
    tracker.mark("item")
    tracker.mark("query")
    tracker.mark("item_wide")
    copy.update(tracker.changes("c", with_rows=True))
    jaxrec.train.restore(other, tmp_path / "run", optimizers[1])
    changes = tracker.changes("c", with_rows=True)
    assert changes["item"].removed.size
    assert changes["age"].ids.tolist() == list(range(10))
    copy.update(changes)
    copy.assert_current(other)
    for name in OPEN:
        assert copy.rows[name].keys() == ids_now(model, name)


def loss_of(model, batch):
    features, labels = batch
    return optax.sigmoid_binary_cross_entropy(model(features), labels).mean(), {}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "open"])
def test_no_change_is_lost_in_a_trainer(kind, accumulate):
    """The trainer reads batches ahead in threads; its callbacks ask after steps."""
    if kind == "plain":
        model, _ = make_plain()
        rng = np.random.default_rng(0)
        batches = [draw_batch(rng) for _ in range(24)]
        copy = tables_of(model)
    else:
        model = make_open(SETTINGS["lost"], rows=200)
        batches, copy = models.stream(24, 300, samples=4)[0], Copy()
    tracker = ChangeTracker(model, ["c"], ahead=4 + 2 * accumulate)

    class Publisher(jaxrec.train.Callback):
        def on_step_dispatched(self, trainer, step):
            if step % 3 == 0:
                changes = tracker.changes("c", with_rows=True, with_state=True)
                brought_up_to_date(copy, changes) if kind == "plain" else copy.update(changes)

    trainer = jaxrec.train.Trainer(
        model=model,
        optimizer=jaxrec.Optimizer(model, optax.sgd(0.1)),
        loss=loss_of,
        accumulate=accumulate,
        callbacks=[Publisher()],
    )
    trainer.train(tracker.watch(batches))
    changes = tracker.changes("c", with_rows=True, with_state=True)
    if kind == "plain":
        brought_up_to_date(copy, changes)
        assert_same(copy, tables_of(model))
    else:
        copy.update(changes)
        copy.assert_current(model)


def test_a_discarded_tracker_is_forgotten():
    model = make_open(SETTINGS["lost"])
    tracker = ChangeTracker(model, ["c"])
    assert len(tier_of(model).observers) == 1
    del tracker
    assert len(tier_of(model).observers) == 0
