"""Encoders that are learned from parts, on one machine or many: bit for bit those of one pass."""

from __future__ import annotations

import fractions
import functools
import itertools
import json
import multiprocessing
import operator
import os
import pickle
import random
import shutil
import sys

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import DataError, EncoderLearner, Schema, TableEncoder, learn_encoder
from jaxrec.data.learn import ColumnStatistics
from jaxrec.data.schema import SchemaError
from jaxrec.data.statistics import Moments, NumberSums

pytestmark = pytest.mark.every_case

SCHEMA = Schema.from_dict(
    {
        "label": {"clicked": {}, "price": {"kind": "number"}},
        "dense": ["age", "time"],
        "categorical": {
            "city": {"num_unknown": 3},
            "user": {},
            "tags": {"min_count": 1},
            "seen": {"table": "user"},
            "device": {"encoding": "hash", "num_embeddings": 50},
        },
    }
)


def rows(count=800):
    rng = np.random.default_rng(7)
    sizes = rng.integers(0, 4, count)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    cities = [f"city_{n}" for n in range(40)]

    def lists(values):
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))

    age = rng.normal(40, 10, count)
    return pa.table(
        {
            "clicked": rng.integers(0, 2, count),
            "price": rng.lognormal(3, 4, count),
            "age": pa.array(age, mask=rng.random(count) < 0.1),
            "time": 1.7e9 + rng.random(count),  # sums of squares in float64 would be noise
            "city": pa.array(cities).take(pa.array(rng.zipf(1.5, count) % 40)),
            "user": rng.zipf(1.3, count) % 300,
            "tags": lists([f"tag_{n}" for n in rng.integers(0, 20, offsets[-1])]),
            "seen": lists(rng.integers(0, 300, offsets[-1])),
            "device": pa.array(["phone", None, "desk"]).take(pa.array(rng.integers(0, 3, count))),
        }
    )


TABLE = rows()


def saved(encoder, path):
    """Return the bytes of everything that an encoder has learned."""
    encoder.save(path)
    files = sorted(x for x in path.rglob("*") if x.is_file() and x.name != "example.parquet")
    return {str(x.relative_to(path)): x.read_bytes() for x in files}


def in_order(parts):
    return functools.reduce(operator.add, parts)


def as_a_tree(parts):
    half = len(parts) // 2
    return as_a_tree(parts[:half]) + as_a_tree(parts[half:]) if half else parts[0]


def shuffled(parts):
    parts = [*parts]
    random.Random(3).shuffle(parts)
    return as_a_tree(parts)


def in_groups(parts):
    return in_order([in_order(parts[5:]), parts[4], in_order(parts[:4])])


@pytest.mark.parametrize("merge", [in_order, as_a_tree, shuffled, in_groups])
def test_parts_give_the_encoder_of_one_pass(merge, tmp_path):
    wanted = saved(learn_encoder(SCHEMA, [TABLE]), tmp_path / "one")
    cuts = [0, 1, 90, 90, 200, 450, 451, 700, 800]  # eight parts, one of them empty
    parts = [TABLE[a:b] for a, b in itertools.pairwise(cuts)]
    parts[2] = parts[2].set_column(5, "user", parts[2]["user"].dictionary_encode())
    found = merge([ColumnStatistics.of(SCHEMA, part) for part in parts]).encoder()
    assert saved(found, tmp_path / "merged") == wanted
    moments = json.loads(wanted["statistics.json"])["moments"]
    assert [*moments] == ["price", "age", "time"]
    assert moments["time"]["squares"] == pytest.approx(800 / 12, rel=0.1)


NUMBERS = {
    "prices": np.random.default_rng(0).lognormal(3, 1, 20_000).round(2),
    "far from zero": np.random.default_rng(0).normal(1e6, 1, 9_000),
    "all magnitudes": np.ldexp(
        np.random.default_rng(0).normal(size=900), np.random.default_rng(1).integers(-450, 450, 900)
    ),
    "cancelling": np.array([1e300, 1.0, -1e300, 2.0**-999]),
    "powers of two": np.ldexp(1.0, np.arange(-990, 1020)) * np.tile([1, -1], 1005),
    "largest": np.array([np.finfo(np.float64).max, -1.7e308, 1.0]),
    "zeros": np.zeros(3),
    "none": np.zeros(0),
}


@pytest.mark.parametrize("values", NUMBERS.values(), ids=NUMBERS)
def test_sums_of_numbers_are_exact(values):
    exact = [fractions.Fraction(x) for x in values.tolist()]
    found = NumberSums.of(values)
    assert fractions.Fraction(found.total, 2**1000) == sum(exact)
    assert fractions.Fraction(found.squares, 2**2000) == sum(x * x for x in exact)
    order = np.random.default_rng(0).permutation(values.size)
    parts = [NumberSums.of(values[part]) for part in np.array_split(order, 8)]
    assert as_a_tree(parts) == found


def test_moments_are_rounded_once():
    values = np.random.default_rng(0).normal(1e6, 1, 1000)
    found = NumberSums.of(values).moments()
    exact = [fractions.Fraction(x) for x in values.tolist()]
    mean = sum(exact) / 1000
    assert found.count == 1000
    assert found.mean == float(mean)
    assert found.squares == float(sum((x - mean) ** 2 for x in exact))
    assert found.scale == pytest.approx(values.std(), rel=1e-9)
    assert NumberSums.of(np.ones(3)).moments().scale == 1
    assert NumberSums.of(np.array([1e300, -1e300])).moments().squares == float("inf")
    assert NumberSums.of(np.zeros(0)).moments() == Moments()


def test_columns_of_several_types_do_not_merge():
    other = TABLE.set_column(4, "city", pa.array(range(800)))
    parts = [ColumnStatistics.of(SCHEMA, table) for table in (TABLE, other)]
    for one, two in (parts, parts[::-1]):
        with pytest.raises(DataError, match=r"'city' is of type .*, and of type .* in the table"):
            one + two
    lists = [ColumnStatistics.of(SCHEMA, TABLE, held_out=True)]
    with pytest.raises(DataError, match="'city' has no values in the training rows"):
        in_order(lists).encoder()


def test_a_learner_runs_on_other_machines(tmp_path):
    """As Ray calls it, with tables, and as Spark does, with an iterator of record batches."""
    wanted = saved(learn_encoder(SCHEMA, [TABLE]), tmp_path / "one")
    learner = pickle.loads(cloudpickle.dumps(EncoderLearner(SCHEMA)))
    tables = [learner(TABLE[start : start + 100]) for start in range(0, 800, 100)]
    assert [len(table) for table in tables] == [1] * 8
    assert saved(learner.encoder(tables), tmp_path / "tables") == wanted
    batches = TABLE.to_batches(max_chunksize=90)
    parts = [*learner(iter(batches[:3])), *learner(iter([])), *learner(iter(batches[3:-1]))]
    parts.append(learner(batches[-1]))
    assert [part.num_rows for part in parts] == [1] * 4
    assert saved(learner.encoder(parts), tmp_path / "batches") == wanted
    with pytest.raises(DataError, match=r"row 2 .* column 'clicked': the label is 9"):
        learner(TABLE.set_column(0, "clicked", pa.array([0, 1, 9] + [0] * 797)))


ENCODER = learn_encoder(SCHEMA, [TABLE])


def test_a_learner_refuses_unknown_zones():
    hour = {"part": "hour", "zone": "Mars/Olympus"}
    schema = Schema.from_dict({"label": [], "categorical": {"ts.hour": hour}})
    with pytest.raises(SchemaError, match=r"'ts\.hour' is in the time zone 'Mars/Olympus'"):
        EncoderLearner(schema)


def test_an_encoder_maps_arrow_to_arrow():
    wanted = ENCODER.encode(TABLE)
    assert wanted.schema.equals(ENCODER.encoded_columns)
    assert wanted.column_names[:4] == ["label", "label 1", "weight", "age"]
    assert ENCODER(TABLE).equals(wanted)
    batches = TABLE.to_batches(max_chunksize=300)
    found = ENCODER(iter(batches))
    assert next(found).equals(ENCODER(batches[0]))  # one batch at a time
    assert pa.Table.from_batches([ENCODER(batches[0]), *found]).equals(wanted)
    for none in (ENCODER(TABLE[:0]), ENCODER(pa.RecordBatch.from_pylist([], TABLE.schema))):
        assert none.schema.equals(wanted.schema)
        assert none.num_rows == 0


def test_a_pickled_encoder_is_the_same():
    ENCODER.batch(TABLE)  # computes what is kept for the next batch
    assert "index" not in str(ENCODER.vocabularies["city"].__reduce__())
    for again in (
        pickle.loads(pickle.dumps(ENCODER)),
        cloudpickle.loads(cloudpickle.dumps(ENCODER)),
    ):
        assert isinstance(again, TableEncoder)
        assert again(TABLE).equals(ENCODER(TABLE))
        assert again.example.equals(ENCODER.example)
        assert again.capacities(9) == ENCODER.capacities(9)


@pytest.mark.slow
def test_a_started_process_encodes_the_same():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(ENCODER, (TABLE,)).equals(ENCODER(TABLE))


@pytest.fixture(scope="module")
def spark():
    pyspark = pytest.importorskip(
        "pyspark.sql", reason="needs the extra `spark`: pip install 'jaxrec[spark]'"
    )
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java: apt-get install openjdk-17-jre-headless")
    builder = pyspark.SparkSession.builder.master("local[2]")
    options = {
        "spark.ui.enabled": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "90",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(sys.path),
    }
    for name, value in options.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_spark_learns_and_encodes(monkeypatch, request, tmp_path):
    # Its workers are processes of this Python.
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    session = request.getfixturevalue("spark")
    from pyspark.sql.pandas.types import from_arrow_schema

    pq.write_table(TABLE, tmp_path / "rows.parquet", row_group_size=200)
    frame = session.read.parquet(str(tmp_path / "rows.parquet"))
    learner = EncoderLearner(SCHEMA)
    parts = frame.repartition(3).mapInArrow(learner, "statistics binary").toArrow()
    assert len(parts) == 3
    encoder = learner.encoder([parts])
    assert saved(encoder, tmp_path / "spark") == saved(ENCODER, tmp_path / "one")
    encoded = frame.mapInArrow(encoder, from_arrow_schema(encoder.encoded_columns)).toArrow()
    assert encoded.to_pydict() == ENCODER(TABLE).to_pydict()
