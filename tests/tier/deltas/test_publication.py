"""Versions bring copies to the model that was published, bit for bit, whatever happens."""

from __future__ import annotations

import pathlib
import types

import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.fs as pafs
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrec
from jaxrec.tier import (
    ChangeTracker,
    Subscriber,
    ahead,
    publish,
)
from jaxrec.tier.deltas import folder
from jaxrec.tier.deltas.folder import VersionFolder
from jaxrec.tier.planning.tier import tier_of
from tests.fuzz import max_examples
from tests.tier.deltas import models as deltas
from tests.tier.deltas.models import (
    ROWS,
    assert_same,
    draw_fixed,
    draw_open,
    fixed_model,
    open_model,
    publish_and_train,
    steps,
    trained_model,
)

# Small tables lose rows often.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")


class Sequence(nnx.Module):
    """A model with dropout, batch statistics, a bfloat16 table, a frozen one and a pytree."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        config = jaxrec.EmbeddingConfig
        self.items = jaxrec.EmbeddingCollection(
            [
                config("item", 30, 8, dtype="bfloat16", initializer="normal"),
                config("fixed", 30, 4, ["item"], trainable=False),
            ],
            optimizer=jaxrec.optim.adam(0.1),
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(12, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.over = nnx.Linear(12, 1, rngs=rngs)
        self.limits = nnx.Variable({"low": jnp.full(2, seed), "high": (jnp.float32(seed),)})

    def __call__(self, features):
        found = self.items(features)
        values = jnp.concatenate([each.values for each in found.values()], 1)
        values = self.dropout(self.norm(values.astype(jnp.float32)))
        return self.over(values)[:4, 0]


# The model that is published, and two copies, of one form or of others.
PAIRS = {
    "lost": lambda: (trained_model("lost"), open_model("lost", seed=5)),
    "stored": lambda: (trained_model("stored"), open_model("stored", "sgd", seed=5)),
    "plain": lambda: (trained_model("plain"), fixed_model("cached", seed=3)),
    "cached": lambda: (fixed_model("cached", "sgd"), fixed_model("cached", "sgd", seed=7)),
    "cached_to_plain": lambda: (trained_model("cached"), fixed_model("plain", "sgd")),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    """A model, its optimizer, a function that draws batches, and copies; examples share them."""
    model, copy = PAIRS[request.param]()
    draw = draw_open if request.param in ("lost", "stored") else draw_fixed
    return model, jaxrec.Optimizer(model, optax.sgd(0.1)), draw, copy


@given(data=st.data())
@settings(max_examples=max_examples(4))
def test_copies_are_equal_after_any_sequence(tmp_path_factory, pair, data):
    """Steps with evictions, publishing, failures of it, new publishers and copies that sleep."""
    directory = tmp_path_factory.mktemp("versions")
    model, optimizer, draw, copy = pair
    tracker, subscriber = ChangeTracker(model, ["publisher"]), Subscriber(copy, directory)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    full_every = data.draw(st.sampled_from([None, 1, 2, 100]))
    actions = st.sampled_from(["train", "train", "publish", "fail", "update", "restart"])
    for action in [*data.draw(st.lists(actions, max_size=8)), "train", "publish"]:
        if action == "train":
            steps(model, optimizer, tracker, [draw(rng) for _ in range(2)])
        elif action == "publish":
            publish(model, directory, tracker=tracker, full_every=full_every)
        elif action == "fail":
            fails_to_publish(model, directory, tracker=tracker, full_every=full_every)
        elif action == "update":
            subscriber.update()
        else:
            tracker = ChangeTracker(model, ["publisher"])
    subscriber.update()
    assert subscriber.update() == 0
    assert_same(copy, model)


def fails_to_publish(model, directory, failure="commit", **options):
    with pytest.MonkeyPatch.context() as patch:
        if failure == "move":
            patch.setattr(folder.pafs, "LocalFileSystem", deltas.NoMoves)
        else:
            patch.setattr(VersionFolder, failure, full_disk)
        with pytest.raises(OSError, match="disk is full"):
            publish(model, directory, **options)


def full_disk(*_, **__):
    raise OSError(28, "the disk is full")


@pytest.mark.parametrize("kind", ["lost", "stored"])
def test_deltas_hold_changed_rows_and_tombstones(tmp_path, kind):
    model, copy = trained_model(kind), open_model(kind)
    subscriber = Subscriber(copy, tmp_path, with_state=True)
    options = {"with_state": True, "full_every": 100, "step": 7}
    found = []
    for version in publish_and_train(model, tmp_path, draw_open, rounds=3, number=10, **options):
        found.append(version)
        assert subscriber.update() == 1
        assert subscriber.version == version.version
        assert subscriber.step == 7
        assert_same(copy, model, with_state=True)
    assert [each.version for each in found] == [1, 2, 3, 4]
    assert [each.is_full for each in found] == [True] + [False] * 3
    assert [each.is_delta for each in found] == [False] + [True] * 3
    assert sum(each.removed for each in found) > 0 or kind == "stored"
    assert all(0 < each.rows < 4 * ROWS for each in found[1:])
    assert tier_of(model).statistics()["query"]["evicted"] > 0


def test_all_kinds_of_variables(tmp_path):
    """bfloat16 rows, NaN, -0, batch statistics, random keys, a pytree and a frozen table."""
    model, copy = Sequence(), Sequence(seed=1)
    optimizer = jaxrec.Optimizer(model, optax.adam(0.1))
    tracker = ChangeTracker(model, ["publisher"])
    subscriber = Subscriber(copy, tmp_path, with_state=True)
    publish(model, tmp_path, tracker=tracker, with_state=True)
    subscriber.update()
    assert_same(copy, model, with_state=True)
    for number in range(3):
        batch = jaxrec.KeyedJaggedArray.from_lists({"item": [[number, 7], [], [29], [3]]})
        steps(model, optimizer, tracker, [(batch, np.ones(4, np.float32))])
        model.items.load_rows("item", [number], np.array([[np.nan, -0.0, *range(6)]]))
        tracker.mark("item", [number])
        model.items.load_rows("fixed", [number], np.full((1, 4), 0.5 + number))
        tracker.mark("fixed", [number])
        model.limits.set_value({"low": jnp.full(2, number), "high": (jnp.float32(number / 2),)})
        assert publish(model, tmp_path, tracker=tracker, with_state=True, full_every=9).rows == 5
        assert subscriber.update() == 1
        assert_same(copy, model, with_state=True)
    assert np.signbit(np.asarray(copy.items.rows("item", [2]), np.float32)[0, 1])


def test_full_versions_come_when_deltas_have_as_many_bytes(tmp_path):
    model = trained_model("plain")
    found = list(publish_and_train(model, tmp_path, draw_fixed, rounds=12, number=8))
    fulls = [each.version for each in found if each.is_full]
    assert len(fulls) > 2
    assert fulls[1] > 2
    names = [name.version for name in VersionFolder(tmp_path).names()]
    assert names == list(range(fulls[-2], 14))
    assert {path.name.split("-")[0] for path in tmp_path.iterdir() if path.is_dir()} == {
        f"{number:012d}" for number in names
    }
    copy = fixed_model("plain")
    assert Subscriber(copy, tmp_path).update() == 14 - fulls[-1]
    assert_same(copy, model)


def test_a_folder_that_is_begun_anew(tmp_path):
    model, copy = trained_model("plain"), fixed_model("plain")
    subscriber = Subscriber(copy, tmp_path)
    list(publish_and_train(model, tmp_path, draw_fixed, full_every=9))
    assert subscriber.update() == 5
    for path in list(tmp_path.glob("0*.json")):
        path.unlink()
    model.embeddings.load_rows("user", [3], np.ones((1, 4)))
    assert publish(model, tmp_path).version == 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1  # of all that were left
    assert subscriber.update() == 1
    assert_same(copy, model)


@pytest.mark.parametrize("failure", ["names", "begin", "writing", "commit", "move"])
def test_publishing_that_fails_loses_nothing(tmp_path, failure):
    model, copy = trained_model("plain"), fixed_model("plain")
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker, subscriber = ChangeTracker(model, ["publisher"]), Subscriber(copy, tmp_path)
    rng = np.random.default_rng(0)
    options = {"tracker": tracker, "full_every": 9}
    publish(model, tmp_path, **options)
    steps(model, optimizer, tracker, [draw_fixed(rng)])
    fails_to_publish(model, tmp_path, failure, **options)
    steps(model, optimizer, tracker, [draw_fixed(rng)])
    version = publish(model, tmp_path, **options)
    assert version.version == 2
    assert version.is_delta
    assert not version.is_full
    subscriber.update()
    assert_same(copy, model)


def test_old_versions_that_cannot_be_removed(tmp_path, monkeypatch):
    model, copy = trained_model("plain"), fixed_model("plain")
    tracker = ChangeTracker(model, ["publisher"])
    options = {"tracker": tracker, "full_every": 1, "keep": 1}
    with monkeypatch.context() as patch:
        patch.setattr(VersionFolder, "remove_before", full_disk)
        for _ in range(3):
            publish(model, tmp_path, **options)
    assert [name.version for name in VersionFolder(tmp_path).names()] == [1, 2, 3]
    assert publish(model, tmp_path, **options).is_delta
    assert [name.version for name in VersionFolder(tmp_path).names()] == [4]
    Subscriber(copy, tmp_path).update()
    assert_same(copy, model)


def test_other_readers_of_changes_make_the_next_version_full(tmp_path):
    model = trained_model("plain")
    tracker = ChangeTracker(model, ["publisher", "other"])
    options = {"tracker": tracker, "full_every": 9}
    assert not publish(model, tmp_path, **options).is_delta
    tracker.changes("other")
    assert publish(model, tmp_path, **options).is_delta
    tracker.changes("publisher")
    assert not publish(model, tmp_path, **options).is_delta
    tracker.load_state(tracker.state())
    assert not publish(model, tmp_path, **options).is_delta
    assert not publish(model, tmp_path, **options, with_state=True).is_delta
    assert publish(model, tmp_path, **options, with_state=True).is_delta
    publish(model, tmp_path)
    assert not publish(model, tmp_path, **options, with_state=True).is_delta
    assert publish(model, tmp_path / "second", **options).is_full


def test_a_model_that_is_restored(tmp_path):
    """Ids that the checkpoint has not lose their rows in the copy."""
    model, copy = trained_model("stored"), open_model("stored")
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker = ChangeTracker(model, ["publisher"])
    subscriber = Subscriber(copy, tmp_path / "versions")
    rng = np.random.default_rng(3)
    options = {"tracker": tracker, "full_every": 9}
    steps(model, optimizer, tracker, [draw_open(rng) for _ in range(2)])
    with jaxrec.train.CheckpointManager(tmp_path / "run") as manager:
        manager.save(model, optimizer, batches=2)
    steps(model, optimizer, tracker, [draw_open(rng) for _ in range(8)])
    publish(model, tmp_path / "versions", **options)
    subscriber.update()
    jaxrec.train.restore(model, tmp_path / "run", optimizer)
    version = publish(model, tmp_path / "versions", **options)
    assert version.is_delta
    assert version.removed > 0
    assert subscriber.update() == 1
    assert_same(copy, model)


def test_a_file_system_without_locks_and_sync(tmp_path, monkeypatch):
    """As of object stores: the folder is reached by PyArrow alone."""
    local = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    found = types.SimpleNamespace(from_uri=lambda url: (local, url.removeprefix("s3://")))
    monkeypatch.setattr(
        folder,
        "pafs",
        types.SimpleNamespace(FileSystem=found, FileSelector=pafs.FileSelector),
    )
    model, copy = trained_model("plain"), fixed_model("plain")
    subscriber = Subscriber(copy, "s3://bucket/versions")
    for _ in publish_and_train(model, "s3://bucket/versions", draw_fixed, full_every=2):
        subscriber.update()
        assert_same(copy, model)
    assert subscriber.version == 5
    assert (tmp_path / "bucket" / "versions").is_dir()


def test_arguments(tmp_path):
    model = trained_model("plain")
    with pytest.raises(ValueError, match="full_every is an integer of 1 or more, got 0"):
        publish(model, tmp_path, full_every=0)
    with pytest.raises(ValueError, match="keep is an integer of 1 or more, got True"):
        publish(model, tmp_path, keep=True)
    with pytest.raises(TypeError, match="tracker"):
        publish(model, tmp_path, tracker="publisher")
    with pytest.raises(ValueError, match="tracks another model"):
        publish(model, tmp_path, tracker=ChangeTracker(Sequence(), ["publisher"]))
    with pytest.raises(KeyError, match="no consumer is named 'publisher'"):
        publish(model, tmp_path, tracker=ChangeTracker(model, ["other"]))
    with pytest.raises(ValueError, match="three slashes"):
        publish(model, "file://data/versions")
    with pytest.raises(ValueError, match="no folder has the URL 'nothing://there'"):
        publish(model, "nothing://there")
    with pytest.raises(TypeError, match=r"[Mm]odule"):
        Subscriber({}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        publish(model, tmp_path / "file" / "versions")
    assert Subscriber(model, tmp_path / "none").update() == 0
    assert VersionFolder("file:///data/a%20b?c#d").local == pathlib.Path("/data/a b?c#d")


def test_one_publisher_at_a_time(tmp_path):
    with VersionFolder(tmp_path).locked(), pytest.raises(BlockingIOError):
        publish(fixed_model("plain"), tmp_path)


def test_rows_are_not_taken_away_in_a_training_loop(tmp_path):
    model, copy = trained_model("lost"), open_model("lost")
    rng = np.random.default_rng(4)
    list(ahead(copy, [draw_open(rng)]))
    publish(model, tmp_path)
    loop = ahead(copy, [draw_open(rng) for _ in range(6)], look_ahead=2)
    next(loop)
    with pytest.raises(RuntimeError, match="plans training batches"):
        Subscriber(copy, tmp_path).update()
    loop.close()
    assert Subscriber(copy, tmp_path).update() == 1
    assert_same(copy, model)


@pytest.mark.slow
def test_killed_publishers(tmp_path):
    """Whenever a publisher is killed, a copy is one of the versions, whole."""
    assert deltas.kill_repeatedly(tmp_path, kills=3) >= 2
