from __future__ import annotations

import concurrent.futures
import pathlib

import pytest

from jaxrec.arguments import ConfigError
from jaxrec.train.config import TrainConfig, load_config, parse_options, write_options

pytestmark = pytest.mark.every_case

YAML = """
data:
  batch-size: 64
  path: log.tsv
model: {bottom_layer_sizes: [8, 4], top-layer-sizes: []}
optimizer:
  learning_rate: 1.0e-3
seed: 7
"""
TOML = """
seed = 7
[data]
batch-size = 64
path = "log.tsv"
[model]
bottom_layer_sizes = [8, 4]
top-layer-sizes = []
[optimizer]
learning_rate = 1e-3
"""


@pytest.mark.parametrize(("suffix", "text"), [(".yaml", YAML), (".toml", TOML)])
def test_files(tmp_path, suffix, text):
    path = tmp_path / f"run{suffix}"
    path.write_text(text)
    config = load_config(path)
    assert config.data.batch_size == 64
    assert config.data.path == pathlib.Path("log.tsv")
    assert config.model.bottom_layer_sizes == (8, 4)
    assert config.model.top_layer_sizes == ()
    assert config.optimizer.learning_rate == 1e-3
    assert config.seed == 7
    assert config.data.epochs == TrainConfig().data.epochs


def test_the_command_line_comes_first(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    config = parse_options(["--seed", "8", "--data.batch-size", "32"], load_config(path))
    assert (config.seed, config.data.batch_size) == (8, 32)
    assert config.model.bottom_layer_sizes == (8, 4)


def test_data_is_short_for_its_path():
    assert parse_options(["--data", "x"]).data.path == pathlib.Path("x")


def test_written_options_are_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parse_options(
        ["--data", "log", "--model.top-layer-sizes", "3", "--model.table-dtype", "bfloat16"]
    )
    write_options(config, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again.data.path == tmp_path / "log"  # so that it is found from anywhere
    assert again.model == config.model
    write_options(TrainConfig(), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == TrainConfig()


def test_an_empty_file_says_nothing(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("")
    assert load_config(path) == TrainConfig()


WRONG_OPTIONS = {
    "unknown": (["--bogus", "1"], "unknown option --bogus; `jaxrec train --help`"),
    "in-a-group": (["--bad-rows", "skip"], "--bad-rows, did you mean --data.bad-rows\\?"),
    "underscores": (["--bad_rows=skip"], "--bad_rows, did you mean --data.bad-rows\\?"),
    "misspelled": (["--data.epoch=3"], "--data.epoch, did you mean --data.epochs\\?"),
    "both": (["--epoch", "3"], "--epoch, did you mean --data.epochs\\?"),
    "in-two-groups": (["--learning-rates", "3"], "did you mean --optimizer.learning-rate"),
    "positional": (["bogus"], "unknown option bogus"),
    "files": ([__file__], "test_config.py is a file too many; put a pattern of files in quotes"),
    "no-number": (["--seed", "x"], "--seed.*invalid literal.*'x'"),
    "no-value": (["--seed"], "--seed"),
    "choice": (["--model.table-dtype", "int8"], "invalid choice 'int8'"),
    "negative": (["--data.batch-size", "-1"], "^data.batch-size must be 0 or more, got -1$"),
    "fraction": (["--data", "x", "--data.eval-fraction", "1"], "must be between 0 and 1, got 1.0"),
    "nan": (["--optimizer.learning-rate", "nan"], "learning-rate must be above 0, got nan"),
    "layers": (["--model.top-layer-sizes", "8", "0"], "sizes must be 1 or more, got .8, 0"),
    "eval-alone": (["--data.eval-path", "x"], "no file to train on"),
    "seed": (["--seed", "-1"], "^seed must be 0 or more, got -1"),
}


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_wrong_options_are_one_sentence(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse_options(options)
    assert "\n" not in str(error.value)
    assert "│" not in str(error.value)


WRONG_FILES = {
    "unknown": ("sed: 1", "unknown option sed; options are data, model"),
    "unknown-in-group": ("data: {pth: x}", "unknown option data.pth; options of data are path"),
    "value": ("seed: x", "--seed.*invalid literal"),
    "group": ("data: 3", "data is a group of options, got 3"),
    "list": ("- 1", "expected options and their values"),
    "yaml": ("data: [", "while parsing"),
    "twice": ("seed: 1\ndata: {epochs: 2}\nseed: 2", "'seed' is given twice.*in line 3"),
    "twice-in-group": ("data: {epochs: 1, epochs: 2}", "'epochs' is given twice"),
    "twice-in-json": ('{"seed": 1,\n"seed": 2}', "'seed' is given twice.*in line 2"),
    "itself": ("config: x", "unknown option config"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_wrong_files_are_named(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_no_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="codec can't decode"):
        load_config(path)


def test_wrong_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seed = ")
    with pytest.raises(ConfigError, match="Invalid value"):
        load_config(path)


def test_help_lists_options(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_options(["--help"])
    assert stop.value.code == 0
    assert "--data.batch-size" in capsys.readouterr().out


def test_written_options_are_read_whole_or_not_at_all(tmp_path):
    config, path = parse_options(["--data.batch-size=3", "--seed=4"]), tmp_path / "config.yaml"
    write_options(config, path)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        writing = pool.submit(lambda: [write_options(config, path) for _ in range(200)])
        while not writing.done():
            assert "seed: 4" in path.read_text()
    writing.result()
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
