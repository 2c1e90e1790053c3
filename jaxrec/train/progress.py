"""Progress of a run on the standard output, and the history of its values."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

# Seconds between two updates of the bar, and between two printed lines.
BAR_SECONDS = 0.2
LINE_SECONDS = 5.0

BAR_WIDTH = 20

# Number of first steps, which compile, that do not count for the samples per second.
WARM_UP_STEPS = 1

# Prefix of the names of held-out values in the history.
HELD_OUT = "held_out_"

_LOST = (
    "jaxrec train: the output is lost ({error}), and training goes on without it; stop it by "
    "Ctrl-C or `kill {pid}`, which saves the model"
)


class Progress:
    """Shows the step, samples per second and a running value, such as the normalized entropy.

    The run has ``num_steps`` steps, of which ``done`` were made before; None: it has no end.
    """

    def __init__(
        self,
        console: Console,
        num_steps: int | None,
        done: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._console = console
        self._of_steps = "" if num_steps is None else f" of {num_steps}"
        self._seconds = BAR_SECONDS if console.is_terminal else LINE_SECONDS
        self._clock = clock
        self._shown = clock()
        self._steps = 0
        self._samples = 0
        # Times of a clock that stands still in pauses.
        self._start = self._end = 0.0
        self._pauses = 0  # number of nested pauses
        self._paused_at = self._paused_for = 0.0
        self._bar = Bar(
            BarColumn(bar_width=BAR_WIDTH, table_column=_fixed(BAR_WIDTH)),
            MofNCompleteColumn(table_column=_fixed(2 * len(str(num_steps)) + 1)),
            TimeRemainingColumn(table_column=_fixed(len("0:00:00"))),
            # A narrow terminal cuts this text.
            TextColumn(
                "{task.fields[rate]}  {task.fields[value]}  {task.fields[ids]}"
                "{task.fields[held_out]}",
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            expand=True,
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=num_steps, completed=done, rate="compiling", value="", ids="", held_out=""
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        if not self._console.is_terminal:
            self._console.print("compiling the training step")
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    @property
    def samples_per_second(self) -> float:
        """Rate between the ends of the first and the last step, without pauses; 0 if unknown."""
        seconds = self._end - self._start
        return self._samples / seconds if self._samples and seconds > 0 else 0.0

    def advance(self, samples: int) -> None:
        """Count a step.

        The rate includes its samples, unless it is a warm-up step or ends within `paused`.
        """
        self._steps += 1
        now = (self._paused_at if self._pauses else self._clock()) - self._paused_for
        if self._steps <= WARM_UP_STEPS:
            self._start = self._end = now
        elif not self._pauses:
            self._samples += samples
            self._end = now

    def is_due(self) -> bool:
        """Return whether it is time for the next `show`."""
        return self._clock() - self._shown > self._seconds

    def show(self, step: int, value: str, ids: str = "") -> None:
        """Show the step, a running value as text, and a text about ids of open vocabularies."""
        self._shown = self._clock()
        speed = self.samples_per_second
        rate = f"{speed:,.0f} samples/s" if speed else "compiling"
        if self._console.is_terminal:
            shown = f"{ids}  " if ids else ""
            self._bar.update(self._task, completed=step, rate=rate, value=value, ids=shown)
        else:
            shown = f", {ids}" if ids else ""
            self._console.print(f"step {step}{self._of_steps}, {rate}, {value}{shown}")

    def show_held_out(self, step: int, values: str) -> None:
        """Show the values of a step on held-out rows, as text."""
        values = f"held out: {values}"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, held_out=values)
        else:
            self._console.print(f"step {step}{self._of_steps}, {values}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time and the samples of the ``with`` block from `samples_per_second`."""
        if not self._pauses:
            self._paused_at = self._clock()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused_for += self._clock() - self._paused_at


@contextlib.contextmanager
def counted(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal within the block; yield a function that counts more rows."""
    bar = Bar(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.update(task, advance=count)


def _fixed(width: int) -> Column:
    """Return a column that a narrow terminal does not cut."""
    return Column(min_width=width, no_wrap=True)


class Output:
    """A text file that may be lost: later text is dropped, and ``report`` gets a message once."""

    def __init__(self, file: TextIO, report: TextIO):
        self._file, self._report = file, report
        self._is_lost = False

    def write(self, text: str) -> int:
        """Write a text, or drop it if the file is lost."""
        self._use(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """Write the buffer, or drop it if the file is lost."""
        self._use(self._file.flush)

    def _use(self, action: Callable[[], Any]) -> None:
        """Call a function of the file, unless the file is lost; if it fails, the file is lost."""
        try:
            if not self._is_lost:
                action()
        except OSError as error:
            self._is_lost = True
            # Python flushes the file's buffer once more when it ends, and would fail again; that
            # text goes to the null device.
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


def read_history(path: pathlib.Path) -> dict[int, dict[str, float]]:
    """Return the values that `jaxrec.metrics.JSONLinesWriter` wrote, by step and name."""
    # The last value of a step counts: a resumed run writes the steps after its checkpoint again.
    history: dict[int, dict[str, float]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        # A killed run leaves an incomplete line.
        except json.JSONDecodeError:
            continue
        step = record.pop("step")
        values = {n: math.nan if x is None else x for n, x in record.items()}
        # An evaluation has a line of its own.
        history[step] = history.get(step, {}) | values
    return dict(sorted(history.items()))
