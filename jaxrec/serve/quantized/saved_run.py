"""Quantized models of runs of ``jaxrec train`` on disk."""

from __future__ import annotations

import os
import pathlib
import shutil

from flax import nnx

from jaxrec.serve.quantized.saved import restore_quantized, save_quantized
from jaxrec.train.checkpoint import CheckpointError
from jaxrec.train.config import CONFIG_FILE, FEATURES_DIRECTORY, load_config
from jaxrec.train.features import saved_encoder
from jaxrec.train.model import Model, make_model

# The options of the run. Another name than the run's own file: the model is not trained further.
RUN_FILE = "run.yaml"


def save_quantized_run(
    small: nnx.Module,
    run: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int,
) -> None:
    """Save the quantized model of a run, with the options and the features of the run.

    Args:
        small: What `quantize` returned for the run's model.
        run: Directory of the run.
        directory: Directory of the quantized model.
        step: Step of the checkpoint that was quantized.

    Raises:
        OSError: A file cannot be written.
    """
    run, directory = pathlib.Path(run), pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / CONFIG_FILE, directory / RUN_FILE)
    if (run / FEATURES_DIRECTORY).is_dir():
        shutil.copytree(run / FEATURES_DIRECTORY, directory / FEATURES_DIRECTORY)
    save_quantized(small, directory, step=step)


def load_quantized(directory: str | os.PathLike[str]) -> Model:
    """Load a model that ``jaxrec quantize`` wrote; its rows have the same bytes.

    The model is called as the run's: ``model(dense, features)``. Memory never holds its float
    tables.

    Args:
        directory: The directory.

    Raises:
        CheckpointError: There is no such model, or it is damaged.
        OSError: A file cannot be read.
    """
    directory = pathlib.Path(directory)
    if not (directory / RUN_FILE).exists():
        raise CheckpointError(
            f"{directory}: there is no model of jaxrec quantize here ({RUN_FILE} is missing)"
        )
    config = load_config(directory / RUN_FILE)
    encoder = saved_encoder(directory)
    model = nnx.eval_shape(lambda: make_model(config, num_steps=1, encoder=encoder)[0])
    return restore_quantized(directory, model)
