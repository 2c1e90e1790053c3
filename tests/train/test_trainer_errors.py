"""Training that fails or skips a step: what the error says, and what is left."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.train import (
    CheckpointManager,
    NotFiniteError,
    SaveCheckpoints,
    Trainer,
)
from tests.train.ranker import (
    BATCH,
    GROUP,
    ROWS,
    Results,
    batches,
    make,
    weights,
)


def test_loss_that_is_no_number(tmp_path):
    """It names the step, and the last good checkpoint is there."""
    data = batches(9)
    data[5] = (data[5][0], np.full(BATCH, np.nan, np.float32))
    with CheckpointManager(tmp_path) as manager:
        trainer = make(callbacks=[SaveCheckpoints(manager, every=2)])
        with pytest.raises(NotFiniteError, match="the loss is nan at step 6"):
            trainer.train(data)
        fresh = make()
        assert fresh.restore(manager).step == 4  # which is still being written
    assert np.isfinite(weights(fresh)[0]).all()


def test_ids_outside_their_table():
    data = batches(3)
    data[1] = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2, ROWS + 7]] * 4}), data[1][1]
    before = weights(trainer := make())[0]
    with pytest.raises(NotFiniteError, match=r"at step 2: .* 'user', sample 1: id 57 is outside"):
        trainer.train(data)
    assert np.isfinite(weights(trainer)[0]).all()
    assert not np.array_equal(weights(trainer)[0], before)
    with pytest.raises(NotFiniteError, match="at step 1, batch 1 of the step: feature 'user'"):
        make(accumulate=2).train(data[:2])


@pytest.mark.parametrize("options", [{}, {"semi_synchronous": True}], ids=["in order", "behind"])
def test_skipped_steps_change_nothing_until_there_are_too_many(options):
    data = batches(6)
    bad = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2, ROWS + 7]] * 4}), data[1][1]
    results = Results()
    trainer = make(metrics=GROUP, max_skipped=2, callbacks=[results], **options)
    if options:  # a lookup for the next batch is made before the update
        assert trainer.train([data[0], bad, bad]) == 1
        assert np.isfinite(list(trainer.compute_metrics().values())).all()
    else:
        assert trainer.train([data[0], bad, bad, data[1], bad, data[2]]) == 3
        plain = make(metrics=GROUP)
        plain.train(data[:3])
        for array, expected in zip(weights(trainer), weights(plain), strict=True):
            np.testing.assert_array_equal(array, expected)
        assert trainer.compute_metrics() == plain.compute_metrics()
        assert [result.step for result in results.seen] == [1, 4, 6]
        assert int(trainer.optimizer.skipped[...]) == 3
    with pytest.raises(NotFiniteError, match=r"the last of 3 in a row .* id 57 is outside"):
        make(max_skipped=2, **options).train([bad, bad, bad, data[0]])


def test_a_gradient_that_is_not_finite_is_named():
    def of_norms(model, batch):
        # The norm of zeros is finite, and its gradient is not.
        return jnp.linalg.norm(0 * model(batch[0])), {}

    trainer = make()
    trainer.loss = of_norms
    with pytest.raises(NotFiniteError, match=r"a gradient is not finite at step 1; .*debug=True"):
        trainer.train(batches(2))


def test_errors_of_callbacks_come_through():
    class Failing(Results):
        def on_step_dispatched(self, trainer, step):
            if step == 3:
                raise OSError("disk on fire")

        def on_train_end(self, trainer):
            raise AssertionError

    trainer = make(callbacks=[failing := Failing()])
    with pytest.raises(OSError, match="disk on fire"):
        trainer.train(batches(9))
    assert [result.step for result in failing.seen] == [1]
    trainer.callbacks = []
    assert trainer.train(batches(2)) == 2  # the steps under way before are forgotten


def test_errors_of_the_reader_come_through():
    def reader():
        yield from batches(3)
        raise OSError("disk on fire")

    trainer = make()
    with pytest.raises(OSError, match="disk on fire"):
        trainer.train(reader())
    assert int(trainer.optimizer.step.get_value()) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 0},
        {"batch_size": 0},
        {"accumulate": 2, "semi_synchronous": True},
    ],
    ids=str,
)
def test_options_that_are_none(options):
    with pytest.raises(ValueError, match=r"must be 1 or more|one batch each"):
        make(**options)


def test_readers_that_give_no_step(tmp_path):
    data = iter(batches(2))
    with CheckpointManager(tmp_path) as manager:
        trainer = make(callbacks=[SaveCheckpoints(manager)])
        assert trainer.train(data) == 2
        with pytest.raises(ValueError, match="no batches to train on; an iterator gives its"):
            trainer.train(data)
        assert trainer.train([], steps=0) == 0
        trainer.restore(tmp_path)
        assert trainer.train([]) == 0  # a run that was restored at its end
        with pytest.raises(ValueError, match="no batches to train on"):
            make(accumulate=3).train([])


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        (
            "optimizer",
            optax.sgd(0.1),
            r"jaxrec.Optimizer\(model, optax.adam\(1e-3\)\), got a Gradient",
        ),
        ("model", len, "a Flax module"),
        ("loss", None, r"a function loss\(model, batch\), got a NoneType"),
        ("metrics", {"ne": 1}, "jaxrec.metrics.MetricGroup"),
        ("batch_size", 8.0, "a number of samples, got a float"),
        ("callbacks", print, "a list of callbacks, got a builtin_function_or_method"),
        ("callbacks", [print], "jaxrec.train.Callback, got a builtin_function_or_method"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_of_other_types(unchecked, name, value, wanted):
    with pytest.raises(TypeError, match=f"{name} must be {wanted}"):
        dataclasses.replace(make(), **{name: value})


def test_what_is_no_stream_of_batches(unchecked):
    (batch,) = batches(1)
    for wrong in (batch[0], batch[1], {"x": batch[1]}, 3):
        for call in (Trainer.train, Trainer.evaluate):
            with pytest.raises(TypeError, match="batches must be an iterable of batches"):
                call(make(), wrong)
    with pytest.raises(ValueError, match="steps is -1; it must be 0 or more"):
        make().train([batch], steps=-1)


def test_strings_in_a_batch():
    with pytest.raises(TypeError, match=r"batch\['name'\] is of type <U1; .* Map strings"):
        make().train([{"name": np.array(["a"])}])
