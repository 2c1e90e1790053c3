"""Two real processes on this machine, joined by gloo, share open vocabularies."""

from __future__ import annotations

import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.tier import ChangeTracker, Subscriber, ahead
from jaxrec.tier.tier import tier_of
from jaxrec.train.checkpoint import restore, save
from tests.tier import models, processes
from tests.tier.vocabulary import test_cached

# The checkout comes last, so that the installed package is tested.
START = (
    f"import sys; sys.path.append({str(pathlib.Path(processes.__file__).parents[2])!r})\n"
    "from tests.tier.processes import main; main()"
)


def run(scenario: str, directory: pathlib.Path) -> list[int]:
    """Run two processes to their end; return their exit codes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", START, port, str(process), scenario, str(directory)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        errors = [each.communicate(timeout=600)[1] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    codes = [each.returncode for each in started]
    assert 1 not in codes, errors
    return codes


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Arrays of each process at the end, by the scenarios of processes.py."""
    directory = tmp_path_factory.mktemp("ends")
    assert run("killed", directory) == [-signal.SIGKILL] * 2
    losses = continue_in_one_process(directory)
    assert run("resumed", directory) == [0, 0]
    scenarios = ("killed", "resumed", "killed_changes", "copies", "planned", "moved", "bad")
    found = {
        scenario: [dict(np.load(directory / f"{scenario}{process}.npz")) for process in range(2)]
        for scenario in (*scenarios, "killed_stored", "resumed_stored")
    }
    return {**found, "directory": directory, "in_one_process": losses}


def continue_in_one_process(directory) -> list[float]:
    """Restore what two processes saved, train some steps, and save that."""
    model = processes.make_model(None)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    first = restore(directory / "saved", model, optimizer).batches
    batches, _ = models.stream(processes.STEPS, 450, samples=processes.SAMPLES)
    losses = []
    for number, (x, y) in enumerate(ahead(model, batches[first:], look_ahead=2), first + 1):
        losses.append(float(models.train_step(model, optimizer, x, y)))
        if number == processes.MOVED_AFTER:
            save(directory / "moved", model, optimizer, batches=number)
            break
    return losses


def test_a_killed_run_that_is_resumed_ends_as_an_undisturbed_one(ends):
    for undisturbed, resumed in zip(ends["killed"], ends["resumed"], strict=True):
        assert resumed.keys() == undisturbed.keys()
        assert len(resumed["losses"]) == processes.STEPS - processes.SAVED_AFTER
        for name, array in undisturbed.items():
            last = array[-len(resumed["losses"]) :] if name == "losses" else array
            np.testing.assert_array_equal(resumed[name], last, err_msg=name)


def test_processes_end_alike(ends):
    first, second = ends["killed"]
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("scenario", ["killed_stored", "resumed_stored", "moved"])
def test_each_record_is_in_the_store_of_one_process(ends, scenario):
    for name in ("item+item_wide", "query"):
        own = [end[f"{name}.own"] for end in ends[scenario]]
        assert name != "query" or min(map(len, own)) > 0
        assert len(np.intersect1d(*own)) == 0
        for end in ends[scenario]:
            np.testing.assert_array_equal(end[f"{name}.all"], np.sort(np.concatenate(own)))


def test_records_are_those_of_one_device(ends):
    first, second = ends["killed_stored"]
    model = processes.make_model(None)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    batches, _ = models.stream(processes.STEPS, 450, samples=processes.SAMPLES)
    for x, y in ahead(model, batches, look_ahead=2):
        models.train_step(model, optimizer, x, y)
    for name, of in {"item": "item+item_wide", "query": "query"}.items():
        np.testing.assert_array_equal(first[f"{name}.rows"], second[f"{name}.rows"])
        rows = model.embeddings.rows(name, first[f"{of}.all"])
        np.testing.assert_allclose(first[f"{name}.rows"], rows, rtol=1e-4, atol=1e-5)


def test_a_run_moves_from_two_processes_to_one_and_back(ends):
    losses = np.concatenate([ends["in_one_process"], ends["moved"][0]["losses"]])
    np.testing.assert_allclose(losses, ends["resumed"][0]["losses"], rtol=1e-5)
    for name, array in ends["moved"][0].items():
        if name.endswith((".all", ".rows", "losses")):
            np.testing.assert_array_equal(ends["moved"][1][name], array, err_msg=name)


def test_all_processes_stop_where_one_cannot_read_a_batch(ends):
    others, own = (end["texts"] for end in ends["bad"])
    assert [int(end["given"]) for end in ends["bad"]] == [2, 2]
    assert own[0] == "OSError: the file of batches ends too early"
    assert own[1].startswith("TypeError: a batch is a pytree with a KeyedJaggedArray")
    for text, of_other in zip(own, others, strict=True):
        assert of_other == f"RuntimeError: process 1 cannot go on: {text}"


def test_rows_by_id_are_those_of_the_table(ends):
    for end in ends["killed"]:
        for name in processes.NAMES:
            np.testing.assert_array_equal(end[f"{name}.rows_by_id"], end[f"{name}.rows"])


def test_every_process_gets_the_changes_of_all(ends):
    model = processes.make_model(None)
    tracker = ChangeTracker(model, ["publisher"])
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    batches, _ = models.stream(processes.STEPS, 450, samples=processes.SAMPLES)
    for x, y in ahead(model, batches, look_ahead=2):
        models.train_step(model, optimizer, x, y)
    expected = processes.changes_of(tracker)
    for changes in ends["killed_changes"]:
        assert changes.keys() == expected.keys()
        for name, array in expected.items():
            assert array.size > 0
            np.testing.assert_allclose(changes[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_copies_of_a_published_model_are_equal(ends):
    """Two processes took the versions over, and one device does."""
    copy = processes.make_model(None)
    assert Subscriber(copy, ends["directory"] / "versions", with_state=True).update() == 2
    for copied in (*ends["copies"], processes.copied(copy, ends["directory"])):
        assert len(copied) > len(processes.NAMES)
        for name, array in copied.items():
            np.testing.assert_array_equal(array, ends["killed"][0][name], err_msg=name)


def test_they_train_as_one_device_does(ends):
    model = processes.make_model(None)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    batches, _ = models.stream(processes.STEPS, 450, samples=processes.SAMPLES)
    losses = [
        float(models.train_step(model, optimizer, x, y))
        for x, y in ahead(model, batches, look_ahead=2)
    ]
    assert tier_of(model).statistics()["query"]["evicted"] > 0
    np.testing.assert_allclose(ends["killed"][0]["losses"], losses, rtol=1e-5)


def test_they_train_by_a_plan_with_caches_as_one_device_does(ends):
    first, second = ends["planned"]
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    assert first["evicted"].min() > 0
    whole = test_cached.make_whole("rowwise_adagrad")
    losses = models.train(whole, test_cached.make_stream(processes.STEPS, processes.SAMPLES))
    np.testing.assert_allclose(first["losses"], losses, rtol=1e-5)
    for name in ("item", "query"):
        rows = whole.embeddings.table(name)
        np.testing.assert_allclose(first[name], rows, rtol=1e-5, atol=1e-6)
