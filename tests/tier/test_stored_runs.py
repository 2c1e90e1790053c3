"""Runs whose rows are in durable stores: restored, moved to other stores, refused."""

from __future__ import annotations

import itertools
import pathlib
import shutil
import warnings

import numpy as np
import optax
import pytest

import jaxrec
from jaxrec.tier import Cached, ahead, close, make
from jaxrec.train.checkpoint import CheckpointError, restore, save
from tests.tier import models
from tests.tier.servers import redis_port  # noqa: F401
from tests.tier.vocabulary.test_cached import (
    NAMES,
    NUM_IDS,
    all_rows,
    assert_same,
    make_stream,
    make_whole,
)

# Stores by name; each table has its own.
URLS = {
    "memory": "memory://",
    "file": "file://{path}/{table}",
    "rocksdb": "rocksdb://{path}/{table}",
    "redis": "redis://127.0.0.1:{port}/0?prefix={path}/{table}",
    "memory+rocksdb": "memory+rocksdb://{path}/{table}?memory=64KB",
}
DURABLE = [name for name in URLS if name != "memory"]
numbers = itertools.count()


@pytest.fixture
def make_model(request, tmp_path):
    """Makes models whose tables are behind stores of a name; equal numbers mean equal stores."""
    made = []

    def make_stored(name: str, number: int, rows: int = 300):
        port = request.getfixturevalue("redis_port") if "redis" in name else 0
        url = URLS[name].replace("{path}", str(tmp_path / f"store{number}"))
        tables = dict.fromkeys(NAMES, Cached(rows, url.replace("{port}", str(port))))
        made.append(make(lambda: models.Ranker(NUM_IDS, "adam"), tables))
        return made[-1]

    yield make_stored
    for model in made:
        close(model)


def train(model, optimizer, batches, save_after: int = 0, directory: pathlib.Path | None = None):
    losses = []
    for number, batch in enumerate(ahead(model, batches, look_ahead=2), 1):
        losses.append(float(models.train_step(model, optimizer, *batch)))
        if number == save_after:
            save(directory, model, optimizer, batches=number)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *zip(DURABLE, DURABLE, strict=True),
        ("file", "rocksdb"),
        ("memory", "file"),
        ("redis", "memory"),
    ],
)
def test_a_restored_run_is_an_undisturbed_one(make_model, tmp_path, first: str, second: str):
    batches = make_stream(60)
    model, whole = make_model(first, 0), make_whole("adam")
    losses = train(model, jaxrec.Optimizer(model, optax.sgd(0.1)), batches, 30, tmp_path / "run")
    assert losses == models.train(whole, batches)
    close(model)

    # The same store has rows of steps after the checkpoint, which must not be read.
    other = make_model(second, 0 if first == second else 1, rows=200)
    optimizer = jaxrec.Optimizer(other, optax.sgd(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(other, tmp_path / "run", optimizer)
        assert train(other, optimizer, batches[30:]) == losses[30:]
    assert_same(all_rows(other), all_rows(whole))


@pytest.mark.filterwarnings("ignore:table item.item_wide begins with:UserWarning")
@pytest.mark.parametrize("name", ["file", "rocksdb"])
def test_a_store_with_rows_of_an_earlier_run(make_model, name: str):
    batches = make_stream(60)
    model = make_model(name, 0)
    train(model, jaxrec.Optimizer(model, optax.sgd(0.1)), batches)
    with pytest.raises(BlockingIOError) as raised:
        make_model(name, 0)
    assert raised.value.__notes__ == ["this is the store of table item+item_wide"]
    close(model)
    other = make_model(name, 0)
    message = r"table query begins with .* rows of an earlier run, which .*restore the checkpoint"
    with pytest.warns(UserWarning, match=message):
        train(other, jaxrec.Optimizer(other, optax.sgd(0.1)), batches[:1])


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
@pytest.mark.parametrize("name", ["file", "rocksdb", "redis"])
def test_a_damaged_snapshot_is_refused(make_model, tmp_path, name: str, damage: str):
    model = make_model(name, 0)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    train(model, optimizer, make_stream(60))
    path = save(tmp_path / "run", model, optimizer)
    expected = all_rows(model)
    files = files_of(path / "stores")
    assert files
    for number, file in enumerate(files):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path / "run", copy)
        damaged = copy / file.relative_to(tmp_path / "run")
        content = damaged.read_bytes()
        if damage == "removed" or not content:
            damaged.unlink()
        elif damage == "cut":
            damaged.write_bytes(content[: len(content) // 2])
        else:
            position = np.flatnonzero(np.frombuffer(content, np.uint8))[-1]
            damaged.write_bytes(
                content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
            )
        with pytest.raises(CheckpointError, match=r"damaged|not what was saved"):
            restore(model, copy, optimizer)
    assert_same(all_rows(model), expected)


def test_tables_with_one_store_are_refused(tmp_path):
    tables = dict.fromkeys(NAMES, Cached(300, f"file://{tmp_path}/rows"))
    with pytest.raises(ValueError, match="tables 'item' and 'query' have the same store"):
        make(lambda: models.Ranker(NUM_IDS, "sgd"), tables)
