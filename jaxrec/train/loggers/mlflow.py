"""The logger of MLflow."""

from __future__ import annotations

import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrec.train.loggers.base import LoggedRun, RunLogger

# Name of the experiment, unless the environment variable MLFLOW_EXPERIMENT_NAME has another.
EXPERIMENT = "jaxrec"

# Characters that MLflow does not take in the name of a value.
_OTHER = re.compile(r"[^/\w.\- ]")

# Largest number of values of one call.
_VALUES = 1000


class MLflowLogger(RunLogger):
    """Sends values to the server or the store that MLFLOW_TRACKING_URI names.

    Values keep their names, but for ``@`` in ``ndcg@10``, which becomes ``ndcg_at_10``. Neither
    parameters nor values of MLflow can change: options that a resumed run changes, such as its
    number of epochs, are tags. Where it makes steps again, their first values stay. To find these,
    the start of a resumed run reads the histories that go beyond its step.
    """

    name = "mlflow"
    package = "mlflow"

    def start(self, run: LoggedRun) -> str:
        self._mlflow = self.require()
        self._written: set[tuple[str, int]] = set()
        # Not `mlflow.start_run`, whose active run is that of a thread.
        self._client = self._mlflow.MlflowClient()
        if run.identity is None:
            self._id = self._client.create_run(self._experiment(), run_name=run.name).info.run_id
        else:
            self._id = run.identity
            self._client.update_run(self._id, status="RUNNING")
            self._written = self._later_values(run.step)
        self._is_finished = False
        self._set_options({name: str(value) for name, value in run.options.items()})
        return str(self._id)

    def _later_values(self, step: int) -> set[tuple[str, int]]:
        """Return the names and steps of the values that the run has of steps after ``step``."""
        # A history is a request or more, with all values since the first step: only those are read
        # that end after the step. `Run.data.metrics` has no steps.
        latest = self._client.get_run(self._id).data.to_proto().metrics
        return {
            (metric.key, each.step)
            for metric in latest
            if metric.step > step
            for each in self._client.get_metric_history(self._id, metric.key)
            if each.step > step
        }

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def _set_options(self, options: Mapping[str, str]) -> None:
        entities = self._mlflow.entities
        known = self._client.get_run(self._id).data.params
        new = [entities.Param(name, value) for name, value in options.items() if name not in known]
        changed = [
            entities.RunTag(f"resumed.{name}", value)
            for name, value in options.items()
            if known.get(name, value) != value
        ]
        self._client.log_batch(self._id, params=new, tags=changed)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        milliseconds = int(1000 * time.time())
        named = {_OTHER.sub("_", name.replace("@", "_at_")): x for name, x in values.items()}
        metrics: list[Any] = [
            self._mlflow.entities.Metric(name, float(value), milliseconds, step)
            for name, value in named.items()
            if (name, step) not in self._written
        ]
        for first in range(0, len(metrics), _VALUES):
            self._client.log_batch(self._id, metrics=metrics[first : first + _VALUES])

    def finish(self, step: int, values: Mapping[str, float], files: Sequence[pathlib.Path]) -> None:
        self.write(step, values)
        for file in files:
            self._client.log_artifact(self._id, str(file))
        self._is_finished = True

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED" if self._is_finished else "KILLED")
