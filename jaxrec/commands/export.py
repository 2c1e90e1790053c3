"""The command ``jaxrec export``, which writes a trained model for prediction."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.filesize import decimal

from jaxrec.arguments import NOT_GIVEN, ConfigError, parse, required
from jaxrec.data import DataError, SchemaError
from jaxrec.serve import export, load, quantize
from jaxrec.serve.artifact.export import BATCH_SIZES, refuse_columns
from jaxrec.serve.artifact.manifest import ArtifactError
from jaxrec.serve.exported_run import column_encoder, load_run, predictions
from jaxrec.train.checkpoint import CheckpointError

USAGE_ERRORS = (ConfigError,)
FAILURES = (ArtifactError, CheckpointError, DataError, FileExistsError, SchemaError, ValueError)


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Export a model of `jaxrec train` for prediction, with the encoding of its columns.

    `jaxrec predict`, `jaxrec serve` and `jaxrec.serve.load` read the exported model. Its outputs
    are the probability and the logit of a click, or the prediction of a number; with several labels
    the names of the outputs begin with those of the labels.

    Example: jaxrec export run model --dtype int8
    """

    run: Annotated[pathlib.Path, tyro.conf.Positional, required("RUN")] = NOT_GIVEN
    """Directory of the run."""
    model: Annotated[pathlib.Path, tyro.conf.Positional, required("MODEL")] = NOT_GIVEN
    """Directory of the exported model; an existing model is replaced."""
    step: int | None = None
    """Step of the checkpoint; by default the newest."""
    dtype: Literal["int8", "int4", "int2", "float8", "float16"] | None = None
    """Format of the tables; by default their type in training."""
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    """Numbers of samples to compile programs for; batches of other sizes are cut and padded."""
    platforms: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    """Platforms to compile programs for; this machine need not have them."""
    example: bool = True
    """Keep two training rows in the model; `jaxrec serve` shows them as an example of a request."""


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec export``; return the exit code."""
    parsed = parse("export", options, ExportOptions())
    if NOT_GIVEN in (parsed.run, parsed.model):
        raise ConfigError("give the directories of the run and of the model: RUN MODEL")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    function = predictions(parsed.run, column_encoder(parsed.run))
    model, encoder = load_run(parsed.run, parsed.step, has_example=parsed.example)
    if parsed.dtype is not None:
        model = quantize(model, parsed.dtype)
    export(
        model,
        parsed.model,
        function=function,
        encoder=encoder,
        batch_sizes=parsed.batch_sizes,
        platforms=parsed.platforms,
    )
    # A model for GPUs alone may not load on this machine: it is then described by its size.
    manifest = load(parsed.model, verify=False).manifest if "cpu" in parsed.platforms else None
    size = sum(path.stat().st_size for path in parsed.model.rglob("*") if path.is_file())
    tables = "" if manifest is None else f"{len(manifest.tables)} tables, "
    console.print(
        f"{tables}{decimal(size)}; programs for {', '.join(parsed.platforms)} and batches of "
        f"{', '.join(map(str, sorted(set(parsed.batch_sizes))))}"
    )
    if (problem := refuse_columns(encoder.schema)) is not None:
        console.print(f"for servers in Python alone: {problem}")
    console.print(f"model exported to {parsed.model}")
    return 0
