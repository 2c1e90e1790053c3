"""Tables as pandas, polars, DuckDB, Hugging Face's datasets and Spark write them, in each format.

`tests/data/tables/write.py` has written them, all with the same rows. One run is trained on one of
them; all others are what it read.
"""

from __future__ import annotations

import functools
import pathlib
import shutil

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrec.commands import main
from jaxrec.data import DataError, ParquetGroups
from jaxrec.data.formats.conversion import table_files
from jaxrec.serve import load
from jaxrec.train.config import DataConfig
from jaxrec.train.features import learn_features, split_groups

pytestmark = pytest.mark.every_case

TABLES = pathlib.Path(__file__).parents[1] / "data/tables"
REFERENCE = "pandas/rows.parquet"
OPTIONS = {"label": ("label",), "exclude": ("row",)}

# By path of files, what an error says of the first one when its last half is lost.
FORMATS = {
    "pandas/rows.parquet": "rows.parquet is not a Parquet file, or damaged",
    "pandas/rows.csv": r"rows.csv, line \d+: Expected 7 columns, got \d",
    "pandas/rows.tsv.bz2": "rows.tsv.bz2",
    "pandas/rows.jsonl.gz": "rows.jsonl.gz",
    "pandas/rows.feather": "rows.feather is no Arrow file or stream, or damaged",
    "polars/rows.parquet": "rows.parquet is not a Parquet file, or damaged",
    "polars/rows.csv": r"rows.csv, line \d+: Expected 7 columns, got \d",
    "polars/rows.ndjson": r"rows.ndjson, line \d+: ",
    "polars/rows.arrow": "rows.arrow is no Arrow file or stream, or damaged",
    "polars/rows.arrows": "rows.arrows is no Arrow file or stream, or damaged",
    "duckdb/rows.csv.gz": "rows.csv.gz",
    "duckdb/rows.json": r"rows.json, line \d+: ",
    "duckdb/keys": r"part=1/data_0.csv, line \d+: Expected 7 columns, got \d",
    "duckdb/both": "part=1/data_0.parquet is not a Parquet file, or damaged",
    "datasets/saved": "data-00000-of-00002.arrow is no Arrow file or stream, or damaged",
    "datasets/splits/train": "data-00000-of-00001.arrow is no Arrow file or stream, or damaged",
    "datasets/rows.parquet": "rows.parquet is not a Parquet file, or damaged",
    "datasets/rows.csv": r"rows.csv, line \d+: Expected 7 columns, got \d",
    "datasets/rows.jsonl": r"rows.jsonl, line \d+: ",
    "spark/csv": r"part=1/part-00000-.*.csv, line \d+: Expected 7 columns, got \d",
    "spark/json": "part=1/part-00000-.*.json.gz",
    "spark/parquet": "part=1/part-00000-.*.snappy.parquet is not a Parquet file, or damaged",
}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXREC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def encoder(cache):
    return learn_features(DataConfig(path=TABLES / REFERENCE, **OPTIONS), Console(quiet=True))


@pytest.fixture(scope="module")
def rows():
    return pq.read_table(TABLES / REFERENCE)


def read(path: pathlib.Path) -> pa.Table:
    groups = ParquetGroups.of_files(table_files(path))
    return pa.concat_tables(groups.read(group) for group in range(len(groups.sizes)))


def assert_same(found, batch):
    assert np.array_equal(found.dense, batch.dense)
    assert np.array_equal(found.labels, batch.labels)
    for name in batch.features.keys:
        assert found.features[name].to_lists() == batch.features[name].to_lists()


@pytest.mark.parametrize("name", FORMATS)
def test_train(name, encoder, rows):
    """What is learned of a table, and what is trained on and held out, is that of the other."""
    others = ("row", "part") if name.startswith(("duckdb", "spark")) else ("row",)
    data = DataConfig(path=TABLES / name, **OPTIONS | {"exclude": others})
    learned = learn_features(data, Console(quiet=True))
    assert learned.schema == encoder.schema
    training, held_out = (
        pa.concat_tables(part.read(group) for group in range(len(part.sizes)))
        for part in split_groups(data, learned.schema)
    )
    assert (len(training), len(held_out)) == (36, 4)
    assert_same(learned.batch(pa.concat_tables([training, held_out])), encoder.batch(rows))


@pytest.mark.parametrize("name", FORMATS)
def test_encode(name, encoder, rows):
    table = read(TABLES / name)
    assert table["row"].to_pylist() == rows["row"].to_pylist()
    assert_same(encoder.batch(table), encoder.batch(rows))


@pytest.fixture(scope="module")
def predict(tmp_path_factory, cache):
    """Predicts a path by the model of a run, which has been trained on a table."""
    work = tmp_path_factory.mktemp("work")
    options = ["--label", "label", "--exclude", "row", "--batch-size", "18"]
    small = ["--model", "deepfm", "--model.embedding-dim", "4", "--model.top-layer-sizes", "4"]
    data = str(TABLES / REFERENCE)
    assert main(["train", "--data", data, *options, *small, "--output", f"{work}/run"]) == 0
    assert main(["export", f"{work}/run", f"{work}/model"]) == 0

    def scores(path) -> pa.Table:
        output = f"{work}/scores.parquet"
        command = ["predict", f"{work}/model", str(path), "-o", output, "--keep", "row"]
        assert main(command) == 0
        return pq.read_table(output)

    with pytest.MonkeyPatch.context() as patch:
        # A model is loaded once: each time its program is compiled.
        patch.setattr("jaxrec.commands.predict.load", functools.lru_cache(load))
        yield scores


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_predict(name, predict):
    assert predict(TABLES / name).to_pydict() == predict(TABLES / REFERENCE).to_pydict()


@pytest.mark.slow
def test_predict_an_address(predict):
    system = fsspec.filesystem("memory")
    for name in (REFERENCE, "pandas/rows.csv", "duckdb/both/part=1/data_0.parquet"):
        system.pipe(f"/tables/{name}", (TABLES / name).read_bytes())
        scores = predict(f"memory://tables/{name}")
        assert scores.equals(predict(TABLES / REFERENCE)[: len(scores)])
    system.rm("/tables", recursive=True)


@pytest.mark.parametrize("name", FORMATS)
def test_damage(name, tmp_path):
    source, target = TABLES / name, tmp_path / pathlib.Path(name).name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    file = target if target.is_file() else table_files(target).sources or table_files(target).paths
    file = file if isinstance(file, pathlib.Path) else file[0]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match=FORMATS[name]) as raised:
        read(target)
    assert "\n" not in str(raised.value)


def test_splits_are_named():
    with pytest.raises(DataError, match=r"has the splits train, test, .* name one: .*splits/train"):
        table_files(TABLES / "datasets/splits")
