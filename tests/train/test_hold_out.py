"""The rows that `jaxrec train` holds out, of each kind of data."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.commands import main
from jaxrec.commands.train import train_config
from jaxrec.data import DataError, Shard
from jaxrec.data.addresses import data_path
from jaxrec.train.config import (
    DataConfig,
    ModelConfig,
    TrainConfig,
    load_config,
    parse_options,
    write_options,
)
from jaxrec.train.datasets import split_datasets
from jaxrec.train.features import learn_features, split_groups
from jaxrec.train.hold_out import split_of
from jaxrec.train.models import KINDS, default_config, model_kind
from jaxrec.train.models.interactions import split_sequences
from jaxrec.train.requests import split_windows
from tests.data.criteo.test_log import KAGGLE

pytestmark = pytest.mark.every_case

ROWS, USERS = 400, 40
START = datetime.datetime(2024, 2, 1)
# Whose rows are those from 2024-03-01 on: 29 days of 4 rows come before.
LATER = 4 * 29


def table():
    rng = np.random.default_rng(0)
    times = [START + datetime.timedelta(hours=6 * n) for n in range(ROWS)]
    return pa.table(
        {
            "click": rng.integers(0, 2, ROWS),
            "user": rng.integers(0, USERS, ROWS),
            "number": np.arange(ROWS) + 0.5,
            "ts": pa.array(times, pa.timestamp("s")),
        }
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One table as a Parquet file and a directory, and in other formats."""
    path = tmp_path_factory.mktemp("rows")
    whole = table()
    pq.write_table(whole, path / "one.parquet", row_group_size=70)
    (path / "parts").mkdir()
    pq.write_table(whole[:150], path / "parts/1.parquet", row_group_size=64)
    pq.write_table(whole[150:], path / "parts/2.parquet")
    pyarrow.csv.write_csv(whole, path / "rows.csv")
    lines = (json.dumps(row, default=str) + "\n" for row in whole.to_pylist())
    (path / "rows.jsonl").write_text("".join(lines))
    with pa.ipc.new_file(path / "rows.arrow", whole.schema) as file:
        file.write_table(whole)
    return path


def config_of(path, **options):
    # Without a schema, the column of times is left out of the features.
    return TrainConfig(data=DataConfig(path=path, batch_size=20, label=("click",), **options))


def numbers(dataset, batch_size=20, epoch=0, first=0):
    """The column "number" of a dataset's rows, in the order of its batches."""
    moments = dataset.encoder.moments["number"]
    found = []
    for batch in dataset.batches(batch_size, first, epoch):
        values = np.asarray(batch.dense)[np.asarray(batch.weights) > 0, 0]
        found.append(np.floor(values * moments.scale + moments.mean).astype(int))
    return np.concatenate(found)


SPLITS = {
    "default": ({}, lambda n: n >= 360),
    "last": ({"hold_out": "0.25"}, lambda n: n >= 300),
    "random": ({"hold_out": "random:0.25"}, None),
    "by": ({"hold_out_by": "user", "hold_out": "0.3"}, None),
    "last-of-each": ({"hold_out": "last", "user": "user", "time": "ts"}, "last"),
    "last-in-files": ({"hold_out": "last", "user": "user"}, "last"),
    "from-time": ({"hold_out_from": "ts=2024-03-01"}, lambda n: n >= LATER),
    "from-number": ({"hold_out_from": "number=223"}, lambda n: n >= 223),
}


@pytest.mark.parametrize(("options", "expected"), SPLITS.values(), ids=SPLITS)
def test_each_row_is_on_one_side_in_each_format_epoch_and_process(files, options, expected):
    users = table()["user"].to_numpy()
    sides = set()
    for name in ("one.parquet", "parts", "rows.csv", "rows.jsonl", "rows.arrow"):
        config = config_of(files / name, **options)
        encoder = learn_features(config.data, seed=config.seed)
        training, held_out = split_datasets(config, encoder=encoder)
        rows = np.sort(numbers(training))
        others = numbers(held_out)
        sides.add((tuple(rows), tuple(others)))
        np.testing.assert_array_equal(np.sort(np.concatenate([rows, others])), np.arange(ROWS))
        assert (len(training), len(held_out)) == (len(rows), len(others))
        # What is learned is learned from the training rows.
        assert encoder.moments["number"].count == len(rows)
        assert encoder.moments["number"].mean == pytest.approx(rows.mean() + 0.5)
        counts = dict(
            zip(
                encoder.vocabularies["user"].values.to_pylist(),
                encoder.vocabularies["user"].counts.tolist(),
                strict=True,
            )
        )
        known = zip(*np.unique(users[rows], return_counts=True), strict=True)
        assert counts == {user: count for user, count in known if count > 1}
    # All formats hold out the same rows.
    assert len(sides) == 1
    if expected == "last":
        # `np.unique` finds first rows: those of the reversed column.
        expected = {
            *(ROWS - 1 - np.unique(users[::-1], return_index=True)[1]).tolist()
        }.__contains__
    if expected is not None:
        np.testing.assert_array_equal(others, [n for n in range(ROWS) if expected(n)])
    if "hold_out_by" in options:
        assert not {*users[rows].tolist()} & {*users[others].tolist()}
    # In another epoch, after a restart, and in two processes.
    assert (numbers(training, epoch=1) != numbers(training)).any()
    np.testing.assert_array_equal(np.sort(numbers(training, epoch=1)), rows)
    np.testing.assert_array_equal(numbers(training, first=2), numbers(training)[40:])
    for side, whole in ((0, rows), (1, others)):
        parts = [split_datasets(config, Shard(index, 2), encoder)[side] for index in range(2)]
        both = np.concatenate([numbers(part) for part in parts])
        np.testing.assert_array_equal(np.sort(both), np.sort(whole))


def test_another_seed_holds_out_other_random_rows(files):
    def held_out(seed, **options):
        config = dataclasses.replace(config_of(files / "one.parquet", **options), seed=seed)
        return set(numbers(split_datasets(config)[1]))

    for options in ({"hold_out": "random"}, {"hold_out_by": "user"}):
        assert held_out(1, **options) == held_out(1, **options) != held_out(2, **options)
    assert held_out(1) == held_out(2)


@pytest.mark.parametrize("path", [KAGGLE, None], ids=["text", "generated"])
def test_rows_of_logs(path):
    data = DataConfig(path=path, table_rows=50, generated_rows=40, generated_eval_rows=10)

    def dense(rows, **options):
        found = rows.batches(8, **options)
        return np.concatenate([np.asarray(x.dense)[np.asarray(x.weights) > 0] for x in found])

    whole = np.concatenate([*map(dense, split_datasets(TrainConfig(data=data)))])
    config = TrainConfig(data=dataclasses.replace(data, hold_out="random:0.3"))
    training, held_out = split_datasets(config)
    mask = split_of(DataConfig(hold_out="random:0.3")).mask(50, "").part(0, 50)
    assert (len(training), len(held_out)) == ((~mask).sum(), mask.sum())
    np.testing.assert_array_equal(dense(training), whole[~mask])
    np.testing.assert_array_equal(dense(held_out), whole[mask])
    np.testing.assert_array_equal(dense(training, first=2), whole[~mask][16:])
    parts = [split_datasets(config, Shard(index, 2))[0] for index in range(2)]
    both = np.concatenate([*map(dense, parts)])
    np.testing.assert_array_equal(np.sort(both, axis=0), np.sort(whole[~mask], axis=0))
    if path is None:
        assert len(held_out.probabilities()) == mask.sum()
    last = TrainConfig(data=dataclasses.replace(data, hold_out="0.2"))
    assert [len(rows) for rows in split_datasets(last)] == [40, 10]
    by = TrainConfig(data=dataclasses.replace(data, hold_out_by="cat_3"))
    with pytest.raises(ConfigError, match="has no column 'cat_3' to hold out rows by"):
        split_datasets(by)


EVENTS = {
    "user": ["b", "a", "b", "a", "c", "b", "c"],
    "item": [1, 2, 3, 4, 5, 6, 7],
    "ts": [1, 2, 3, 4, 5, 6, 7],
}
# Of three users: sequences to train on, and pairs of the items before and the item to predict.
SEQUENCES = {
    "last-items": ({}, [[1, 3], [2], [5]], [([1, 3], 6), ([2], 4), ([5], 7)]),
    "last": ({"hold_out": "last"}, [[1, 3], [2], [5]], [([1, 3], 6), ([2], 4), ([5], 7)]),
    "last-sequences": ({"hold_out": "0.3"}, [[1, 3, 6], [2, 4], []], [([5], 7)]),
    "from": ({"hold_out_from": "ts=4"}, [[1, 3], [2], []], [([1, 3], 6), ([2], 4), ([5], 7)]),
    "from-later": ({"hold_out_from": "ts=6"}, [[1, 3], [2, 4], [5]], [([1, 3], 6), ([5], 7)]),
}


@pytest.mark.parametrize(("options", "rows", "asked"), SEQUENCES.values(), ids=SEQUENCES)
def test_sequences(tmp_path, options, rows, asked):
    pq.write_table(pa.table(EVENTS), tmp_path / "events.parquet")
    names = {"user": "user", "item": ("item",), "time": "ts"}
    split = split_sequences(DataConfig(path=tmp_path / "events.parquet", **names, **options), 0)
    assert split.training.to_pylist() == rows
    assert [*zip(split.before.to_pylist(), split.last.to_pylist(), strict=True)] == asked


@pytest.mark.parametrize("form", ["rows", "lists"])
def test_whole_sequences_of_some_users(tmp_path, form):
    data = {"hold_out_by": "user", "hold_out": "0.4"}
    users = np.repeat(np.arange(30), 3)
    items = np.arange(90)
    if form == "rows":
        rows = pa.table({"user": users, "item": items})
        data |= {"user": "user", "item": ("item",)}
    else:
        lists = [None, *items.reshape(30, 3).tolist()]
        rows = pa.table({"user": pa.array([7, *range(30)]), "items": lists})
        data |= {"history": ("items",)}
    pq.write_table(rows, tmp_path / "x.parquet")
    split = split_sequences(DataConfig(path=tmp_path / "x.parquet", **data), 0)
    held_out = {row[-1] // 3 for row in split.before.to_pylist()}
    assert 5 < len(held_out) < 20
    trained = [row for row in split.training.to_pylist() if row]
    assert {row[0] // 3 for row in trained} == {*range(30)} - held_out
    assert all(len(row) == 3 for row in trained)
    assert split.last.to_pylist() == [3 * user + 2 for user in sorted(held_out)]


def test_the_newest_candidates_of_a_ranker(tmp_path):
    rng = np.random.default_rng(0)
    rows = {"uid": np.repeat(np.arange(20), 10), "item_id": rng.integers(0, 9, 200)}
    rows |= {"timestamp": np.arange(200), "rating": rng.integers(1, 6, 200)}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")

    def windows(**options):
        base = default_config("hstu_ranker")
        data = dataclasses.replace(base.data, path=tmp_path / "log.parquet", **options)
        model = dataclasses.replace(base.model, name="hstu_ranker")
        config = dataclasses.replace(base, data=data, model=model)
        encoder = KINDS["hstu_ranker"].learn(config, Console(quiet=True))
        kind = model_kind(config, encoder)
        return [w.start for w in split_windows(kind._groups(config.data.path), config)]

    assert windows()[1] == 179
    assert windows(hold_out="0.5")[1] == 99
    assert windows(hold_out_from="timestamp=150")[1] == 150
    with pytest.raises(DataError, match="column 'timestamp' has values from 0 to 199"):
        windows(hold_out_from="timestamp=200")
    for wrong in ({"hold_out": "random"}, {"hold_out_by": "uid"}, {"hold_out_from": "rating=3"}):
        with pytest.raises(ConfigError, match="--hold-out-from timestamp=TIME"):
            windows(**wrong)


WRONG = {
    "text": (["--hold-out=some"], "--hold-out takes a fraction, random, random: .* got 'some'"),
    "no-user": (["--hold-out=last", "--time=ts"], "name their column with --user"),
    "last-by": (["--hold-out=last", "--user=u", "--hold-out-by=u"], "leave --hold-out-by out"),
    "half": (["--hold-out=random:"], "--hold-out takes a fraction"),
    "all": (["--hold-out=1"], "must be between 0 and 1, got 1.0"),
    "nan": (["--hold-out=random:nan"], "must be between 0 and 1, got nan"),
    "no-value": (["--hold-out-from=ts"], "takes NAME=VALUE, such as ts=2024-03-01, got 'ts'"),
    "from-and-fraction": (["--hold-out-from=a=1", "--hold-out=0.1"], "leave --hold-out out"),
    "from-and-by": (["--hold-out-from=a=1", "--hold-out-by=b"], "leave --hold-out-by out"),
    "file-and-by": (
        ["--data=x", "--hold-out-data=y", "--hold-out-by=b"],
        "holds out the rows of other files; leave --hold-out-by out",
    ),
    "windows": (
        ["--model=hstu_ranker", "--windows=3", "--hold-out=0.1"],
        "each window is evaluated before it is trained on",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_options(options)


def test_options_of_earlier_runs(tmp_path):
    """Earlier runs wrote the fraction also for data that it did not apply to."""
    for fraction, expected in ((0.1, None), (0.25, "0.25")):
        (tmp_path / "x.yaml").write_text(f"data: {{eval_fraction: {fraction}}}")
        assert load_config(tmp_path / "x.yaml").data.hold_out == expected


DESCRIBED = {
    "last": ({}, "the last 10 % of the rows"),
    "random": ({"hold_out": "random:0.25"}, "random 25 % of the rows, seed 0"),
    "by": ({"hold_out_by": "user"}, "random 10 % of the values of user, seed 0"),
    "from": ({"hold_out_from": "ts=5"}, "rows from ts=5 on"),
    "last-of-each": ({"hold_out": "last", "user": "u"}, "the last row of each u"),
    "file": ({"eval_path": pathlib.Path("y")}, "the rows of y"),
    "generated": ({"path": None}, "the last 200,000 rows"),
    "last-items": (
        {"model": "sasrec", "hold_out": "last", "user": "u"},
        "the last item of each sequence",
    ),
    "items": ({"model": "sasrec"}, "the last item of each sequence"),
    "newest": ({"model": "hstu_ranker"}, "the newest 10 % of the candidates"),
}


@pytest.mark.parametrize(("options", "text"), DESCRIBED.values(), ids=DESCRIBED)
def test_results_say_which_rows_are_held_out(options, text):
    given = {"path": pathlib.Path("x"), **options}
    model = ModelConfig(name=given.pop("model", "dlrm"))
    config = TrainConfig(data=DataConfig(**given), model=model)
    assert model_kind(config).hold_out == text


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--hold-out=0.2", "--hold-out differs from that of the run; leave --hold-out out"),
        ("--hold-out-by=number", "--hold-out-by differs"),
        ("--hold-out-from=a=1", "--hold-out-from"),
        ("--hold-out-data=x", "--hold-out-data"),
        ("--data.types=a=string", "--data.types differs"),
    ],
    ids=["fraction", "by", "from", "file", "types"],
)
def test_a_run_keeps_its_split(tmp_path, capsys, option, name):
    data = DataConfig(path=pathlib.Path("x"), hold_out="0.3", hold_out_by="user")
    write_options(TrainConfig(data=data), tmp_path / "config.yaml")
    assert main(["train", f"--resume={tmp_path}", option]) == 2
    assert name in capsys.readouterr().err


def test_the_best_step_is_that_of_one_hold_out(tmp_path, monkeypatch):
    """Its values are compared over all parts of a run; without a best step others may come."""
    monkeypatch.chdir(tmp_path)
    data = DataConfig(path=pathlib.Path("x"), eval_path=pathlib.Path("y"))
    write_options(TrainConfig(data=data, patience=2), tmp_path / "config.yaml")
    resumed = [f"--resume={tmp_path}", "--epochs=3"]
    message = f"--hold-out-data z has other rows than {tmp_path / 'y'}, on which the run has"
    with pytest.raises(ConfigError, match=message):
        train_config([*resumed, "--hold-out-data=z"])
    assert train_config([*resumed, "--hold-out-data=y"]).patience == 2
    for options in (["--patience=0"], ["--eval-only"]):
        config = train_config([*resumed, "--hold-out-data=z", *options])
        assert config.data.eval_path == pathlib.Path("z")


def test_other_files_may_be_evaluated(tmp_path):
    data = DataConfig(path=pathlib.Path("x"), hold_out="0.3")
    write_options(TrainConfig(data=data), tmp_path / "config.yaml")
    options = [f"--resume={tmp_path}", "--eval-only", "--hold-out-data=y"]
    assert train_config(options).data.eval_path == pathlib.Path("y")


def _visits(day):
    """Rows of a day, with an object, a time as text and a vector, all whole on the first day."""
    return [
        {
            "click": n % 2,
            "user": {"id": f"u{n % 3}", "number": n},
            "ts": f"{day} 10:00:0{n % 7}",
            "title": [n, 1, 2.5 if day == "2024-03-02" else 2],
        }
        for n in range(9)
    ]


# Held-out rows of each day.
OF_COLUMNS = {
    "key": ({"hold_out_from": "day=2024-03-02"}, [[], [*range(9)]]),
    "time": ({"hold_out_from": "ts=2024-03-02T10:00:06"}, [[], [6]]),
    "field": ({"hold_out_from": "user.number=7"}, [[7, 8], [7, 8]]),
    "last": ({"hold_out": "last", "user": "user.id", "time": "ts"}, [[], [4, 5, 6]]),
    "last-key": ({"hold_out": "last", "user": "user.id", "time": "day"}, [[], [6, 7, 8]]),
}


@pytest.mark.parametrize("place", ["jsonl", "parquet", "address"])
def test_columns_of_every_kind_hold_rows_out(place, tmp_path, monkeypatch):
    """Directories' keys, fields of objects and vectors, in files here and at an address."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path / "cache"))
    for day in ("2024-03-01", "2024-03-02"):
        path = tmp_path / "days" / f"day={day}" / "part-0.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in _visits(day)))
        if place == "parquet":
            pq.write_table(pa.Table.from_pylist(_visits(day)), path.with_suffix(".parquet"))
            path.unlink()
    root = tmp_path / "days"
    if place == "address":
        fsspec.filesystem("memory").put(str(root), "/days", recursive=True)
        root = data_path("memory://days")
    for options, expected in OF_COLUMNS.values():
        data = DataConfig(path=root, label=("click",), **options)
        schema = learn_features(data).schema
        assert schema.dense["title"].width == 3
        assert {"user.id", "user.number", "day"} <= schema.categorical.keys()
        training, held_out = split_groups(data, schema)
        sides = [{}, {}]
        for side, rows in zip(sides, (held_out, training), strict=True):
            for numbers, day in _by_day(rows):
                side.setdefault(day, []).extend(numbers)
        days = ("2024-03-01", "2024-03-02")
        assert [sides[0].get(day, []) for day in days] == expected
        assert [sides[1].get(day, []) for day in days] == [
            [n for n in range(9) if n not in each] for each in expected
        ]


def _by_day(rows):
    """Yield the users' numbers in each row group, and its day."""
    for group in range(len(rows.sizes)):
        table = rows.read(group)
        yield table["user.number"].to_pylist(), table["day"][0].as_py()
