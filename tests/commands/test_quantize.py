"""The command jaxrec quantize: what it writes and prints, and its errors."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from jaxrec.commands import main
from jaxrec.serve import by_frequency, count_ids, load_quantized, quantize
from jaxrec.train import checkpoint, load_model
from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.config import load_config, parse_options, write_options
from jaxrec.train.datasets import split_datasets
from jaxrec.train.model import make_model
from tests.data.criteo.test_log import KAGGLE

SMALL = [
    f"--data={KAGGLE}",
    "--data.eval-fraction=0.2",
    "--data.batch-size=20",
    "--data.table-rows=50",
    "--model.embedding-dim=4",
    "--model.bottom-layer-sizes=4",
    "--model.top-layer-sizes=4",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs as jaxrec train writes them before its first step."""
    directory = tmp_path_factory.mktemp("quantize")
    for name, model in (("run", "dlrm"), ("deepfm", "deepfm")):
        config = parse_options([*SMALL, f"--model.name={model}"])
        checkpoint.save(directory / name, *make_model(config, num_steps=2))
        write_options(config, directory / name / "config.yaml")
    return directory


@pytest.fixture
def work(trained, tmp_path, monkeypatch):
    """A directory with the runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "deepfm"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path


def assert_same(model: nnx.Module, other: nnx.Module) -> None:
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(other))
    for one, two in zip(*map(jax.tree.leaves, map(nnx.state, (model, other))), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_run(work, capsys):
    assert main(["quantize", "run", "--dtype", "int4", "--per-table", "cat_1?=float16"]) == 0
    said = capsys.readouterr().out
    assert "quantizing 26 tables of run\n" in said
    assert "comparing both models on 10 held-out rows\n" in said
    assert "cat_9   int4        50" in said
    assert "cat_10  float16     50" in said
    assert "normalized entropy" in said
    assert "quantized model saved in run-int4\n" in said
    model = load_model("run")
    formats = {f"cat_{i}": "float16" for i in range(10, 20)}
    assert_same(load_quantized("run-int4"), quantize(model, "int4", per_table=formats))
    values = json.loads((work / "run-int4/quality.json").read_text())
    assert [table["name"] for table in values["tables"]] == [f"cat_{i}" for i in range(26)]
    assert values["before"]["samples"] == 10
    assert (work / "run-int4/quality.png").read_bytes().startswith(b"\x89PNG")
    assert not list(work.glob("*.unfinished"))


@pytest.mark.slow
def test_pruning_by_frequency(work, capsys):
    options = ["--prune", "cat_*=0.5", "cat_3=0", "--prune-by", "frequency", "--out", "small"]
    assert main(["quantize", "run", *options]) == 0
    assert "counting the ids of 40 training rows\n" in capsys.readouterr().out
    model = load_model("run")
    rows, _ = split_datasets(load_config(work / "run/config.yaml"))
    counts = count_ids(model, (batch.features for batch in rows.batches(20)))
    rules = {
        name: by_frequency(each, share=0 if name == "cat_3" else 0.5)
        for name, each in counts.items()
    }
    assert_same(load_quantized("small"), quantize(model, prune=rules))


@pytest.mark.slow
def test_two_collections(work, capsys):
    options = ["--per-table", "*(linear)=int8", "--output-dtype", "bfloat16"]
    assert main(["quantize", "deepfm", "--dtype", "int2", *options]) == 0
    assert "quantizing 52 tables" in capsys.readouterr().out
    again = load_quantized("deepfm-int2")
    assert again.embeddings.dtype == "bfloat16"
    assert again.linear.weights.tables.get_value().formats()["cat_3 (linear)"].name == "int8"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "give the directory of a run of jaxrec train: jaxrec quantize RUN"),
        (["nowhere"], 1, "nowhere: there is no saved run here (config.yaml is missing)"),
        (["run", "--dtype", "int5"], 2, "invalid choice 'int5' for argument '--dtype'"),
        (["run", "--per-table", "user"], 2, "--per-table takes NAME=VALUE, got 'user'"),
        (["run", "--per-table", "cat_1=int5"], 2, "--per-table cat_1=int5: 'int5' is not one of"),
        (["run", "--per-table", "x*=int8"], 2, "no table is named 'x*'; there are 'cat_0', "),
        (["run", "--prune", "cat_1=30"], 2, "--prune cat_1=30: '30' is not a share from 0 to 1"),
        (["run", "--prune", "cat_1=a"], 2, "'a' is not a share from 0 to 1"),
        (["run", "--prune", "user=0.1"], 2, "--prune user=0.1: no table is named 'user'"),
        (["run", "--out", "deepfm"], 2, "deepfm exists; give another --out, or remove it"),
        (["run", "--step", "7"], 1, "step 7 was not saved; there are [0]"),
        (
            ["deepfm", "--dtype", "int4"],
            2,
            "table 'cat_0 (linear)' cannot be int4: int4 packs 2 columns in a byte, so the number "
            "of columns must be a multiple of 2, got 1; give it another format by --per-table "
            "'cat_0 (linear)=int8'",
        ),
    ],
    ids=[
        "no_run", "not_a_run", "dtype", "no_format", "format", "table", "percent", "no_number",
        "pruned_table", "out", "step", "width",
    ],
)  # fmt: skip
def test_errors(work, capsys, options, code, message):
    before = sorted(work.rglob("*"))
    assert main(["quantize", *options]) == code
    error = capsys.readouterr().err
    assert error.startswith("jaxrec quantize: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(work.rglob("*")) == before


def test_quantizing_twice(work, capsys):
    (work / "run/quantized.yaml").write_text("")
    assert main(["quantize", "run"]) == 1
    assert "run is quantized already" in capsys.readouterr().err


def test_an_open_vocabulary(work, capsys):
    path = work / "run/config.yaml"
    path.write_text(path.read_text().replace("kind: fixed", "kind: dynamic"))
    assert main(["quantize", "run"]) == 1
    assert "open vocabularies (--vocabulary dynamic)" in capsys.readouterr().err


def test_a_row_with_a_nan(work, capsys, monkeypatch):
    def load(path, step=None):
        model = load_model(path, step)
        model.embeddings.load_rows("cat_3", [7], np.full((1, 4), np.nan))
        return model

    monkeypatch.setattr("jaxrec.commands.quantize.load_model", load)
    assert main(["quantize", "run"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxrec quantize: table 'cat_3', row 7, column 0 is nan")
    assert not (work / "run-int8").exists()


def test_files_that_came_meanwhile(work, capsys, monkeypatch):
    kept = work / "run-int8/notes.txt"

    def load(path):
        kept.parent.mkdir()
        kept.write_text("mine")

    monkeypatch.setattr("jaxrec.commands.quantize.load_quantized", load)
    assert main(["quantize", "run"]) == 2
    assert "run-int8 exists; give another --out" in capsys.readouterr().err
    assert kept.read_text() == "mine"


def test_a_directory_that_is_no_quantized_model(work):
    with pytest.raises(CheckpointError, match="there is no model of jaxrec quantize here"):
        load_quantized(work / "run")
