"""Checkpoints that hold changes alone restore as full ones do."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import Cached, ChangeTracker, Dynamic, make
from jaxrec.tier.planning.tier import tier_of
from jaxrec.tier.stores import row_store
from jaxrec.train import checkpoint
from jaxrec.train.checkpoint import (
    CheckpointError,
    CheckpointManager,
    PreservationPolicy,
    all_steps,
    manager,
    restore,
)
from tests.tier import models
from tests.tier.deltas.models import (
    OPEN,
    Fixed,
    assert_same,
    draw_fixed,
    draw_open,
    fixed_model,
    open_model,
    steps,
    trained_model,
)

# Small tables lose rows often.
pytestmark = pytest.mark.filterwarnings("ignore:the table .* thrashes")

KINDS = {
    "lost": (lambda: open_model("lost"), draw_open),
    "stored": (lambda: open_model("stored"), draw_open),
    "plain": (lambda: fixed_model("plain"), draw_fixed),
    "cached": (lambda: fixed_model("cached"), draw_fixed),
}
STORES = {
    "memory": "memory://",
    "file": "file://{path}",
    "rocksdb": "rocksdb://{path}",
    "stack": "memory+file://{path}?memory=1MB",
}
KEEP_ALL = PreservationPolicy(latest=99)


class Run:
    """A model that trains, and its checkpoints."""

    def __init__(self, directory, kind, model=None, **options):
        self.made, self.draw = KINDS[kind]
        self.model = trained_model(kind) if model is None else model
        self.optimizer = jaxrec.Optimizer(self.model, optax.adam(0.1))
        self.tracker = ChangeTracker(self.model, ["checkpoint"])
        self.rng, self.directory = np.random.default_rng(2), directory
        self.manager = CheckpointManager(
            directory, options.pop("policy", KEEP_ALL), tracker=self.tracker, **options
        )

    def train(self, number=2):
        steps(
            self.model, self.optimizer, self.tracker, [self.draw(self.rng) for _ in range(number)]
        )

    def save(self):
        path = self.manager.save(self.model, self.optimizer)
        self.manager.wait_until_finished()
        return path

    def restored(self, step=None, made=None, **options):
        model = (made or self.made)()
        optimizer = jaxrec.Optimizer(model, optax.adam(0.1))
        restore(model, self.directory, optimizer, step=step, **options)
        return model, optimizer


def size(path):
    return sum(each.stat().st_size for each in (path / "state").rglob("*") if each.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_they_restore_as_full_ones(tmp_path, kind):
    """Also the run that continues is the same, to the bit."""
    run = Run(tmp_path / "run", kind, full_every=3)
    with run.manager:
        for _ in range(6):
            run.train()
            run.save()
    bases = [checkpoint.files.read_link(run.directory / str(step)).base for step in range(2, 13, 2)]
    assert bases == [None, 2, 4, None, 8, 10]
    model, optimizer = run.restored()
    assert_same(model, run.model, with_state=True)
    if kind == "cached":
        batches = [run.draw(run.rng) for _ in range(2)]
        for each, of_model in ((model, optimizer), (run.model, run.optimizer)):
            steps(each, of_model, run.tracker, batches)
        assert_same(model, run.model, with_state=True)


def contents(model):
    """The records of the stores, by vocabulary and id."""
    return {
        (each.name, key): bytes(record)
        for each in tier_of(model).vocabularies
        for ids, records in each.transfer.store.scan()
        for key, record in zip(ids.tolist(), records, strict=True)
    }


def is_changes(run, step):
    return row_store.is_changes(run.directory / str(step) / "stores" / "user")


@pytest.mark.parametrize("name", STORES)
def test_they_hold_the_records_of_stores_that_changed(tmp_path, name):
    def made(path):
        url = STORES[name].format(path=tmp_path / path)
        return make(lambda: Fixed("adam"), {"user": Cached(rows=40, store=url)})

    run = Run(tmp_path / "run", "cached", made("store"), full_every=3)
    with run.manager:
        for _ in range(5):
            run.train()
            run.save()
    assert [is_changes(run, step) for step in range(2, 11, 2)] == [False, True, True, False, True]
    model, _ = run.restored(made=lambda: made("restored"))
    assert contents(model) == contents(run.model)
    assert_same(model, run.model, with_state=True)
    jaxrec.tier.close(model)
    jaxrec.tier.close(run.model)


def test_records_that_were_removed(tmp_path):
    run = Run(tmp_path / "run", "stored", open_model("stored"))
    tier = tier_of(run.model)
    with run.manager:
        run.train(20)
        run.save()
        stored = contents(run.model)
        with tier.settled(run.model):
            for each in tier.vocabularies:
                ids = sorted(key for name, key in stored if name == each.name)[::2]
                tier.forget(run.model, each, np.array(ids, np.int64))
        run.train(1)
        run.save()
    assert len(contents(run.model)) < len(stored)
    model, _ = run.restored()
    assert contents(model) == contents(run.model)
    assert_same(model, run.model, with_state=True)


def test_stores_after_a_save_that_fails_and_a_restored_checkpoint(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", "cached", fixed_model("cached"))

    def full_disk(*_):
        raise OSError(28, "the disk is full")

    with run.manager:
        run.train()
        run.save()
        run.train()
        with monkeypatch.context() as patch:
            patch.setattr(manager, "write_checksums", full_disk)
            with pytest.raises(OSError, match="disk is full"):
                run.save()
        run.train()
        run.save()
        assert is_changes(run, 6)
        assert_same(run.restored()[0], run.model, with_state=True)
        # The store then has other records than those of the checkpoint before, all of them.
        restore(run.model, run.directory, run.optimizer, step=2)
        run.optimizer.step.set_value(run.optimizer.step.get_value() + 100)
        run.save()
    assert not is_changes(run, 102)
    assert contents(run.restored()[0]) == contents(run.model)


@pytest.mark.slow
def test_they_restore_over_a_mesh(tmp_path):
    run = Run(tmp_path / "run", "plain")
    with run.manager:
        for _ in range(3):
            run.train(1)
            run.save()
    plan = jaxrec.plan.ShardingPlan.from_dict(
        dict.fromkeys(("user", "age"), jaxrec.mesh.row_wise())
    )
    mesh = jax.make_mesh((8,), ("data",))
    model, _ = run.restored(made=lambda: jaxrec.shard(lambda: Fixed("adam"), plan, mesh))
    assert_same(model, run.model, with_state=True)


@pytest.mark.slow
def test_they_restore_to_fewer_rows(tmp_path):
    run = Run(tmp_path / "run", "lost")
    with run.manager:
        for _ in range(3):
            run.train(3)
            run.save()

    def smaller():
        return make(lambda: models.Ranker(20, "adam"), dict.fromkeys(OPEN, Dynamic()))

    model, _ = run.restored(made=smaller, resized=True)
    ids, _ = tier_of(model).vocabularies[0].vocabulary.map.items()
    assert ids.size == 19 < len(tier_of(run.model).vocabularies[0].vocabulary)
    for name in ("item", "item_wide"):
        collections = [x.wide if name == "item_wide" else x.embeddings for x in (model, run.model)]
        np.testing.assert_array_equal(*(each.rows(name, ids) for each in collections))


def test_they_restore_to_a_smaller_cache(tmp_path):
    run = Run(tmp_path / "run", "cached")
    with run.manager:
        for _ in range(3):
            run.train(2)
            run.save()
    model, _ = run.restored(made=lambda: make(lambda: Fixed("adam"), {"user": Cached(rows=25)}))
    assert_same(model, run.model, with_state=True)


def test_they_hold_the_rows_that_changed(tmp_path):
    config = jaxrec.EmbeddingConfig("item", 20_000, 16)
    model = jaxrec.EmbeddingCollection([config], rngs=nnx.Rngs(0))
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    tracker = ChangeTracker(model, ["checkpoint"])
    with CheckpointManager(tmp_path, KEEP_ALL, tracker=tracker) as saver:
        first = saver.save(model, optimizer)
        model.load_rows("item", [7, 19_999], np.ones((2, 16)))
        tracker.mark("item", [7, 19_999])
        optimizer.step.set_value(optimizer.step.get_value() + 1)
        second = saver.save(model, optimizer)
    assert size(first) > 20_000 * 16 * 4 / 2
    assert size(second) < 10_000
    other = jaxrec.EmbeddingCollection([config], rngs=nnx.Rngs(1))
    restore(other, tmp_path)
    np.testing.assert_array_equal(other.table("item"), model.table("item"))


def test_checkpoints_on_which_others_build_are_kept(tmp_path):
    run = Run(tmp_path / "run", "plain", full_every=3, policy=PreservationPolicy(latest=1))
    kept = []
    with run.manager:
        for _ in range(5):
            run.train(1)
            run.save()
            kept.append(all_steps(run.directory))
    assert kept == [[1], [1, 2], [1, 2, 3], [4], [4, 5]]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damage_of_a_link(tmp_path):
    run = Run(tmp_path / "run", "plain")
    with run.manager:
        for _ in range(4):
            run.train(1)
            run.save()
    before = [np.asarray(x) for x in jax.tree.leaves(run.restored(1)[0].embeddings.table("user"))]
    data = max((run.directory / "2" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    flip(data)
    for step in (3, 4, None):
        with pytest.raises(
            CheckpointError,
            match=r"/run/[34]: the checkpoint builds on .*/run/2, which is damaged \(state/.*"
            r"of steps \[2, 3, 4\], to go on",
        ):
            run.restored(step)
    with pytest.raises(CheckpointError, match="/run/2: the checkpoint is damaged"):
        run.restored(2)
    again = jax.tree.leaves(run.restored(1)[0].embeddings.table("user"))
    np.testing.assert_array_equal(again, before)


def test_a_base_that_is_gone_or_saved_again(tmp_path):
    run = Run(tmp_path / "run", "plain")
    with run.manager:
        run.train(1)
        run.save()
        run.train(1)
        run.save()
    model, optimizer = run.restored(1)
    with CheckpointManager(run.directory, KEEP_ALL) as saver:
        saver.save(model, optimizer)  # the first step again
    with pytest.raises(CheckpointError, match="run/1, on which 2 builds, was saved again"):
        run.restored(2)
    (run.directory / "1").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="run/1 is missing, on which 2 builds"):
        run.restored()


@pytest.mark.parametrize("moment", ["begin", "end"])
def test_a_save_that_fails_loses_no_change(tmp_path, monkeypatch, moment):
    run = Run(tmp_path / "run", "plain")

    def full_disk(*_):
        raise OSError(28, "the disk is full")

    with run.manager:
        run.train(1)
        run.save()
        run.train(1)
        with monkeypatch.context() as patch:
            name = "table_shapes" if moment == "begin" else "write_checksums"
            patch.setattr(manager, name, full_disk)
            with pytest.raises(OSError, match="disk is full"):
                run.save()
        run.train(1)
        assert checkpoint.files.read_link(run.save()).base == 1
    assert_same(run.restored()[0], run.model, with_state=True)


def test_by_a_trainer(tmp_path):
    model, draw = fixed_model("plain"), draw_fixed
    tracker = ChangeTracker(model, ["checkpoint"], ahead=6)
    rng = np.random.default_rng(0)
    with CheckpointManager(tmp_path, KEEP_ALL, tracker=tracker, full_every=4) as saver:
        trainer = jaxrec.train.Trainer(
            model=model,
            optimizer=jaxrec.Optimizer(model, optax.adam(0.1)),
            loss=lambda model, batch: ((model(batch[0]) - batch[1]).mean() ** 2, {}),
            callbacks=[jaxrec.train.SaveCheckpoints(saver, every=2)],
        )
        trainer.train(tracker.watch([draw(rng) for _ in range(7)]))
    links = [checkpoint.files.read_link(tmp_path / str(step)).base for step in (2, 4, 6, 7)]
    assert links == [None, 2, 4, 6]
    other = fixed_model("plain")
    restore(other, tmp_path, jaxrec.Optimizer(other, optax.adam(0.1)))
    assert_same(other, model, with_state=True)


def test_arguments(tmp_path):
    tracker = ChangeTracker(fixed_model("plain"), ["publisher"])
    with pytest.raises(KeyError, match="no consumer 'checkpoint'; it has 'publisher'"):
        CheckpointManager(tmp_path, tracker=tracker)
    with pytest.raises(ValueError, match="full_every is an integer of 1 or more, got 0"):
        CheckpointManager(tmp_path, tracker=tracker, consumer="publisher", full_every=0)
    other = fixed_model("cached")
    with (
        CheckpointManager(tmp_path, tracker=tracker, consumer="publisher") as saver,
        pytest.raises(ValueError, match="tracks another model"),
    ):
        saver.save(other, jaxrec.Optimizer(other, optax.sgd(0.1)))
