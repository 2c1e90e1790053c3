"""`jaxrec train` on Parquet files of columns of one's own."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import re
import shutil
import uuid

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

import jaxrec
from jaxrec.commands import main
from jaxrec.data import ClickBatch, DataError, Schema, Shard, TableEncoder
from jaxrec.data.statistics import ListLengths
from jaxrec.metrics import auc
from jaxrec.train import Trainer, checkpoint, load_model
from jaxrec.train.checkpoint.tree import saved_tree
from jaxrec.train.config import (
    FEATURES_DIRECTORY,
    DataConfig,
    ModelConfig,
    TrainConfig,
    load_config,
)
from jaxrec.train.datasets import run_batches, split_datasets
from jaxrec.train.devices import Devices
from jaxrec.train.features import learn_features
from jaxrec.train.model import make_model, predict
from jaxrec.train.models import model_kind
from jaxrec.train.models.kind import HeldOutBatches
from jaxrec.train.models.labels import click_loss

ROOT = pathlib.Path(__file__).parents[2]
DOCS = (ROOT / "docs/data.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", DOCS, re.DOTALL)

ROWS = 2000
SMALL = [
    "--data.batch-size=100",
    "--model.embedding-dim=4",
    "--model.bottom-layer-sizes=4",
    "--model.top-layer-sizes=8",
    "--optimizer.table-learning-rate=0.5",
]
# That of docs/data.md.
SCHEMA = next(yaml.safe_load(text) for language, text in BLOCKS if language == "yaml")


def table(rows=ROWS, seed=0):
    """A click is likely in some cities and with some tags."""
    rng = np.random.default_rng(seed)
    city = rng.integers(0, 20, rows)
    lengths = rng.poisson(2, rows)
    tags = rng.integers(0, 30, lengths.sum())
    of_tags = np.bincount(np.repeat(np.arange(rows), lengths), tags < 15, rows)
    price = rng.lognormal(size=rows)
    score = 2.0 * (city < 10) + 1.5 * (of_tags > 0) + np.log(price) - 2
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = {
        "click": rng.random(rows) < 1 / (1 + np.exp(-score)),
        "importance": rng.choice([0.5, 2.0], rows),
        "age": rng.normal(size=rows),
        "price": pa.array(price, mask=rng.random(rows) < 0.1),
        "city": np.char.add("city ", city.astype(str)),
        "user": rng.integers(0, 200, rows).astype(str),
        "item": rng.integers(-(2**63), 2**63, 10)[rng.integers(0, 10, rows)],
        "tags": pa.ListArray.from_arrays(offsets, pa.array(np.char.add("t", tags.astype(str)))),
    }
    return pa.table(columns)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Two files of rows, and the schema."""
    path = tmp_path_factory.mktemp("columns")
    whole = table()
    (path / "rows").mkdir()
    pq.write_table(whole[:900], path / "rows/a.parquet", row_group_size=400)
    pq.write_table(whole[900:], path / "rows/b.parquet")
    (path / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    return path


@pytest.fixture(scope="module")
def trained(directory):
    output = directory / "trained"
    options = [f"--data={directory / 'rows'}", f"--schema={directory / 'schema.yaml'}", *SMALL]
    assert main(["train", *options, f"--output={output}"]) == 0
    return output


@pytest.mark.slow
def test_a_schema_and_a_directory(trained):
    results = json.loads((trained / "results.json").read_text())
    encoder = TableEncoder.load(trained / FEATURES_DIRECTORY)
    assert encoder.schema == Schema.from_dict(SCHEMA)
    # The last rows are held out, and the vocabulary is that of the others.
    counts = table()["city"][:1800].to_pylist()
    known = encoder.vocabularies["city"]
    found = dict(zip(known.values.to_pylist(), known.counts.tolist(), strict=True))
    assert found == {city: counts.count(city) for city in set(counts)}
    held_out = encoder.batch(table()[1800:])
    logits = np.asarray(predict(load_model(trained), held_out))
    assert auc(logits, held_out.labels, held_out.weights) == pytest.approx(results["auc"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dcn_v2", "deepfm"])
def test_models_on_one_file_without_a_schema(directory, tmp_path, name, capsys):
    options = [f"--data={directory / 'rows/b.parquet'}", f"--model.name={name}", *SMALL]
    assert main(["train", *options, f"--output={tmp_path / 'model'}"]) == 0
    said = capsys.readouterr().out
    assert "label: click\n" in said
    assert "  city: 20 values" in said
    assert json.loads((tmp_path / "model/results.json").read_text())["auc"] > 0.5
    assert load_model(tmp_path / "model").embeddings.table("tags").shape == (31, 4)


def test_the_code_of_the_docs(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(trained)
    pq.write_table(table(10).drop(["click", "importance"]), "new.parquet")
    names = {"jaxrec": jaxrec, "pyarrow": pa, "table": table()}
    code = [text for language, text in BLOCKS if language == "python"]
    for text in code[: code.index(next(text for text in code if "Vocabulary.build" in text)) + 1]:
        exec(text, names)
    assert np.isfinite(names["logits"]).all()
    assert names["logits"].shape == (10,)
    assert names["features"].keys == ("city", "tags")
    assert len(jaxrec.data.Vocabulary.load("city.parquet")) == 20


def test_evaluated_on_values_that_training_has_not_seen(trained, tmp_path, capsys):
    later = table(100, seed=1)
    later = later.set_column(4, "city", pa.array(["elsewhere", None] * 50))
    longer = [["t1", "never"] * 40] * 100
    pq.write_table(later.set_column(7, "tags", pa.array(longer)), tmp_path / "later.parquet")
    options = ["--eval-only", f"--data.eval-path={tmp_path / 'later.parquet'}"]
    assert main(["train", f"--resume={trained}", *options]) == 0
    assert "on 100 held-out rows" in capsys.readouterr().out
    other = tmp_path / "other.yaml"
    other.write_text("{label: click, categorical: [city]}")
    assert main(["train", f"--resume={trained}", f"--schema={other}"]) == 2
    assert "the run has a schema of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_devices_and_one_device_agree(trained, directory, tmp_path):
    """Lists as well, whose capacity on a device is that of its fullest."""
    options = [f"--data={directory / 'rows'}", f"--schema={directory / 'schema.yaml'}", *SMALL]
    output = tmp_path / "many"
    assert main(["train", *options, "--devices=2", f"--output={output}"]) == 0
    one, many = (load_model(path).embeddings for path in (trained, output))
    for name in SCHEMA["categorical"]:
        np.testing.assert_allclose(one.table(name), many.table(name), rtol=1e-4, atol=1e-5)


CONFIG = TrainConfig(
    data=DataConfig(batch_size=200),
    model=ModelConfig(embedding_dim=4, bottom_layer_sizes=(), top_layer_sizes=(8,)),
)


def test_stopped_and_resumed_is_as_never_stopped(directory, tmp_path):
    data = dataclasses.replace(
        CONFIG.data, path=directory / "rows", schema=directory / "schema.yaml"
    )
    config = dataclasses.replace(CONFIG, data=data)
    encoder = learn_features(data)
    encoder.save(tmp_path / FEATURES_DIRECTORY)

    def run(model, optimizer, encoder, steps=None):
        rows, _ = split_datasets(config, encoder=encoder)
        trainer = Trainer(model=model, optimizer=optimizer, loss=click_loss)
        trainer.train(run_batches(rows, 200, 2, first=trainer.step), steps)
        assert encoder.lengths["tags"].usual(200) < encoder.lengths["tags"].most(200)
        return model, optimizer

    def numbers(model):
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(saved_tree(*model, None))]

    whole = run(*make_model(config, 18, encoder=encoder), encoder)
    stopped = run(*make_model(config, 18, encoder=encoder), encoder, steps=11)
    assert int(stopped[1].step.get_value()) == 11
    checkpoint.save(tmp_path, *stopped)
    loaded = TableEncoder.load(tmp_path / FEATURES_DIRECTORY)
    resumed = make_model(dataclasses.replace(config, seed=5), 18, encoder=loaded)
    checkpoint.restore(resumed[0], tmp_path, resumed[1])
    for got, wanted in zip(numbers(run(*resumed, loaded)), numbers(whole), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_processes_read_rows_of_their_own(directory):
    data = dataclasses.replace(
        CONFIG.data, path=directory / "rows", schema=directory / "schema.yaml"
    )
    config = dataclasses.replace(CONFIG, data=data)
    encoder = learn_features(data)

    def bags(shard):
        rows, _ = split_datasets(config, shard, encoder)
        found = list(rows.batches(200))
        assert len(found) == rows.num_batches(200) == 9
        return sorted(
            (tuple(bag), float(age), float(weight))
            for batch in found
            for bag, (age, _), weight in zip(
                batch.features["tags"].to_lists(), batch.dense, batch.weights, strict=True
            )
            if weight
        )

    assert sorted([*bags(Shard(0, 2)), *bags(Shard(1, 2))]) == bags(Shard())


def test_capacities_on_devices(directory, monkeypatch):
    """One process takes those of the encoder's packer; of several all take what none exceeds."""
    encoder = TableEncoder(
        Schema.from_dict({"label": "click", "categorical": ["city", "tags"]}),
        {}, {}, {"tags": ListLengths.of(np.array([1, 2, 3, 3]))},
    )  # fmt: skip
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    devices = Devices(mesh, encoder=encoder)
    lists = [[1] * 9, [1], [1] * 3, [1] * 20]
    batch = jaxrec.KeyedJaggedArray.from_lists({"city": [[1]] * 4, "tags": lists})
    sizes = []
    for tags in ([[1] * 3] * 4, lists, [[1]] * 4):
        features = encoder._packer.from_lists({"city": [[1]] * 4, "tags": tags})
        put = devices.put_batch(ClickBatch(np.zeros((4, 1)), features, np.zeros(4), np.ones(4)))
        sizes.append(put.features.capacities)
    assert sizes[0] == sizes[2] == (2, 16)  # the mean 2.25 of two samples, four deviations more
    assert sizes[1] > sizes[0]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(DataError, match="'tags' has 23 ids in a batch on one device, more than"):
        devices._capacities(mesh, batch)
    usual = jaxrec.KeyedJaggedArray.from_lists({"city": [[1]] * 4, "tags": [[1] * 3] * 4})
    assert devices._capacities(mesh, usual) == {"city": 8, "tags": 8}


@pytest.mark.slow
def test_a_run_repeats_from_its_options(trained, tmp_path, monkeypatch, capsys):
    """With its label, weight and features, also from another directory."""
    monkeypatch.chdir(tmp_path)
    rows = table(400).rename_columns({"click": "y"})
    pq.write_table(rows.append_column("copy", rows["y"]), "rows.parquet")
    chosen = ["--label=y", "--weight=importance", "--exclude", "copy", "user"]
    assert main(["train", "--data=rows.parquet", "--output=first", *SMALL, *chosen]) == 0
    assert "copy" not in capsys.readouterr().out
    pathlib.Path("first").rename("moved")
    assert main(["train", "moved/config.yaml", "--output=again"]) == 0
    columns = ("y", "importance", "age", "price", "city", "item", "tags")
    first, again = (load_model(run).embeddings for run in ("moved", "again"))
    for run in ("moved", "again"):
        assert TableEncoder.load(f"{run}/{FEATURES_DIRECTORY}").schema.columns == columns
    for name in ("city", "item", "tags"):
        np.testing.assert_array_equal(first.table(name), again.table(name))
    # A run with a schema has a copy of it.
    shutil.copytree(trained, "copy")
    copied = load_config(pathlib.Path("copy/config.yaml")).data
    assert copied.schema == pathlib.Path("copy/features/schema.yaml")
    assert learn_features(copied).schema == Schema.from_dict(SCHEMA)
    # Nothing is left to do, and results stay.
    results = pathlib.Path("again/results.json").read_bytes()
    capsys.readouterr()
    assert main(["train", "--resume=again"]) == 0
    said = capsys.readouterr().out
    assert "again is finished: 4 steps of 4 are made" in said
    assert "more epochs than 1: --epochs" in said
    assert pathlib.Path("again/results.json").read_bytes() == results
    for option in ("--exclude=city", "--weight=age"):
        assert main(["train", "--resume=again", option, "--data.epochs=2"]) == 2
        assert "the run has a schema of its own" in capsys.readouterr().err


def test_weights_weigh_loss_and_metrics(tmp_path, monkeypatch, capsys):
    """Rows of weight 2 are as rows that are there twice, in what is reported."""
    rows = table(400).select(["click", "importance", "price", "city"])
    doubled = pc.equal(rows["importance"], 2.0)
    pq.write_table(rows.set_column(1, "importance", pc.add(pc.cast(doubled, "int8"), 1)),
                   tmp_path / "weighted.parquet")  # fmt: skip
    data = dataclasses.replace(
        CONFIG.data, path=tmp_path / "weighted.parquet", weight="importance", hold_out="0.5"
    )
    config = dataclasses.replace(CONFIG, data=data)
    encoder = learn_features(data)
    assert encoder.schema.weight == "importance"
    _, held_out = split_datasets(config, encoder=encoder)
    model, _ = make_model(config, 10, encoder=encoder)
    values = model_kind(config, encoder).evaluate(HeldOutBatches(model, held_out, 200))
    batch = encoder.batch(rows[200:])
    p = 1 / (1 + np.exp(-np.asarray(predict(model, batch), np.float64)))
    y, w = np.asarray(batch.labels), 1.0 + np.asarray(doubled)[200:]
    losses = -np.where(y == 1, np.log(p), np.log(1 - p))
    assert values["log_loss"] == pytest.approx((w * losses).sum() / w.sum(), rel=1e-5)
    assert values["log_loss"] != pytest.approx(losses.mean(), rel=1e-5)
    assert values["auc"] == pytest.approx(auc(p, y, w), abs=1e-6)


def without(name):
    return lambda rows: rows.drop([name])


def with_column(name, values):
    return lambda rows: rows.set_column(rows.column_names.index(name), name, values(rows))


SAME = lambda rows: rows  # noqa: E731
BAD = {
    "column": (without("city"), {}, [], 1, "rows.parquet has no column 'city'; its columns are cl"),
    "label": (
        with_column("click", lambda rows: pa.array(range(len(rows)))), {}, [], 1,
        "rows.parquet, row 2 (from 0), column 'click': the label is 2; labels must be 0 or 1",
    ),
    "nan": (
        with_column("price", lambda rows: pa.array([1.0] * 77 + [float("nan")] * (len(rows) - 77))),
        {}, [], 1, "row 77 (from 0), column 'price': the number is nan; replace it",
    ),
    "nulls": (
        with_column("tags", lambda rows: pa.array([[None]] * len(rows), pa.list_(pa.string()))),
        {}, [], 1, "row 0 (from 0), column 'tags': a value of the list is null; drop it",
    ),
    "type": (
        with_column("city", lambda rows: pa.nulls(len(rows), pa.date32())), {}, [], 1,
        "column 'city' is of type date32[day]; expected strings, bytes or integers, or lists of th",
    ),
    "no-label": (without("click"), None, [], 2, "is named label, click or target; name the label"),
    "other-label": (SAME, None, ["--label=y"], 2, "there is no column 'y'; the columns are"),
    "two-labels": (SAME, {}, ["--label=click"], 2, "names the column of labels; leave data.label"),
    "held-out": (
        with_column("click", lambda rows: pa.array([0.0, 1] * 49 + [1, float("nan")])), {}, [], 1,
        "rows.parquet, row 99 (from 0), column 'click': the label is nan; labels must be 0 or 1",
    ),
    "held-out-number": (
        with_column("age", lambda rows: pa.array([1.0] * 99 + [1e300])), {}, [], 1,
        "row 99 (from 0), column 'age': the number 1e+300 does not fit float32; take its log",
    ),
    "text-label": (
        with_column("click", lambda rows: pa.array(["yes", "no"] * 50)), None, [], 1,
        "column 'click' is of type string; expected numbers",
    ),
    "two-weights": (SAME, {}, ["--weight=age"], 2, "names the column of weights; leave data.wei"),
    "two-choices": (SAME, {}, ["--exclude=age"], 2, "names the features; leave data.exclude out"),
    "no-exclude": (SAME, None, ["--exclude=y"], 2, "there is no column 'y'; the columns are"),
    "schema": (SAME, {"dense": {"price": {"transform": "log"}}}, [], 2, "must be one of standard"),
    "no-dense": (SAME, {"dense": {}}, [], 2, "dlrm needs a dense column, and there is none"),
    "widths": (
        SAME, {"categorical": {"city": {"embedding_dim": 2}, "tags": {}}}, [], 2,
        "dlrm has tables of one width",
    ),
    "missing-schema": (SAME, None, ["--schema=never.yaml"], 1, "never.yaml: No such file"),
    "no-file": (SAME, {}, ["--data=never.parquet"], 1, "never.parquet: No such file"),
    "text": (SAME, {}, ["--data=schema.yaml"], 1, "schema.yaml is not a Parquet file; a schema is"),
    "csv": (SAME, None, ["--data=rows.csv"], 2, "none of the columns a, b is named label, click"),
    "csv-held-out": (
        SAME, None, ["--data.eval-path=rows.csv"], 1,
        "rows.parquet has no column 'a', which rows.csv has",
    ),
    "csv-line": (SAME, None, ["--data=bad.csv"], 1, "bad.csv, line 3: Expected 2 columns, got 1"),
    "csv-types": (SAME, None, ["--data=rows.csv", "--data.types", "a=id"], 2, "a=id: give NAME="),
    "types-name": (
        SAME, None, ["--data=rows.csv", "--data.types", "c=string"], 2,
        "--data.types c: rows.csv has no column 'c'; its columns are a, b",
    ),
    "types-of-parquet": (SAME, None, ["--data.types", "age=string"], 2, "rows.parquet holds its"),
    "pattern": (SAME, None, ["--data=x*.parquet"], 1, "no Parquet file matches this pattern"),
    "few": (lambda rows: rows[:1], {}, [], 1, "1 rows are too few to train on some"),
    "empty": (lambda rows: rows[:0], {}, [], 1, "it has no rows"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "schema", "options", "code", "message"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_one_sentence(
    tmp_path, monkeypatch, capsys, change, schema, options, code, message
):
    monkeypatch.chdir(tmp_path)
    pq.write_table(change(table(100)), "rows.parquet")
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n3\n")
    if schema is not None:
        (tmp_path / "schema.yaml").write_text(yaml.safe_dump(SCHEMA | schema))
        options = ["--schema=schema.yaml", *options]
    assert main(["train", "--data=rows.parquet", *SMALL, "--output=model", *options]) == code
    said, error = capsys.readouterr()
    assert message in error
    assert error.count("\n") == 1
    assert "learned the columns" not in said
    assert not (tmp_path / "model/config.yaml").exists()


@pytest.mark.slow
def test_a_column_of_unique_ids_is_left_out(tmp_path, capsys):
    """Its vocabulary would have no value. Rows to predict may have the column, or lack it."""
    rows = table(400).drop_columns(["importance", "tags"])
    ids = [str(uuid.UUID(int=number)) for number in range(len(rows))]
    rows = rows.append_column("request", pa.array(ids))
    pq.write_table(rows, tmp_path / "rows.parquet")
    run = tmp_path / "run"
    main(["train", "--data", str(tmp_path / "rows.parquet"), "--output", str(run), *SMALL])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "left out: column 'request', since no value of it is in 2 training rows or more; "
        "--categorical request takes it nevertheless" in said
    )
    encoder = TableEncoder.load(run / FEATURES_DIRECTORY)
    assert [*encoder.schema.categorical] == [*encoder.table_rows] == ["city", "user", "item"]
    assert encoder.example.column_names == [*encoder.schema.feature_inputs]
    main(["export", str(run), str(tmp_path / "model")])
    for number, each in enumerate((rows, rows.drop_columns(["request"]))):
        pq.write_table(each, tmp_path / f"{number}.parquet")
        scores = str(tmp_path / f"scores{number}.parquet")
        main(
            ["predict", str(tmp_path / "model"), str(tmp_path / f"{number}.parquet"), "-o", scores]
        )
    first, second = (pq.read_table(tmp_path / f"scores{number}.parquet") for number in range(2))
    assert first == second
    assert first.num_rows == 400


@pytest.mark.parametrize("given", ["categorical", "item", "schema"])
def test_a_column_of_unique_ids_that_is_named(tmp_path, given):
    """It stays, with a warning."""
    rows = {"label": [0, 1] * 15, "city": ["a", "b"] * 15, "id": [str(n) for n in range(30)]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    (tmp_path / "s.yaml").write_text("label: label\ncategorical: [city, id]\n")
    options = {"categorical": ("i*",), "item": ("id",), "schema": tmp_path / "s.yaml"}[given]
    text = io.StringIO()
    data = DataConfig(path=tmp_path / "rows.parquet", **{given: options})
    encoder = learn_features(data, Console(file=text, width=1000, markup=False))
    assert encoder.table_rows == {"city": 3, "id": 1}
    assert (
        "warning: column 'id' tells rows nothing apart, since no value of it is" in text.getvalue()
    )


def test_columns_of_unique_values_alone(tmp_path):
    """A model needs a table. Of a few rows all values may differ."""
    for rows in (10, 40):
        columns = {"label": [0, 1] * (rows // 2), "id": [*map(str, range(rows))]}
        pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
        text = io.StringIO()
        console = Console(file=text, width=1000, markup=False)
        encoder = learn_features(DataConfig(path=tmp_path / "rows.parquet"), console)
        assert encoder.table_rows == {"id": 1}
        assert ("warning: column 'id' tells" in text.getvalue()) == (rows == 40)
