"""The default number of samples of a step, and of epochs, by the rows of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jaxrec.data import TableEncoder
from jaxrec.train.config import TrainConfig

# Options of `DataConfig` that follow from the rows where they are 0.
SIZES = ("batch_size", "epochs")

MIN_BATCH_SIZE, MAX_BATCH_SIZE = 16, 2048

# Small files are read twice if the rows of their tables are looked up often. A row of few lookups
# repeats the labels of its samples when it sees them again: on Amazon Beauty, with 7 lookups of a
# row, a second epoch raised the log loss from 0.650 to 0.669.
MAX_ROWS_READ_TWICE = 100_000
MIN_LOOKUPS_READ_TWICE = 25


def with_sizes(
    config: TrainConfig, rows: int, devices: int, epochs: Callable[[int], int]
) -> TrainConfig:
    """Return the options of a run with a batch size and a number of epochs, where they are 0.

    The batch size is about the root of the number of rows, so that an epoch has about as many steps
    as a step has samples: fewer steps would not train a model on a small file, and more would cost
    time on a large one. It is a power of two, or the next multiple of the number of devices.

    Args:
        config: Options of the run.
        rows: Number of training rows.
        devices: Number of devices of all processes.
        epochs: Function that returns the number of epochs by that of the training rows, such as
            `ModelKind.epochs`.
    """
    data = config.data
    if not data.batch_size:
        size = 2 ** round(math.log2(max(rows, 1)) / 2)
        size = min(max(size, MIN_BATCH_SIZE), MAX_BATCH_SIZE)
        data = dataclasses.replace(data, batch_size=-(-size // devices) * devices)
    if not data.epochs:
        data = dataclasses.replace(data, epochs=epochs(rows))
    return dataclasses.replace(config, data=data)


def epochs_of_clicks(encoder: TableEncoder, rows: int) -> int:
    """Return the number of epochs for a model that predicts each row's label."""
    is_frequent = _mean_lookups(encoder, rows) >= MIN_LOOKUPS_READ_TWICE
    return 2 if is_frequent and rows <= MAX_ROWS_READ_TWICE else 1


def _mean_lookups(encoder: TableEncoder, rows: int) -> float:
    """Return the mean number of lookups of a table's row in an epoch, if each bag has one id."""
    columns = encoder.schema.categorical
    total = sum(encoder.table_rows[name] for name, x in columns.items() if x.table is None)
    return rows * len(columns) / total
