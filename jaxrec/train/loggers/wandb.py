"""The logger of Weights & Biases."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence

from jaxrec.train.loggers.base import LoggedRun, RunLogger

# Name of the project, unless the environment variable WANDB_PROJECT has another.
PROJECT = "jaxrec"


class WandbLogger(RunLogger):
    """Sends values to Weights & Biases, or with WANDB_MODE=offline to ``wandb/`` in the run.

    A step that the system has already is not written again: a resumed run repeats its values.
    """

    name = "wandb"
    package = "wandb"

    def start(self, run: LoggedRun) -> str:
        self._run = self.require().init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            dir=run.directory,
            config=dict(run.options),
            id=run.identity,
            # With a new id "allow" starts a run, with a known one it goes on.
            resume="allow",
            reinit="create_new",
        )
        self._is_finished = False
        return str(self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, step: int, values: Mapping[str, float], files: Sequence[pathlib.Path]) -> None:
        self._run.summary.update(dict(values))
        for file in files:
            self._run.save(file, base_path=file.parent, policy="now")
        self._is_finished = True

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._is_finished else 1)
