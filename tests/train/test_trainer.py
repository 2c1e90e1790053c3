"""The training loop: its steps beside those of NumPy, its evaluation and its hooks."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.metrics import AUC, BackgroundWriter, MetricGroup
from jaxrec.train import (
    Callback,
    CheckpointError,
    CheckpointManager,
    PreservationPolicy,
    SaveCheckpoints,
    Trainer,
    WriteMetrics,
    compile_step,
)
from jaxrec.train.train_steps import SemiSynchronousSteps
from tests.copies import find_copies
from tests.train.ranker import (
    BATCH,
    DIM,
    GROUP,
    WEIGHTED_GROUP,
    Ranker,
    Results,
    Steps,
    batches,
    batches_of,
    ids_of,
    loss,
    make,
    same,
    weighted_loss,
    weights,
)


@pytest.mark.parametrize("semi_synchronous", [False, True])
def test_steps(semi_synchronous):
    """Semi-synchronous rows are those of before the last update, and dense layers are current."""
    trainer, data = make(semi_synchronous=semi_synchronous), batches(6)
    oracle = Steps(trainer)
    assert trainer.train(data) == 6
    ahead = oracle.pooled(data[0])
    for batch, following in zip(data, [*data[1:], data[0]], strict=True):
        pooled = ahead if semi_synchronous else oracle.pooled(batch)
        ahead = oracle.pooled(following)
        oracle.update(batch, pooled)
    np.testing.assert_allclose(weights(trainer)[0], oracle.table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights(trainer)[1][:, 0], oracle.kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("semi_synchronous", [False, True])
def test_steps_are_compiled_once(semi_synchronous):
    """Of several epochs; another loss is seen."""
    traced = []

    def counted(model, batch):
        traced.append(batch)
        return loss(model, batch)

    trainer, data = make(counted, semi_synchronous=semi_synchronous), batches(4)
    trainer.train(data[:2])
    count = len(traced)
    trainer.train(data[2:])
    assert len(traced) == count
    expected = make(semi_synchronous=semi_synchronous)
    expected.train(data[:2]), expected.train(data[2:])
    same(trainer, expected)
    trainer.loss = lambda model, batch: (0 * loss(model, batch)[0] + 7, {})
    results = Results()
    trainer.callbacks = [results]
    trainer.train(data[:1])
    assert results.seen[-1].loss == 7


def test_batches_of_any_lengths_compile_few_steps():
    """Though no packer made them, and on a mesh, where a step routes the next batch."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": jaxrec.mesh.row_wise()})
    shapes = []

    def recorded(model, batch):
        shapes.append((batch[0].capacities, batch[0].values.shape))
        return loss(model, batch)

    model = jaxrec.shard(Ranker, plan, mesh)
    trainer = Trainer(
        model=model,
        optimizer=jaxrec.Optimizer(model, optax.sgd(0.5)),
        loss=recorded,
        place=lambda batch: jaxrec.mesh.shard_batch(batch, mesh),
    )
    rng = np.random.default_rng(0)
    data = [
        (
            jaxrec.KeyedJaggedArray.from_lists({"user": [[1] * n for n in rng.geometric(0.1, 16)]}),
            np.zeros(16, np.float32),
        )
        for _ in range(20)
    ]
    longer = jaxrec.KeyedJaggedArray.from_lists({"user": [[1] * 60] * 16}), np.zeros(16, np.float32)
    assert trainer.train([*data[:3], longer, *data[3:], longer]) == 22
    assert 2 <= len(set(shapes)) <= 3
    # A program for each shape routes a batch, and the step is traced for taps, for gradients and
    # for the route of the next batch.
    assert len(shapes) == 4 * len(set(shapes))
    trainer.evaluate(data)
    assert len(set(shapes)) <= 3


def test_semi_synchronous_steps_differ():
    one, other = make(), make(semi_synchronous=True)
    one.train(batches(4)), other.train(batches(4))
    assert not np.allclose(weights(one)[0], weights(other)[0], atol=1e-6)


def test_semi_synchronous_steps_copy_no_table():
    trainer, (one, other) = make(semi_synchronous=True), batches(2)
    modules = (trainer.model, trainer.optimizer, trainer._metric_state)
    steps = SemiSynchronousSteps(*modules[:2], trainer.loss, None, modules[2], False)
    ahead = nnx.Variable(steps._lookup(trainer.model, one))
    step = compile_step(steps._step, *modules, ahead)
    compiled = step.lower((one, other)).compile()
    tables = jax.tree.leaves(trainer.model.embeddings.tables.get_value())
    shapes = {x.shape for x in tables if x.shape[-1:] == (DIM,)}
    assert shapes
    for rows, dim in shapes:
        assert f"[{rows},{dim}]" in compiled.as_text()
        assert find_copies(compiled, (rows, dim)) == []


def test_accumulated_batches_are_one_large_batch():
    data = batches(6)
    whole = []
    for i in range(0, 6, 3):
        ids = np.concatenate([np.asarray(f.values).reshape(BATCH, 2) for f, _ in data[i : i + 3]])
        features = jaxrec.KeyedJaggedArray.from_dense({"user": ids})
        whole.append((features, np.concatenate([y for _, y in data[i : i + 3]])))
    one, other = make(), make(accumulate=3, metrics=GROUP)
    assert one.train(whole) == 2
    assert other.train(data) == 2
    same(one, other, rtol=1e-5, atol=1e-6)
    assert other.compute_metrics()["click/lifetime_ne"] > 0


def test_evaluation():
    trainer, data = make(metrics=GROUP), batches(5)
    got = trainer.evaluate(iter(data))
    expected = [loss(trainer.model, batch) for batch in data]
    assert got["loss"] == pytest.approx(np.mean([float(x) for x, _ in expected]), rel=1e-6)
    state = GROUP.init()
    for _, outputs in expected:
        state = GROUP.update(state, outputs)
    assert got["click/lifetime_ne"] == pytest.approx(GROUP.compute(state)["click/lifetime_ne"])
    with pytest.raises(ValueError, match="no batches to evaluate on"):
        trainer.evaluate([])


def test_stopped_and_restored_is_as_never_stopped(tmp_path):
    data = batches(10)

    class StopAfterFive(Results):
        def on_step_dispatched(self, trainer, step):
            trainer.should_stop = len(self.seen) >= 5

    never = make(metrics=GROUP)
    never.train(data)
    with CheckpointManager(tmp_path / "a", PreservationPolicy(latest=2)) as manager:
        stop = StopAfterFive()
        stopped = make(metrics=GROUP, callbacks=[SaveCheckpoints(manager, every=4), stop])
        assert stopped.train(data) == 7  # what is under way is finished
        assert [result.step for result in stop.seen] == list(range(1, 8))
        again = make(metrics=GROUP, callbacks=[SaveCheckpoints(manager)])
        run = again.restore(tmp_path / "a")
        assert (run.step, run.batches) == (7, 7)
        again.train(data[run.batches :])
        same(again, never)
        assert again.compute_metrics() == never.compute_metrics()
        assert again.restore(tmp_path / "a", step=7).batches == 7
        with pytest.raises(CheckpointError, match="step 4 was not saved"):
            again.restore(tmp_path / "a", step=4)


def test_values_are_written():
    written = []

    class Writer:
        def write(self, step, values):
            written.append((step, values))

        def close(self):
            pass

    trainer = make(metrics=GROUP, callbacks=[WriteMetrics(Writer(), every=2)])
    trainer.train(batches(9), steps=5)
    assert [step for step, _ in written] == [2, 4]
    assert set(written[0][1]) == {"loss", "click/lifetime_ne"}


def test_values_of_a_background_writer_are_those_of_the_foreground():
    class Writer:
        def __init__(self):
            self.written = []

        def write(self, step, values):
            self.written.append((step, dict(values)))

        def close(self):
            pass

    in_front, behind = Writer(), Writer()
    group = MetricGroup(tasks=GROUP.tasks, metrics={**GROUP.metrics, "auc": AUC(window=30)})
    make(metrics=group, callbacks=[WriteMetrics(in_front, every=2)]).train(batches(9))
    writer = BackgroundWriter(behind)
    make(metrics=group, callbacks=[WriteMetrics(writer, every=2)]).train(batches(9))
    assert behind.written == in_front.written
    assert [step for step, _ in behind.written] == [2, 4, 6, 8]


@pytest.mark.parametrize("options", [{}, {"semi_synchronous": True}, {"accumulate": 2}], ids=str)
def test_hooks_are_called_in_order(options):
    """Results come up to two steps late, or when they are waited for, and with the outputs."""
    calls = []

    class Watching(Callback):
        needs_outputs = True

        def on_train_start(self, trainer):
            calls.append("start")

        def on_step_dispatched(self, trainer, step):
            calls.append(step)
            if step == 5:
                trainer.wait()

        def on_step_end(self, trainer, result):
            assert [set(outputs) for outputs in result.outputs] == [{"p", "y"}] * count
            calls.append(f"end {result.step}")

        def on_train_end(self, trainer):
            calls.append("end")

    count = options.get("accumulate", 1)
    make(callbacks=[Watching()], **options).train(batches(6 * count))
    ends = ["end 1", 3, "end 2", 4, "end 3", 5, "end 4", "end 5", 6, "end 6"]
    assert calls == ["start", 1, 2, *ends, "end"]


def on_mesh(devices, placement, loss=loss, **options):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("data",), auto, devices=jax.devices()[:devices])
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": placement})
    model = jaxrec.shard(Ranker(), plan, mesh)
    return Trainer(
        model=model,
        optimizer=jaxrec.Optimizer(model, optax.sgd(0.5)),
        loss=loss,
        metrics=GROUP if loss is not weighted_loss else WEIGHTED_GROUP,
        place=lambda batch: jaxrec.mesh.shard_batch(batch, mesh),
        **options,
    )


@pytest.mark.slow
def test_goes_on_with_another_number_of_devices(tmp_path):
    """Eight devices, then two, then four, each with another placement."""
    data, never = batches(9), make(metrics=GROUP)
    never.train(data)
    parts = (
        (8, jaxrec.mesh.row_wise()),
        (2, jaxrec.mesh.column_wise(devices=(0, 1))),
        (4, jaxrec.mesh.table_wise(device=3)),
    )
    for number, (devices, placement) in enumerate(parts):
        with CheckpointManager(tmp_path) as manager:
            trainer = on_mesh(devices, placement, callbacks=[SaveCheckpoints(manager)])
            start = trainer.restore(tmp_path).batches if number else 0
            assert start == 3 * number
            assert trainer.train(data[start : start + 3]) == 3
    same(never, trainer, rtol=1e-6, atol=1e-6)
    assert trainer.compute_metrics() == pytest.approx(never.compute_metrics(), rel=1e-6)


def pair_auc(p, y):
    """The share of pairs of a click and no click that are in order."""
    return np.mean(np.sign(p[y > 0][:, None] - p[y == 0][None]) / 2 + 0.5)


@pytest.mark.parametrize("semi_synchronous", [False, True])
@pytest.mark.parametrize("devices", [1, 8])
def test_all_rows_count_once(devices, semi_synchronous):
    """Ten rows by four, which eight devices cannot share, as they are in NumPy without padding."""
    options = {"batch_size": 8, "semi_synchronous": semi_synchronous}
    data = batches_of([4, 4, 2])
    if devices == 1:
        trainer = make(weighted_loss, metrics=WEIGHTED_GROUP, **options)
    else:
        trainer = on_mesh(devices, jaxrec.mesh.row_wise(), weighted_loss, **options)
    oracle = Steps(trainer)
    assert trainer.train(data) == 3
    ahead = oracle.pooled(data[0])
    for batch, following in zip(data, [*data[1:], data[0]], strict=True):
        pooled = ahead if semi_synchronous else oracle.pooled(batch)
        ahead = oracle.pooled(following)
        oracle.update(batch, pooled)
    np.testing.assert_allclose(weights(trainer)[0], oracle.table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights(trainer)[1][:, 0], oracle.kernel, rtol=1e-5, atol=1e-6)
    if semi_synchronous:
        return
    held_out = batches_of([4, 1, 3, 2], seed=1)
    got = trainer.evaluate(held_out)
    p = np.concatenate([oracle.predict(oracle.pooled(batch)) for batch in held_out])
    y = np.concatenate([batch[1] for batch in held_out])
    loss = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    rate = y.mean()
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    assert got["click/lifetime_ne"] == pytest.approx(loss / entropy, rel=1e-5)
    assert got["click/window_auc"] == pytest.approx(pair_auc(p, y), rel=1e-6)


def test_accumulated_batches_weigh_their_samples():
    data = batches_of([8, 8, 2])
    ids = np.concatenate([ids_of(batch) for batch in data])
    whole = (
        jaxrec.KeyedJaggedArray.from_dense({"user": ids}),
        np.concatenate([labels for _, labels in data]),
    )
    expected = make()
    assert expected.train([whole]) == 1
    for trainer in (make(accumulate=3), make(weighted_loss, accumulate=3, batch_size=8)):
        assert trainer.train(data) == 1
        same(trainer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_batches_that_are_left_make_a_smaller_update(tmp_path, devices):
    """Two epochs of five batches, two an update, with a new process between; as NumPy has it."""
    data, steps = batches_of([8, 8, 8, 4, 2]), ([0, 1], [2, 3], [4])
    options = {"batch_size": 8, "accumulate": 2}

    def new(manager):
        callbacks = [SaveCheckpoints(manager)]
        if devices == 1:
            return make(weighted_loss, metrics=WEIGHTED_GROUP, callbacks=callbacks, **options)
        placement = jaxrec.mesh.row_wise()
        return on_mesh(devices, placement, weighted_loss, callbacks=callbacks, **options)

    with CheckpointManager(tmp_path) as manager:
        oracle = Steps(trainer := new(manager))
        assert trainer.train(data) == len(steps)
    with CheckpointManager(tmp_path) as manager:
        trainer = new(manager)
        assert trainer.restore(manager).batches == len(data)
        assert trainer.train(data) == len(steps)
        assert trainer.restore(manager).batches == 2 * len(data)
    for step in 2 * steps:
        ids = np.concatenate([ids_of(data[i]) for i in step])
        features = jaxrec.KeyedJaggedArray.from_dense({"user": ids})
        joined = features, np.concatenate([data[i][1] for i in step])
        oracle.update(joined, oracle.pooled(joined))
    np.testing.assert_allclose(weights(trainer)[0], oracle.table, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights(trainer)[1][:, 0], oracle.kernel, rtol=1e-5, atol=1e-6)
