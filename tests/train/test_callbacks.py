from __future__ import annotations

import pytest

from jaxrec.train import CheckpointManager, SaveCheckpoints, WriteMetrics
from jaxrec.train.checkpoint import PreservationPolicy, all_steps, restore
from tests.train.ranker import GROUP, batches, make


class Writer:
    def __init__(self):
        self.written = []

    def write(self, step, values):
        self.written.append((step, values))

    def close(self):
        pass


def test_checkpoints_have_metrics_and_plan(tmp_path):
    values = iter([0.5, 0.9, 0.6])
    with CheckpointManager(tmp_path, PreservationPolicy(best=1, metric="auc")) as manager:
        saving = SaveCheckpoints(manager, 2, metrics=lambda: {"auc": next(values)}, plan="{}")
        trainer = make(callbacks=[saving])
        assert trainer.train(batches(5)) == 5
        assert all_steps(tmp_path) == [4, 5]  # the best and the last, which is complete
        metadata = restore(trainer.model, tmp_path, step=4)
    assert (metadata.metrics, metadata.plan, metadata.batches) == ({"auc": 0.9}, "{}", 4)


def test_a_step_is_saved_once(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        trainer = make(callbacks=[SaveCheckpoints(manager, every=3)])
        trainer.train(batches(3))
        before = (tmp_path / "3").stat().st_ino
        trainer.train(batches(3), steps=0)
    assert all_steps(tmp_path) == [3]
    assert (tmp_path / "3").stat().st_ino == before


def test_metrics_are_those_of_the_step():
    writer, results = Writer(), []
    trainer = make(metrics=GROUP, callbacks=[WriteMetrics(writer, every=2)])
    trainer.train(batches(5))
    again = make(metrics=GROUP)
    for batch in batches(4):
        again.train([batch])
        results.append(again.compute_metrics())
    assert [step for step, _ in writer.written] == [2, 4]
    for (_, values), expected in zip(writer.written, results[1::2], strict=True):
        assert values == {"loss": values["loss"], **expected}


def test_arguments_that_are_none(tmp_path, unchecked):
    with pytest.raises(
        TypeError, match=r"must be jaxrec.train.CheckpointManager\(directory\), got"
    ):
        SaveCheckpoints("directory")
    with CheckpointManager(tmp_path) as manager:
        for make_callback in (
            lambda: SaveCheckpoints(manager, 0),
            lambda: WriteMetrics(Writer(), 0),
        ):
            with pytest.raises(ValueError, match="every=0 must be 1 or more"):
                make_callback()
