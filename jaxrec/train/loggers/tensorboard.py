"""The logger of TensorBoard."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from jaxrec.metrics.writers import TensorBoardWriter
from jaxrec.train.loggers.base import LoggedRun, RunLogger

DIRECTORY = "tensorboard"


class TensorBoardLogger(RunLogger):
    """Writes event files to ``tensorboard/`` in the run's directory."""

    name = "tensorboard"
    package = "tensorboardX"

    def start(self, run: LoggedRun) -> None:
        # TensorBoard drops the values of the steps that a resumed run makes again.
        self._writer = TensorBoardWriter(run.directory / DIRECTORY, purge_step=run.step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.write(step, values)

    def finish(self, step: int, values: Mapping[str, float], files: Sequence[pathlib.Path]) -> None:
        self._writer.write(step, values)

    def close(self) -> None:
        self._writer.close()
