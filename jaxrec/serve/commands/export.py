"""The command ``jaxrec export``."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import numpy as np
import pyarrow as pa
import tyro
from flax import nnx
from jaxtyping import Array
from rich.console import Console
from rich.filesize import decimal

from jaxrec.arguments import ConfigError, parse
from jaxrec.data import Clicks, DataError, SchemaError, TableEncoder
from jaxrec.data.criteo.log import criteo_schema
from jaxrec.data.encoder import NUM_ROWS, first_rows
from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES
from jaxrec.serve import export, load, quantize
from jaxrec.serve.artifact.export import BATCH_SIZES
from jaxrec.serve.artifact.manifest import ArtifactError
from jaxrec.serve.commands.frozen_run import load_frozen
from jaxrec.train import load_model
from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.config import TrainConfig
from jaxrec.train.datasets import ParquetDataset, split_datasets
from jaxrec.train.features import FEATURES_DIRECTORY
from jaxrec.train.model import CONFIG_FILE, table_rows
from jaxrec.train.options import load_config

USAGE_ERRORS = (ConfigError,)
FAILURES = (ArtifactError, CheckpointError, DataError, FileExistsError, SchemaError, ValueError)

# Default of required paths; no file has this name.
_NOT_GIVEN = pathlib.Path("\0")


def _required(name: str) -> Any:
    return tyro.conf.arg(metavar=name, help_behavior_hint="(required)")


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Write a model that `jaxrec train` saved for prediction, with the encoding of its columns.

    `jaxrec predict` and `jaxrec.serve.load` read it. They return the probability of a click and
    its logit.
    """

    run: Annotated[pathlib.Path, tyro.conf.Positional, _required("RUN")] = _NOT_GIVEN
    """Directory of the run."""
    model: Annotated[pathlib.Path, tyro.conf.Positional, _required("MODEL")] = _NOT_GIVEN
    """Directory of the exported model; one that is there is replaced."""
    step: int | None = None
    """Step of the checkpoint; by default the newest."""
    dtype: Literal["int8", "int4", "int2", "float8", "float16"] | None = None
    """Format of the tables; by default their type in training."""
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    """Numbers of samples that programs are made for; other batches are cut and padded."""
    platforms: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    """Platforms that programs are made for; this machine need not have them."""
    example: bool = True
    """Keep two training rows in the model, the example of a request that `jaxrec serve` gives."""


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec export``; return the exit code."""
    parsed = parse("export", options, ExportOptions())
    if _NOT_GIVEN in (parsed.run, parsed.model):
        raise ConfigError("give the directories of the run and of the model: RUN MODEL")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    encoder = column_encoder(parsed.run)
    config = load_config(parsed.run / CONFIG_FILE)
    encoder = with_example(config, encoder)
    if encoder.example is not None and not parsed.example:
        encoder = dataclasses.replace(encoder, example=encoder.example.slice(0, 0))
    model: nnx.Module
    if encoder.schema.dynamic:
        model, encoder = load_frozen(parsed.run, config, encoder, parsed.step)
    else:
        model = load_model(parsed.run, parsed.step)
    if parsed.dtype is not None:
        model = quantize(model, parsed.dtype)
    export(
        model,
        parsed.model,
        function=click_scores,
        encoder=encoder,
        batch_sizes=parsed.batch_sizes,
        platforms=parsed.platforms,
    )
    manifest = load(parsed.model, verify=False).manifest if "cpu" in parsed.platforms else None
    size = sum(path.stat().st_size for path in parsed.model.rglob("*") if path.is_file())
    tables = "" if manifest is None else f"{len(manifest.tables)} tables, "
    console.print(
        f"{tables}{decimal(size)}; programs for {', '.join(parsed.platforms)} and batches of "
        f"{', '.join(map(str, sorted(set(parsed.batch_sizes))))}"
    )
    console.print(f"model exported to {parsed.model}")
    return 0


def click_scores(model: nnx.Module, dense: Array, features: Any) -> dict[str, Array]:
    """Return the probability of a click and its logit, ``[batch]`` each."""
    call: Any = model
    logits = call(dense, features)
    return {"probability": jax.nn.sigmoid(logits), "logit": logits}


def column_encoder(directory: pathlib.Path) -> TableEncoder:
    """Return the encoder of a run's columns; that of Criteo's columns for other click logs.

    Raises:
        CheckpointError: There is no run.
        OSError, SchemaError, DataError: The encoder cannot be read.
    """
    if not (directory / CONFIG_FILE).exists():
        raise CheckpointError(
            f"{directory}: there is no saved model here ({CONFIG_FILE} is missing)"
        )
    config = load_config(directory / CONFIG_FILE)
    if (directory / FEATURES_DIRECTORY).is_dir():
        return TableEncoder.load(directory / FEATURES_DIRECTORY)
    schema = criteo_schema(table_rows(config), is_dynamic=config.vocabulary.is_dynamic)
    return TableEncoder(schema, {}, {}, {})


def with_example(config: TrainConfig, encoder: TableEncoder) -> TableEncoder:
    """Return an encoder that keeps some training rows, if it can be found which they were."""
    if encoder.example is not None:
        return encoder
    try:
        training, _ = split_datasets(config, encoder=encoder)
        if isinstance(training, ParquetDataset):
            rows = training.groups.read(0)
        else:
            rows = _columns(next(training.log.chunks(training.start, training.start + NUM_ROWS)))
    except (OSError, DataError, SchemaError):  # the data are elsewhere by now
        return encoder
    return dataclasses.replace(encoder, example=first_rows(encoder.schema, rows))


def _columns(clicks: Clicks) -> pa.Table:
    """Return rows of a log in Criteo's format as `jaxrec data criteo` writes them."""
    counts = np.round(np.exp(clicks.dense.T) - 3).astype(np.int32)
    names = (*DENSE_NAMES, *CATEGORICAL_NAMES)
    return pa.table(dict(zip(names, (*counts, *clicks.ids.T), strict=True)))
