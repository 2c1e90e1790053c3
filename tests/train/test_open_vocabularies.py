"""`jaxrec train --vocabulary dynamic`: its options, and runs on text and generated logs."""

from __future__ import annotations

import contextlib
import io
import json
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.arguments import ConfigError
from jaxrec.commands import main
from jaxrec.data import CategoricalColumn, CriteoFile, GeneratedLog, Schema
from jaxrec.data.criteo.conversion import convert
from jaxrec.data.criteo.parts import Conversion
from jaxrec.metrics import auc
from jaxrec.tier import default_row, lfu_lru, zeros
from jaxrec.train import Trainer, WriteMetrics, load_model
from jaxrec.train.config import TrainConfig, load_config, parse_options
from jaxrec.train.datasets import split_datasets
from jaxrec.train.model import predict
from jaxrec.train.open_vocabularies import check_fixed, settings, with_dynamic_columns
from tests.data.criteo.test_log import KAGGLE
from tests.tier import models
from tests.train.vocabulary_runs import LAYERS, assert_same, history, rows_by_id

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with room for all ids, and its output."""
    output = tmp_path_factory.mktemp("trained") / "model"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["train", *BASE, *ROOMY, f"--output={output}"]) == 0
    return output, said.getvalue()


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_generated_run(tmp_path, capsys):
    rows = ["--data.generated-rows=40", "--data.generated-eval-rows=20"]
    assert main(["train", *BASE[2:], *rows, *ROOMY, f"--output={tmp_path / 'model'}"]) == 0
    assert "best reachable 0." in capsys.readouterr().out
    clicks = next(GeneratedLog(60, id_bits=64).chunks(0, 40))
    residents = rows_by_id(load_model(tmp_path / "model"), "cat_2").keys()
    assert residents == set(clicks.ids[:, 2].tolist())


@pytest.mark.slow
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


# Options.

WRONG = {
    "policy": (
        ["--vocabulary.eviction=lfu"],
        "vocabulary.eviction is for --vocabulary dynamic; give this too, or leave it out",
    ),
    "store": (["--vocabulary.store=memory://"], "vocabulary.store is for --vocabulary dynamic"),
    "unknown store": (
        ["--vocabulary=dynamic", "--vocabulary.store=nowhere://x"],
        "vocabulary.store does not name a row store: no row store has the URL 'nowhere://x'",
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
