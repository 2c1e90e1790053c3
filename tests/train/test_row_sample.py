"""Samples of held-out rows: spread over all rows and processes, and shuffled in one column."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import Clicks, Shard
from jaxrec.data.selection import RowMask
from jaxrec.data.transforms import CATEGORICAL_NAMES
from jaxrec.train.config import DataConfig, TrainConfig
from jaxrec.train.datasets import LogDataset, split_datasets
from jaxrec.train.models.kind import HeldOutBatches
from jaxrec.train.models.rows import RowModel

ROWS = 240


class Log:
    """A log whose first number and id are the number of the row."""

    num_rows = ROWS

    def chunks(self, start, stop):
        for first in range(start, stop, 50):
            rows = np.arange(first, min(first + 50, stop))
            dense = np.zeros((len(rows), 13), np.float32)
            dense[:, 0] = rows
            ids = np.tile(rows[:, None], (1, 26)).astype(np.int32)
            yield Clicks((rows % 2).astype(np.float32), dense, ids)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A file with rows in many groups; the number is that of the row and a half."""
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    numbers = np.arange(ROWS)
    lists = pa.array([[str(n % 5)] * (n % 3) for n in numbers])
    columns = {"label": numbers % 2, "number": numbers + 0.5, "id": numbers % 7, "tags": lists}
    pq.write_table(pa.table(columns), path, row_group_size=10)
    return path


def numbers_of(sample, column=0):
    """The real rows' numbers, in batches of 8 of all processes."""
    found = [np.asarray(x.dense)[:, column][x.weights > 0] for x in sample.batches(8)]
    return np.concatenate(found)


@pytest.mark.parametrize("selected", [None, 60], ids=["all", "some"])
def test_rows_of_a_log(selected):
    """Of two processes together as of one, all or spread over the dataset."""
    whole = LogDataset(Log(), 0, ROWS)
    if selected is not None:
        mask = RowMask.empty(ROWS)
        mask.add(0, np.arange(ROWS) % (ROWS // selected) == 0)
        whole = whole.selected(mask)
    every = numbers_of(whole.sample(10**6))
    assert every.tolist() == [*range(0, ROWS, 1 if selected is None else ROWS // selected)]
    some = numbers_of(whole.sample(32))
    assert len(some) == 32 == len({*some})
    assert some.min() < ROWS / 8
    assert some.max() > ROWS * 7 / 8
    parts = [
        numbers_of(dataclasses.replace(whole, shard=Shard(index, 2)).sample(32)) for index in (0, 1)
    ]
    assert sorted(np.concatenate(parts)) == sorted(some)


def test_rows_of_a_table(table):
    config = TrainConfig(data=DataConfig(path=table, hold_out="0.5"))
    own = []
    for index in (0, 1):
        _, held_out = split_datasets(config, Shard(index, 2))
        sample = held_out.sample(40)
        assert len(sample) == 20
        rows = np.asarray(sample.table["number"])
        own += rows.tolist()
        assert len([*sample.batches(8)]) == 5, "as many batches in each process"
    assert len({*own}) == 40
    _, held_out = split_datasets(config)
    for count, expected in ((40, 40), (10**6, ROWS // 2)):
        numbers = np.asarray(held_out.sample(count).table["number"])
        assert len({*numbers.tolist()}) == expected
        assert np.ptp(numbers) > 0.8 * np.ptp(np.asarray(held_out.sample(10**6).table["number"]))


def test_fewer_rows_than_processes(table):
    """The sample is empty in all processes, and explains nothing."""
    config = TrainConfig(data=DataConfig(path=table, hold_out="0.5"))
    _, held_out = split_datasets(config, Shard(1, 4))
    for rows in (LogDataset(Log(), 0, ROWS, Shard(1, 4)), held_out):
        sample = rows.sample(3)
        assert len(sample) == 0
        assert [*sample.batches(8)] == []
    kind = types.SimpleNamespace(encoder=held_out.encoder)
    batches = HeldOutBatches(None, held_out, 8, place=lambda batch: batch)
    assert RowModel.explain(kind, batches, 3) == {}


@pytest.mark.parametrize("column", ["number", "id", "tags"])
def test_one_column_of_a_table_is_shuffled(table, column):
    _, held_out = split_datasets(TrainConfig(data=DataConfig(path=table, hold_out="0.5")))
    sample = held_out.sample(10**6)
    assert sample.columns == ("number", "id", "tags")
    order = np.random.default_rng(0).permutation(len(sample))
    shuffled = sample.shuffled(column, order)
    before, after = ([*x.batches(64)] for x in (sample, shuffled))
    for name in ("number", "id", "tags"):
        values = sample.table[name].to_pylist()
        wanted = [values[n] for n in order] if name == column else values
        assert shuffled.table[name].to_pylist() == wanted
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.labels, two.labels)
        for name, is_other in (("id", column == "id"), ("tags", column == "tags")):
            bags = [np.asarray(x.features[name].lengths) for x in (one, two)]
            ids = [np.asarray(x.features[name].values) for x in (one, two)]
            assert is_other != (np.array_equal(*bags) and np.array_equal(*ids))
        assert (column == "number") != np.array_equal(one.dense, two.dense)


@pytest.mark.parametrize("column", ["int_0", "cat_3"])
def test_one_column_of_a_log_is_shuffled(column):
    sample = LogDataset(Log(), 0, ROWS).sample(ROWS)
    order = np.random.default_rng(0).permutation(ROWS)
    clicks = sample.shuffled(column, order).clicks
    dense, ids = sample.clicks.dense.copy(), sample.clicks.ids.copy()
    if column == "int_0":
        dense[:, 0] = dense[order, 0]
    else:
        ids[:, CATEGORICAL_NAMES.index(column)] = ids[order, 3]
    np.testing.assert_array_equal(clicks.dense, dense)
    np.testing.assert_array_equal(clicks.ids, ids)
    np.testing.assert_array_equal(clicks.labels, sample.clicks.labels)
