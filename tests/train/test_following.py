"""``jaxrec train --follow``: rows are trained on as they come, once each, and runs go on."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.commands import main
from jaxrec.data import FolderSource, KafkaSource, Schema, TableEncoder
from jaxrec.data.streams.decode import Decoder
from jaxrec.train.checkpoint import all_steps
from jaxrec.train.checkpoint.files import read_run
from jaxrec.train.config import load_config, parse_options, write_options
from jaxrec.train.following import SAMPLE_FILE, _batches, _sample
from jaxrec.train.interrupt import Interrupt
from jaxrec.train.resumed import check_resumed
from jaxrec.train.stream_options import StreamConfig, open_source, topic_address

OPTIONS = ["--follow", "--until", "caught_up", "--vocabulary", "dynamic", "--batch-size", "16"]
OPTIONS += ["--data.table-rows", "100", "--stream.sample-rows", "50", "--record-every", "2"]
OPTIONS += ["--model", "dcn_v2", "--model.embedding-dim", "2", "--model.cross-layers", "1"]
OPTIONS += ["--model.top-layer-sizes", "4"]


def rows(first, count):
    rng = np.random.default_rng(first)
    return {
        "click": rng.integers(0, 2, count),
        "item": rng.integers(0, 60, count),
        "price": rng.random(count),
    }


def write(folder, first, count):
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(rows(first, count)), folder / f"{first}.parquet")


def history(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_folder(tmp_path, capsys):
    folder, output = tmp_path / "in", tmp_path / "run"
    write(folder, 0, 100)
    assert main(["train", "--data", str(folder), "--output", str(output), *OPTIONS]) == 0
    shown = capsys.readouterr().out
    assert f"following {folder}; 16 rows a step" in shown
    assert "no more rows: 7 steps made; AUC" in shown
    assert all_steps(output) == [7]
    assert [line["stream/lag"] for line in history(output)][-1] == 0
    write(folder, 100, 40)
    assert main(["train", "--resume", str(output)]) == 0
    assert "7 steps made before" in capsys.readouterr().out
    assert all_steps(output) == [10]
    (state,) = read_run(output / "10").reader
    done = {"0.parquet": [1, 0], "100.parquet": [1, 0]}
    assert json.loads(state)["positions"] == done


@pytest.mark.slow
def test_the_default_batch_size_is_the_largest(tmp_path, capsys):
    folder, output = tmp_path / "in", tmp_path / "run"
    write(folder, 0, 100)
    options = [option for option in OPTIONS if option not in ("--batch-size", "16")]
    assert main(["train", "--data", str(folder), "--output", str(output), *options]) == 0
    assert "2,048 rows a step" in capsys.readouterr().out
    assert all_steps(output) == [1]
    data = load_config(output / "config.yaml").data
    assert (data.batch_size, data.epochs) == (2048, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_topic(broker, tmp_path, capsys):
    """A message that cannot be decoded is left out, and a label that is none ends the run."""
    messages = pa.table(rows(0, 70)).to_pylist()
    broker.send("cli", [*messages, b"nonsense", messages[0] | {"click": 2}])
    output, address = tmp_path / "run", f"kafka://{broker.address}/cli"
    options = ["--data", address, "--output", str(output), *OPTIONS, "--data.bad-rows", "skip"]
    assert main(["train", *options, "--checkpoint.every", "2"]) == 1
    shown = capsys.readouterr()
    assert "warning: topic 'cli', partition 0, offset 70: the message cannot be" in shown.out
    assert "topic 'cli', partition 0, offset 71: " in shown.err
    assert load_config(output / "config.yaml").stream.follow
    assert topic_address(load_config(output / "config.yaml").data.path) == address
    assert all_steps(output) == [4]


PROBLEMS = {
    "epochs": (["--epochs", "2"], "--epochs is for a run over all rows"),
    "patience": (["--patience", "2"], "--patience is for a run over all rows"),
    "hold-out": (["--hold-out", "0.2"], "--hold-out is for a run over all rows"),
    "held-out column": (["--hold-out-by", "item"], "--hold-out-by is for a run over all rows"),
    "held-out data": (["--data", "x", "--hold-out-data", "y"], "--hold-out-data is for a run over"),
    "types": (["--data", "x", "--data.types", "a=string"], "--data.types is for a run over all"),
    "start": (["--data", "x", "--stream.start", "latest"], "--stream.start is for messages of a"),
    "bad rows": (["--data", "x", "--data.bad-rows", "skip"], "leave it out with a folder"),
    "output": (["--data", "."], "--output run lies in the folder that is followed"),
    "sweep": (["--data", "x", "--sweep", "lr=1,2"], "--sweep compares runs on held-out rows"),
    "model": (["--model", "sasrec"], "--model sasrec needs others with it; take one of dlrm"),
    "no data": ([], "--follow needs --data kafka://HOST:PORT/TOPIC, or a folder"),
    "no folder": (["--data", "missing"], "missing is no folder"),
    "a file": (["--data", "file.csv"], "file.csv is a file"),
    "elsewhere": (["--data", "s3://bucket/clicks"], "is elsewhere"),
    "no topic": (["--data", "kafka://host:9092"], "give kafka://HOST:PORT/TOPIC"),
    "no rows": (["--data", "empty"], "empty has no rows yet"),
    "sample": (["--stream.sample-rows", "0"], "stream.sample-rows must be 1 or more"),
}


@pytest.mark.every_case
@pytest.mark.parametrize(("options", "problem"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_problems(options, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.csv").write_text("x\n1\n")
    assert main(["train", "--follow", "--output", "run", *options]) in (1, 2)
    assert problem in capsys.readouterr().err


def test_a_followed_run_is_not_evaluated(tmp_path, capsys):
    config = parse_options(["--follow", "--data", "kafka://h:1/x"])
    write_options(config, tmp_path / "config.yaml")
    assert main(["train", f"--resume={tmp_path}", "--eval-only"]) == 2
    assert "follows a stream has no held-out rows" in capsys.readouterr().err


def test_options_without_follow():
    with pytest.raises(ConfigError, match=r"stream\.until is for --follow"):
        parse_options(["--until", "caught_up"])
    with pytest.raises(ConfigError, match=r"--data kafka://h:1/x is read with --follow"):
        parse_options(["--data", "kafka://h:1/x"])
    with pytest.raises(ConfigError, match=r"takes files, and kafka://h:1/x is a topic"):
        parse_options(["--data", "a.parquet", "--hold-out-data", "kafka://h:1/x"])


def test_resumed_runs_read_as_before():
    followed = parse_options(["--follow", "--data", "x"])
    check_resumed(followed, followed)
    with pytest.raises(ConfigError, match="--no-follow reads other rows than the run did"):
        check_resumed(parse_options(["--no-follow"], followed), followed)
    with pytest.raises(ConfigError, match="--follow reads other rows than the run did"):
        check_resumed(followed, parse_options(["--data", "x"]))


def test_a_new_run_reads_a_sample_of_its_own(tmp_path):
    """A failed run leaves its sample in the directory; a resumed run keeps it."""
    write(tmp_path / "in", 0, 8)
    pq.write_table(pa.table({"other": [1]}), tmp_path / SAMPLE_FILE)
    options = ["--follow", "--data", str(tmp_path / "in")]
    config, console = parse_options(options), Console(quiet=True)
    resumed = dataclasses.replace(config, resume=tmp_path)
    assert pq.read_schema(_sample(resumed, tmp_path, console)).names == ["other"]
    names = pq.read_schema(_sample(config, tmp_path, console)).names
    assert names == ["click", "item", "price"]


def test_columns_of_a_stream_are_those_of_the_model(tmp_path):
    """Other fields may come later, or change their types."""
    item = {"encoding": "dynamic", "num_embeddings": 9}
    schema = Schema.from_dict({"label": "click", "categorical": {"user.id": item}})
    user = pa.struct({"id": pa.int64(), "home": pa.null()})
    columns = pa.schema({"click": pa.int64(), "user": user, "note": pa.null()})
    config = parse_options(["--follow", "--data", "kafka://h:1/x", "--batch-size", "8"])
    batches = _batches(config, TableEncoder(schema, {}, {}, {}), columns, Interrupt())
    assert batches.source.schema.names == ["click", "user"]
    rows = pa.table({"click": [1], "user": pa.array([{"id": 3, "home": None}], user)})
    assert batches.transform(rows).labels[0] == 1


def test_numbers_and_times_of_json_stay_what_they_are():
    """The rows of the sample may all have whole numbers and whole seconds."""
    item = {"encoding": "dynamic", "num_embeddings": 9}
    schema = Schema.from_dict(
        {
            "label": "click",
            "weight": "weight",
            "dense": {
                "price": {},
                "user.age": {},
                "vector": {"width": 2},
                "ts.age": {"part": "age"},
            },
            "categorical": {"item": item},
        }
    )
    user = pa.struct({"age": pa.int64()})
    kinds = {"click": pa.int64(), "weight": pa.int64(), "price": pa.int64(), "user": user}
    kinds |= {"vector": pa.list_(pa.int64()), "ts": pa.timestamp("s"), "item": pa.int64()}
    encoder = TableEncoder(schema, {}, {}, {})
    config = parse_options(["--follow", "--data", "kafka://h:1/x", "--batch-size", "8"])
    batches = _batches(config, encoder, pa.schema(kinds), Interrupt())
    decode = Decoder("json", batches.source.schema)
    later = (
        b'{"click": 1.0, "weight": 0.5, "price": 2.5, "user": {"age": 3.5}, "vector": [1, 0.5], '
        b'"ts": "2024-03-01T10:00:00.25Z", "item": 7.0}'
    )
    table, _ = decode([later], lambda at, error: pytest.fail(str(error)))
    batch = batches.transform(table)
    assert (batch.labels[0], batch.weights[0]) == (1, 0.5)
    np.testing.assert_allclose(batch.dense[0, :4], [2.5, 3.5, 1, 0.5])
    assert table["item"].to_pylist() == [7]


def test_sources(tmp_path):
    options = StreamConfig(follow=True, start="latest", group="g", deleted="skip")
    config = parse_options(["--follow", "--data", "kafka://a:1,b:2/x,y"])
    source = open_source(config.data.path, options, "skip")
    assert isinstance(source, KafkaSource)
    assert (source.brokers, source.topics) == ("a:1,b:2", ("x", "y"))
    assert (source.start, source.group, source.deleted) == ("latest", "g", "skip")
    assert source.bad_messages == "skip"
    folder = open_source(tmp_path, options, "fail")
    assert isinstance(folder, FolderSource)
    assert folder.deleted == "skip"


def test_flags_of_files(tmp_path):
    (tmp_path / "run.yaml").write_text("stream: {follow: true}\nprofile: false\n")
    config = load_config(tmp_path / "run.yaml")
    assert (config.stream.follow, config.profile) == (True, False)
    (tmp_path / "run.yaml").write_text("stream: {follow: false}\nprofile: true\n")
    assert load_config(tmp_path / "run.yaml").profile
