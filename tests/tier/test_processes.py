"""Two real processes on this machine, joined by gloo, share open vocabularies."""

from __future__ import annotations

import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.tier import ChangeTracker, Subscriber
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.checkpoint import restore, save
from tests.pairs import Pair
from tests.tier import models, processes
from tests.tier.vocabulary import test_cached

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def directory(forks, tmp_path_factory):
    """The checkpoint and the stores of two processes that were killed."""
    directory = tmp_path_factory.mktemp("runs")
    victims = Pair(forks)
    try:
        for victim in victims.send("tests.tier.processes:killed", directory=directory):
            assert victim.wait(300) == -signal.SIGKILL, victim.errors
    finally:
        victims.stop()
    return directory


@pytest.fixture(scope="module")
def undisturbed(pair, directory):
    """Arrays of each process after a run that was not killed, and after its publication."""
    return pair.run("tests.tier.processes:undisturbed", directory=directory)


@pytest.fixture(scope="module")
def resumed(pair, directory):
    """Arrays of each process after the run that goes on from the checkpoint."""
    return pair.run("tests.tier.processes:resumed", directory=directory)


@pytest.fixture(scope="module")
def in_one_process(resumed, directory):
    """Losses of one process that restores the checkpoint of two, trains some steps, and saves."""
    model, optimizer = processes.make_model(None)
    first = restore(model, directory / "saved", optimizer).batches
    batches = processes.all_batches()[first : processes.MOVED_AFTER]
    losses = list(processes.train(model, optimizer, batches))
    save(directory / "moved", model, optimizer, batches=processes.MOVED_AFTER)
    return losses


@pytest.fixture(scope="module")
def moved(pair, in_one_process, directory):
    """Arrays of each process after the run that goes on from the checkpoint of one process."""
    return pair.run("tests.tier.processes:moved", directory=directory)


@pytest.fixture(scope="module")
def on_one_device():
    """A model, its losses in all steps, and the changes of its tables."""
    model, optimizer = processes.make_model(None)
    tracker = ChangeTracker(model, ["publisher"])
    losses = list(processes.train(model, optimizer, processes.all_batches()))
    return model, losses, processes.changes_of(tracker)


def test_a_killed_run_that_is_resumed_ends_as_an_undisturbed_one(undisturbed, resumed):
    for whole, rest in zip(undisturbed, resumed, strict=True):
        expected, end = whole["end"], rest["end"]
        assert end.keys() == expected.keys()
        assert len(end["losses"]) == processes.STEPS - processes.SAVED_AFTER
        for name, array in expected.items():
            last = array[-len(end["losses"]) :] if name == "losses" else array
            np.testing.assert_array_equal(end[name], last, err_msg=name)


@pytest.mark.jax_version
def test_processes_end_alike(undisturbed):
    first, second = (each["end"] for each in undisturbed)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("run", ["undisturbed", "resumed", "moved"])
def test_each_record_is_in_the_store_of_one_process(run, request):
    ends = [each if run == "moved" else each["stored"] for each in request.getfixturevalue(run)]
    for name in ("item+item_wide", "query"):
        own = [end[f"{name}.own"] for end in ends]
        assert name != "query" or min(map(len, own)) > 0
        assert len(np.intersect1d(*own)) == 0
        for end in ends:
            np.testing.assert_array_equal(end[f"{name}.all"], np.sort(np.concatenate(own)))


def test_records_are_those_of_one_device(undisturbed, on_one_device):
    first, second = (each["stored"] for each in undisturbed)
    model = on_one_device[0]
    for name, of in {"item": "item+item_wide", "query": "query"}.items():
        np.testing.assert_array_equal(first[f"{name}.rows"], second[f"{name}.rows"])
        rows = model.embeddings.rows(name, first[f"{of}.all"])
        np.testing.assert_allclose(first[f"{name}.rows"], rows, rtol=1e-4, atol=1e-5)


def test_a_run_moves_from_two_processes_to_one_and_back(resumed, in_one_process, moved):
    losses = np.concatenate([in_one_process, moved[0]["losses"]])
    np.testing.assert_allclose(losses, resumed[0]["end"]["losses"], rtol=1e-5)
    for name, array in moved[0].items():
        if name.endswith((".all", ".rows", "losses")):
            np.testing.assert_array_equal(moved[1][name], array, err_msg=name)


@pytest.mark.jax_version
def test_all_processes_stop_where_one_cannot_read_a_batch(pair):
    ends = pair.run("tests.tier.processes:bad_batches")
    others, own = (end["texts"] for end in ends)
    assert [end["given"] for end in ends] == [2, 2]
    assert own[0] == "OSError: the file of batches ends too early"
    assert own[1].startswith("TypeError: a batch is a pytree with a KeyedJaggedArray")
    for text, of_other in zip(own, others, strict=True):
        assert of_other == f"RuntimeError: process 1 cannot go on: {text}"


def test_rows_by_id_are_those_of_the_table(undisturbed):
    for each in undisturbed:
        for name in processes.NAMES:
            end = each["end"]
            np.testing.assert_array_equal(end[f"{name}.rows_by_id"], end[f"{name}.rows"])


@pytest.mark.jax_version
def test_every_process_gets_the_changes_of_all(undisturbed, on_one_device):
    expected = on_one_device[2]
    for each in undisturbed:
        assert each["changes"].keys() == expected.keys()
        for name, array in expected.items():
            assert array.size > 0
            changes = each["changes"][name]
            np.testing.assert_allclose(changes, array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_copies_of_a_published_model_are_equal(undisturbed, directory):
    """Two processes took the versions over, and one device does."""
    copy, _ = processes.make_model(None)
    assert Subscriber(copy, directory / "versions", with_state=True).update() == 2
    end = undisturbed[0]["end"]
    for copied in (*(each["copies"] for each in undisturbed), processes.copied(copy, end)):
        assert len(copied) > len(processes.NAMES)
        for name, array in copied.items():
            np.testing.assert_array_equal(array, end[name], err_msg=name)


@pytest.mark.jax_version
def test_they_train_as_one_device_does(undisturbed, on_one_device):
    model, losses, _ = on_one_device
    assert tier_of(model).statistics()["query"]["evicted"] > 0
    np.testing.assert_allclose(undisturbed[0]["end"]["losses"], losses, rtol=1e-5)


def test_they_train_by_a_plan_with_caches_as_one_device_does(pair, tmp_path):
    first, second = pair.run("tests.tier.processes:planned", directory=tmp_path)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    assert first["evicted"].min() > 0
    whole = test_cached.make_whole("rowwise_adagrad")
    losses = models.train(whole, processes.batches_by_power_law())
    np.testing.assert_allclose(first["losses"], losses, rtol=1e-5)
    for name in ("item", "query"):
        rows = whole.embeddings.table(name)
        np.testing.assert_allclose(first[name], rows, rtol=1e-5, atol=1e-6)


def test_a_file_that_cannot_be_written_ends_all_processes(pair, tmp_path):
    ends = pair.run("tests.tier.processes:failed_export", directory=tmp_path)
    assert all("missing" in end["error"] for end in ends)
    assert [end["rows"] for end in ends] == [10, 10]
    assert np.load(tmp_path / "a.npy").shape == (10, 4)


def test_a_store_that_one_process_cannot_read_ends_all(pair, tmp_path):
    ends = pair.run("tests.tier.processes:failed_export_of_stored", timeout=120, directory=tmp_path)
    assert all("Input/output error" in end["error"] for end in ends)
    assert [end["rows"] for end in ends] == [10, 10]
    assert [path.name for path in tmp_path.iterdir()] == ["b.parquet"]


# For each kind of table the files of process 1, and the error in both processes.
UNREADABLE = {
    "cached": {
        "missing.parquet": "No such file or directory",
        "damaged.parquet": "damaged.parquet cannot be read as Parquet",
        "other ids.parquet": "differs between processes: process 0 has 'ids of part 0'",
        "no state.parquet": "differs between processes: process 0 has 'columns': rows, accum",
        "unreadable later.parquet": "Input/output error",
    },
    "plain": {
        "missing.parquet": "No such file or directory",
        "other ids.parquet": "lacks id 0 of the table's 10",
        "no state.parquet": "differs between processes: process 0 has 'columns': rows, accum",
    },
    "npy": {"missing.npy": "No such file or directory"},
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_one_process_cannot_read_ends_all(pair, tmp_path, kind):
    rows = np.repeat(np.arange(10, dtype=np.float32), 4)
    columns = {
        "id": pa.array(np.arange(10)),
        "row": pa.FixedSizeListArray.from_arrays(pa.array(rows), 4),
        "state_accumulator": pa.array(np.ones(10, np.float32)),
    }
    names = list(UNREADABLE[kind])
    for process in range(2):
        (tmp_path / f"{process}").mkdir()
        for name in names:
            path, table = tmp_path / f"{process}" / name, pa.table(columns)
            if process == 1 and name == "other ids.parquet":
                table = table.slice(1)
            if process == 1 and name == "no state.parquet":
                table = table.drop_columns("state_accumulator")
            if path.suffix == ".npy":
                np.save(path, rows.reshape(10, 4))
            else:
                pq.write_table(table, path)
            if process == 1 and name.startswith("missing"):
                path.unlink()
            if process == 1 and name.startswith("damaged"):
                path.write_bytes(path.read_bytes()[:50])
    ends = pair.run(
        "tests.tier.processes:failed_imports",
        timeout=120,
        directory=tmp_path,
        kind=kind,
        names=names,
    )
    for end in ends:
        for error, text in zip(end["errors"], UNREADABLE[kind].values(), strict=True):
            assert text in error
        # No process waits for another: the next file is read.
        assert end["count"] == 10
        np.testing.assert_array_equal(end["rows"].reshape(-1), rows)
