"""Times, vectors, structs and booleans on the whole path: schema, training, export, requests."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import zoneinfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.commands import main
from jaxrec.data import DataError, SchemaError, TableEncoder
from jaxrec.data.addresses import data_path
from jaxrec.data.structs import flat_table
from jaxrec.serve import load
from jaxrec.serve.http.bodies import ArrowDecoder, JsonDecoder
from jaxrec.serve.http.predictor import Predictor
from jaxrec.train.config import DataConfig, TrainConfig, load_config
from jaxrec.train.datasets import ParquetDataset, split_datasets
from jaxrec.train.features import learn_features, run_encoder
from jaxrec.train.open_vocabularies import with_dynamic_columns

ROWS = 400
RUN = pathlib.Path("run")
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
START = datetime.datetime(1969, 12, 1, tzinfo=datetime.UTC)
SMALL = [
    "--data.batch-size=100",
    "--model.embedding-dim=4",
    "--model.bottom-layer-sizes=4",
    "--model.top-layer-sizes=4",
]


def table(rows=ROWS):
    """Rows with every kind of column; two labels, of which one is in a struct, and weights."""
    rng = np.random.default_rng(0)
    times = [START + datetime.timedelta(hours=int(x)) for x in rng.integers(0, 10_000, rows)]
    vectors = rng.normal(size=(rows, 3)).astype(np.float16)
    texts = rng.choice(["a", "b"], rows)
    ages = pa.array(rng.integers(18, 60, rows), mask=rng.random(rows) < 0.1)
    home = pa.StructArray.from_arrays([pa.array(texts)], ["city"])
    known = pa.array(rng.random(rows) < 0.1)
    return pa.table(
        {
            "outcome": [{"click": bool(x)} for x in rng.random(rows) < 0.4],
            "buy": rng.integers(0, 2, rows),
            "w": rng.choice([0.5, 2.0], rows),
            "ts": pa.array(
                times, pa.timestamp("ms", "Europe/Berlin"), mask=rng.random(rows) < 0.05
            ),
            "born": [x.date() - datetime.timedelta(days=40) for x in times],
            "member": pa.array(rng.random(rows) < 0.5, mask=rng.random(rows) < 0.2),
            "vector": pa.array([None if n % 9 == 0 else x.tolist() for n, x in enumerate(vectors)]),
            "user": pa.StructArray.from_arrays([ages, home], ["age", "home"], mask=known),
            "item": rng.integers(0, 9, rows),
            "items": [[{"id": 1}]] * rows,
        }
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("kinds") / "rows.parquet"
    pq.write_table(table(), path, row_group_size=150)
    return path


def config(file, **options):
    return DataConfig(path=file, label=("outcome.click", "buy"), weight="w", **options)


def test_learned_and_encoded(file):
    encoder = learn_features(config(file))
    schema = encoder.schema
    assert [*schema.dense] == ["ts.age", "born.age", "vector"]
    assert schema.num_dense == 5
    assert [*schema.categorical] == [
        "ts.hour", "ts.weekday", "ts.month", "born.weekday", "born.month", "member", "user.age",
        "user.home.city", "item",
    ]  # fmt: skip
    rows = flat_table(table())
    training = table()[:360]
    batch = encoder.batch(rows)
    np.testing.assert_array_equal(batch.labels[:, 0], rows["outcome.click"].to_numpy())
    np.testing.assert_array_equal(batch.weights, table()["w"].to_numpy())
    # Ages count from the earliest training row; a null has the mean of the ages.
    first = min(x for x in training["ts"].to_pylist() if x is not None)
    day = datetime.timedelta(days=1)
    ages = np.array([np.nan if x is None else (x - first) / day for x in rows["ts"].to_pylist()])
    ages = np.where(np.isnan(ages), np.nanmean(ages[:360]), ages)
    np.testing.assert_allclose(batch.dense[:, 0], np.sign(ages) * np.log1p(abs(ages)), rtol=1e-5)

    # Every category of training has a row of its own, and nulls have another.
    def hour(x):
        return None if x is None else x.astimezone(BERLIN).hour

    for name, values in {
        "ts.hour": [hour(x) for x in rows["ts"].to_pylist()],
        "born.month": [x.month for x in rows["born"].to_pylist()],
        "member": rows["member"].to_pylist(),
        "user.home.city": rows["user.home.city"].to_pylist(),
    }.items():
        ids = [row for (row,) in batch.features[name].to_lists()]
        pairs = set(zip(values, ids, strict=True))
        assert len(pairs) == len(set(values)) == len(set(ids)), name
        assert {row for value, row in pairs if value is None} <= {0}
    nulls = [n for n in range(ROWS) if n % 9 == 0]
    assert not batch.dense[nulls, 2:].any()


def test_the_reader_reads_what_the_encoder_learned(file):
    run = TrainConfig(data=config(file, batch_size=100), seed=3)
    training, held_out = split_datasets(run)
    assert isinstance(training, ParquetDataset)
    batches = [*training.batches(100)]
    assert sum(int(batch.weights.astype(bool).sum()) for batch in batches) == 360
    ordered = next(iter(held_out.batches(100)))
    wanted = training.encoder.batch(table()[360:], 100)
    np.testing.assert_array_equal(ordered.dense, wanted.dense)
    np.testing.assert_array_equal(ordered.labels, wanted.labels)
    for name in wanted.features.keys:
        assert ordered.features[name].to_lists() == wanted.features[name].to_lists()


def test_columns_by_pattern(file):
    patterns = {"exclude": ("born", "*.weekday"), "dense": ("user.a*", "ts.hour", "member")}
    schema = learn_features(config(file, **patterns)).schema
    assert [*schema.dense] == ["ts.age", "ts.hour", "member", "vector", "user.age"]
    assert [*schema.categorical] == ["ts.month", "user.home.city", "item"]
    with pytest.raises(SchemaError, match="no column matches 'x"):
        learn_features(config(file, categorical=("x*",)))
    with pytest.raises(ConfigError, match=r"names the features; leave data.dense out"):
        DataConfig(path=file, schema=file, dense=("x",))
    with pytest.raises(ConfigError, match=r"where dense layers lie is --dense-layers fsdp"):
        DataConfig(dense=("fsdp",))


def test_open_vocabularies_number_parts_of_times(file):
    schema = with_dynamic_columns(learn_features(config(file)).schema, 50)
    assert "ts.hour" not in schema.dynamic
    assert "member" in schema.dynamic
    encoder = learn_features(config(file, table_rows=50), is_dynamic=True)
    assert encoder.table_rows["ts.hour"] == 24
    assert encoder.table_rows["born.month"] == 13
    months = encoder.encode(table())["born.month"].to_pylist()
    assert months == [x.month for x in table()["born"].to_pylist()]


CSV = """label,ts,day,city
1,2024-02-29 23:30:00,2024-02-29,a
0,,2024-03-01,b
1,2024-03-01 01:00:00,,a
0,2024-03-01 02:00:00,2024-03-02,b
"""


def test_times_of_text_files(tmp_path):
    """Times that the readers of CSV and JSON lines find in text."""
    (tmp_path / "rows.csv").write_text(CSV)
    lines = [line.split(",") for line in CSV.splitlines()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    rows = [{k: int(v) if k == "label" else v or None for k, v in row.items()} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("rows.csv", "rows.jsonl"):
        path = tmp_path / name
        encoder = learn_features(DataConfig(path=path, eval_path=path))
        assert {"ts.age", "ts.hour", "ts.weekday", "ts.month"} <= {*encoder.schema.columns}, name
        encoded = encoder.encode(pa.Table.from_pylist(rows))  # text, as requests have it
        assert encoded["ts.hour"].to_pylist() == [0, 0, 0, 0]  # each came once: unknown
        days = [0, 1.5 / 24, 2.5 / 24]
        wanted = np.log1p([days[0], np.mean(days), *days[1:]])
        np.testing.assert_allclose(encoded["ts.age"].to_numpy(), wanted, rtol=1e-6)


def test_text_that_is_no_time_is_named(tmp_path):
    texts = ["2024-03-01", "2024-03-02"] * 50
    texts[7] = "soon"
    columns = {"label": [0, 1] * 50, "ts": texts, "c": ["a", "b"] * 50}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    text = "label: label\ncategorical: {c: {}, ts.month: {part: month}}\n"
    (tmp_path / "schema.yaml").write_text(text)
    data = DataConfig(path=tmp_path / "x.parquet", schema=tmp_path / "schema.yaml")
    with pytest.raises(DataError, match=r"x.parquet, row 7 .*'ts': \"soon\" is no time; write it"):
        learn_features(data)


def test_earlier_runs_load(tmp_path, file):
    """Options and statistics as earlier versions wrote them."""
    (tmp_path / "config.yaml").write_text("devices: 2\ndense: fsdp\n")
    assert load_config(tmp_path / "config.yaml").dense_layers == "fsdp"
    encoder = learn_features(config(file, exclude=("ts", "born")))
    encoder.save(tmp_path / "features")
    statistics = json.loads((tmp_path / "features/statistics.json").read_text())
    assert [{*x} for x in statistics["moments"].values()] == [{"count", "mean", "squares"}]
    loaded = TableEncoder.load(tmp_path / "features")
    assert loaded.encode(table()).equals(encoder.encode(table()))


@pytest.mark.slow
def test_trained_exported_and_served(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--label", "outcome.click", "buy", "--weight=w", "--exclude", "item?", *SMALL]
    assert main(["train", f"--data={file}", *options, "--model=mmoe", "--output=run"]) == 0
    said = capsys.readouterr().out
    assert "vector: vectors of 3 numbers; 40 rows have none, and zeros stand for it" in said
    assert "parts of times, which --exclude leaves out: ts.age, born.age, ts.hour" in said
    resumed = dataclasses.replace(load_config(RUN / "config.yaml"), resume=RUN)
    assert run_encoder(resumed, Console(quiet=True)).schema.num_dense == 5
    data = dataclasses.replace(resumed.data, exclude=("ts",))
    with pytest.raises(ConfigError, match="the run has a schema of its own"):
        run_encoder(dataclasses.replace(resumed, data=data), Console(quiet=True))
    assert main(["export", "run", "model", "--platforms=cpu", "--batch-sizes=16"]) == 0
    said = capsys.readouterr().out
    assert (
        "C++ encodes parts of times in UTC alone, not ts.hour (Europe/Berlin), ts.weekday (" in said
    )
    new = table().drop_columns(["outcome", "buy", "w", "items"])
    pq.write_table(new, "new.parquet")
    assert main(["predict", "model", "new.parquet", "-o", "scores.parquet", "--keep=user.age"]) == 0
    served = load("model")
    scores = pq.read_table("scores.parquet")
    assert scores["user.age"].equals(flat_table(new)["user.age"])
    expected = served.predict_columns(new)["buy_probability"]
    np.testing.assert_allclose(scores["buy_probability"].to_numpy(), expected, rtol=1e-5)
    # Requests: JSON has times as text and fields of structs by their names, Arrow has its types.
    predictor = Predictor(served)
    rows = flat_table(new)[:20]
    columns = {name: rows[name].to_pylist() for name in rows.column_names}
    for name in ("ts", "born"):
        columns[name] = [None if x is None else x.isoformat() for x in columns[name]]
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows)
    for decoder, body in (
        (JsonDecoder(predictor.columns, 20), json.dumps(columns).encode()),
        (ArrowDecoder(predictor.columns, 20), stream.getvalue().to_pybytes()),
    ):
        (scored,) = predictor.predict([decoder.decode(body)])
        np.testing.assert_allclose(scored.columns["buy_probability"], expected[:20], rtol=1e-5)
    example = predictor.columns.example()
    assert example["ts"][0].endswith("Z")
    (scored,) = predictor.predict(
        [JsonDecoder(predictor.columns, 9).decode(json.dumps(example).encode())]
    )
    np.testing.assert_allclose(scored.columns["buy_probability"], expected[:2], rtol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["csv", "address", "files"])
def test_held_out_text_of_numbers_is_text(tmp_path, kind):
    """A CSV's columns are guessed from its values, those of held-out rows by training's types."""
    rows = {"click": [0, 1] * 2, "zip": ["7", "A8"] * 2, "n": [1, 2] * 2}
    path = tmp_path / "train"
    path.mkdir()
    if kind == "csv":
        (path / "a.csv").write_text("click,zip,n\n" + "0,7,1\n1,A8,2\n" * 2)
    elif kind == "files":
        # The first file has no zip codes, and those of the others are dictionaries.
        table = pa.table(rows)
        table = table.set_column(1, "zip", table["zip"].dictionary_encode())
        pq.write_table(pa.table(rows | {"zip": pa.nulls(4)}), path / "a.parquet")
        pq.write_table(table, path / "b.parquet")
    else:
        pq.write_table(pa.table(rows), path / "a.parquet")
        memory = pytest.importorskip("fsspec").filesystem("memory")
        memory.put(str(path), "/held_out_text", recursive=True)
        path = data_path("memory://held_out_text")
    (tmp_path / "later.csv").write_text("n,zip,click\n1,7,0\n2,9,1\n")
    data = DataConfig(path=path, eval_path=tmp_path / "later.csv")
    encoder = learn_features(data)
    _, held_out = split_datasets(TrainConfig(data=data), encoder=encoder)
    rows = held_out.encoder.encode(held_out.groups.read(0))
    known = encoder.vocabularies["zip"].values.to_pylist()
    assert sorted(known) == ["7", "A8"]
    assert rows["zip"].to_pylist() == [1 + known.index("7"), 0]
