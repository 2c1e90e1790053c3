"""`jaxrec train --vocabulary dynamic`: runs whose tables give rows to raw ids."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import subprocess
import time

import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import jaxrec
from jaxrec.arguments import ConfigError
from jaxrec.cli import main
from jaxrec.data import CategoricalColumn, CriteoFile, GeneratedLog, Schema, TableEncoder
from jaxrec.data.conversion import convert
from jaxrec.data.parts import Conversion
from jaxrec.metrics import auc
from jaxrec.tier import default_row, lfu_lru, zeros
from jaxrec.tier.tier import tier_of
from jaxrec.train import Trainer, WriteMetrics, load_model, progress
from jaxrec.train.config import TrainConfig
from jaxrec.train.datasets import split_datasets
from jaxrec.train.features import FEATURES_DIRECTORY, learn_features
from jaxrec.train.model import predict
from jaxrec.train.open_vocabularies import check_fixed, settings, with_dynamic_columns
from jaxrec.train.options import load_config, parse_options
from tests.data.test_criteo import KAGGLE
from tests.tier import models
from tests.train.test_cli import PROGRAM

LAYERS = [
    "--model.embedding-dim=4",
    "--model.bottom-layer-sizes=4",
    "--model.top-layer-sizes=4",
]
BASE = [
    f"--data={KAGGLE}",
    "--data.eval-fraction=0.2",
    "--data.batch-size=4",
    "--vocabulary=dynamic",
    *LAYERS,
]
TRAINING_ROWS = 40
# Rows for all ids.
ROOMY = ["--data.table-rows=50"]
ROOM = 50 - zeros().rows


def ids_of_log(rows=TRAINING_ROWS):
    """The ids of each column of the first rows of the log, read by Python."""
    lines = KAGGLE.read_text().splitlines()[:rows]
    fields = [line.split("\t")[14:] for line in lines]
    return [[int(x or "0", 16) for x in column] for column in zip(*fields, strict=True)]


def rows_by_id(model, table="cat_0"):
    (each,) = [v for v in tier_of(model).vocabularies if table in [t.config.name for t in v.tables]]
    ids, rows = each.vocabulary.map.items()
    values = np.asarray(model.embeddings.table(table))
    return dict(zip(ids.tolist(), values[rows], strict=True))


def assert_same(model, other, tables=("cat_0", "cat_2", "cat_25"), **tolerances):
    for table in tables:
        rows, others = rows_by_id(model, table), rows_by_id(other, table)
        assert rows.keys() == others.keys()
        for i, row in rows.items():
            np.testing.assert_allclose(row, others[i], err_msg=f"{table}, {i}", **tolerances)


def history(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with room for all ids, and its output."""
    output = tmp_path_factory.mktemp("trained") / "model"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["train", *BASE, *ROOMY, f"--output={output}"]) == 0
    return output, said.getvalue()


def test_a_run_on_text(trained):
    output, said = trained
    assert "40 rows to train on, 10 held out; 10 steps of 4" in said
    model = load_model(output)
    for number, ids in enumerate(ids_of_log()):
        assert rows_by_id(model, f"cat_{number}").keys() == set(ids)
    assert model.embeddings.table("cat_0").shape == (50, 4)
    assert load_config(output / "config.yaml").vocabulary.is_dynamic


def test_the_held_out_rows_read_the_rows_of_their_ids(trained):
    """Batches of raw ids are given to `predict`."""
    model, config = load_model(trained[0]), load_config(trained[0] / "config.yaml")
    _, held_out = split_datasets(config)
    columns = [
        (np.asarray(predict(model, batch)), batch.labels, batch.weights)
        for batch in held_out.batches(4)
    ]
    logits, labels, weights = (np.concatenate(column) for column in zip(*columns, strict=True))
    results = json.loads((trained[0] / "results.json").read_text())
    assert auc(logits, labels, weights) == pytest.approx(results["auc"], abs=1e-6)


def test_statistics_are_written_and_shown(trained):
    """Each table's, at each line of the history; they count by the log itself."""
    output, said = trained
    last = history(output)[-1]
    lookups = hits = admitted = 0
    for number, ids in enumerate(ids_of_log()):
        seen, of_table = set(), 0
        for start in range(0, TRAINING_ROWS, 4):
            batch = ids[start : start + 4]
            of_table += sum(i in seen for i in batch)
            seen.update(batch)
        values = {
            name: last[f"vocabulary/cat_{number}/{name}"]
            for name in ("lookups", "hits", "new", "admitted", "evicted", "refused", "resident")
        }
        counts = (len(ids), of_table, len(seen), len(seen), 0, 0, len(seen))
        assert tuple(values.values()) == counts
        assert last[f"vocabulary/cat_{number}/load"] == pytest.approx(len(seen) / ROOM)
        lookups, hits, admitted = lookups + len(ids), hits + of_table, admitted + len(seen)
    load = admitted / (26 * ROOM)
    assert f"  ids          hits {hits / lookups:.1%}, evicted 0, load {load:.1%}\n" in said


def test_only_evaluated(trained, capsys):
    made = {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}
    assert main(["train", f"--resume={trained[0]}", "--eval-only"]) == 0
    again = capsys.readouterr().out
    (ne,) = re.findall("  NE .*", again)
    assert ne in trained[1]
    assert made == {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}


def test_devices_and_one_device_agree(trained, tmp_path):
    output = tmp_path / "many"
    options = [*BASE, *ROOMY, f"--output={output}", "--devices=4", "--evaluate-every=5"]
    assert main(["train", *options]) == 0
    assert_same(load_model(trained[0]), load_model(output), rtol=1e-4, atol=1e-5)


def test_too_few_rows_are_one_sentence(tmp_path, capsys):
    options = [*BASE, "--data.table-rows=9", f"--output={tmp_path / 'model'}"]
    assert main(["train", *options]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(
        r"feature 'cat_\d+', sample \d: no row of table cat_\d+ is left for id \d+: the batch has "
        r"\d new ids, and \d of the \d rows",
        error,
    )
    assert error.endswith(
        "admit ids later (Dynamic(admit_after=...)): --data.table-rows, --data.batch-size, "
        "--vocabulary.admit-after\n"
    )


def test_a_generated_log_has_hashes_of_its_ids():
    rows = [
        next(GeneratedLog(100, seed=3, id_bits=id_bits).chunks(0, 100)).ids for id_bits in (32, 64)
    ]
    for number, (ids, hashes) in enumerate(zip(rows[0].T, rows[1].T, strict=True)):
        expected = jaxrec.ragged.hash_ids(ids, None, seed=number)
        np.testing.assert_array_equal(hashes.view(np.uint64), expected)
    with pytest.raises(ValueError, match="id_bits is 16; expected 32 or 64"):
        GeneratedLog(1, id_bits=16)


def test_ids_of_text_stay_as_they_are():
    log = CriteoFile(KAGGLE, (50,) * 26, id_bits=64)
    clicks = next(log.chunks(0, TRAINING_ROWS))
    assert clicks.ids.dtype == np.int64
    np.testing.assert_array_equal(clicks.ids.T, ids_of_log())
    with pytest.raises(ValueError, match="id_bits is 16; expected 32 or 64"):
        CriteoFile(KAGGLE, (50,) * 26, id_bits=16)


def test_a_generated_run(tmp_path, capsys):
    rows = ["--data.generated-rows=40", "--data.generated-eval-rows=20"]
    assert main(["train", *BASE[2:], *rows, *ROOMY, f"--output={tmp_path / 'model'}"]) == 0
    assert "best reachable 0." in capsys.readouterr().out
    clicks = next(GeneratedLog(60, id_bits=64).chunks(0, 40))
    residents = rows_by_id(load_model(tmp_path / "model"), "cat_2").keys()
    assert residents == set(clicks.ids[:, 2].tolist())


# Parquet.

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


def test_ids_that_are_rare_get_no_row(items, tmp_path):
    options = ["--data.table-rows=2000", "--vocabulary.admit-after=3"]
    options += ["--vocabulary.unknown=default", f"--output={tmp_path / 'model'}"]
    assert main(["train", *items[1], *options]) == 0
    values = pq.read_table(items[0])["item"].to_pylist()[:360]
    frequent = [value for value in set(values) if values.count(value) >= 3]
    expected = jaxrec.ragged.hash_ids(frequent, None).view(np.int64)
    assert rows_by_id(load_model(tmp_path / "model"), "item").keys() == set(expected.tolist())
    assert history(tmp_path / "model")[-1]["vocabulary/item/refused"] > 0


def test_killed_and_resumed_ends_with_the_same_bits(items, tmp_path):
    """Ids lose their rows and come back, before and after."""
    options = [*items[1], *TIGHT, "--vocabulary.store=memory://", "--checkpoint.every=20"]
    never, output = tmp_path / "never", tmp_path / "model"
    assert main(["train", *options, f"--output={never}"]) == 0
    assert history(never)[-1]["vocabulary/item/evicted"] > 200
    command = [*PROGRAM, "train", *options, f"--output={output}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        while run.poll() is None and not (output / "40").exists():
            time.sleep(0.001)
        run.kill()
        _, errors = run.communicate()
    assert run.returncode == -signal.SIGKILL, errors
    assert main(["train", f"--resume={output}"]) == 0
    assert_same(load_model(output), load_model(never), ("item",), rtol=0, atol=0)


def test_a_converted_log_with_raw_ids(tmp_path):
    convert(KAGGLE, tmp_path / "raw", Conversion(ids="raw"))
    options = [f"--data={tmp_path / 'raw'}", *BASE[1:], *ROOMY, f"--output={tmp_path / 'model'}"]
    assert main(["train", *options]) == 0
    assert rows_by_id(load_model(tmp_path / "model"), "cat_3").keys() == set(ids_of_log()[3])


def test_a_converted_log_with_row_indices_is_refused(tmp_path, capsys):
    convert(KAGGLE, tmp_path / "rows", Conversion(table_rows=(50,)))
    options = [f"--data={tmp_path / 'rows'}", *BASE[1:], f"--output={tmp_path / 'model'}"]
    assert main(["train", *options]) == 2
    assert (
        f"{tmp_path / 'rows'}: `jaxrec data criteo` has made row indices of its ids; --vocabulary "
        "dynamic takes raw ids: convert the log with --ids raw" in capsys.readouterr().err
    )


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


# Options.

WRONG = {
    "policy": (
        ["--vocabulary.eviction=lfu"],
        "vocabulary.eviction is for --vocabulary dynamic; give this too, or leave it out",
    ),
    "store": (["--vocabulary.store=memory://"], "vocabulary.store is for --vocabulary dynamic"),
    "unknown store": (
        ["--vocabulary=dynamic", "--vocabulary.store=nowhere://x"],
        "vocabulary.store is no store: no row store has the URL 'nowhere://x'",
    ),
    "sightings": (
        ["--vocabulary=dynamic", "--vocabulary.admit-after=0"],
        "vocabulary.admit-after must be from 1 to 255, got 0",
    ),
    "no time": (
        ["--vocabulary=dynamic", "--vocabulary.eviction=ttl"],
        "vocabulary.eviction ttl needs vocabulary.ttl-batches, and only ttl takes them",
    ),
    "time": (
        ["--vocabulary=dynamic", "--vocabulary.ttl-batches=3"],
        "vocabulary.eviction ttl needs vocabulary.ttl-batches, and only ttl takes them",
    ),
    "zero time": (
        ["--vocabulary=dynamic", "--vocabulary.eviction=ttl", "--vocabulary.ttl-batches=0"],
        "vocabulary.ttl-batches must be above 0, got 0",
    ),
    "kind": (["--vocabulary=open"], "invalid choice"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_options(options)


def test_options_are_settings():
    default = settings(parse_options(["--vocabulary=dynamic"]).vocabulary)
    assert (default.admit_after, default.unknown, default.store) == (1, zeros(), None)
    config = parse_options(
        [
            "--vocabulary=dynamic",
            "--vocabulary.eviction=lfu_lru",
            "--vocabulary.admit-after=2",
            "--vocabulary.unknown=default",
            "--vocabulary.store=memory://",
        ]
    )
    given = settings(config.vocabulary)
    assert given.eviction == lfu_lru()
    assert (given.admit_after, given.unknown, given.store) == (2, default_row(), "memory://")
    options = ["--vocabulary=dynamic", "--vocabulary.eviction=ttl", "--vocabulary.ttl-batches=5"]
    assert settings(parse_options(options).vocabulary).eviction.batches == 5
    assert not TrainConfig().vocabulary.is_dynamic


def schema(**options):
    column = CategoricalColumn(**options)
    return Schema("click", {}, {"city": column})


def test_schemas_that_fit_no_option():
    with pytest.raises(ConfigError, match="column 'city' of the schema has encoding dynamic; give"):
        check_fixed(schema(encoding="dynamic", num_embeddings=5))
    with pytest.raises(ConfigError, match="column 'city' of the schema has max_size, which is for"):
        with_dynamic_columns(schema(max_size=5), 10)
    with pytest.raises(ConfigError, match=r"the schema has none \(city hash\)"):
        with_dynamic_columns(schema(encoding="hash", num_embeddings=5), 10)
    given = schema(pooling="mean", missing="error", embedding_dim=3)
    column = with_dynamic_columns(given, 10).categorical["city"]
    wanted = CategoricalColumn("dynamic", 10, pooling="mean", missing="error", embedding_dim=3)
    assert column == wanted


def test_nothing_is_read_beforehand(tmp_path, monkeypatch):
    rows = table().drop_columns(["age", "tags"])
    pq.write_table(rows, tmp_path / "rows.parquet")
    config = parse_options([f"--data={tmp_path / 'rows.parquet'}", "--vocabulary=dynamic"])
    monkeypatch.setattr("jaxrec.train.features.learn_encoder", None)
    encoder = learn_features(config.data, is_dynamic=True)
    batch = encoder.batch(rows[:3])
    assert batch.features["item"].to_lists() == [[i] for i in rows["item"][:3].to_pylist()]


# The library's own callbacks.


def test_write_metrics_writes_each_tables_statistics():
    written = {}

    class Writer:
        def write(self, step, values):
            written[step] = dict(values)

        def close(self):
            pass

    batches, _ = models.stream(3, 50)
    names = ("item", "query", "item_wide")
    model = jaxrec.tier.make(
        lambda: models.Ranker(100, "sgd"), dict.fromkeys(names, jaxrec.tier.Dynamic())
    )

    def loss(model, batch):
        features, labels = batch
        return optax.sigmoid_binary_cross_entropy(model(features), jnp.asarray(labels)).mean(), {}

    callbacks = [WriteMetrics(Writer(), every=3)]
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    Trainer(model=model, optimizer=optimizer, loss=loss, callbacks=callbacks).train(batches)
    ids = [models.ids_of(features, "item") for features, _ in batches]
    values = written[3]
    assert values["vocabulary/item/lookups"] == sum(map(len, ids))
    assert values["vocabulary/item_wide/resident"] == len(np.unique(np.concatenate(ids)))
    assert "loss" in values
