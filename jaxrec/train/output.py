"""Standard output that a run outlives: the reader of a pipe may go away."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

_LOST = (
    "jaxrec train: the output is lost ({error}), and training goes on without it; stop it by "
    "Ctrl-C or `kill {pid}`, which saves the model"
)


class Output:
    """A text file whose loss is no error: what is written afterwards is dropped.

    Args:
        file: The file, such as `sys.stdout`.
        report: File of the message that the output is lost.
    """

    def __init__(self, file: TextIO, report: TextIO):
        self._file, self._report = file, report
        self._is_lost = False

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        if not self._is_lost:
            try:
                return self._file.write(text)
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        if not self._is_lost:
            try:
                self._file.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._is_lost = True
        # The file still has a buffer, which Python writes when it ends.
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._file.fileno())
        message = _LOST.format(error=error.strerror, pid=os.getpid())
        with contextlib.suppress(OSError):  # both may be one pipe
            print(message, file=self._report, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def standard_output() -> Output:
    """Return the standard output as it is now."""
    return Output(sys.stdout, sys.stderr)
