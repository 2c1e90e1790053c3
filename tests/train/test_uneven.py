"""Two processes of which one has more batches than the other."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

import jaxrec
from jaxrec.commands import main
from tests.commands.test_train import SMALL
from tests.forks import free_port
from tests.train.ranker import WEIGHTED_GROUP, ids_of, make, weighted_loss, weights
from tests.train.uneven import data_of

pytestmark = pytest.mark.slow

COUNTS = (10, 20)


def together(uneven):
    """The batches of one process that has the samples of both."""
    both = [data_of(process, count) for process, count in enumerate(COUNTS)]
    joined = []
    for parts in zip(*both, strict=False) if uneven == "stop" else itertools.zip_longest(*both):
        parts = [part for part in parts if part is not None]
        ids = np.concatenate([ids_of(part) for part in parts])
        features = jaxrec.KeyedJaggedArray.from_dense({"user": ids})
        joined.append((features, np.concatenate([part[1] for part in parts])))
    return joined


@pytest.mark.every_case
@pytest.mark.parametrize(("uneven", "accumulate"), [("stop", 1), ("empty", 3)])
def test_trainers_end_together(pair, tmp_path, uneven, accumulate):
    """Every sample that is trained on counts once: in updates, metrics and evaluations."""
    data = together(uneven)
    alone = make(weighted_loss, metrics=WEIGHTED_GROUP, batch_size=16, accumulate=accumulate)
    steps = alone.train(data)
    held_out = alone.evaluate(data)
    alone.train(data, steps=2)
    arguments = {"counts": COUNTS, "uneven": uneven, "accumulate": accumulate}
    for found in pair.run("tests.train.uneven:train", directory=tmp_path, **arguments):
        assert found[:2] == (steps, len(data))
        assert found[2] == pytest.approx(held_out, rel=1e-5)
        assert found[3] == pytest.approx(alone.compute_metrics(), rel=1e-5)
        for array, expected in zip(found[4], weights(alone), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.every_case
@pytest.mark.parametrize("uneven", ["stop", "empty"])
def test_a_loop_of_ones_own(pair, uneven):
    data = together(uneven)
    alone = make(weighted_loss, batch_size=16)
    steps = alone.train(data)
    lines = pair.processes[0].errors.count("has only 10 batches") if pair.processes else 0
    for count, arrays in pair.run("tests.train.uneven:loop", counts=COUNTS, uneven=uneven):
        assert count == steps
        for array, expected in zip(arrays, weights(alone), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-6)
    first, second = (process.errors for process in pair.processes)
    assert first.count("process 0 has only 10 batches, and others more") == lines + 1
    assert "has only" not in second


def test_the_command_line(forks, tmp_path):
    """`jaxrec train` hands its ``--uneven`` to the trainer: here "empty", not the default.

    Each process trains on one of its devices, while gathers of numbers take all of them.
    """
    port = free_port()
    environ = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
    }
    processes = []
    for process, count in enumerate((5, 10)):
        options = [
            *SMALL[2:],
            f"--data.generated-rows={4 * count}",
            "--data.generated-eval-rows=8",
            f"--output={tmp_path / 'model'}",
            f"--coordinator=localhost:{port}",
            "--num-processes=2",
            f"--process-id={process}",
            "--uneven=empty",
        ]
        processes.append(forks.run("jaxrec", "train", *options, environ=environ))
    for process in processes:
        assert process.wait(300) == 0, process.errors
    assert "process 0 has only 5 batches, and others more" in processes[0].errors
    assert (tmp_path / "model" / "10").is_dir()


def test_a_word_that_is_none(capsys):
    assert main(["train", "--uneven=wait"]) == 2
    with pytest.raises(ValueError, match='uneven is "stop" or "empty"'):
        make(uneven="wait")
