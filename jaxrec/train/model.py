"""The model and the optimizer of a configuration."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import optax
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.arguments import ConfigError
from jaxrec.data import ClickBatch, TableEncoder
from jaxrec.embed import Optimizer
from jaxrec.embed.config import TableConfig
from jaxrec.tier import make
from jaxrec.train.checkpoint import CheckpointError, restore
from jaxrec.train.config import CONFIG_FILE, ModelConfig, TrainConfig, load_config
from jaxrec.train.devices import Devices
from jaxrec.train.features import saved_encoder
from jaxrec.train.models import model_kind
from jaxrec.train.models.kind import ModelKind
from jaxrec.train.open_vocabularies import settings, with_rows

_ONE_DEVICE = Devices()

# The first runs did not write the name of their model, which was always this one.
_FIRST_RUNS = TrainConfig(model=ModelConfig(name="dlrm"))


def table_configs(kind: ModelKind) -> list[TableConfig]:
    """Return the configurations of a model's tables; raise a ConfigError if two share a name."""
    tables = [*kind.tables()]
    names = [table.name for table in tables]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"two tables have the name {min(repeated)!r}; rename one of the columns")
    return tables


def make_model(
    config: TrainConfig,
    num_steps: int,
    devices: Devices = _ONE_DEVICE,
    encoder: TableEncoder | None = None,
) -> tuple[Any, Optimizer]:
    """Make a model and its optimizer for a run of ``num_steps`` steps."""
    return make_kind(model_kind(config, encoder), num_steps, devices)


def make_kind(
    kind: ModelKind, num_steps: int, devices: Devices = _ONE_DEVICE
) -> tuple[Any, Optimizer]:
    """Make a model of a kind and its optimizer for a run of ``num_steps`` steps."""
    config, encoder = kind.config, kind.encoder
    kind.check(config, encoder.schema)
    features = {*encoder.schema.dynamic}
    dynamic = [x.name for x in table_configs(kind) if features.intersection(x.feature_names)]

    # A function, since tables that are made within `shard` lie on the mesh from the start: whole,
    # they may fit no single device.
    def make_on_devices() -> nnx.Module:
        model = kind.make(num_steps, nnx.Rngs(config.seed))
        if dynamic:
            make(model, dict.fromkeys(dynamic, settings(config.vocabulary)))
        return model

    model = devices.make_model(make_on_devices)
    schedule = optax.linear_schedule(config.optimizer.learning_rate, 0.0, num_steps)
    return model, Optimizer(model, optax.adam(schedule))


def predict(model: Any, batch: ClickBatch) -> Float[Array, "batch *labels"]:
    """Return the outputs of a batch for each label; raw ids get their rows as by `with_rows`."""
    batch = with_rows(model, batch)
    return model(batch.dense, batch.features)


def saved_config(path: str | os.PathLike[str]) -> TrainConfig:
    """Return the configuration of a saved run; raise a CheckpointError if there is none."""
    config_file = pathlib.Path(path, CONFIG_FILE)
    if not config_file.exists():
        raise CheckpointError(f"{path}: there is no saved run here ({CONFIG_FILE} is missing)")
    return load_config(config_file, _FIRST_RUNS)


def load_model(directory: str | os.PathLike[str], step: int | None = None) -> Any:
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
