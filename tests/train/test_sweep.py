"""Sweeps: their options, their runs, and their table."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrec.arguments import ConfigError, OptionNames
from jaxrec.commands import main, train
from jaxrec.commands.train import train_config
from jaxrec.data import DataError
from jaxrec.train.config import DataConfig, OptimizerConfig, TrainConfig, write_options
from jaxrec.train.features import run_encoder
from jaxrec.train.interrupt import Interrupt
from jaxrec.train.models.kind import Measure
from jaxrec.train.sweep import Combination, SharedEncoders, combinations, read_axes, run_sweep
from jaxrec.train.sweep_report import RunRow, draw_sweep, report_sweep, sorted_rows

pytestmark = pytest.mark.every_case

SMALL = ["--label=click", "--batch-size=64", "--model.bottom-layer-sizes=4"]
SMALL += ["--model.top-layer-sizes=4", "--model.embedding-dim=4"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(0)
    columns = {"click": rng.integers(0, 2, 256), "item": rng.integers(0, 9, 256)}
    columns["age"] = rng.random(256)
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return path


NAMES = {
    "lr": "optimizer.learning-rate",
    "optimizer.learning_rate": "optimizer.learning-rate",
    "--optimizer.learning-rate": "optimizer.learning-rate",
    "embedding_dim": "model.embedding-dim",
    "embedding-dim": "model.embedding-dim",
    "model": "model.name",
    "epochs": "data.epochs",
    "hold-out": "data.hold-out",
    "history": "data.history",
    "ranker.history": "ranker.history",
    "seed": "seed",
    "patience": "patience",
}


@pytest.mark.parametrize(("name", "option"), NAMES.items(), ids=NAMES)
def test_options_by_long_and_short_names(name, option):
    (axis,) = read_axes([f"{name}=1,2"])
    assert (axis.name, axis.option, axis.values) == (name.lstrip("-"), option, ("1", "2"))


WRONG = {
    "unknown": (["embeding_dim=4"], "no option --embeding-dim, did you mean model.embedding-dim"),
    "nothing-like-it": (["x_y_z=4"], "there is no option --x-y-z; `jaxrec train --help` lists"),
    "no-values": (["lr="], "--sweep takes NAME=VALUE,VALUE, such as lr=0.01,0.02, got 'lr='"),
    "no-name": (["=1"], "takes NAME=VALUE"),
    "empty": (["lr=1,,2"], "takes NAME=VALUE"),
    "twice": (["lr=1,1"], "1 is given twice"),
    "two-names": (["lr=1", "learning_rate=2"], "has optimizer.learning-rate twice, as lr and"),
    "output": (["output=a,b"], "--output is the same in all runs of a sweep"),
    "job": (["coordinator=a,b"], "--job.coordinator is the same in all runs"),
    "devices": (["devices=1,2"], "--devices is the same in all runs"),
    "flag": (["profile=1"], "--profile is the same"),
    "value": (["lr=low"], "--sweep, lr=low: .* could not convert"),
    "range": (["lr=0.1,-1"], "--sweep, lr=-1: optimizer.learning-rate must be above 0"),
    "folders": (["data.path=a/b,a-b"], "two runs would have the folder data.path=a-b"),
}


@pytest.mark.parametrize(("texts", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_swept(texts, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        combinations(read_axes(texts), [], tmp_path, train_config)


def test_a_name_of_two_options(monkeypatch):
    options = [OptionNames("a.rate"), OptionNames("b.rate", ("lr",))]
    monkeypatch.setattr("jaxrec.train.sweep.option_names", lambda kind: options)
    with pytest.raises(ConfigError, match=r"rate may be a\.rate or b\.rate; give the whole name"):
        read_axes(["rate=1"])
    assert read_axes(["lr=1"])[0].option == "b.rate"


def test_combinations_replace_options_and_keep_those_of_their_model(tmp_path):
    texts = ["lr=0.1,0.2", "top_layer_sizes=8 4,2", "model=dlrm,hstu_ranker"]
    options = ["--lr=7", "--seed=3", "--sweep", *texts]
    runs = combinations(read_axes(texts), options, tmp_path, train_config)
    assert [run.output.name for run in runs] == [
        f"lr={lr},top_layer_sizes={sizes},model={model}"
        for lr in ("0.1", "0.2")
        for sizes in ("8-4", "2")
        for model in ("dlrm", "hstu_ranker")
    ]
    assert {run.config.optimizer.learning_rate for run in runs} == {0.1, 0.2}
    assert {run.config.model.top_layer_sizes for run in runs} == {(8, 4), (2,)}
    assert {(run.config.seed, run.config.sweep) for run in runs} == {(3, ())}
    # The default batch size is that of the model; that of models of rows follows from them.
    sizes = {run.values["model"]: run.config.data.batch_size for run in runs}
    assert sizes == {"dlrm": 0, "hstu_ranker": 128}
    write_options(train_config([]), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="to go on with a sweep, repeat its command"):
        train_config(["--sweep", "lr=1", f"--resume={tmp_path}"])


class Runs:
    """Stands for training: notes the runs, and writes the files of one that has finished."""

    def __init__(self, interrupt, actions=()):
        self.interrupt, self.actions, self.made = interrupt, dict(actions), []

    def __call__(self, config, console, interrupt, learn):
        name = config.output.name
        self.made.append((name, config.resume is not None))
        config.output.mkdir(exist_ok=True)
        write_options(config, config.output / "config.yaml")
        action = self.actions.get(name)
        if isinstance(action, Exception):
            raise action
        if action == "stop":
            (config.output / "3/model").mkdir(parents=True)
            (config.output / "3/run.json").write_text("{}")
            self.interrupt.signal = 2
            return 130
        results = {"auc": action or 0.5, "steps": 4, "seconds": 1.0}
        (config.output / "results.json").write_text(json.dumps(results))
        return 0


@pytest.fixture
def sweep(tmp_path):
    """Function that makes runs of some learning rates, and returns the table as it is then."""

    def run(rates, actions=(), seed=0):
        interrupt = Interrupt()
        train = Runs(interrupt, actions)
        made = []
        for rate in rates:
            optimizer = OptimizerConfig(learning_rate=rate)
            output = tmp_path / f"lr={rate}"
            config = TrainConfig(optimizer=optimizer, output=output, seed=seed)
            made.append(Combination({"lr": str(rate)}, config))
        code = run_sweep(made, tmp_path, Console(quiet=True), interrupt, train)
        return (
            code,
            train.made,
            [*csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())],
        )

    return run


def test_a_sweep_goes_on_where_it_was_stopped(sweep, monkeypatch):
    monkeypatch.setattr("jaxrec.train.sweep.all_steps", lambda path: [*path.glob("3")])
    monkeypatch.setattr("jaxrec.train.sweep.saved_encoder", lambda path: None)
    names = [f"lr={lr}" for lr in (1, 2, 3, 4)]
    values = {"lr=1": 0.6, "lr=2": DataError("bad\n  row"), "lr=3": "stop"}
    code, made, table = sweep([1, 2, 3, 4], values)
    assert (code, made) == (130, [(name, False) for name in names[:3]])
    assert [(line["lr"], line["state"]) for line in table] == [
        ("1", "finished"), ("2", "failed"), ("3", "to do"), ("4", "to do")
    ]  # fmt: skip
    assert table[1]["error"] == "bad row"
    # The failed one is made again, the stopped one goes on, the finished one is left alone.
    code, made, table = sweep([1, 2, 3, 4], {"lr=3": 0.9, "lr=2": ValueError("still bad")})
    assert (code, made) == (1, [("lr=2", False), ("lr=3", True), ("lr=4", False)])
    assert [line["lr"] for line in table] == ["3", "1", "4", "2"]  # by AUC
    assert table[3]["error"] == "ValueError: still bad"
    assert [line["auc"] for line in table] == ["0.9", "0.6", "0.5", ""]
    # More values, and no other options.
    code, made, table = sweep([1, 2, 3, 4, 5])
    assert (code, made) == (0, [("lr=2", False), ("lr=5", False)])
    with pytest.raises(ConfigError, match=r"lr=1 has a run of another sweep, with seed 0 in place"):
        sweep([1, 2], seed=4)


def test_sizes_of_the_rows_do_not_make_another_sweep(tmp_path, monkeypatch):
    """A run writes the batch size and the epochs that its rows gave, and goes on with them."""
    monkeypatch.setattr("jaxrec.train.sweep.all_steps", lambda path: [3])
    monkeypatch.setattr("jaxrec.train.sweep.saved_encoder", lambda path: None)
    run = Combination({"seed": "0"}, TrainConfig(output=tmp_path / "seed=0"))
    run.output.mkdir()
    sizes = DataConfig(batch_size=32, epochs=2)
    write_options(TrainConfig(data=sizes), run.output / "config.yaml")
    resumed = []

    def train(config, *_):
        resumed.append((config.resume, config.data))
        return 0

    assert run_sweep([run], tmp_path, Console(quiet=True), Interrupt(), train) == 0
    assert resumed == [(run.output, sizes)]
    other = dataclasses.replace(run.config, data=DataConfig(batch_size=64))
    with pytest.raises(ConfigError, match=r"with data\.batch-size 32 in place of 64"):
        run_sweep(
            [Combination({"seed": "0"}, other)], tmp_path, Console(quiet=True), Interrupt(), train
        )


def test_another_schema_makes_another_sweep(rows, tmp_path, monkeypatch):
    """A finished run has a copy of its schema; the file may have changed since."""
    schema = tmp_path / "schema.yaml"
    schema.write_text("label: click\ncategorical:\n  item: {encoding: vocabulary}\n")
    data = DataConfig(path=rows, schema=schema)
    run = Combination({"seed": "0"}, TrainConfig(data=data, output=tmp_path / "seed=0"))
    made = []

    def train(config, console, interrupt, learn):
        made.append(config)
        run.output.mkdir(exist_ok=True)
        learn(config, console).save(run.output / "features")
        write_options(config, run.output / "config.yaml")
        (run.output / "results.json").write_text('{"auc": 0.5}')

    def sweep(config):
        run_sweep([dataclasses.replace(run, config=config)], tmp_path, quiet, Interrupt(), train)

    quiet = Console(quiet=True)
    sweep(run.config)
    sweep(run.config)
    assert len(made) == 1, "it is finished"
    schema.write_text(schema.read_text() + "dense:\n  age: {transform: standardize}\n")
    with pytest.raises(
        ConfigError, match=r"seed=0 has a run of another schema than .*schema\.yaml"
    ):
        sweep(run.config)
    without = dataclasses.replace(data, schema=None, label=("click",))
    with pytest.raises(ConfigError, match=r"with data\.schema a file in place of None"):
        sweep(dataclasses.replace(run.config, data=without))
    # A run that failed before its first checkpoint may have failed by its schema.
    (run.output / "results.json").unlink()
    sweep(run.config)
    assert len(made) == 2


def test_columns_are_learned_once(rows, monkeypatch):
    learned = []

    def learn(*args, **options):
        learned.append(args)
        return run_encoder(*args, **options)

    monkeypatch.setattr("jaxrec.train.models.kind.run_encoder", learn)
    shared, quiet = SharedEncoders(), Console(quiet=True)
    base = [f"--data={rows}", *SMALL]
    for options, expected in (
        (["--lr=0.1"], 1),
        (["--lr=0.2", "--batch-size=8", "--epochs=3", "--model.embedding-dim=8"], 1),
        (["--model=dcn_v2"], 1),
        (["--seed=3"], 1),
        (["--exclude=age", "--model=dcn_v2"], 2),
        (["--hold-out=0.3"], 3),
        (["--hold-out=random"], 4),
        (["--hold-out=random", "--seed=3"], 5),
        (["--lr=0.3"], 5),
    ):
        shared(train_config([*base, *options]), quiet)
        assert len(learned) == expected, options
    # What a model cannot take is refused before it is made.
    with pytest.raises(ConfigError, match="din reads columns of lists"):
        shared(train_config([*base, "--model=din"]), quiet)


def test_rows_are_sorted_by_their_value():
    rows = [RunRow(str(n), {}, {} if x is None else {"x": x}) for n, x in enumerate([2, None, 3])]
    assert [row.folder for row in sorted_rows(rows, Measure("x", "X", "max"))] == ["2", "0", "1"]
    assert [row.folder for row in sorted_rows(rows, Measure("x", "X", "min"))] == ["0", "2", "1"]


def test_runs_of_other_held_out_rows_are_not_compared(tmp_path):
    def said(*results):
        console = Console(file=io.StringIO(), soft_wrap=True)
        rows = [RunRow(str(n), {"x": str(n)}, each) for n, each in enumerate(results)]
        report_sweep(rows, [], tmp_path, console, is_last=True)
        return "different held-out rows" in console.file.getvalue()

    one = {"data": "a.parquet", "hold_out": "the last 10 % of the rows", "seed": 0}
    assert not said(one, one | {"seed": 1}, {})
    assert said(one, one | {"hold_out": "the last 20 % of the rows"})
    assert said(one | {"data": None}, one | {"data": None, "seed": 1})


def test_a_package_that_the_picture_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it fails
    console = Console(file=io.StringIO(), soft_wrap=True, markup=False)
    rows = [RunRow("0", {"x": "0"}, {"auc": 0.5})]
    report_sweep(rows, [Measure("auc", "AUC", "max")], tmp_path, console, is_last=True)
    wanted = "no sweep.png: drawing needs matplotlib: pip install 'jaxrec[plot]'\n"
    assert wanted in console.file.getvalue()


def test_a_picture_of_numbers_and_names(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        RunRow(f"{lr}{model}", {"lr": lr, "model": model, "seed": "0", "x": "1"}, {"auc": n / 9})
        for n, (lr, model) in enumerate(
            [("0.1", "dlrm"), ("0.01", "dlrm"), ("0.001", "din"), ("0.1", "din")]
        )
    ]
    draw_sweep([*rows, RunRow("failed", rows[0].values, {}, "bad")], Measure("auc", "AUC", "max"),
               tmp_path / "sweep.png")  # fmt: skip
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sweep_of_the_command(rows, tmp_path, capsys, monkeypatch):
    """Two runs on random rows, of which one fails; then once more without the other."""
    output = tmp_path / "sweep"
    options = ["train", f"--data={rows}", *SMALL, "--hold-out=random:0.3", f"--output={output}"]
    options += ["--sweep", "model=dlrm,din"]
    assert main(options) == 1
    said = capsys.readouterr().out
    assert "run 2 of 2: model=din" in said
    assert "model=din failed: model.name din reads columns of lists" in said
    assert said.count("learned the columns") == 1
    results = json.loads((output / "model=dlrm/results.json").read_text())
    assert results["hold_out"] == "random 30 % of the rows, seed 0"
    assert results["rows"] + results["held_out_rows"] == 256
    found = json.loads((output / "sweep.json").read_text())
    assert found["sorted_by"] == "auc"
    assert [run["state"] for run in found["runs"]] == ["finished", "failed"]
    assert found["runs"][0]["results"] == results
    monkeypatch.setattr(train, "_train", lambda *args: pytest.fail("it is finished"))
    assert main([*options[:-1], "model=dlrm"]) == 0
    assert "AUC" in capsys.readouterr().out
