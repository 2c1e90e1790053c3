"""``--memory``: what rows take is bounded by the sizes of row groups and of what is shuffled."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.data import DataError, ParquetGroups, Schema, Shard
from jaxrec.train.config import DataConfig, TrainConfig, parse_options
from jaxrec.train.datasets import split_datasets
from jaxrec.train.features import convert_files, learn_features, parquet_data
from jaxrec.train.models import KINDS
from jaxrec.train.resumed import check_resumed
from jaxrec.train.row_memory import check_groups, parse_memory, window_within

SCHEMA = Schema.from_dict(
    {"label": "label", "dense": ["x", "user.age"], "categorical": ["city", "tags"]}
)


def table(rows):
    rng = np.random.default_rng(0)
    tags = pa.array(rng.integers(0, 9, 3 * rows))
    return pa.table(
        {
            "label": rng.integers(0, 2, rows).astype(np.int8),
            "x": rng.random(rows),
            "user": [{"age": n % 90} for n in range(rows)],
            "city": rng.integers(0, 20, rows).astype(str),
            "tags": pa.ListArray.from_arrays(np.arange(0, 3 * rows + 1, 3, np.int32), tags),
            "unread": rng.random(rows),
        }
    )


def test_sizes():
    assert [parse_memory(x) for x in ("100MB", "1.5 gb", "2G", "100000000")] == [
        10**8,
        1_500_000_000,
        2 * 10**9,
        10**8,
    ]
    for text in ("many", "-1GB", "2PB", ""):
        with pytest.raises(ConfigError, match="give a size such as 500MB or 2GB"):
            parse_memory(text)
    with pytest.raises(ConfigError, match="--memory 99MB is too small; give 100MB or more"):
        parse_memory("99MB")


def test_bytes_are_about_those_of_the_rows(tmp_path):
    pq.write_table(table(5000), tmp_path / "x.parquet", row_group_size=2000)
    groups = ParquetGroups((tmp_path / "x.parquet",), SCHEMA.inputs, dictionaries=True)
    sizes = [groups.read(number).nbytes for number in range(3)]
    for estimated, size in zip(groups.bytes_of_groups, sizes, strict=True):
        assert size <= estimated < 2 * size
    assert groups.values_of_groups == (2000 * 7, 2000 * 7, 1000 * 7)
    assert ParquetGroups((tmp_path / "x.parquet",)).values_of_groups[2] == 1000 * 8


def test_a_resumed_run_has_the_same_memory():
    """Sizes are compared, not their texts; an evaluation shuffles nothing."""
    run = TrainConfig(data=DataConfig(path=pathlib.Path("x"), memory="500MB"))

    def resumed(memory, **options):
        data = dataclasses.replace(run.data, memory=memory)
        check_resumed(dataclasses.replace(run, data=data, resume=pathlib.Path("r"), **options), run)

    resumed("0.5GB")
    resumed("1GB", eval_only=True)
    resumed(None, eval_only=True)
    for other in ("1GB", None):
        with pytest.raises(ConfigError, match="--memory differs from that of the run"):
            resumed(other)


def test_the_window_follows_from_the_memory(tmp_path, monkeypatch):
    pq.write_table(table(8000), tmp_path / "x.parquet", row_group_size=1000)
    groups = ParquetGroups((tmp_path / "x.parquet",), SCHEMA.inputs, dictionaries=True)
    monkeypatch.setattr("jaxrec.train.row_memory.SMALLEST", 1)
    monkeypatch.setattr("jaxrec.train.row_memory.FIXED", 0)
    windows = {}
    for memory in range(300_000, 3_000_000, 20_000):
        with contextlib.suppress(DataError):
            check_groups(str(memory), groups, SCHEMA)
            windows[memory] = window_within(str(memory), groups, SCHEMA, 8)
    assert sorted(set(windows.values())) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [*windows.values()] == sorted(windows.values())
    check_groups(None, groups, SCHEMA)
    with pytest.raises(DataError, match=r"x\.parquet has a row group of 1,000 rows, "):
        check_groups(str(min(windows) - 20_000), groups, SCHEMA)


def test_converted_files_have_groups_that_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path / "cache"))
    rows = table(120_000).drop_columns(["user", "tags"])
    pyarrow.csv.write_csv(rows, tmp_path / "x.csv")
    groups = []
    with pytest.raises(ConfigError, match="--memory 299MB is too small to convert CSV; give 300MB"):
        convert_files(DataConfig(path=tmp_path / "x.csv", memory="299MB"), Console(quiet=True))
    monkeypatch.setattr("jaxrec.train.row_memory._CONVERTED_PART", 240)
    for memory in (None, "300MB"):
        data = DataConfig(path=tmp_path / "x.csv", memory=memory)
        convert_files(data, Console(quiet=True))
        groups.append(ParquetGroups.of_files(parquet_data(data.path, data)))
    assert len(groups[0].sizes) < len(groups[1].sizes)
    encoder = learn_features(data)
    config = parse_options(["--data", str(data.path), "--memory", "300MB"])
    training, _ = split_datasets(config, encoder=encoder)
    assert sum(int(batch.weights.sum()) for batch in training.batches(4096)) == 108_000


def two_towers(path, memory, *options):
    """The training rows of two towers over the columns of users and items."""
    config = parse_options(
        ["--data", str(path), "--memory", memory, "--model", "two_tower", "--item", "item",
         "--user", "user", *options]
    )  # fmt: skip
    kind = KINDS["two_tower"](config, learn_features(config.data, needs_label=False))
    return kind.datasets(Shard(0, 1))


def test_pairs_of_two_towers_count(tmp_path):
    rng = np.random.default_rng(0)
    rows = 300_000
    columns = {name: rng.integers(0, 3000, rows) for name in ("user", "item")}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=10_000)
    training, held_out = two_towers(tmp_path / "x.parquet", "100MB")
    assert training.rows.besides == held_out.rows.besides == 18 * 270_000
    # Pairs are not held where --exclude leaves the users out.
    others, _ = two_towers(
        tmp_path / "x.parquet", "100MB", "--exclude", "user", "--categorical=item"
    )
    assert others.rows.besides == 0
    tracemalloc.start()
    catalog = training.catalog(held_out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 200_000 < len(catalog.pairs) == len(set(catalog.pairs.tolist()))
    assert (np.diff(catalog.pairs) > 0).all()
    assert peak < 18 * 270_000 + 20 * 10_000 * 8


def test_pairs_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    columns = {name: np.arange(30_000) % 3000 for name in ("user", "item")}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=10_000)
    monkeypatch.setattr("jaxrec.train.models.two_tower.pair_bytes", lambda rows: 1000 * rows)
    message = "several, and the items of users, up to 27MB; give --memory 110MB, leave columns out"
    with pytest.raises(DataError, match=message):
        two_towers(tmp_path / "x.parquet", "100MB")


REFUSED = {
    "a generated log": ([], "--memory is for the files of --data"),
    "sequences": (["--data", "x", "--model", "sasrec", "--history", "i"], "is for models of rows"),
    "requests": (["--data", "x", "--model", "hstu_ranker"], "is for models of rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_has_no_meaning(name):
    options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        checked([*options, "--memory", "1GB"])


def checked(options):
    config = parse_options(options)
    KINDS[config.model.name].check(config, SCHEMA)


def test_a_resumed_run_keeps_it():
    run = parse_options(["--data", "x.parquet", "--memory", "1GB"])
    with pytest.raises(ConfigError, match="--memory differs from that of the run"):
        check_resumed(parse_options(["--memory", "2GB"], run), run)


PEAK = r"""
import json, re, sys
from jaxrec.train.config import parse_options
from jaxrec.train.datasets import split_datasets
from jaxrec.train.features import convert_files, learn_features
from rich.console import Console

def peak():
    # getrusage tells the peak of the parent that forked, too.
    return int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024

def read(*options):
    config = parse_options(["--data", *options])
    convert_files(config.data, Console(quiet=True))
    training, _ = split_datasets(config, encoder=learn_features(config.data))
    for batch in training.batches(4096):
        pass

read(sys.argv[1])  # The libraries that a run loads take memory, too.
before = peak()
read(*sys.argv[2:])
print(json.dumps(peak() - before))
"""


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_peak(tmp_path, monkeypatch, suffix):
    """The process takes no more memory for its rows than it is given, and more without a bound."""
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path / "cache"))
    rows = 1_300_000 if suffix == "parquet" else 150_000
    rng = np.random.default_rng(0)
    columns = {f"x{n}": rng.random(rows) for n in range(16)}
    columns |= {f"c{n}": rng.integers(0, 99, rows) for n in range(4)}
    whole = pa.table({"label": rng.integers(0, 2, rows), **columns})
    small, path = tmp_path / f"small.{suffix}", tmp_path / f"x.{suffix}"
    for part, file in ((whole[:1000], small), (whole, path)):
        if suffix == "csv":
            pyarrow.csv.write_csv(part, file)
        else:
            pq.write_table(part, file, row_group_size=50_000)

    def peak(*options):
        command = [sys.executable, "-P", "-c", PEAK, str(small), str(path), *options]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    if suffix == "csv":
        assert peak("--memory", "300MB") <= 300 * 10**6
    else:
        # The least that these row groups need, as the error for 150MB says.
        assert peak("--memory", "151MB") <= 151 * 10**6 < peak()
