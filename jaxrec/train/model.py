"""The model and the optimizer of a configuration."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import optax
from flax import nnx
from jaxtyping import Array, Float

from jaxrec import optim
from jaxrec.arguments import ConfigError
from jaxrec.data import ClickBatch, TableEncoder
from jaxrec.data.generated import TABLE_ROWS
from jaxrec.data.transforms import CATEGORICAL_NAMES, NUM_CATEGORICAL, NUM_DENSE
from jaxrec.embed import EmbeddingBagCollection, EmbeddingBagConfig, Optimizer
from jaxrec.nn import DLRM, DCNv2, DeepFM
from jaxrec.ragged.raw_ids import is_raw
from jaxrec.tier import ahead, make
from jaxrec.train.checkpoint import CheckpointError, restore
from jaxrec.train.config import CONFIG_FILE, TrainConfig, load_config
from jaxrec.train.devices import Devices
from jaxrec.train.features import saved_encoder
from jaxrec.train.open_vocabularies import dynamic_features, settings

Model: TypeAlias = DLRM | DCNv2 | DeepFM

_ONE_DEVICE = Devices()

# End of the names of the tables of DeepFM's linear part.
_LINEAR = " (linear)"


def table_rows(config: TrainConfig) -> tuple[int, ...]:
    """Return the number of rows of each table, for text in Criteo's format or a generated log."""
    if config.data.path is None and not config.vocabulary.is_dynamic:
        return TABLE_ROWS
    return (config.data.table_rows,) * NUM_CATEGORICAL


def table_configs(
    config: TrainConfig, encoder: TableEncoder | None = None
) -> list[EmbeddingBagConfig]:
    """Return the configurations of the model's tables, by default of Criteo's columns."""
    dtype, dim = config.model.table_dtype, config.model.embedding_dim
    if encoder is None:
        tables = [
            EmbeddingBagConfig(name, rows, dim, dtype=dtype)
            for name, rows in zip(CATEGORICAL_NAMES, table_rows(config), strict=True)
        ]
    else:
        tables = [
            EmbeddingBagConfig(
                name,
                encoder.table_rows[name],
                options.embedding_dim or dim,
                pooling=options.pooling,
                dtype=dtype,
            )
            for name, options in encoder.schema.categorical.items()
        ]
    if config.model.name == "deepfm":
        # DeepFM's linear part is a second set of tables of one column that read the same features.
        tables += [
            dataclasses.replace(
                table, name=f"{table.name}{_LINEAR}", embedding_dim=1, feature_names=(table.name,)
            )
            for table in tables
        ]
    names = [table.name for table in tables]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two tables have the name {min(repeated)!r}; rename one of the columns")
    return tables


def make_model(
    config: TrainConfig,
    num_steps: int,
    devices: Devices = _ONE_DEVICE,
    encoder: TableEncoder | None = None,
) -> tuple[Model, Optimizer]:
    """Make a model and its optimizer for a run of ``num_steps`` steps."""
    rates = config.optimizer

    tables = table_configs(config, encoder)
    features = dynamic_features(config, encoder, [table.name for table in _wide(tables)])
    dynamic = [table.name for table in tables if features.intersection(table.feature_names)]

    # A function, since tables that are made within `shard` lie on the mesh from the start: whole,
    # they may fit no single device.
    def make_on_devices() -> Model:
        model = _make(config, num_steps, encoder, nnx.Rngs(config.seed))
        if dynamic:
            make(model, dict.fromkeys(dynamic, settings(config.vocabulary)))
        return model

    model = devices.make_model(make_on_devices)
    schedule = optax.linear_schedule(rates.learning_rate, 0.0, num_steps)
    return model, Optimizer(model, optax.adam(schedule))


def _make(
    config: TrainConfig, num_steps: int, encoder: TableEncoder | None, rngs: nnx.Rngs
) -> Model:
    options = config.model
    schedule = optax.linear_schedule(config.optimizer.table_learning_rate, 0.0, num_steps)
    tables = table_configs(config, encoder)
    num_dense = NUM_DENSE if encoder is None else len(encoder.schema.dense)
    if encoder is not None:
        options.check_columns(encoder.schema)

    def collection(tables: Sequence[EmbeddingBagConfig]) -> EmbeddingBagCollection:
        return EmbeddingBagCollection(tables, optimizer=optim.rowwise_adagrad(schedule), rngs=rngs)

    dtype = None if options.dense_dtype == "float32" else options.dense_dtype
    types: dict[str, Any] = {"dtype": dtype, "logit_dtype": "float32"}
    embeddings = collection(_wide(tables))
    if options.name == "dcn_v2":
        return DCNv2(
            embeddings,
            num_dense=num_dense,
            cross_layers=options.cross_layers,
            deep_layer_sizes=options.top_layer_sizes,
            rngs=rngs,
            **types,
        )
    if options.name == "deepfm":
        linear = collection(tables[len(tables) // 2 :])
        return DeepFM(
            embeddings,
            linear,
            num_dense=num_dense,
            deep_layer_sizes=(*options.top_layer_sizes, 1),
            rngs=rngs,
            **types,
        )
    return DLRM(
        embeddings,
        num_dense=num_dense,
        bottom_layer_sizes=(*options.bottom_layer_sizes, embeddings.configs[0].embedding_dim),
        top_layer_sizes=(*options.top_layer_sizes, 1),
        rngs=rngs,
        **types,
    )


def _wide(tables: Sequence[EmbeddingBagConfig]) -> list[EmbeddingBagConfig]:
    """Return all tables but those of DeepFM's linear part."""
    return [table for table in tables if not table.name.endswith(_LINEAR)]


def predict(model: Model, batch: ClickBatch) -> Float[Array, " batch"]:
    """Return the logits of a batch, ``[batch]``; raw ids get their rows as by `with_rows`."""
    batch = with_rows(model, batch)
    return model(batch.dense, batch.features)


def with_rows(model: Model, batch: ClickBatch) -> ClickBatch:
    """Replace raw ids of a batch, if it has any, by their rows, without changing vocabularies."""
    if is_raw(batch.features.values):
        (batch,) = ahead(model, [batch], is_training=False)
    return batch


def saved_config(path: str | os.PathLike[str]) -> TrainConfig:
    """Return the configuration of a saved run; raise a CheckpointError if there is none."""
    config_file = pathlib.Path(path, CONFIG_FILE)
    if not config_file.exists():
        raise CheckpointError(f"{path}: there is no saved run here ({CONFIG_FILE} is missing)")
    return load_config(config_file)


def load_model(directory: str | os.PathLike[str], step: int | None = None) -> Model:
    """Load the model that `jaxrec train` saved in a directory.

    Args:
        directory: Directory of the run.
        step: The checkpoint's step, such as ``best_step`` of `results.json`; None: the newest.

    Raises:
        CheckpointError: There is no saved model, or it is damaged.
        OSError: The model cannot be read.
    """
    config = saved_config(directory)
    # The number of steps sets only the learning rates, which a loaded model does not use.
    model, _ = make_model(config, num_steps=1, encoder=saved_encoder(directory))
    restore(model, directory, step=step)
    return model
