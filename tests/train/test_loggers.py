"""The systems that log runs: each goes on with a run where it was."""

from __future__ import annotations

import json
import math
import sys

import pytest

from jaxrec.train.loggers import LOGGERS, LoggedRun
from jaxrec.train.loggers.tensorboard import DIRECTORY
from tests.metrics.test_writers import events

OPTIONS = {"data.epochs": 2, "model.name": "dlrm", "data.label": ["click"]}


def session(name, directory, step, identity=None, *, is_finished=True, options=OPTIONS):
    """A session of two steps; returns the text by which the run is found again."""
    logger = LOGGERS[name]()
    run = LoggedRun("sweep/lr=1", directory, options, step, identity)
    identity = logger.start(run)
    logger.write(step + 1, {"auc": 0.5 + step / 100, "ndcg@10": math.nan})
    logger.write(step + 2, {"auc": 0.6})
    logger.write(step + 2, {"held_out_auc": 0.7})
    if is_finished:
        (directory / "results.json").write_text("{}")
        logger.finish(step + 2, {"final_auc": 0.75}, [directory / "results.json"])
    logger.close()
    return identity


def installed(name, monkeypatch):
    """Skip the test unless the extra of a system is installed."""
    try:
        return LOGGERS[name].require()
    except ImportError:
        pytest.skip(f"needs the extra {name}")


@pytest.mark.every_case
@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_names_the_extra(name, monkeypatch):
    package = LOGGERS[name].package
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"--log {name} needs {package}: pip install 'jaxrec\["):
        LOGGERS[name].require()


def test_tensorboard(tmp_path):
    """A resumed run makes steps again, and TensorBoard drops the earlier ones."""
    from tensorboardX.proto.event_pb2 import SessionLog

    assert session("tensorboard", tmp_path, 0, is_finished=False) is None
    first = events(tmp_path / DIRECTORY)
    assert [(step, tag) for step, tag, _ in first] == [
        (1, "auc"), (1, "ndcg_10"), (2, "auc"), (2, "held_out_auc")
    ]  # fmt: skip
    for file in (tmp_path / DIRECTORY).iterdir():
        file.rename(tmp_path / "first")
    session("tensorboard", tmp_path, 1)
    (file,) = (tmp_path / DIRECTORY).iterdir()
    assert events(tmp_path / DIRECTORY)[-1] == (3, "final_auc", 0.75)
    purged = [(x.step, x.session_log.status) for x in records(file) if x.HasField("session_log")]
    assert purged == [(2, SessionLog.START)]


def records(file):
    """The records of an event file."""
    import struct

    from tensorboardX.proto.event_pb2 import Event

    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


class FakeRun:
    """A run of W&B that notes its calls."""

    def __init__(self, made, **options):
        self.id = options["id"] or "fresh"
        self.made = made
        self.summary = {}
        made.append(("init", self.id, options["resume"], options["name"], options["project"]))

    def log(self, values, step):
        self.made.append((step, *values))

    def save(self, path, base_path, policy):
        self.made.append((path.name, base_path == path.parent, policy))

    def finish(self, exit_code):
        self.made.append(("finish", exit_code, self.summary))


def test_wandb_goes_on_with_its_run(tmp_path, monkeypatch):
    """By the calls that it makes; the next test has the package itself."""
    made = []
    fake = type(sys)("wandb")
    fake.init = lambda **options: FakeRun(made, **options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    identity = session("wandb", tmp_path, 0, is_finished=False)
    session("wandb", tmp_path, 2, identity)
    steps = [(1, "auc", "ndcg@10"), (2, "auc"), (2, "held_out_auc")]
    start = ("init", "fresh", "allow", "sweep/lr=1", "jaxrec")
    assert made[:5] == [start, *steps, ("finish", 1, {})]
    assert made[5] == start
    assert made[-2:] == [
        ("results.json", True, "now"),
        ("finish", 0, {"final_auc": 0.75}),
    ]


@pytest.mark.filterwarnings("default")
def test_wandb(tmp_path, monkeypatch):
    installed("wandb", monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    identity = session("wandb", tmp_path, 0, is_finished=False)
    assert session("wandb", tmp_path, 2, identity) == identity
    runs = [path for path in (tmp_path / "wandb").glob("offline-run-*") if path.is_dir()]
    # W&B adds what is sent of one id to one run.
    assert [path.name.endswith(identity) for path in runs] == [True, True]
    assert all([*path.glob("*.wandb")] for path in runs)


@pytest.mark.filterwarnings("default")
def test_mlflow(tmp_path, monkeypatch):
    mlflow = installed("mlflow", monkeypatch)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "clicks")
    identity = session("mlflow", tmp_path, 0, is_finished=False)
    client = mlflow.MlflowClient()
    assert client.get_run(identity).info.status == "KILLED"
    changed = OPTIONS | {"data.epochs": 3}
    assert session("mlflow", tmp_path, 1, identity, is_finished=False) == identity
    assert session("mlflow", tmp_path, 2, identity, options=changed) == identity
    experiment = client.get_experiment_by_name("clicks")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("sweep/lr=1", "FINISHED")
    assert run.data.params == {"data.epochs": "2", "model.name": "dlrm", "data.label": "['click']"}
    assert run.data.tags["resumed.data.epochs"] == "3"
    history = client.get_metric_history(identity, "auc")
    # Step 2 was made twice, and so was step 3.
    assert [(x.step, x.value) for x in history] == [(1, 0.5), (2, 0.6), (3, 0.6), (4, 0.6)]
    assert math.isnan(run.data.metrics["ndcg_at_10"])
    assert run.data.metrics["final_auc"] == 0.75
    assert [x.path for x in client.list_artifacts(identity)] == ["results.json"]
    assert json.loads((tmp_path / "results.json").read_text()) == {}
    # Only histories that go beyond the step of a resumed run are read: the last NDCG is of step 3.
    read = []
    monkeypatch.setattr(
        mlflow.MlflowClient, "get_metric_history", lambda _, run, name: read.append(name) or []
    )
    LOGGERS["mlflow"]().start(LoggedRun("sweep/lr=1", tmp_path, OPTIONS, 3, identity))
    assert sorted(read) == ["auc", "final_auc", "held_out_auc"]
