"""The interface of systems that log runs.

To add a system, write a module here with a subclass of `RunLogger`, and list it in `LOGGERS` of
this package. The command, ``--resume``, ``--follow`` and ``--sweep`` see only this interface.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

# Prefix of the names of a run's final values on held-out rows.
FINAL = "final_"


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """A run, as a logger sees it when it starts.

    Attributes:
        name: Name of the run, the text of its directory.
        directory: Directory of the run.
        options: Options of the run by name, such as ``{"data.batch_size": 128}``.
        step: Number of steps that were made before; 0 in a new run.
        identity: Text that `RunLogger.start` returned when the run was started first; None: the
            system does not know the run yet.
    """

    name: str
    directory: pathlib.Path
    options: Mapping[str, Any]
    step: int = 0
    identity: str | None = None


class RunLogger(abc.ABC):
    """A session with a system that logs runs; a `jaxrec.metrics.Writer` of its values.

    Process 0 makes one for each run, and calls `start` once, then `write` in the order of the
    steps, `finish` unless the run was stopped or has failed, and `close`. `write` is called from
    another thread than the others. Addresses, projects and keys are those of the system's own
    environment variables.

    Attributes:
        name: Name of the system for ``--log``, and of the extra that installs it.
        package: The package that it needs.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    @classmethod
    def require(cls) -> Any:
        """Import and return the package; raise an ImportError that names the extra."""
        try:
            return importlib.import_module(cls.package)
        except ImportError as error:
            raise ImportError(
                f"--log {cls.name} needs {cls.package}: pip install 'jaxrec[{cls.name}]'"
            ) from error

    @abc.abstractmethod
    def start(self, run: LoggedRun) -> str | None:
        """Start a run, or go on with the one that ``run.identity`` names.

        Values of steps after ``run.step`` are written again, and take the place of earlier ones as
        far as the system can replace them.

        Returns:
            A text by which the run is found again when it is resumed; None: its directory suffices.
        """

    @abc.abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, by name. A step may come twice, with other names."""

    @abc.abstractmethod
    def finish(self, step: int, values: Mapping[str, float], files: Sequence[pathlib.Path]) -> None:
        """Write the values of the run that has ended with a step, and its files."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the session. Without `finish` before, the run was stopped and may be resumed."""
