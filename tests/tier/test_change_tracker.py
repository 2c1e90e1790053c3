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
from jaxrec import mesh as m
from jaxrec.mesh import shard_batch
from jaxrec.tier import ChangeTracker, Dynamic, ahead, lfu, lru, make, shared
from jaxrec.tier.tier import tier_of
from tests.fuzz import max_examples
from tests.tier import models

PLACEMENTS = {
    "one_device": None,
    "data_parallel": m.data_parallel(),
    "row_wise": m.row_wise(),
    "column_wise": m.column_wise(devices=(2, 7)),
    "grid": m.grid(),
}
BATCH = 8

# Small tables lose rows often.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")


class Plain(nnx.Module):
    """Tables that share a feature, one with two features, and a frozen one."""

    def __init__(self):
        config = jaxrec.EmbeddingBagConfig
        tables = [
            config("item", 60, 8),
            config("user", 40, 8, ["user", "friend"]),
            config("age", 50, 8, ["user"]),
            config("fixed", 60, 8, ["item"], trainable=False),
        ]
        rngs, optimizer = nnx.Rngs(0), jaxrec.optim.adam(0.1)
        self.deep = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs)
        self.wide = jaxrec.EmbeddingBagCollection(
            [config("item", 60, 8)], optimizer=optimizer, rngs=rngs
        )

    def __call__(self, features):
        return self.deep(features).values.sum(1) + self.wide(features).values.sum(1)


NAMES = ("deep/item", "user", "age", "wide/item")
READS = {"deep/item": ["item"], "user": ["user", "friend"], "age": ["user"], "wide/item": ["item"]}


def make_plain(placement=None):
    if placement is None:
        return Plain(), None
    mesh = jax.make_mesh((2, 4), ("host", "device"))
    plan = dict.fromkeys(["item", "user", "age", "fixed"], placement)
    return jaxrec.shard(Plain, jaxrec.plan.ShardingPlan.from_dict(plan), mesh), mesh


def draw_batch(rng):
    data = {
        key: [rng.integers(0, 40, n).tolist() for n in rng.integers(0, 3, BATCH)]
        for key in ("item", "user", "friend", "unread")
    }
    capacities = dict.fromkeys(data, 2 * BATCH)
    features = jaxrec.KeyedJaggedArray.from_lists(data, capacities=capacities)
    return features, rng.integers(0, 2, BATCH).astype(np.float32)


def tables_of(model):
    """Rows and state of the trained tables, by the tracker's names."""
    result = {}
    for name in NAMES:
        path, _, table = name.rpartition("/")
        collection = getattr(model, path or "deep")
        result[name] = {"rows": np.array(collection.table(table))}
        result[name] |= {k: np.array(x) for k, x in collection.table_state(table).items()}
    return result


def brought_up_to_date(copy, changes):
    for name, arrays in copy.items():
        each = changes[name]
        for key, array in {"rows": each.rows, **each.state}.items():
            arrays[key][each.ids] = array


def assert_same(copy, tables):
    for name, arrays in tables.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(copy[name][key], array, err_msg=f"{name} {key}")


def ids_in(batches):
    """The ids of batches by the names of the tables that read them."""
    return {
        name: sorted(
            {
                i
                for features, _ in batches
                for key in keys
                for bag in features[key].to_lists()
                for i in bag
            }
        )
        for name, keys in READS.items()
    }


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


OPEN = ("item", "query", "item_wide")
SETTINGS = {
    "lost": Dynamic(eviction=lru()),
    "stored": Dynamic(store="memory://", unknown=shared(3)),
    "refused": Dynamic(eviction=lfu(), admit_after=2, unknown=shared(3)),
}


def make_open(settings, devices=1, rows=110):
    def made():
        return make(lambda: models.Ranker(rows, "adam"), dict.fromkeys(OPEN, settings))

    if devices == 1:
        return made()
    mesh = jax.make_mesh((devices,), ("data",))
    placements = dict.fromkeys((*OPEN, "age"), jaxrec.mesh.row_wise())
    placements["query"] = jaxrec.mesh.column_wise([0, 1])
    return jaxrec.shard(made, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)


class Copy:
    """A copy of a model's open tables, by id, and of the rows that other ids read."""

    def __init__(self):
        self.rows = {name: {} for name in OPEN}
        self.unknown = {name: {} for name in OPEN}

    def update(self, changes):
        for name in OPEN:
            each = changes[name]
            assert not set(each.ids.tolist()) & set(each.removed.tolist())
            self.rows[name].update(zip(each.ids.tolist(), each.rows, strict=True))
            for i in each.removed.tolist():
                self.rows[name].pop(i, None)
            self.unknown[name].update(
                zip(each.unknown.ids.tolist(), each.unknown.rows, strict=True)
            )

    def assert_current(self, model):
        for name, rows in self.rows.items():
            collection = model.wide if name == "item_wide" else model.embeddings
            now = collection.rows(name, list(rows))
            np.testing.assert_array_equal(np.array(list(rows.values())).reshape(now.shape), now)
            table = np.asarray(collection.table(name))
            for row, values in self.unknown[name].items():
                np.testing.assert_array_equal(values, table[row])


def ids_now(model, name):
    """The ids that have a row, in the table or in its store, when the model is settled."""
    (each,) = [v for v in tier_of(model).vocabularies if name in v.name.split("+")]
    ids = set(each.vocabulary.map.items()[0].tolist())
    if each.transfer is not None:
        for stored, _ in each.transfer.store.scan():
            ids |= set(stored.tolist())
    return ids


@pytest.mark.parametrize("devices", [1, 8])
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
    jaxrec.train.restore(tmp_path / "run", other, optimizers[1])
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
    model = jaxrec.tier.ManagedCollisionEmbeddingBagCollection(
        collection, {"item": jaxrec.tier.MultiProbeConfig(100)}, rngs=nnx.Rngs(0)
    )
    with pytest.raises(TypeError, match="gives rows to ids in the compiled step"):
        ChangeTracker(model, ["c"])


def test_a_failure_leaves_the_position(plain_model, monkeypatch):
    tracker = ChangeTracker(plain_model, ["c"])
    tracker.mark("user", [3])

    def fail(*arguments, **options):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("jaxrec.tier.change_tracker.read_ids", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            tracker.changes("c", with_rows=True)
    assert tracker.changes("c")["user"].ids.tolist() == [3]


def test_a_discarded_tracker_is_forgotten():
    model = make_open(SETTINGS["lost"])
    tracker = ChangeTracker(model, ["c"])
    assert len(tier_of(model).observers) == 1
    del tracker
    assert len(tier_of(model).observers) == 0
