"""Early stopping, in a program and from the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrec.commands import main
from jaxrec.train import (
    CheckpointManager,
    EarlyStopping,
    PreservationPolicy,
    SaveCheckpoints,
    load_model,
)
from jaxrec.train.checkpoint import all_steps
from jaxrec.train.run_callbacks import RunStopping
from tests.forks import free_port
from tests.train.ranker import batches, make, same


class Scripted(EarlyStopping):
    """Evaluations whose values are given, one after the other."""

    script = ()

    def values(self, trainer, step):
        value = self.script[step // self.every - 1]
        return None if value is None else {"ne": value, "step": float(step)}


def scripted(script, patience=2, **options):
    stopping = Scripted("ne", patience, **{"every": 1, **options})
    stopping.script = script
    return stopping


def after(steps):
    trainer = make()
    trainer.train(batches(9), steps=steps)
    return trainer


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("script", "mode", "best", "stopped"),
    [
        ([0.9, 0.7, 0.8, 0.75, 0.1, 0.1], "min", 2, 4),
        ([0.1, 0.7, 0.8, 0.75, 0.8, 0.9], "max", 3, 5),
        ([0.9, 0.8, 0.9, 0.7, 0.9, 0.8], "min", 4, 6),
        ([float("nan"), 0.8, float("nan"), 0.9, 0.1, 0.1], "min", 2, 4),
        ([0.9, 0.8, None, None, 0.7, 0.6], "min", 6, None),
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.6], "min", 5, None),
    ],
    ids=["min", "max", "better-in-time", "nan", "not-evaluated", "to-the-end"],
)
def test_the_best_step_is_kept(script, mode, best, stopped):
    stopping = scripted(script, mode=mode)
    trainer = make(callbacks=[stopping])
    assert trainer.train(batches(9), steps=6) == best
    assert (stopping.best_step, stopping.stopped_step, trainer.step) == (best, stopped, best)
    assert stopping.best == script[best - 1]
    same(trainer, after(best))
    # Training goes on from there.
    trainer.callbacks = []
    trainer.train(batches(9)[best:], steps=1)
    same(trainer, after(best + 1))


def test_the_last_step_may_stay():
    trainer = make(callbacks=[scripted([0.5, 0.6, 0.7, 0.8], restore_best=False)])
    assert trainer.train(batches(9)) == 3
    same(trainer, after(3))


def test_evaluated_on_batches():
    held_out = batches(2, seed=1)
    trainer = make(callbacks=[EarlyStopping("loss", 1, batches=lambda: held_out, every=2)])
    trainer.train(batches(9), steps=4)
    losses = {}
    for step in (2, 4):
        again = after(step)
        losses[step] = again.evaluate(held_out)["loss"]
    assert trainer.step == min(losses, key=losses.__getitem__)


def manager(directory, **options):
    policy = PreservationPolicy(**{"best": 1, "metric": "ne", "mode": "min", **options})
    return CheckpointManager(directory, policy)


def test_the_best_checkpoint_is_the_newest(tmp_path):
    with manager(tmp_path) as checkpoints:
        trainer = make(callbacks=[scripted([0.9, 0.7, 0.8, 0.75], manager=checkpoints)])
        assert trainer.train(batches(9)) == 2
        same(trainer, after(2))
        trainer.save(checkpoints, metrics={"ne": 0.7})
    assert all_steps(tmp_path) == [2]


@pytest.mark.parametrize("between", [0.6, 0.7], ids=["better", "as-good"])
def test_a_better_step_between_two_evaluations_is_kept(tmp_path, between):
    """Its checkpoint takes the place of that of the best evaluation, which is step 2."""
    with manager(tmp_path) as checkpoints:
        stopping = scripted([0.7, 0.8, 0.9], manager=checkpoints, every=2)
        trainer = make()
        values = {3: {"ne": between}}
        trainer.callbacks = [
            stopping,
            SaveCheckpoints(checkpoints, 3, metrics=lambda: values.get(trainer.step, {})),
        ]
        assert trainer.train(batches(9)) == 3
        assert (stopping.best_step, stopping.best, stopping.stopped_step) == (3, between, 6)
        same(trainer, after(3))
    assert all_steps(tmp_path) == [3]


def test_skipped_steps_do_not_count(tmp_path):
    """The second batch is skipped, so that step 2 is made by the third."""
    first, *rest = batches(8)
    skipped = (rest[0][0], rest[0][1] * np.float32("nan"))
    with manager(tmp_path) as checkpoints:
        stopping = scripted([0.9, 0.7, 0.8, 0.75], manager=checkpoints)
        trainer = make(callbacks=[stopping], max_skipped=1)
        assert trainer.train([first, skipped, *rest]) == 2
        assert (stopping.best_step, stopping.stopped_step) == (2, 4)
        same(trainer, after(2))


def test_a_run_of_values_that_are_no_numbers_is_described():
    stopping = RunStopping("auc", 2, evaluation=None, saving=None, interrupt=None)
    stopping.last_step = stopping.stopped_step = 4
    assert stopping.describe(9).endswith("the model is that of step 4, as no auc is a number")


def test_a_run_that_goes_on_knows_its_best_step(tmp_path):
    """Stopped after step 3, and patience ends after step 4, two evaluations after the best."""
    script = [0.9, 0.7, 0.8, 0.75, 0.1]
    with manager(tmp_path, latest=2) as checkpoints:
        trainer = make(callbacks=[scripted(script, manager=checkpoints)])
        trainer.callbacks[0].on_train_end = lambda trainer: None  # killed
        trainer.train(batches(9), steps=3)
        trainer.save(checkpoints, metrics={"ne": 0.8})
    with manager(tmp_path) as checkpoints:
        stopping = scripted(script, manager=checkpoints)
        again = make(callbacks=[stopping])
        assert again.restore(checkpoints).step == 3
        again.train(batches(9)[3:])
        assert (stopping.best_step, stopping.stopped_step) == (2, 4)
        same(again, after(2))
    assert all_steps(tmp_path) == [2]


@pytest.mark.every_case
def test_what_is_wrong_is_said(tmp_path, unchecked):
    for options, message in (
        ({"patience": 0}, "patience=0 must be 1 or more"),
        ({"patience": 1, "every": 0}, "every=0 must be 1 or more"),
        ({"patience": 1, "mode": "best"}, 'mode is "min" or "max", got \'best\''),
    ):
        with pytest.raises(ValueError, match=message):
            EarlyStopping("loss", **options)
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(ValueError, match="best=1, met"):
        EarlyStopping("loss", 1, manager=checkpoints)
    with pytest.raises(ValueError, match=r"batches=lambda: held_out.from_batch\(0\)"):
        make(callbacks=[EarlyStopping("loss", 1, every=1)]).train(batches(1))
    stopping = EarlyStopping("auc", 1, every=1, batches=lambda: batches(1))
    with pytest.raises(
        ValueError, match="'auc' is not a value of the evaluation; its values are l"
    ):
        make(callbacks=[stopping]).train(batches(1))


@pytest.mark.slow
def test_patience_of_a_run(tmp_path, monkeypatch, capsys):
    """At a rate that is too high: the model of the best step is what is loaded and exported."""
    from tests.commands.test_train import SMALL

    monkeypatch.chdir(tmp_path)
    options = [*SMALL, "--lr=0.3", "--epochs=9", "--evaluate-every=2", "--patience=2"]
    options += ["--checkpoint.best-by=log_loss", "--checkpoint.every=3"]
    assert main(["train", "--output=model", *options]) == 0
    said = capsys.readouterr().out
    results = json.loads((tmp_path / "model/results.json").read_text())
    lines = map(json.loads, (tmp_path / "model/metrics.jsonl").read_text().splitlines())
    seen = {x["step"]: x["held_out_log_loss"] for x in lines if "held_out_log_loss" in x}
    best = min(seen, key=seen.__getitem__)
    assert all(step % 2 == 0 for step in seen), "checkpoints of step 3 and others are not evaluated"
    assert results["best_step"] == best
    assert results["log_loss"] == seen[best]
    assert best < results["steps"] < 90
    assert f"stopped after step {results['steps']} of 90: 2 evaluations without a bet" in said
    assert f"the model is that of step {best}, the best by log_loss" in said
    assert all_steps(tmp_path / "model") == [best]
    np.testing.assert_array_equal(
        load_model("model").embeddings.table("cat_0"),
        load_model("model", step=best).embeddings.table("cat_0"),
    )
    assert main(["train", "--resume=model"]) == 0
    assert "and more patience than 2" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step(pair, tmp_path):
    """The values of process 0 decide, also where those of the other process differ."""
    for found in pair.run("tests.train.uneven:stop_early", directory=tmp_path / "run"):
        assert found == (1, 1, 3, 1.0)


@pytest.mark.slow
def test_patience_of_a_run_of_two_processes(tmp_path, forks):
    """They stop together, at the best step of one split of the rows; the run is one of a sweep."""
    from tests.commands.test_train import SMALL

    output = tmp_path / "lr=0.3"
    options = ["train", *SMALL, "--epochs=9", "--evaluate-every=2", "--patience=2"]
    options += ["--hold-out=random:0.2", "--checkpoint.best-by=log_loss", f"--output={tmp_path}"]
    options += ["--sweep", "lr=0.3", f"--coordinator=localhost:{free_port()}", "--num-processes=2"]
    running = [
        forks.run("jaxrec", *options, f"--process-id={process}", environ={"JAX_PLATFORMS": "cpu"})
        for process in range(2)
    ]
    try:
        codes = [process.wait(300) for process in running]
    finally:
        for process in running:
            process.stop()
    assert codes == [0, 0], [process.errors for process in running]
    results = json.loads((output / "results.json").read_text())
    assert results["hold_out"] == "random 20 % of the rows, seed 0"
    assert results["rows"] + results["held_out_rows"] == 50
    best = results["best_step"]
    assert best < results["steps"] < 90
    assert f"stopped after step {results['steps']} of" in running[0].output
    assert all_steps(output) == [best]
    assert json.loads((tmp_path / "sweep.json").read_text())["runs"][0]["results"] == results
