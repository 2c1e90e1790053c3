"""Batches of Ray data sets: of one in memory, and of a cluster whose workers are killed."""

from __future__ import annotations

import itertools
import os
import pathlib
import pickle
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrec.data import EncoderLearner, Schema, learn_encoder, ray_batches

SCHEMA = Schema.from_dict(
    {"label": "label", "dense": ["age"], "categorical": {"city": {"min_count": 1}}}
)
TABLE = pa.table(
    {
        "label": np.arange(1000) % 2,
        "age": np.random.default_rng(0).normal(40, 10, 1000),
        "city": [f"city {n}" for n in np.random.default_rng(1).zipf(1.5, 1000) % 100],
        "row": np.arange(1000),
    }
)


class Iterator:
    """A `ray.data.DataIterator` of a table in memory."""

    def __init__(self, table):
        self.table = table

    def iter_batches(self, *, batch_size, batch_format, prefetch_batches, **shuffle):
        assert batch_format == "pyarrow"
        rows = self.table
        if shuffle:
            order = np.random.default_rng(shuffle["local_shuffle_seed"]).permutation(len(rows))
            rows = rows.take(order)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size]


class Dataset(Iterator):
    def __init__(self, table, preserve_order=True):
        super().__init__(table)
        self.context = SimpleNamespace(
            execution_options=SimpleNamespace(preserve_order=preserve_order)
        )

    def count(self):
        return len(self.table)

    def streaming_split(self, count, equal):
        assert equal
        rows = len(self.table) // count
        return [Iterator(self.table[start * rows :][:rows]) for start in range(count)]


def numbers(batches):
    return [batch["row"].to_pylist() for batch in batches]


@pytest.mark.parametrize("seed", [None, 5])
def test_batches_go_on_where_a_run_stopped(seed):
    batches = ray_batches(Dataset(TABLE), 300, seed=seed, epochs=3)
    assert (len(batches), batches.batches_per_epoch) == (12, 4)
    everything = numbers(batches.from_batch())
    assert [len(batch) for batch in everything] == [300, 300, 300, 100] * 3
    for start in range(13):
        assert numbers(batches.from_batch(start)) == everything[start:]
    for epoch in range(3):
        rows = [*itertools.chain(*everything[4 * epoch : 4 * epoch + 4])]
        assert sorted(rows) == [*range(1000)]
        assert (rows == sorted(rows)) == (seed is None)
    assert (everything[:4] == everything[4:8]) == (seed is None)


def test_rows_in_any_order_go_on_at_an_epoch():
    batches = ray_batches(Dataset(TABLE, preserve_order=False), 300, epochs=2)
    assert len([*batches.from_batch(4)]) == 4
    with pytest.raises(ValueError, match=r"batch 5 is in the middle of an epoch of 4 .* 4 or 8"):
        batches.from_batch(5)


def test_each_process_has_a_part():
    encoder = learn_encoder(SCHEMA, [TABLE])
    dataset = Dataset(encoder(TABLE))
    whole = ray_batches(dataset, 100, lambda rows: encoder.pack(rows, 100), epochs=2)
    parts = whole.split(3)
    assert [len(part) for part in parts] == [8, 8, 8]  # 333 rows an epoch
    batches = [*parts[1].from_batch()]
    assert [batch.weights.sum() for batch in batches] == [100, 100, 100, 33] * 2
    np.testing.assert_array_equal(batches[4].dense, encoder.batch(TABLE[333:433]).dense)
    with pytest.raises(TypeError, match="a split cannot be split again"):
        parts[0].split(2)
    with pytest.raises(ValueError, match="batch 1 is in the middle of an epoch"):
        parts[0].from_batch(1)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match=r"must be a ray.data.Dataset or .* got a Table"):
        ray_batches(TABLE, 10)
    assert len([*ray_batches(Iterator(TABLE), 10).from_batch()]) == 100
    with pytest.raises(ValueError, match="does not know its number of rows; give rows"):
        ray_batches(Iterator(TABLE), 10).from_batch(100)
    with pytest.raises(ValueError, match="batch_size is 1 or more, got 0"):
        ray_batches(Dataset(TABLE), 0)
    with pytest.raises(ValueError, match="rows is 1 or more, got 0"):
        ray_batches(Dataset(TABLE), 10, rows=0)
    with pytest.raises(RuntimeError, match="epoch 0 had 1,000 rows; expected 999"):
        [*ray_batches(Iterator(TABLE), 10, rows=999).from_batch()]


class DiesOnce:
    """An encoder whose process is killed at the first call."""

    def __init__(self, encoder, mark):
        self.encoder, self.mark = encoder, mark

    def __call__(self, rows):
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.encoder(rows)


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="needs the extra `ray`: pip install 'jaxrec[ray]'")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_cluster_learns_encodes_and_feeds_two_processes(cluster, tmp_path):
    ray = cluster
    for part in range(4):
        pq.write_table(TABLE[part * 250 :][:250], tmp_path / f"{part}.parquet")
    rows = ray.data.read_parquet(str(tmp_path))
    wanted = learn_encoder(SCHEMA, [TABLE])
    learner = EncoderLearner(SCHEMA)
    parts = rows.map_batches(learner, batch_format="pyarrow", batch_size=None)
    encoder = learner.encoder(parts.iter_batches(batch_format="pyarrow", batch_size=None))
    assert encoder(TABLE).equals(wanted(TABLE))
    # A worker that is killed while it encodes is replaced, and no row is lost or repeated.
    mark = pathlib.Path(tmp_path, "killed")
    encoded = rows.map_batches(DiesOnce(encoder, mark), batch_format="pyarrow", batch_size=100)
    batches = ray_batches(
        encoded, 300, lambda rows: encoder.pack(rows, 300), rows=rows.count(), epochs=2
    )
    assert not mark.exists()  # the worker is killed while it encodes, not while it counts
    dense = [batch.dense for batch in batches.from_batch()]
    assert mark.exists()
    np.testing.assert_array_equal(np.concatenate(dense[:4])[:1000], encoder.batch(TABLE).dense)
    assert all((x.dense == y).all() for x, y in zip(batches.from_batch(3), dense[3:], strict=True))

    @ray.remote(num_cpus=0)
    def train(part):
        return np.concatenate([batch.labels for batch in part.from_batch()]), len(part)

    plain = rows.map_batches(encoder, batch_format="pyarrow")
    batches = ray_batches(plain, 100, lambda rows: encoder.pack(rows, 100), rows=1000, epochs=2)
    halves = batches.split(2)
    assert len(pickle.dumps(halves[0].dataset)) > 0
    results = ray.get([train.remote(half) for half in halves])
    assert [len(labels) for labels, _ in results] == [1000, 1000]
    assert [count for _, count in results] == [10, 10]
    assert sum(labels.sum() for labels, _ in results) == 1000
