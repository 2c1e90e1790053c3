"""Data of `jaxrec train --model hstu_ranker`: columns by name, windows of time, batches, runs."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from jaxrec.arguments import ConfigError
from jaxrec.commands import main
from jaxrec.data import (
    DataError,
    EventGroups,
    GeneratedEvents,
    RequestGroups,
    RequestLimits,
    Shard,
    write_events,
    write_histories,
)
from jaxrec.data.parquet import ParquetGroups
from jaxrec.data.sequences.rows import SequenceRows
from jaxrec.train import load_model, requests
from jaxrec.train.config import DataConfig, ModelConfig, RankerConfig, TrainConfig
from jaxrec.train.datasets import run_batches
from jaxrec.train.models import model_kind
from jaxrec.train.models.interactions import read_sequences
from jaxrec.train.request_columns import Columns, table_schema
from jaxrec.train.requests import RequestData, split_windows

CONFIG = TrainConfig(
    data=DataConfig(batch_size=16, generated_rows=300, generated_eval_rows=40, epochs=3),
    model=ModelConfig(name="hstu_ranker"),
    ranker=RankerConfig(history=20, candidates=4),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same log as events, as users and as requests."""
    directory = tmp_path_factory.mktemp("log")
    log = GeneratedEvents(60)
    write_events(log, directory / "events.parquet")
    write_events(log, directory / "requests.parquet", form="rows")
    write_histories(ParquetGroups((directory / "events.parquet",)), directory / "users")
    pyarrow.csv.write_csv(pq.read_table(directory / "events.parquet"), directory / "events.csv")
    return directory


def config_of(path, **data):
    return dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, path=path, **data))


def groups_of(config):
    data = RequestData.open(config, config.data.path)
    names = Columns.find(config.data, data.columns.names)
    schema = table_schema(config, names, data.columns)
    return data.groups(config.data, names, schema, RequestLimits(20, 4))


def write_ratings(directory, users=30, each=40):
    """A log in the format of MovieLens 100K."""
    rng = np.random.default_rng(0)
    path = directory / "u.data"
    rows = [
        (user, rng.integers(1, 50), rng.integers(1, 6), 1000 * step + user)
        for user in range(1, users + 1)
        for step in range(each)
    ]
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("events.parquet", EventGroups),
        ("events.csv", EventGroups),
        ("users", EventGroups),
        ("requests.parquet", RequestGroups),
    ],
)
@pytest.mark.every_case
def test_the_form_of_files_is_seen(files, name, kind):
    groups = groups_of(config_of(files / name))
    assert isinstance(groups, kind)
    assert groups.sequences.items == {"item_id": "candidate_item_id"}
    assert groups.sequences.context == {"uid": 1}
    counts = [groups.requests(group).counts for group in range(len(groups.sizes))]
    candidates = sum(each.candidates for each in counts)
    listens = pq.read_table(files / "events.parquet")["event_type"].to_pylist().count("listen")
    assert candidates == (60 * 4 if kind is RequestGroups else listens)


def test_events_are_grouped_as_the_command_groups_them(files):
    events, users = (groups_of(config_of(files / x)) for x in ("events.parquet", "users"))
    assert list(events.sequences.columns) == list(users.sequences.columns)
    capacities = dict.fromkeys(events.sequences.columns, 1 << 12)
    one, other = (
        SequenceRows.concatenate([groups.read(group) for group in range(len(groups.sizes))])
        for groups in (events, users)
    )
    rows = np.arange(len(one))
    assert one.batch(rows, capacities).to_lists() == other.batch(rows, capacities).to_lists()


def test_a_label_column_of_ones_is_the_action(tmp_path):
    rows = pa.table(
        {"u": ["a", "a", "b"], "i": ["x", "y", "x"], "t": [1, 2, 3], "c": [True, False, True]}
    )
    pq.write_table(rows, tmp_path / "log.parquet")
    config = config_of(tmp_path, user="u", item=("i",), time="t", label=("c",))
    groups = groups_of(config)
    parts = [groups.read(group) for group in range(len(groups.sizes))]
    capacities = dict.fromkeys(groups.sequences.columns, 8)
    batch = SequenceRows.concatenate(parts).batch(np.arange(2), capacities)
    assert batch["candidate_action"].to_lists() == [[1, 0], [1]]
    assert {x.encoding for x in groups.sequences.encodings.values()} == {"hash"}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        pytest.param(
            {"t": [1]}, {}, "no column 'item_id' or 'movie_id'; name it with --item", id="item"
        ),
        pytest.param({"item_id": [1]}, {}, "no column 'timestamp'; name it with --time", id="time"),
        pytest.param(
            {"item_id": [1], "timestamp": [1]},
            {},
            "name the column of users with --user",
            id="user",
        ),
        pytest.param(
            {"item_id": [1], "timestamp": [1], "uid": [1]}, {}, "with --label", id="label"
        ),
        pytest.param(
            {"item_id": [1], "timestamp": [1]}, {"user": "who"}, "no column 'who'", id="named user"
        ),
        pytest.param(
            {"item_id": [1], "timestamp": [1], "uid": [1]},
            {"label": ("a", "b")},
            "predicts one label, got 2",
            id="two labels",
        ),
    ],
)
def test_columns_that_are_missing(tmp_path, columns, options, message):
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    with pytest.raises(ConfigError, match=message):
        groups_of(config_of(tmp_path / "log.parquet", **options))


OPENED = {
    "hstu_ranker": lambda path: RequestData.open(CONFIG, path),
    "sasrec": lambda path: read_sequences(
        DataConfig(path=path, user="user_id", item=("item_id",), time="timestamp"), path
    ),
}


@pytest.mark.parametrize("model", OPENED)
def test_files_of_other_types_are_named(tmp_path, model):
    """A column of text in one file and of numbers in another is an error, in any order."""
    log = pa.table({"user_id": [1, 1], "item_id": [3, 4], "timestamp": [1, 2], "rating": [5, 1]})
    texts = log.set_column(1, "item_id", pa.array(["3", "4"]))
    for number, order in enumerate(((log, texts), (texts, log))):
        (folder := tmp_path / str(number)).mkdir()
        for name, table in zip("ab", order, strict=True):
            pq.write_table(table, folder / f"{name}.parquet")
        with pytest.raises(DataError, match=r"b.parquet, column 'item_id' is of type .*a.parquet"):
            OPENED[model](folder)


def test_requests_have_labels_of_their_own(files):
    with pytest.raises(ConfigError, match="which the column 'candidate_action' labels"):
        groups_of(config_of(files / "requests.parquet", label=("is_organic",)))


def test_logs_beyond_memory_name_the_command(files, monkeypatch):
    monkeypatch.setattr(requests, "MOST_EVENTS", 10)
    with pytest.raises(DataError, match="jaxrec data histories LOG OUTPUT"):
        groups_of(config_of(files / "events.parquet"))


def test_the_last_candidates_are_held_out():
    kind = model_kind(CONFIG)
    rows, held_out = kind.datasets(Shard())
    assert len(rows) + len(held_out) == 340 * 4
    assert abs(len(held_out) - 0.1 * 340 * 4) <= 4
    times = [
        [
            np.asarray(batch.features["candidate_timestamp"].values)
            for batch in dataset.batches(16)
            if batch.features["candidate_timestamp"].lengths.sum()
        ]
        for dataset in (rows, held_out)
    ]
    newest = max(int(each.max()) for each in times[0])
    assert all(each[each > 0].min() > newest for each in times[1])


def test_a_resumed_run_goes_on_with_its_batch():
    rows, _ = model_kind(CONFIG).datasets(Shard())
    whole = list(run_batches(rows, 16, 3))
    assert len(whole) == rows.num_batches(16) * 3
    for first in (1, rows.num_batches(16) + 2, len(whole) - 1):
        rest = list(run_batches(rows, 16, 3, first=first))
        assert len(rest) == len(whole) - first
        for one, other in zip(rest, whole[first:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, other)


def test_windows_are_trained_in_order_and_evaluated_before(tmp_path):
    config = config_of(write_ratings(tmp_path), epochs=1)
    config = dataclasses.replace(config, windows=4)
    kind = model_kind(config)
    rows, held_out = kind.datasets(Shard())
    assert len(rows.windows) == 3
    assert len(rows) + len(held_out) == 30 * 40
    found = kind.evaluations(rows, held_out)
    assert tuple(found) == rows.ends
    windows = [source.groups.limits.window for source in rows.windows]
    assert [each.windows[0].groups.limits.window for each in found.values()] == [
        *windows[1:],
        held_out.windows[0].groups.limits.window,
    ]
    assert kind.evaluations(rows, held_out)[rows.ends[-1]] is held_out
    batches = list(rows.batches(16))
    assert len(batches) == rows.ends[-1] == rows.num_batches(16)


def test_one_time_cannot_be_split(tmp_path):
    rows = {"uid": [1, 2], "item_id": [1, 2], "timestamp": [5, 5], "rating": [5, 1]}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    config = config_of(tmp_path / "log.parquet")
    with pytest.raises(DataError, match="all candidates have one time"):
        split_windows(groups_of(config), config)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            "--windows 3", "windows are 2 or more, and for --model hstu_ranker", id="model"
        ),
        pytest.param("--model hstu_ranker --windows 1", "windows are 2 or more", id="one window"),
        pytest.param(
            "--model hstu_ranker --item item_id",
            "columns of the generated log are known",
            id="known_columns",
        ),
        pytest.param(
            "--model hstu_ranker --data.types uid=string",
            "data.types is for the files of --data",
            id="types_of_no_file",
        ),
        pytest.param(
            "--model hstu_ranker --windows 3 --epochs 2", "leave --epochs and", id="epochs"
        ),
        pytest.param(
            "--model hstu_ranker --windows 3 --patience 2", "leave --patience and", id="patience"
        ),
        pytest.param("--model hstu_ranker --ranker.heads 3", "divide by 3 heads", id="heads"),
        pytest.param(
            "--model hstu_ranker --ranker.window -1", "ranker.window must be", id="window"
        ),
        pytest.param(
            "--model hstu_ranker --vocabulary dynamic", "leave --vocabulary out", id="vocabulary"
        ),
    ],
)
def test_options_that_are_refused(options, message, tmp_path, capsys):
    output = ["--output", str(tmp_path / "run")]
    assert main(["train", *options.split(), *output]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_in_windows(tmp_path, capsys):
    path, run = write_ratings(tmp_path), tmp_path / "run"
    options = "--model hstu_ranker --windows 3 --ranker.history 20 --ranker.dim 8 --ranker.layers 1"
    small = "--data.table-rows 100 --batch-size 32 --model.embedding-dim 8"
    command = ["train", *options.split(), *small.split(), "--data", str(path)]
    assert main([*command, "--output", str(run)]) == 0
    results = json.loads((run / "results.json").read_text())
    assert [set(each) >= {"step", "auc", "log_loss"} for each in results["windows"]] == [True] * 2
    assert results["windows"][-1]["auc"] == results["auc"]
    assert results["windows"][-1]["step"] == results["steps"]
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--eval-only"]) == 0
    assert f"{results['auc']:.4f}" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--windows", "4"]) == 2
    assert "than those of the run; leave them out" in capsys.readouterr().err
    # A saved model needs no data.
    path.unlink()
    model = load_model(run)
    assert model.features.items == {"movie_id": "candidate_movie_id"}
