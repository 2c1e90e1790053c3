"""Progress of training: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType

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


class Progress:
    """Shows the step, samples per second and the running normalized entropy (NE).

    Args:
        console: The console.
        num_steps: Number of steps of the whole run.
        done: Number of steps made before.
        clock: Function that returns a time in seconds.
    """

    def __init__(
        self,
        console: Console,
        num_steps: int,
        done: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._console = console
        self._num_steps = num_steps
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
                "{task.fields[rate]}  {task.fields[ne]}  {task.fields[ids]}{task.fields[held_out]}",
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            expand=True,
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=num_steps, completed=done, rate="compiling", ne="", ids="", held_out=""
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        if not self._console.is_terminal:
            self._console.print("compiling the training step")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @property
    def samples_per_second(self) -> float:
        """Rate from the end of the first step to that of the last, without pauses; 0: unknown."""
        seconds = self._end - self._start
        return self._samples / seconds if self._samples and seconds > 0 else 0.0

    def advance(self, samples: int) -> None:
        """Count a step; its samples count unless it ends in a pause."""
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

    def show(self, step: int, ne: float, ids: str = "") -> None:
        """Show the step and the running NE.

        Args:
            step: Number of the step.
            ne: The running NE.
            ids: Text about the ids of open vocabularies.
        """
        self._shown = self._clock()
        speed = self.samples_per_second
        rate = f"{speed:,.0f} samples/s" if speed else "compiling"
        if self._console.is_terminal:
            shown = f"{ids}  " if ids else ""
            self._bar.update(self._task, completed=step, rate=rate, ne=f"NE {ne:.4f}", ids=shown)
        else:
            shown = f", {ids}" if ids else ""
            self._console.print(f"step {step} of {self._num_steps}, {rate}, NE {ne:.4f}{shown}")

    def show_held_out(self, step: int, auc: float, ne: float) -> None:
        """Show the values of a step on held-out rows."""
        values = f"held out: AUC {auc:.4f}, NE {ne:.4f}"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, held_out=values)
        else:
            self._console.print(f"step {step} of {self._num_steps}, {values}")

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


def _fixed(width: int) -> Column:
    """Return a column that a narrow terminal does not cut."""
    return Column(min_width=width, no_wrap=True)
