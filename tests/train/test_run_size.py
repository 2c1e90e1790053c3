"""The default batch size and number of epochs of a run."""

from __future__ import annotations

import pytest

from jaxrec.data import Schema, TableEncoder
from jaxrec.train.config import DataConfig, TrainConfig
from jaxrec.train.features import text_encoder
from jaxrec.train.models import default_config
from jaxrec.train.models.cross_networks import DCNv2Kind
from jaxrec.train.models.two_tower import TwoTowerKind
from jaxrec.train.run_size import with_sizes


@pytest.mark.parametrize(
    ("rows", "devices", "size"),
    [
        (0, 1, 16),
        (160, 1, 16),
        (1_600, 1, 32),
        (90_000, 1, 256),
        (10**9, 1, 2048),
        (90_000, 6, 258),
    ],
)
def test_the_batch_size_is_about_the_root_of_the_rows(rows, devices, size):
    assert with_sizes(TrainConfig(), rows, devices, lambda rows: 1).data.batch_size == size


@pytest.mark.parametrize(
    ("rows", "epochs"),
    [
        pytest.param(3_000, 1, id="rare ids"),
        pytest.param(5_000, 2, id="frequent ids"),
        pytest.param(100_001, 1, id="many rows"),
    ],
)
def test_small_files_with_frequent_ids_are_read_twice(rows, epochs):
    """The generated log has 26 ids a row, of 4,315 in all."""
    config = TrainConfig()
    kind = DCNv2Kind(config, text_encoder(config))
    assert with_sizes(config, rows, 1, kind.epochs).data.epochs == epochs


def test_columns_of_a_shared_table_look_its_rows_up_together():
    """50,000 rows of two columns: 20 lookups of each row by one of them, 40 by both."""
    item = {"encoding": "ids", "num_embeddings": 2_500}
    columns = {"item": item, "before": {"table": "item"}}
    for categorical, epochs in (({"item": item}, 1), (columns, 2)):
        schema = Schema.from_dict({"label": "y", "categorical": categorical})
        kind = DCNv2Kind(TrainConfig(), TableEncoder(schema, {}, {}, {}))
        assert kind.epochs(50_000) == epochs


def test_two_towers_learn_from_as_many_samples_of_small_and_large_files():
    config = default_config("two_tower")
    kind = TwoTowerKind(config, text_encoder(config))
    for rows, epochs in ((99_057, 20), (200_000, 10), (2_000_001, 1), (10**8, 1)):
        data = with_sizes(config, rows, 1, kind.epochs).data
        assert (data.epochs, data.batch_size) == (epochs, 2048)


def test_given_numbers_stay():
    config = TrainConfig(data=DataConfig(batch_size=7, epochs=3))
    assert with_sizes(config, 90_000, 2, lambda rows: 1) == config


@pytest.mark.parametrize("batch_size", [16, 512])
def test_rates_of_tables_do_not_depend_on_it(batch_size):
    """The first sum of squares is in squares of one sample's gradient, a share of the mean's."""
    config = TrainConfig(data=DataConfig(batch_size=batch_size))
    kind = DCNv2Kind(config, text_encoder(config))
    optimizer = kind.row_optimizer(10)
    assert optimizer.initial_accumulator_value * batch_size**2 == pytest.approx(10)
