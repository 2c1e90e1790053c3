"""The model and the optimizer that a configuration describes."""

from __future__ import annotations

import pathlib

import optax
from flax import nnx

from jaxrec import optim
from jaxrec.data.convert import read_summary
from jaxrec.data.generated import TABLE_ROWS
from jaxrec.data.transforms import CATEGORICAL_NAMES, NUM_CATEGORICAL, NUM_DENSE
from jaxrec.embed import EmbeddingBagCollection, EmbeddingBagConfig, Optimizer
from jaxrec.nn import DLRM
from jaxrec.train.checkpoint import CheckpointError, restore
from jaxrec.train.config import TrainConfig
from jaxrec.train.devices import Devices
from jaxrec.train.options import load_config

CONFIG_FILE = "config.yaml"

_ONE_DEVICE = Devices()


def table_rows(config: TrainConfig) -> tuple[int, ...]:
    """The rows of each table.

    Raises:
        OSError, DataError: A directory of Parquet files has no summary.
    """
    path = config.data.path
    if path is None:
        return TABLE_ROWS
    if path.is_dir():
        # Raw ids need as many rows as the user gives them.
        return read_summary(path).table_rows or (config.data.table_rows,) * NUM_CATEGORICAL
    return (config.data.table_rows,) * NUM_CATEGORICAL


def table_configs(config: TrainConfig) -> list[EmbeddingBagConfig]:
    """The tables."""
    return [
        EmbeddingBagConfig(name, rows, config.model.embedding_dim, dtype=config.model.table_dtype)
        for name, rows in zip(CATEGORICAL_NAMES, table_rows(config), strict=True)
    ]


def make_model(
    config: TrainConfig, num_steps: int, devices: Devices = _ONE_DEVICE
) -> tuple[DLRM, Optimizer]:
    """A fresh model and its optimizer, for a run of that many steps."""
    model, rates = config.model, config.optimizer
    tables = table_configs(config)

    def make() -> DLRM:
        rngs = nnx.Rngs(config.seed)
        embeddings = EmbeddingBagCollection(
            tables,
            optimizer=optim.rowwise_adagrad(
                optax.linear_schedule(rates.table_learning_rate, 0.0, num_steps)
            ),
            rngs=rngs,
        )
        return DLRM(
            embeddings,
            num_dense=NUM_DENSE,
            bottom_layer_sizes=(*model.bottom_layer_sizes, model.embedding_dim),
            top_layer_sizes=(*model.top_layer_sizes, 1),
            rngs=rngs,
        )

    dlrm = devices.make_model(make)
    schedule = optax.linear_schedule(rates.learning_rate, 0.0, num_steps)
    return dlrm, Optimizer(dlrm, optax.adam(schedule))


def load_model(directory: pathlib.Path, step: int | None = None) -> DLRM:
    """The model that `jaxrec train` saved in a directory.

    Args:
        directory: The run's.
        step: Of which checkpoint, such as the best of `results.json`; None: the newest.

    Raises:
        CheckpointError: There is no saved model.
        OSError: It cannot be read.
    """
    config_file = directory / CONFIG_FILE
    if not config_file.exists():
        raise CheckpointError(
            f"{directory}: there is no saved model here ({CONFIG_FILE} is missing)"
        )
    model, _ = make_model(load_config(config_file), num_steps=1)
    restore(directory, model, step=step)
    return model
