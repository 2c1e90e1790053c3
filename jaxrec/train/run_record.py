"""The record of a run's values: its history, and the systems that ``--log`` names."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from jaxrec.files.atomic import write_atomically
from jaxrec.mesh.agree import on_process_zero
from jaxrec.metrics.writers import BackgroundWriter, JSONLinesWriter, Values, Writer, Writers
from jaxrec.train.config import TrainConfig, run_options
from jaxrec.train.loggers import LOGGERS, LoggedRun, RunLogger
from jaxrec.train.results import HISTORY_FILE

# File of a run's directory with the texts by which loggers find the run again.
IDENTITIES_FILE = "loggers.json"


class LoggerError(RuntimeError):
    """A system that logs runs refuses a run, or cannot be reached."""


class RunRecord:
    """Writes the values of a run in a thread; in all processes but 0 it does nothing.

    Args:
        history: The writer of the run's own file; None: not in process 0.
        loggers: The loggers, which have started.
        console: Where the error of a logger is reported. The run goes on without that logger.
    """

    def __init__(self, history: Writer | None, loggers: Sequence[RunLogger], console: Console):
        self._loggers = [_Session(each, console) for each in loggers]
        self._writer = None
        if history is not None:
            self._writer = BackgroundWriter(Writers(history, *self._loggers))

    def write(self, step: int, values: Values) -> None:
        """Write the values of a step later, as `BackgroundWriter.write` does."""
        if self._writer is not None:
            self._writer.write(step, values)

    def wait(self) -> None:
        """Wait until all values are written."""
        if self._writer is not None:
            self._writer.wait()

    def finish(
        self, step: int, values: Mapping[str, float], files: Sequence[pathlib.Path] = ()
    ) -> None:
        """Give the loggers the values and the existing files of a run that has ended."""
        self.wait()
        kept = [file for file in files if file.exists()]
        for each in self._loggers:
            each.finish(step, values, kept)

    def close(self) -> None:
        """Write what waits, and end the sessions of the loggers."""
        if self._writer is not None:
            self._writer.close()


class _Session:
    """A logger whose first error is reported, after which the run goes on without it."""

    def __init__(self, logger: RunLogger, console: Console):
        self._logger, self._console = logger, console
        self._is_lost = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._call(lambda: self._logger.write(step, values))

    def finish(self, step: int, values: Mapping[str, float], files: Sequence[pathlib.Path]) -> None:
        self._call(lambda: self._logger.finish(step, values, files))

    def close(self) -> None:
        if self._is_lost:
            with contextlib.suppress(Exception):
                self._logger.close()
        self._call(self._logger.close)

    def _call(self, function: Callable[[], Any]) -> None:
        if self._is_lost:
            return
        try:
            function()
        except Exception as error:  # whatever the system raises
            self._is_lost = True
            name, text = self._logger.name, _sentence(error)
            self._console.print(f"warning: --log {name}: {text}; the run goes on without it")


def require_loggers(names: Sequence[str]) -> None:
    """Raise an ImportError in all processes if process 0 lacks the package of a logger."""

    def require() -> None:
        for name in names:
            LOGGERS[name].require()

    on_process_zero(require, (ImportError,))


def open_record(
    config: TrainConfig, output: pathlib.Path, step: int, console: Console
) -> RunRecord:
    """Open the record of a run that goes on after a step; all processes call it.

    Raises:
        ImportError: The package of a logger is missing.
        LoggerError: A logger refuses the run.
        OSError: The history cannot be written.
    """
    loggers: list[RunLogger] = []
    errors = (ImportError, LoggerError, OSError)
    on_process_zero(lambda: loggers.extend(_start(config, output, step)), errors)
    is_first = jax.process_index() == 0
    history = JSONLinesWriter(output / HISTORY_FILE) if is_first else None
    return RunRecord(history, loggers, console)


def _start(config: TrainConfig, output: pathlib.Path, step: int) -> list[RunLogger]:
    """Start the loggers of a run, and keep the texts by which they find it again."""
    file = output / IDENTITIES_FILE
    known: dict[str, str] = {}
    # A new run in the directory of one that failed before its first checkpoint is another run.
    if config.resume is not None and file.exists():
        known = json.loads(file.read_text())
    options = _flat(run_options(config))
    with contextlib.ExitStack() as stack:
        started = []
        for name in config.loggers:
            logger = LOGGERS[name]()
            run = LoggedRun(str(output), output, options, step, known.get(name))
            try:
                identity = logger.start(run)
            except (ImportError, OSError):
                raise
            except Exception as error:
                raise LoggerError(f"--log {name}: {_sentence(error)}") from error
            stack.callback(logger.close)
            started.append(logger)
            known |= {} if identity is None else {name: identity}
        if known:
            with write_atomically(file) as unfinished:
                unfinished.write_text(json.dumps(known) + "\n")
        stack.pop_all()
    return started


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the options of groups by their whole names: ``{"data.epochs": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: " + " ".join(f"{error}".split())
