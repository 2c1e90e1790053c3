"""Writers of metric values to the console, files and TensorBoard, at once or in a thread."""

from __future__ import annotations

import collections
import contextlib
import csv
import datetime
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

from rich.console import Console


class Writer(Protocol):
    """The interface of writers."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, by name."""

    def close(self) -> None:
        """Write out buffered values. The writer must not be used afterwards."""


class ConsoleWriter:
    """Writer of one line per step on the console.

    Args:
        console: Console to write to; None: standard output.
        names: Names of the values to show, in order; None: all.

    Example:
        >>> ConsoleWriter().write(7, {"click/window_ne": 0.81234, "click/window_auc": 0.75})
        step 7  click/window_ne 0.8123  click/window_auc 0.7500
    """

    def __init__(self, console: Console | None = None, names: Sequence[str] | None = None):
        self._console = Console(highlight=False, soft_wrap=True) if console is None else console
        self._names = names

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # Values of the first steps may be missing, such as a throughput during warm-up.
        names = values if self._names is None else [n for n in self._names if n in values]
        shown = "".join(f"  {name} {_short(values[name])}" for name in names)
        self._console.print(f"step {step:,}{shown}", markup=False)

    def close(self) -> None:
        """Do nothing."""


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"


class _LineWriter:
    """Base of writers that append lines to a file, whose directory is made if needed."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = pathlib.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", newline="")  # noqa: SIM115 - `close` closes it
        # A killed run may have left half a line: the next must not continue it.
        with open(path, "rb") as existing:
            if existing.seek(0, os.SEEK_END):
                existing.seek(-1, os.SEEK_END)
                self._file.write("" if existing.read(1) == b"\n" else "\n")

    def close(self) -> None:
        self._file.close()


class JSONLinesWriter(_LineWriter):
    """Writer of one JSON object per line: ``step``, ``time`` in seconds since 1970, and the values.

    NaN and infinite values are written as null. `write` flushes each line, so that a killed run
    loses none. Lines are appended to an existing file.

    Args:
        path: The file. Its directory is made if needed.

    Raises:
        OSError: The file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "metrics.jsonl")
        >>> with contextlib.closing(JSONLinesWriter(path)) as writer:
        ...     writer.write(1, {"ne": 0.9})
        >>> json.loads(path.read_text())["ne"]
        0.9
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON has no NaN: strict readers refuse the word that Python writes for it.
        record = {"step": step, "time": _now(), **{n: _finite(x) for n, x in values.items()}}
        self._file.write(json.dumps(record, default=float, allow_nan=False) + "\n")
        self._file.flush()


class CSVWriter(_LineWriter):
    """Writer of a table: ``step``, ``time`` in seconds since 1970, and a column for each value.

    The first step sets the columns. Rows are appended to an existing file, whose columns stay.

    Args:
        path: The file. Its directory is made if needed.

    Raises:
        OSError: The file cannot be written.
        ValueError: From `write`: a value has no column, or the file is another kind of table.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._columns: list[str] | None = None
        with open(path, newline="") as file:
            header = next(csv.reader(file), None)
        if header is not None:
            if header[:2] != ["step", "time"]:
                self._file.close()
                raise ValueError(
                    f"{self._path} is not a table of metrics: its first columns are "
                    f"{', '.join(header[:2])}, not step, time; give another file"
                )
            self._columns = header[2:]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row; columns of missing values stay empty."""
        rows = csv.writer(self._file, lineterminator="\n")
        if self._columns is None:
            # The header is fixed now: a later column would mean writing the whole file anew.
            self._columns = list(values)
            rows.writerow(["step", "time", *self._columns])
        unknown = [name for name in values if name not in self._columns]
        if unknown:
            raise ValueError(
                f"{self._path} has no column for {unknown[0]!r}; the first step written sets the "
                "columns. Write all values from the first step on, or JSON lines"
            )
        rows.writerow([step, _now(), *(values.get(name, "") for name in self._columns)])
        self._file.flush()


class TensorBoardWriter:
    """Writer of scalars for TensorBoard; needs the extra ``jaxrec[tensorboard]``.

    Args:
        directory: Directory of the event files, which is made if needed.
        **options: Options of `tensorboardX.SummaryWriter`.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any):
        try:
            import tensorboardX
        except ImportError:
            raise ImportError(
                "TensorBoardWriter needs tensorboardX: pip install 'jaxrec[tensorboard]'"
            ) from None
        self._writer = tensorboardX.SummaryWriter(os.fspath(directory), **options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._writer.close()


class Writers:
    """Several writers as one, which its ``with`` block closes.

    Example:
        >>> with Writers(ConsoleWriter()) as writers:
        ...     writers.write(1, {"ne": 0.5})
        step 1  ne 0.5000
    """

    def __init__(self, *writers: Writer):
        self._writers = writers

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Close each writer, also if another fails."""
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _now() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


Values: TypeAlias = Mapping[str, float] | Callable[[], Mapping[str, float]]


class BackgroundWriter:
    """Computes and writes values in one thread, in the order of the calls of `write`.

    `jaxrec.train.WriteMetrics` gives it a function that computes the metrics from a copy of their
    state. The sorts of AUC and other work on the host then run during the next steps.

    If a computation or a write fails, the next call of `write`, `wait` or `close` raises its error,
    and later values are not written. After an interrupt, waiting values are written before `close`
    returns and before Python ends.

    Args:
        writer: The writer of the values; `close` closes it.
        max_waiting: Largest number of waiting calls. The next call blocks until the oldest is done,
            which bounds the memory of the copied states.

    Raises:
        ValueError: ``max_waiting`` is below 1.

    Example:
        >>> import contextlib
        >>> from jaxrec.metrics import ConsoleWriter
        >>> with contextlib.closing(BackgroundWriter(ConsoleWriter())) as writer:
        ...     writer.write(1, {"ne": 0.9})
        ...     writer.write(2, lambda: {"ne": 0.8})
        step 1  ne 0.9000
        step 2  ne 0.8000
    """

    def __init__(self, writer: Writer, max_waiting: int = 2):
        if max_waiting < 1:
            raise ValueError(f"max_waiting is {max_waiting}; it must be 1 or more")
        self._writer, self._max_waiting = writer, max_waiting
        # Python waits for the threads of an executor before it ends, also after an interrupt. NumPy
        # releases Python's lock while it sorts, so that one thread beside training is enough.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._waiting: collections.deque[Future[None]] = collections.deque()
        self._has_failed = self._is_closed = False

    def write(self, step: int, values: Values) -> None:
        """Write the values of a step later.

        Args:
            step: Number of the step.
            values: The values by name, or a function that returns them, which the thread calls.

        Raises:
            ValueError: The writer is closed.
            Exception: The error of an earlier computation or write.
        """
        if self._is_closed:
            raise ValueError("the writer is closed")
        while self._waiting and (
            self._waiting[0].done() or len(self._waiting) >= self._max_waiting
        ):
            self._finish_first()
        self._waiting.append(self._thread.submit(self._write, step, values))

    def wait(self) -> None:
        """Wait until all values are written.

        Raises:
            Exception: The error of an earlier computation or write.
        """
        while self._waiting:
            self._finish_first()

    def close(self) -> None:
        """Wait until all values are written, and close the writer.

        Raises:
            Exception: The error of an earlier computation or write.
        """
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._writer.close()

    def _write(self, step: int, values: Values) -> None:
        if self._has_failed:
            return
        try:
            self._writer.write(step, values() if callable(values) else values)
        except BaseException:
            self._has_failed = True
            raise

    def _finish_first(self) -> None:
        # First wait, then remove: an interrupt during the wait leaves the call in the queue.
        self._waiting[0].exception()
        self._waiting.popleft().result()
