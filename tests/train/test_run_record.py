"""The record of a run: where its values go, and what happens when a logger fails."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.commands import main
from jaxrec.train.config import DataConfig, TrainConfig, parse_options
from jaxrec.train.loggers import LOGGERS, RunLogger
from jaxrec.train.run_record import LoggerError, open_record, require_loggers
from tests.train.test_following import OPTIONS as FOLLOWED
from tests.train.test_following import write
from tests.train.test_sweep import SMALL
from tests.train.test_sweep import rows as rows  # a fixture


@pytest.fixture
def made(monkeypatch):
    """The calls of all loggers, by run."""
    calls = []

    class Recording(RunLogger):
        name, package = "tensorboard", "json"

        def start(self, run):
            self.run = run.name
            calls.append((run.name, "start", run.step, run.identity))
            return f"id of {run.name}"

        def write(self, step, values):
            calls.append((self.run, "write", step, sorted(values)))

        def finish(self, step, values, files):
            calls.append((self.run, "finish", step, sorted(values), [x.name for x in files]))

        def close(self):
            calls.append((self.run, "close"))

    monkeypatch.setitem(LOGGERS, "tensorboard", Recording)
    return calls


def of(calls, kind):
    return [call for call in calls if call[1] == kind]


@pytest.mark.parametrize("given", [["tensorboard,mlflow"], ["tensorboard", "mlflow"]])
def test_names_by_commas_or_words(given):
    assert parse_options(["--log", *given]).loggers == ["tensorboard", "mlflow"]


@pytest.mark.parametrize("name", ["comet", "wandb,wandb"], ids=["unknown", "twice"])
def test_wrong_names(name):
    with pytest.raises(ConfigError, match="--log takes each of tensorboard, wandb, mlflow once"):
        parse_options(["--log", name])


def config_of(**options):
    return TrainConfig(log=("tensorboard",), **options)


def test_a_run_that_goes_on_is_found_again(made, tmp_path):
    quiet = Console(quiet=True)
    for resume, step in ((None, 0), (tmp_path, 3), (None, 0)):
        config = config_of(resume=resume, data=DataConfig(epochs=2))
        with contextlib.closing(open_record(config, tmp_path, step, quiet)) as record:
            record.write(step + 1, {"auc": 0.5})
    name = str(tmp_path)
    # The last one starts anew, in the directory of a run that has failed.
    assert [call[2:] for call in of(made, "start")] == [(0, None), (3, f"id of {name}"), (0, None)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 1]
    assert [call[2] for call in of(made, "write")] == [1, 4, 1]


def test_a_logger_that_fails_does_not_end_the_run(made, tmp_path, monkeypatch):
    def fail(self, step, values):
        raise ConnectionError("no\n route")

    monkeypatch.setattr(LOGGERS["tensorboard"], "write", fail)
    text = io.StringIO()
    console = Console(file=text, soft_wrap=True)
    with contextlib.closing(open_record(config_of(), tmp_path, 0, console)) as record:
        for step in (1, 2):
            record.write(step, {"auc": 0.5})
        record.finish(2, {}, [tmp_path / "missing"])
    assert text.getvalue() == (
        "warning: --log tensorboard: ConnectionError: no route; the run goes on without it\n"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert not of(made, "finish")
    assert len(of(made, "close")) == 1


def test_a_logger_that_does_not_start_ends_the_run(made, tmp_path, monkeypatch):
    class Refusing(LOGGERS["tensorboard"]):
        def start(self, run):
            raise RuntimeError("no such project")

    monkeypatch.setitem(LOGGERS, "wandb", Refusing)
    config = TrainConfig(log=("tensorboard,wandb",))
    with pytest.raises(LoggerError, match="--log wandb: RuntimeError: no such project"):
        open_record(config, tmp_path, 0, Console(quiet=True))
    assert len(of(made, "close")) == 1, "that of the other one"


def test_a_missing_package_ends_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(LOGGERS["wandb"], "package", "a_package_that_is_missing")
    with pytest.raises(ImportError, match=r"pip install 'jaxrec\[wandb\]'"):
        require_loggers(["tensorboard", "wandb"])
    assert main(["train", "--data=x.parquet", f"--output={tmp_path / 'r'}", "--log=wandb"]) == 1
    error = capsys.readouterr().err
    assert error == (
        "jaxrec train: --log wandb needs a_package_that_is_missing: pip install 'jaxrec[wandb]'\n"
    )


@pytest.mark.slow
def test_runs_of_the_command(made, rows, tmp_path, monkeypatch, capsys):
    """A sweep of two runs, a run that goes on, and one that follows a folder."""
    monkeypatch.chdir(tmp_path)
    train = ["train", f"--data={rows}", *SMALL, "--log=tensorboard", "--record-every=2"]
    assert main([*train, "--epochs=1", "--output=sweep", "--sweep", "seed=0,1"]) == 0
    for seed in (0, 1):
        own = [call[1:] for call in made if call[0] == f"sweep/seed={seed}"]
        assert own[0] == ("start", 0, None)
        assert [call[1] for call in own if call[0] == "write"] == [2, 4]
        assert own[-2][:2] == ("finish", 4)
        assert {"final_auc", "final_log_loss", "final_seconds"} <= set(own[-2][2])
        assert own[-2][3] == ["results.json", "summary.png"]
        assert own[-1] == ("close",)
    made.clear()
    assert main(["train", "--resume=sweep/seed=1", "--epochs=2", "--evaluate-every=3"]) == 0
    assert made[0] == ("sweep/seed=1", "start", 4, "id of sweep/seed=1")
    assert sorted((call[2], "held_out_auc" in call[3]) for call in of(made, "write")) == [
        (6, False), (6, True), (8, False), (8, True),
    ]  # fmt: skip
    made.clear()
    write(tmp_path / "in", 0, 100)
    options = [*FOLLOWED, "--log=tensorboard"]
    assert main(["train", "--data=in", "--output=followed", *options]) == 0
    assert [call[2] for call in of(made, "write")] == [2, 4, 6, 7]
    assert made[-2:] == [("followed", "finish", 7, [], []), ("followed", "close")]
