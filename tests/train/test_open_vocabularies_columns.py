"""`jaxrec train --vocabulary dynamic` on Parquet: strings, integers and lists get rows."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import jaxrec
from jaxrec.commands import main
from jaxrec.data import TableEncoder
from jaxrec.metrics import auc
from jaxrec.train import load_model, progress
from jaxrec.train.config import FEATURES_DIRECTORY, parse_options
from jaxrec.train.features import learn_features
from jaxrec.train.model import predict
from tests.train.vocabulary_runs import LAYERS, assert_same, history, rows_by_id

ROWS = 400
COLUMNS = [
    *LAYERS,
    "--data.batch-size=20",
    "--data.table-rows=150",
    "--vocabulary=dynamic",
    "--optimizer.table-learning-rate=0.5",
]


def table(rows=ROWS):
    rng = np.random.default_rng(0)
    city = rng.integers(0, 20, rows)
    lengths = rng.poisson(2, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tags = np.char.add("t", rng.integers(0, 30, lengths.sum()).astype(str))
    return pa.table(
        {
            "click": rng.random(rows) < np.where(city < 10, 0.9, 0.1),
            "age": rng.normal(size=rows),
            "city": pa.array(np.char.add("city ", city.astype(str)), mask=rng.random(rows) < 0.05),
            "item": rng.integers(-(2**63), 2**63, 10)[rng.integers(0, 10, rows)],
            "user": rng.integers(2**63, 2**64 - 1, 40, np.uint64)[rng.integers(0, 40, rows)],
            "tags": pa.ListArray.from_arrays(offsets, pa.array(tags)),
        }
    )


def hashed(column):
    """Strings as the raw ids of their hashes."""
    hashes = jaxrec.ragged.hash_ids(column.drop_null(), None)
    return pa.array(np.asarray(hashes).view(np.int64))


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    """A Parquet file, and a run on it."""
    directory = tmp_path_factory.mktemp("columns")
    pq.write_table(table(), directory / "rows.parquet", row_group_size=100)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        options = [f"--data={directory / 'rows.parquet'}", *COLUMNS]
        assert main(["train", *options, f"--output={directory / 'model'}"]) == 0
    return directory, said.getvalue()


def test_strings_integers_and_lists_get_rows_when_they_come(columns):
    directory, said = columns
    encoder = TableEncoder.load(directory / "model" / FEATURES_DIRECTORY)
    assert encoder.schema.dynamic == ("city", "item", "user", "tags")
    assert encoder.vocabularies == {}
    assert encoder.table_rows == dict.fromkeys(encoder.schema.dynamic, 150)
    assert "encoding: dynamic" in said
    assert " values\n" not in said, "no vocabulary was learned"
    model, rows = load_model(directory / "model"), table()[:360]
    residents = {name: set(rows_by_id(model, name)) for name in encoder.schema.dynamic}
    assert residents["item"] == set(rows["item"].to_pylist())
    assert residents["user"] == {i - 2**64 for i in rows["user"].to_pylist()}
    assert residents["city"] == set(hashed(rows["city"]).to_pylist())
    assert residents["tags"] == set(hashed(rows["tags"].combine_chunks().flatten()).to_pylist())
    results = json.loads((directory / "model/results.json").read_text())
    assert results["auc"] > 0.7
    held_out = encoder.batch(table()[360:])
    logits = np.asarray(predict(model, held_out))
    assert auc(logits, held_out.labels) == pytest.approx(results["auc"], abs=1e-6)


@pytest.mark.slow
def test_strings_and_their_hashes_are_trained_alike(columns, tmp_path):
    directory, _ = columns
    rows = table()
    city = rows["city"].combine_chunks()
    ids = np.zeros(len(city), np.int64)
    ids[np.asarray(city.is_valid())] = hashed(rows["city"]).to_numpy()
    rows = rows.set_column(2, "city", pa.array(ids, mask=np.asarray(city.is_null())))
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=100)
    options = [f"--data={tmp_path / 'rows.parquet'}", *COLUMNS, f"--output={tmp_path / 'model'}"]
    assert main(["train", *options]) == 0
    models = load_model(tmp_path / "model"), load_model(directory / "model")
    assert_same(*models, ("city", "item", "tags"), rtol=0, atol=0)


@pytest.mark.slow
def test_a_schema_chooses_columns_and_resume_keeps_it(columns, tmp_path, capsys):
    """DeepFM, whose linear tables share the rows of their ids."""
    schema = {
        "label": "click",
        "dense": {"age": {"transform": "none", "missing": "zero"}},
        "categorical": {
            "city": {"encoding": "dynamic", "num_embeddings": 60},
            "item": {"encoding": "hash", "num_embeddings": 70},
            "tags": {},
        },
    }
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(schema))
    options = [f"--data={columns[0] / 'rows.parquet'}", f"--schema={tmp_path / 'schema.yaml'}"]
    output = tmp_path / "model"
    arguments = ["train", *options, *COLUMNS, "--model.name=deepfm", f"--output={output}"]
    assert main(arguments) == 0
    model = load_model(output)
    shapes = [model.embeddings.table(name).shape for name in ("city", "item", "tags")]
    assert shapes == [(60, 4), (70, 4), (150, 4)]
    assert set(jaxrec.tier.statistics(model)) == {
        "city",
        "city (linear)",
        "tags",
        "tags (linear)",
    }
    assert main(["train", f"--resume={output}", "--data.epochs=2", *options[1:]]) == 0
    assert "36 steps of 20, 18 of them made before" in capsys.readouterr().out
    assert main(["train", f"--resume={output}", "--vocabulary=fixed"]) == 2
    assert (
        "--vocabulary fixed is not that of the run, whose tables have dynamic vocabularies; leave "
        "--vocabulary out\n" in capsys.readouterr().err
    )


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """A Parquet file of one column of 200 strings, and options of a run on it."""
    path = tmp_path_factory.mktemp("items") / "rows.parquet"
    rng = np.random.default_rng(0)
    columns = {"click": rng.integers(0, 2, ROWS), "age": rng.normal(size=ROWS)}
    columns["item"] = np.char.add("item ", rng.integers(0, 200, ROWS).astype(str))
    pq.write_table(pa.table(columns), path)
    return path, [f"--data={path}", *LAYERS, "--vocabulary=dynamic", "--data.batch-size=10"]


# Few rows, so that ids lose theirs, but enough for the batches under way.
TIGHT = ["--data.table-rows=80", "--data.epochs=3"]


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
def test_few_rows_are_warned_of_and_shown(items, tmp_path, capsys, monkeypatch):
    """The progress shows all steps here, in place of one every few seconds."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    options = [*items[1], *TIGHT, "--vocabulary.eviction=lfu"]
    assert main(["train", *options, f"--output={tmp_path / 'model'}"]) == 0
    out = capsys.readouterr().out
    assert "\nwarning: the table item thrashes: " in out
    assert "--data.table-rows, --vocabulary.admit-after, --vocabulary.store\n" in out
    values = history(tmp_path / "model")[-1]
    assert values["vocabulary/item/load"] == pytest.approx(1, abs=0.1)
    assert values["vocabulary/item/evicted"] > 200
    lines = re.findall(r"step \d+ of 108, .*, NE .*", out)
    assert len(lines) == 108
    for line in lines:
        assert re.search(r"NE \S+, hits \d+\.\d%, evicted \d+, load \d+\.\d%$", line), line


@pytest.mark.slow
def test_stores_are_shown_and_recorded(items, tmp_path, capsys, monkeypatch):
    """Rows are 4 float32 with a sum of squares; those that leave with few rows come back."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    output = tmp_path / "model"
    options = [*items[1], *TIGHT, "--vocabulary.store=memory://"]
    assert main(["train", *options, f"--output={output}"]) == 0
    out = capsys.readouterr().out
    lines = re.findall(r"step \d+ of 108, .*, NE .*", out)
    assert len(lines) == 108
    for line in lines:
        assert re.search(r"load \d+\.\d%, stall \d+\.\d\d ms$", line), line
    values = history(output)[-1]
    of_item = {
        name.removeprefix("vocabulary/item/"): value
        for name, value in values.items()
        if name.startswith("vocabulary/item/")
    }
    assert of_item["fetched"] + of_item["initialized"] == of_item["admitted"]
    assert of_item["fetched"] > 200
    assert 0 < of_item["written"] <= of_item["evicted"]  # the last may be on their way
    assert of_item["fetched_bytes"] == of_item["fetched"] * 4 * (4 + 1)
    assert of_item["stall_ms"] >= 0
    assert of_item["read_ms"] > 0 < of_item["write_ms"]
    (rows,) = re.findall(r"^  rows         (.*)$", out, re.MULTILINE)
    bytes_and_times = (
        r"\(\S+ \S+\), written back [\d,]+ \(\S+ \S+\), new [\d,]+; ms a step: stall .*"
    )
    shown = re.fullmatch(rf"fetched ([\d,]+) {bytes_and_times}, reads \S+, writes \S+", rows)
    # The evaluation at the end moves rows, too.
    assert int(shown[1].replace(",", "")) >= of_item["fetched"]


@pytest.mark.slow
def test_ids_that_are_rare_get_no_row(items, tmp_path):
    options = ["--data.table-rows=2000", "--vocabulary.admit-after=3"]
    options += ["--vocabulary.unknown=default", f"--output={tmp_path / 'model'}"]
    assert main(["train", *items[1], *options]) == 0
    values = pq.read_table(items[0])["item"].to_pylist()[:360]
    frequent = [value for value in set(values) if values.count(value) >= 3]
    expected = jaxrec.ragged.hash_ids(frequent, None).view(np.int64)
    assert rows_by_id(load_model(tmp_path / "model"), "item").keys() == set(expected.tolist())
    assert history(tmp_path / "model")[-1]["vocabulary/item/refused"] > 0


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_bits(items, tmp_path, forks):
    """Ids lose their rows and come back, before and after."""
    # All in processes of one device: this one has eight, and rounds otherwise.
    options = [*items[1], *TIGHT, "--data.epochs=2"]
    options += ["--vocabulary.store=memory://", "--checkpoint.every=20"]
    never, output = tmp_path / "never", tmp_path / "model"
    whole = forks.run("jaxrec", "train", *options, f"--output={never}")
    assert whole.wait(300) == 0, whole.errors
    assert history(never)[-1]["vocabulary/item/evicted"] > 200
    killed = forks.run("jaxrec", "train", *options, f"--output={output}")
    while killed.poll() is None and not (output / "20").exists():
        time.sleep(0.001)
    assert killed.stop() == -signal.SIGKILL, killed.errors
    resumed = forks.run("jaxrec", "train", f"--resume={output}")
    assert resumed.wait(300) == 0, resumed.errors
    assert_same(load_model(output), load_model(never), ("item",), rtol=0, atol=0)


def test_a_reserved_id_is_an_error_that_names_its_row(tmp_path, capsys):
    rows = table(40)
    users = rows["user"].to_pylist()
    users[7] = 2**64 - 1
    rows = rows.set_column(4, "user", pa.array(users, pa.uint64()))
    pq.write_table(rows, tmp_path / "rows.parquet")
    options = [f"--data={tmp_path / 'rows.parquet'}", *COLUMNS, f"--output={tmp_path / 'model'}"]
    assert main(["train", *options]) == 1
    assert (
        f"{tmp_path / 'rows.parquet'}, row 7 (from 0), column 'user': id -1 (2**64 - 1 unsigned) "
        "is reserved" in capsys.readouterr().err
    )


def test_nothing_is_read_beforehand(tmp_path, monkeypatch):
    rows = table().drop_columns(["age", "tags"])
    pq.write_table(rows, tmp_path / "rows.parquet")
    config = parse_options([f"--data={tmp_path / 'rows.parquet'}", "--vocabulary=dynamic"])
    monkeypatch.setattr("jaxrec.train.features.learn_encoder", None)
    encoder = learn_features(config.data, is_dynamic=True)
    batch = encoder.batch(rows[:3])
    assert batch.features["item"].to_lists() == [[i] for i in rows["item"][:3].to_pylist()]
