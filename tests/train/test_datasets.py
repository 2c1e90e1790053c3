from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrec.data import Clicks, DataError, Shard
from jaxrec.data.criteo.conversion import convert
from jaxrec.data.criteo.parts import Conversion
from jaxrec.data.transforms import table_ids
from jaxrec.train.config import DataConfig, ModelConfig, TrainConfig
from jaxrec.train.datasets import LogDataset, split_datasets
from jaxrec.train.model import make_model
from jaxrec.train.models import model_kind
from jaxrec.train.models.kind import HeldOutBatches
from tests import golden
from tests.data.criteo.test_log import KAGGLE

BATCH = 64
CONFIG = TrainConfig(
    data=DataConfig(batch_size=BATCH, generated_rows=300, generated_eval_rows=100, epochs=2),
    model=ModelConfig(embedding_dim=4, bottom_layer_sizes=(), top_layer_sizes=(8,)),
)


def test_rows_of_files():
    def lengths(**options):
        config = dataclasses.replace(CONFIG, data=DataConfig(path=KAGGLE, **options))
        train_rows, held_out = split_datasets(config)
        return (train_rows.start, train_rows.stop), (held_out.start, held_out.stop)

    assert lengths() == ((0, 45), (45, 50))
    assert lengths(hold_out="0.5") == ((0, 25), (25, 50))
    assert lengths(hold_out="0.001") == ((0, 49), (49, 50))
    assert lengths(eval_path=KAGGLE) == ((0, 50), (0, 50))


@pytest.mark.parametrize("ids", ["hash", "contiguous", "raw"])
def test_rows_of_parquet_files(tmp_path, ids):
    """The same rows as of the text, each once an epoch, in another order each time."""
    convert(KAGGLE, tmp_path, Conversion(ids=ids, table_rows=(77,)))
    data = DataConfig(path=tmp_path, table_rows=77)
    train_rows, held_out = split_datasets(dataclasses.replace(CONFIG, data=data))
    assert (len(train_rows), len(held_out)) == (45, 5)

    def read(rows, **options):
        found = list(rows.batches(8, **options))
        assert len(found) == rows.num_batches(8)
        return np.concatenate([np.asarray(batch.dense)[batch.weights > 0] for batch in found])

    text_data = DataConfig(path=KAGGLE, table_rows=77)
    text, _ = split_datasets(dataclasses.replace(CONFIG, data=text_data))
    epochs = [read(train_rows, epoch=epoch) for epoch in (0, 1)]
    assert not np.array_equal(*epochs)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch, axis=0), np.sort(read(text), axis=0))
    again = [batch.dense for batch in train_rows.batches(8, first=3, epoch=1)]
    np.testing.assert_array_equal(np.concatenate(again)[: 45 - 24], epochs[1][24:])
    if ids != "contiguous":
        by_id = [
            next(iter(rows.batches(50))).features["cat_2"].values for rows in (train_rows, text)
        ]
        np.testing.assert_array_equal(np.sort(by_id[0][:45]), np.sort(by_id[1][:45]))
    config = dataclasses.replace(CONFIG, data=data)
    model, _ = make_model(config, 10)
    assert "best_auc" not in model_kind(config).evaluate(HeldOutBatches(model, held_out, 4))


@pytest.mark.parametrize("count", [2, 4])
def test_processes_have_parts_of_the_batches_of_one(count):
    data = DataConfig(path=KAGGLE, table_rows=77)
    (whole, _), *parts = (
        split_datasets(dataclasses.replace(CONFIG, data=data), shard)
        for shard in (Shard(), *(Shard(index, count) for index in range(count)))
    )
    for first in (0, 2):
        expected = list(whole.batches(8, first))
        found = [list(part.batches(8, first)) for part, _ in parts]
        assert {len(batches) for batches in found} == {whole.num_batches(8) - first}
        for number, batch in enumerate(expected):
            counts = [int(batches[number].weights.sum()) for batches in found]
            # The last batch is shared evenly, too.
            assert max(counts) - min(counts) <= 1
            assert sum(counts) == batch.weights.sum()
            for name in ("dense", "labels"):
                together = np.concatenate(
                    [
                        getattr(batches[number], name)[:own]
                        for batches, own in zip(found, counts, strict=True)
                    ]
                )
                np.testing.assert_array_equal(together, getattr(batch, name)[: sum(counts)])
            ids = [bag for batches in found for bag in batches[number].features["cat_2"].to_lists()]
            assert [x for x in ids if x] == [x for x in batch.features["cat_2"].to_lists() if x]


@dataclasses.dataclass(frozen=True)
class TwoFiles:
    """The arrays of a golden case as a log, a file at a time."""

    arrays: dict
    hashes: tuple[int, ...] | None

    def chunks(self, start, stop):
        first = 0
        for file in range(2):
            labels, dense, ids = (
                self.arrays[f"{name}_file_{file}"] for name in ("labels", "dense", "sparse")
            )
            clicks = Clicks(
                labels[:, 0].astype(np.float32),
                dense,
                ids % ID_BOUND
                if self.hashes is None
                else table_ids(ids.astype(np.uint32), self.hashes),
            )
            yield clicks[max(start - first, 0) : max(stop - first, 0)]
            first += len(clicks)


# TorchRec's raw ids have 32 bits, of which devices take 31; hashed ones are below in any case.
ID_BOUND = 2**31
IN_MEMORY = [(name, case) for name, case in golden.cases("criteo") if name.startswith("in_memory")]


@pytest.mark.parametrize(("name", "case"), IN_MEMORY, ids=[name for name, _ in IN_MEMORY])
def test_golden_batches_of_processes(name, case):
    """TorchRec's InMemoryBinaryCriteoIterDataPipe; its last batch is ours without the padding."""
    arrays, meta = golden.load("criteo", name), case["meta"]
    hashes = meta["hashes"] and tuple(meta["hashes"])
    shard = Shard(meta["rank"], meta["world_size"])
    rows = LogDataset(TwoFiles(arrays, hashes), 0, 50, shard)
    found = list(rows.batches(8 * shard.count))
    if meta["drop_last"]:
        found = [batch for batch in found if batch.weights.all()]
    assert len(found) == arrays["n_batches"]
    for number, batch in enumerate(found):
        real = batch.weights > 0
        np.testing.assert_allclose(
            batch.dense[real], arrays[f"dense_{number}"], **case["tolerance"]
        )
        np.testing.assert_array_equal(batch.labels[real], arrays[f"labels_{number}"])
        ids = np.asarray(batch.features.values).reshape(26, 8)[:, real].reshape(-1)
        np.testing.assert_array_equal(ids, arrays[f"sparse_values_{number}"] % ID_BOUND)
        lengths = np.asarray(batch.features.lengths).reshape(26, 8)[:, real].reshape(-1)
        np.testing.assert_array_equal(lengths, arrays[f"sparse_lengths_{number}"])
        assert list(batch.features.keys) == arrays["keys"].tolist()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_golden_row_ranges(count):
    """TorchRec's get_file_row_ranges_and_remainder; a row is process, file, first and last row."""
    expected = golden.load("criteo", f"row_ranges_{count}")
    first_rows = np.cumsum([0, *expected["lengths"][:-1]])
    for process in range(count):
        start, stop = Shard(process, count).stretch(int(expected["lengths"].sum()))
        ranges = expected["ranges"][expected["ranges"][:, 0] == process]
        wanted = [
            row
            for _, file, first, last in ranges
            for row in range(first_rows[file] + first, first_rows[file] + last + 1)
        ]
        assert list(range(start, stop)) == wanted


@pytest.mark.parametrize("count", [2, 7])
def test_processes_share_the_rows_of_parquet_files(tmp_path, count):
    convert(KAGGLE, tmp_path, Conversion(ids="raw", table_rows=(77,)))
    config = dataclasses.replace(CONFIG, data=DataConfig(path=tmp_path, table_rows=77))
    whole, _ = split_datasets(config)
    parts = [split_datasets(config, Shard(index, count))[0] for index in range(count)]
    size = 4 * count
    seen = []
    for part in parts:
        for epoch, first in ((0, 0), (1, 1)):
            found = list(part.batches(size, first, epoch))
            assert len(found) == part.num_batches(size) - first
            assert {batch.labels.shape for batch in found} == {(4,)}
            if not first:
                seen += [batch.dense[batch.weights > 0] for batch in found]
    expected = [batch.dense[batch.weights > 0] for batch in whole.batches(8)]
    np.testing.assert_array_equal(
        np.sort(np.concatenate(seen), axis=0), np.sort(np.concatenate(expected), axis=0)
    )
    with pytest.raises(DataError, match="45 rows are too few for 46 processes"):
        next(split_datasets(config, Shard(0, 46))[0].batches(46))


def test_a_directory_that_is_not_done(tmp_path):
    config = dataclasses.replace(CONFIG, data=DataConfig(path=tmp_path))
    with pytest.raises(DataError, match="there are no Parquet files in this directory"):
        split_datasets(config)
    convert(KAGGLE, tmp_path, Conversion())
    (tmp_path / "summary.json").unlink()
    with pytest.raises(DataError, match=r"summary\.json is missing"):
        split_datasets(config)
