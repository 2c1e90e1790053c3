"""`jaxrec export`: runs of every kind give the probabilities of their model."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.commands import main
from jaxrec.data import GeneratedLog
from jaxrec.data.clicks import batches
from jaxrec.data.criteo.log import CriteoFile
from jaxrec.data.transforms import CATEGORICAL_NAMES
from jaxrec.serve import load
from jaxrec.serve.exported_run import column_encoder
from jaxrec.serve.http.bodies import JsonDecoder
from jaxrec.serve.http.predictor import Predictor
from jaxrec.serve.http.raw_columns import RawColumns
from jaxrec.train import load_model
from jaxrec.train.config import TrainConfig, write_options
from jaxrec.train.model import predict
from tests.data.criteo.test_log import KAGGLE
from tests.train.test_columns import SCHEMA, SMALL, directory, table  # noqa: F401
from tests.train.vocabulary_runs import rows_by_id

ONE_SIZE = ["--batch-sizes", "16", "--platforms", "cpu"]
TINY = ["--data.batch-size=20", "--model.embedding-dim=4", "--model.top-layer-sizes=4"]


@pytest.fixture(scope="module")
def of_text(tmp_path_factory):
    """A run on text in Criteo's format."""
    output = tmp_path_factory.mktemp("text") / "run"
    options = [f"--data={KAGGLE}", "--data.table-rows=50", "--model.name=dcn_v2", *TINY]
    assert main(["train", *options, f"--output={output}"]) == 0
    return output


def logits_of(run, log) -> np.ndarray:
    chunks = log.chunks(0, log.num_rows)
    (batch,) = batches(chunks, log.num_rows, CATEGORICAL_NAMES)
    return np.asarray(predict(load_model(run), batch))


def assert_scores(outputs, logits) -> None:
    np.testing.assert_allclose(outputs["logit"], logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs["probability"], 1 / (1 + np.exp(-logits)), atol=1e-5)


@pytest.mark.slow
def test_a_run_on_text_takes_raw_columns(of_text, tmp_path, capsys):
    model, rows = tmp_path / "model", tmp_path / "rows"
    assert main(["export", str(of_text), str(model), *ONE_SIZE]) == 0
    assert "26 tables, " in (said := capsys.readouterr().out)
    assert f"programs for cpu and batches of 16\nmodel exported to {model}\n" in said
    assert main(["data", "criteo", str(KAGGLE), str(rows), "--ids", "raw"]) == 0
    (file,) = rows.glob("*.parquet")
    outputs = load(model).predict_columns(pq.read_table(file))
    assert_scores(outputs, logits_of(of_text, CriteoFile(KAGGLE, (50,) * 26)))


def test_columns_of_a_generated_log(tmp_path):
    write_options(TrainConfig(), tmp_path / "config.yaml")
    (clicks,) = GeneratedLog(30).chunks(0, 30)
    columns = dict(zip(CATEGORICAL_NAMES, clicks.ids.T, strict=True))
    counts = np.round(np.exp(clicks.dense.T) - 3).astype(int)
    columns |= {f"int_{i}": column for i, column in enumerate(counts)}
    batch = column_encoder(tmp_path).batch(pa.table(columns))
    np.testing.assert_allclose(batch.dense, clicks.dense, rtol=1e-6)
    for name, ids in zip(CATEGORICAL_NAMES, clicks.ids.T, strict=True):
        np.testing.assert_array_equal(batch.features[name].values, ids)


@pytest.mark.slow
def test_a_run_on_columns_of_ones_own(directory, tmp_path):  # noqa: F811
    run, model = tmp_path / "run", tmp_path / "model"
    data = [f"--data={directory / 'rows'}", f"--schema={directory / 'schema.yaml'}"]
    assert main(["train", *data, *SMALL, f"--output={run}"]) == 0
    assert main(["export", str(run), str(model), *ONE_SIZE]) == 0
    served = load(model)
    new = table(50, seed=3).drop_columns(["click", "importance"])
    batch = served.encoder.batch(new)
    assert {each.name for each in served.manifest.tables} == SCHEMA["categorical"].keys()
    assert_scores(served.predict_columns(new), np.asarray(predict(load_model(run), batch)))


DYNAMIC = ["--vocabulary=dynamic", "--data.table-rows=130", "--data.batch-size=20"]


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["--model.name=deepfm", "--vocabulary.unknown=default", "--vocabulary.admit-after=2"],
            id="lost",
        ),
        pytest.param(["--vocabulary.store=memory://"], id="stored"),
    ],
)
@pytest.mark.filterwarnings("ignore:the table .* thrashes")
def test_open_vocabularies_are_frozen(directory, tmp_path, options):  # noqa: F811
    """Rows of a run for all ids of its checkpoint, and the row of unknown ids for others."""
    run, model = tmp_path / "run", tmp_path / "model"
    data = [f"--data={directory / 'rows'}", "--label=click", "--data.eval-fraction=0.5"]
    assert main(["train", *data, *SMALL, *DYNAMIC, *options, f"--output={run}"]) == 0
    saved = load_model(run)
    encoder = column_encoder(run)
    new = table(300, seed=3).drop_columns(["click"])
    user = ["nobody", *new["user"].to_pylist()[1:]]
    new = new.set_column(new.column_names.index("user"), "user", pa.array(user))
    parts = [new.slice(start, 50) for start in range(0, 300, 50)]
    expected = np.concatenate([predict(saved, encoder.batch(part)) for part in parts])
    resident = rows_by_id(saved, "user")
    assert main(["export", str(run), str(model), *ONE_SIZE]) == 0
    served = load(model)
    assert_scores(served.predict_columns(new), expected)
    # Evicted rows of a store are known, too; training evicted some.
    known = served.encoder.table_rows["user"] - 1
    assert (known > 129, len(resident) <= 129) == ("store" in str(options), True)
    columns = RawColumns(served.encoder, served.manifest.batch)
    example = columns.example()
    rows = pq.read_table(directory / "rows/a.parquet").slice(0, 2)
    assert example["user"] == rows["user"].to_pylist()
    payload = JsonDecoder(columns, 10).decode(json.dumps(example).encode())
    (scores,) = Predictor(served).predict([payload])
    expected = served.predict_columns(rows.select(columns.names))
    np.testing.assert_allclose(scores.columns["logit"], expected["logit"], rtol=1e-6)


@pytest.mark.slow
def test_a_generated_log_with_open_vocabularies(tmp_path):
    run, model = tmp_path / "run", tmp_path / "model"
    rows = ["--data.generated-rows=600", "--data.generated-eval-rows=100", *TINY]
    small = ["--model.name=dcn_v2", "--vocabulary=dynamic", "--data.table-rows=200"]
    assert main(["train", *rows, *small, f"--output={run}"]) == 0
    assert main(["export", str(run), str(model), *ONE_SIZE]) == 0
    log = GeneratedLog(60, id_bits=64)
    (clicks,) = log.chunks(0, 60)
    columns = dict(zip(CATEGORICAL_NAMES, clicks.ids.T, strict=True))
    counts = np.round(np.exp(clicks.dense.T) - 3).astype(int)
    columns |= {f"int_{i}": column for i, column in enumerate(counts)}
    served = load(model)
    (batch,) = batches(log.chunks(0, 60), 60, CATEGORICAL_NAMES, id_bits=64)
    expected = np.asarray(predict(load_model(run), batch))
    assert_scores(served.predict_columns(pa.table(columns)), expected)
    # Examples are the first rows of the log.
    example = RawColumns(served.encoder, served.manifest.batch).example()
    assert example["cat_3"] == clicks.ids[:2, 3].tolist()
    assert example["int_5"] == counts[5, :2].tolist()


def test_tables_are_quantized_on_request(of_text, tmp_path):
    assert main(["export", str(of_text), str(tmp_path / "m"), "--dtype", "int8", *ONE_SIZE]) == 0
    assert {each.row_format for each in load(tmp_path / "m").manifest.tables} == {"int8"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "jaxrec export: give the directories of the run and of the model: RUN MODEL\n"),
        (["missing", "model"], 1, "jaxrec export: missing: there is no saved run here"),
        (["run", "model", "--step", "7"], 1, "7"),
        (["run", "run"], 1, "run exists and is not an exported model; give another path"),
        (["run", "model", "--batch-sizes", "0"], 1, "batch_sizes are whole numbers of 1 or more"),
        (["run", "model", "--platforms", "tpu"], 2, "platforms"),
        (["run", "model", "--dtype", "int3"], 2, "dtype"),
        (
            ["run", "--output", "model"],
            2,
            "jaxrec export: unknown option --output; `jaxrec export` takes RUN MODEL without "
            "names, and the options are --step, --dtype, --batch-sizes, --platforms, --example\n",
        ),
        (["--model=model", "run"], 2, "unknown option --model; `jaxrec export` takes RUN MODEL"),
        (["run", "model", "--dtpe=int8"], 2, "unknown option --dtpe, did you mean --dtype?"),
    ],
    ids=[
        "none",
        "no run",
        "no step",
        "no model",
        "size",
        "platform",
        "dtype",
        "unknown",
        "path by name",
        "slip",
    ],
)
def test_wrong_options(of_text, tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(of_text)
    before = sorted(of_text.rglob("*"))
    assert main(["export", *arguments]) == code
    captured = capsys.readouterr().err
    assert message in captured
    assert captured.count("\n") == 1
    assert sorted(of_text.rglob("*")) == before
